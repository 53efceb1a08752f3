"""Simulated peaks of memory are the measured ones within a kilobyte on the CPU."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import nn

from slipstream import Pipeline
from slipstream.pipeline.execution import StepState
from slipstream.profile.stage_bench import LiveMemory, MemoryMeter, memory_meter, tensors_alive
from slipstream.schedule import Action, Op
from slipstream.simulator import MemoryKind, memory_of
from support.architectures import ARCHITECTURES, labels_of, tokens
from support.forked import launch
from support.hybrids import HYBRIDS
from support.paths import WORKERS
from support.pipelines import make_pipe

WORKER = WORKERS / "pipeline/memory.py"


def test_the_meter_counts_storages_once_and_as_long_as_they_live() -> None:
    present = torch.zeros(100)
    with LiveMemory([present, present[:10]]) as memory:
        assert memory.num_bytes == memory.peak == 400
        made = torch.ones(1000)
        view = made.view(10, 100)[2:]
        del made
        assert memory.num_bytes == 4400
        del view
        assert (memory.num_bytes, memory.peak) == (400, 4400)
        memory.restart_peak()
        assert memory.peak == 400
        del present
        assert memory.num_bytes == 0


def test_the_meter_sees_what_graphs_keep_and_backwards_make() -> None:
    weight, x = nn.Parameter(torch.ones(50, 40)), torch.ones(10, 50)
    with LiveMemory([weight, x]) as memory:
        before = memory.num_bytes
        y = (x @ weight).exp().sum()
        assert memory.num_bytes == before + 10 * 40 * 4 + 4  # exp keeps its result
        y.backward()
        assert memory.num_bytes == before + 4 + weight.nbytes
        assert memory.peak >= before + 4 + weight.nbytes + 10 * 40 * 4
        del y
        weight.grad = None
        assert memory.num_bytes == before


def test_the_meter_sees_in_place_views_and_several_results() -> None:
    with LiveMemory() as memory:
        values, indices = torch.arange(6.0).view(2, 3).max(dim=1)
        assert memory.num_bytes == 2 * 4 + 2 * 8
        values.add_(1).mul_(2)
        assert memory.num_bytes == 2 * 4 + 2 * 8
        del values, indices
        assert memory.num_bytes == 0


def test_what_was_there_before_is_known_by_what_operations_read() -> None:
    weight, read, unread = torch.ones(500), torch.ones(100), torch.ones(7)
    made = torch.tensor([1.0, 2.0])  # as it is within the block
    with LiveMemory() as memory:
        views = weight[2:], read.add_(1).view(10, 10)
        assert (memory.num_bytes, memory.peak) == (0, 0)
        constant, other = torch.tensor([1.0, 2.0]), views[0] * 2
        assert memory.num_bytes == made.nbytes + 4 * 498
        del read, views, unread
        assert memory.num_bytes == made.nbytes + 4 * 498 - 400
        del constant, other
        assert memory.num_bytes == -400


def test_a_limit_on_sequences_looks_through_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are hundreds of thousands, and a rehearsal of each stage and of several rows."""
    inputs = [tokens(batch=1, length=length)[0] for length in (40, 9, 25)]
    pipe = make_pipe(ARCHITECTURES["llama"], num_ranks=2, slices=3, num_microbatches=2, memory_limit=1e9)
    walks: list[int] = []
    get_objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda *given: walks.append(1) or get_objects(*given))
    pipe.step(inputs, inputs)
    assert not walks


def peaks(pipe: Pipeline, rows: int = 2) -> tuple[float, float]:
    """Simulated and measured, without the tokens and whatever else lives in this process."""
    inputs = tokens(batch=rows)
    labels = labels_of(inputs)
    optimizer = torch.optim.AdamW(pipe.parameters())
    for _ in range(2):
        pipe.step(inputs, labels)
        optimizer.step()
        optimizer.zero_grad()
    numbers = range(len(set(pipe.last_step.microbatches)))
    tables = [pipe.memory_table(inputs, labels, number) for number in numbers]
    (rank,) = memory_of(pipe.layout.training, tables if len(tables) > 1 else tables[0])
    static = rank.worst.during[MemoryKind.PARAMETERS] + rank.worst.during[MemoryKind.OPTIMIZER]
    assert all(parameter.grad is None for parameter in pipe.parameters())
    with memory_meter(pipe.device, tensors_alive()) as memory:
        others = memory.num_bytes - static
        pipe.step(inputs, labels)
        return rank.peak, memory.peak - others


SETTINGS: list[dict[str, Any]] = [
    {"slices": 1},
    {"slices": [20, 30, 14]},
    {"slices": 4, "schedule": "zb-h1"},
    {"slices": 4, "recompute": "stage"},
    {"slices": 4, "recompute": "selective", "offload": 0.7},
    {"slices": 4, "offload": 1.0, "num_flushes": 2},
    {"slices": 3, "schedule": "interleaved-1f1b", "stages_per_rank": 2},
    {"slices": 3, "schedule": "zb-v", "stages_per_rank": 2},
    {"slices": 3, "schedule": "zb-v", "stages_per_rank": 2, "offload": 0.5, "recompute": 1},
    {"slices": 1, "recompute": "full"},
    {"slices": 4, "recompute": "full", "schedule": "zb-h1"},
    {"slices": 3, "recompute": "stage+full", "schedule": "gpipe"},
    # A cut makes weight gradients wait as the order has it.
    {"slices": 3, "schedule": "zb-v", "stages_per_rank": 2, "context": "host", "partition": [2, 2]},
    {"slices": 4, "schedule": "zb-v", "stages_per_rank": 2, "context": 0.5, "partition": [2, 2], "recompute": "stage"},
]


# Nothing is trained before the third layer. GPT-2's norm keeps what the second stage is handed, as the account has it;
# Llama's keeps less.
FROZEN = ["transformer.wte*", "transformer.wpe*", "transformer.h.0.*", "transformer.h.1.*", "transformer.h.3.mlp*"]
UNTIED = copy.deepcopy(ARCHITECTURES["gpt2"])
UNTIED.tie_word_embeddings = False
CONFIGS = ARCHITECTURES | HYBRIDS | {"gpt2, untied": UNTIED}
CUTS = {1: [64], 2: [50, 14], 3: [20, 30, 14]}  # by the rows of a microbatch


def cases() -> Iterator[ParameterSet]:
    """Each way to run, of a few models; with a frozen stage; with parts of a head, of tied weights what rows look up,
    too; and with microbatches that differ."""
    more, grid = pytest.mark.more, pytest.mark.grid
    for n, settings in enumerate(SETTINGS):
        yield pytest.param("llama, tied", settings, marks=[more] * (n not in (4, 7)))
        yield pytest.param("gpt2", settings, marks=more if n % 6 == 1 else grid)
        if n > 0:
            yield pytest.param("qwen3_5_text", settings, marks=more if n == 4 else grid)
        if n in (6, 7, 8):
            frozen = settings | {"freeze": FROZEN, "partition": [2, 2]}
            yield pytest.param("gpt2, untied", frozen, marks=[more] * (n != 7))
        for name in ("llama, tied", "llama", "gpt2") if n > 0 else ():
            is_chosen = n < 3 and name == "llama, tied"
            yield pytest.param(name, settings | {"vocabulary": "spread"}, marks=more if is_chosen else grid)
    orders = product(("gpipe", "zb-h1", "1f1b"), ((3, 1), (1, 3), (1, 3, 2)))
    for n, (schedule, sizes) in enumerate(orders):
        differing = {"schedule": schedule, "microbatches": [(rows, CUTS[rows]) for rows in sizes]}
        yield pytest.param("llama, tied", differing, marks=more if n % 4 == 0 else grid)


@pytest.mark.parametrize(("name", "settings"), [*cases()], ids=str)
def test_one_rank(name: str, settings: dict[str, Any]) -> None:
    differing = settings.get("microbatches", [])
    pipe = make_pipe(CONFIGS[name], **settings if differing else {"num_microbatches": 2} | settings)
    assert pipe.layout.training.num_frozen_stages == ("freeze" in settings)
    simulated, measured = peaks(pipe, sum(rows for rows, _ in differing) or 2)
    # Of carried states the account is off by up to 0.5% in this combination (docs/limits.md).
    is_inexact = name in HYBRIDS and settings.get("recompute") == 1 and "offload" in settings
    assert abs(simulated - measured) < (0.005 * measured if is_inexact else 1024)


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"), [("zb-v", 2), pytest.param("zb-h1", 1, marks=pytest.mark.more)]
)
def test_the_gradient_that_ew_and_w_share_is_counted_once(schedule: str, stages_per_rank: int) -> None:
    """It is held as long as the later of the two needs it: after every action what is held is what is counted."""
    cut: dict[str, Any] = {"slices": 4, "schedule": schedule, "stages_per_rank": stages_per_rank}
    pipe = make_pipe(ARCHITECTURES["gpt2"], num_microbatches=2, vocabulary="spread", **cut)
    inputs = tokens(batch=2)
    pipe.step(inputs, inputs)
    torch.optim.SGD(pipe.parameters()).zero_grad()
    order = pipe.layout.training
    (rank,) = memory_of(order, pipe.memory_table(inputs, inputs))
    counted = [(moment.action, moment.after - rank.moments[0].after) for moment in rank.moments]
    pairs = [(action, Action(Op.W, 0, *action[2:])) for action, _ in counted if action.op is Op.EW]
    assert {order.positions[rows] < order.positions[weights] for rows, weights in pairs} == {True, False}
    with memory_meter(pipe.device, tensors_alive()) as memory:
        held = HeldAfterActions(memory)
        pipe._runtime.executors[0].observe(held)
        pipe.step(inputs, inputs)
    (_, first), *_ = held.sizes
    assert [(action, size - first) for action, size in held.sizes] == counted


class HeldAfterActions:
    """Notes what is held after each action of a rank."""

    def __init__(self, memory: MemoryMeter) -> None:
        self.sizes: list[tuple[Action, int]] = []
        self._memory = memory

    def before(self, action: Action, state: StepState) -> None:
        """Notes nothing."""

    def after(self, action: Action, state: StepState) -> None:
        self.sizes.append((action, self._memory.num_bytes))


@pytest.mark.more
def test_processes() -> None:
    """With the buffers of messages."""
    ended = launch(2, WORKER)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.grid
@pytest.mark.usefixtures("compiled_search")
def test_processes_hold_less_than_a_limit() -> None:
    """From the first step on, as another meter counts than the one that rehearses."""
    ended = launch(2, WORKER, "limit")
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_rehearsing_leaves_gradients_as_they_were() -> None:
    pipe = make_pipe(ARCHITECTURES["llama"], slices=4)
    inputs = tokens()
    pipe.step(inputs, inputs)
    before = {name: (p.grad, p.grad.clone()) for name, p in pipe.named_parameters() if p.grad is not None}
    pipe.memory_table(inputs, inputs)
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is before[name][0]
        assert torch.equal(before[name][0], before[name][1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_rank_on_cuda() -> None:
    """The allocator rounds up, and a workspace of the matrix products may be made at any time."""
    pipe = make_pipe(ARCHITECTURES["llama"], num_microbatches=2, slices=4, device="cuda")
    simulated, measured = peaks(pipe)
    assert abs(simulated / measured - 1) < 0.05
