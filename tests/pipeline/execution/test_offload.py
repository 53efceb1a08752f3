"""Offload changes no bit of a gradient, frees the memory while it is on the host, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream import Action, Op, Pipeline, Schedule, SlipstreamError, gpipe
from slipstream.host_memory import FileMemory, Tenant
from slipstream.model import storage_id
from slipstream.model.autograd_memory import RecomputationError, SavedTensors
from slipstream.pipeline.execution import StepState
from slipstream.profile.stage_bench import memory_meter, tensors_alive
from support.architectures import ARCHITECTURES, build, gradients, labels_of, llama, tokens
from support.live_memory import LiveMemory, held_after_three_slices
from support.observers import BeforeEach
from support.options import grouped
from support.parameters import first_of
from support.pipelines import make_pipe

NOBODY = Tenant("a test", "tensors", "give fewer")
EMBEDDING = "model.embed_tokens.weight"


def step(name: str, offload: float, device: str = "cpu", **settings: object) -> tuple[Tensor, dict[str, Tensor]]:
    settings = {"slices": [5, 30, 17, 12], "num_microbatches": 2, "num_ranks": 2} | settings
    model = build(ARCHITECTURES[name]).float()
    pipe = make_pipe(model, offload=offload, **settings, device=device)
    inputs = tokens(batch=4)
    loss = pipe.step(inputs, labels_of(inputs))
    num_moved = sum(span.action.op is Op.OFFLOAD for span in pipe.timeline().spans)
    assert (num_moved > 0) == (offload > 0)
    assert num_moved == sum(span.action.op is Op.RELOAD for span in pipe.timeline().spans)
    return loss, gradients(pipe)


@pytest.mark.parametrize(
    ("name", "schedule"), first_of([("llama", "gpipe"), ("gpt2", "1f1b"), ("mixtral", "1f1b")], 1, "grid")
)
def test_nothing_changes_to_the_bit(name: str, schedule: str) -> None:
    loss, expected = step(name, 0.0, schedule=schedule)
    for offload, recompute in ((0.5, "none"), (1.0, "none"), (0.5, "selective"), (1.0, "full"), (1.0, 1)):
        moved_loss, found = step(name, offload, schedule=schedule, recompute=recompute)
        assert moved_loss == loss
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_pinned_memory(recompute: str) -> None:
    """The copies run on a stream of their own; a race would change numbers.

    The embedding's gradient adds rows in whatever order the device comes to them, so its last bits vary.
    """
    loss, expected = step("llama", 0.0, "cuda")
    for _ in range(3):
        moved_loss, found = step("llama", 1.0, "cuda", recompute=recompute)
        assert moved_loss == loss
        torch.testing.assert_close(found.pop(EMBEDDING), expected[EMBEDDING], rtol=1e-5, atol=1e-7)
        changed = [name for name, gradient in found.items() if not torch.equal(gradient, expected[name])]
        assert not changed


@cache
def live_bytes(offload: float, recompute: str = "none") -> tuple[int, int, int]:
    """On one stage while three of four slices are away: bytes alive, those of keys and values, bytes after the step."""
    model = build(llama(num_key_value_heads=1)).float()
    pipe = make_pipe(model, "gpipe", slices=4, offload=offload, recompute=recompute)
    return held_after_three_slices(pipe, tokens(batch=4))


def test_memory_is_free_while_it_is_on_the_host() -> None:
    none, context, after = live_bytes(0.0)
    for recompute in ("none", "selective"):
        moved, _, after_moving = live_bytes(1.0, recompute)
        batch = 4 * 64 * 8  # one tensor of token ids
        assert moved < context + 8 * batch < none / 8
        assert after_moving == after


def test_what_enters_the_layers_of_one_slice_is_on_the_host() -> None:
    """Of the first half of twelve layers, and of all: to the bit, and to the byte."""
    ids, peaks, found = tokens(batch=1), list[int](), list[dict[str, Tensor]]()
    for offload in (0.0, 0.5, 1.0):
        model = build(llama(num_hidden_layers=12)).float()
        pipe = make_pipe(model, slices=1, recompute="full", offload=offload, self_check=False)
        pipe.step(ids, ids)
        with memory_meter(torch.device("cpu"), tensors_alive()) as memory:
            before = memory.num_bytes
            pipe.step(ids, ids)
            peaks.append(memory.peak - before)
        found.append(gradients(pipe))
    assert all(torch.equal(found[0][name], gradient) for name, gradient in (*found[1].items(), *found[2].items()))
    entering = 64 * 32 * 4  # (b, T, hidden) in float32
    assert [peaks[0] - peak for peak in peaks] == [0, 6 * entering, 12 * entering]


def test_half_of_the_slices_is_half_of_the_memory() -> None:
    """Equal slices; of the first three the two that wait longest go."""
    none, half, all_of_it = (live_bytes(share)[0] for share in (0.0, 0.5, 1.0))
    assert abs((none - half) - 2 / 3 * (none - all_of_it)) < 0.02 * none


def test_a_stage_lets_go_of_its_input_too() -> None:
    """Two stages on one rank, everything recomputed: all that F keeps is the input of the second, and it goes."""
    order = "0F0.0 1F0.0 {offload} 0F0.1 1F0.1 1B0.1 0B0.1 {reload} 1R0.0 1B0.0 0R0.0 0B0.0"
    live = []
    for moves in (("", ""), ("1OFFLOAD0.0", "1RELOAD0.0")):
        row = order.format(offload=moves[0], reload=moves[1])
        schedule = Schedule.parse(f"schedule: s\nplacement: 0 0\nmicrobatches: 1\nslices: 2\nrank 0: {row}")
        pipe = make_pipe(build(llama()), schedule, slices=[60, 4], recompute="stage")
        (executor,) = pipe._runtime.executors
        memory = LiveMemory(besides=pipe.parameters())

        def note(action: Action, state: StepState, memory: LiveMemory = memory) -> None:
            if action == Action(Op.F, 0, 0, 1):
                live.append(memory.num_bytes)

        executor.observe(BeforeEach(note))
        with memory:
            pipe.step(tokens(), tokens())
    assert live[0] - live[1] == 2 * 60 * 32 * 8  # (b, T, hidden) in float64


def num_files(folder: Path) -> int:
    """Open or mapped, whether they have a name or not."""
    gc.collect()
    assert not list(folder.iterdir())
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return len(mapped) + len(os.listdir("/proc/self/fd"))


def test_no_file_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    inputs, before, most = tokens(), num_files(tmp_path), 0
    settings = {"slices": 4, "num_ranks": 2, "offload": 1.0, "self_check": False}
    Pipeline(build(llama()), **grouped(**settings)).step(inputs, inputs)
    assert num_files(tmp_path) == before
    pipe = Pipeline(build(llama()), **grouped(**settings))

    def fail(action: Action, state: StepState) -> None:
        nonlocal most
        if action.op is Op.RELOAD:
            most = num_files(tmp_path)
            raise OSError("disk failed")

    pipe._runtime.executors[0].observe(BeforeEach(fail))
    with pytest.raises(OSError, match="disk failed"):
        pipe.step(inputs, inputs)
    assert most >= before + 3  # one a slice that is away
    del pipe
    assert num_files(tmp_path) == before


def test_storages_move_once_and_views_come_back() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    saved = SavedTensors({storage_id(weight)})
    x = torch.randn(4, 8)
    with saved.saving(lambda tensor: True):
        product = x @ weight
        left, right = product.chunk(2, dim=1)
        output = (left * right.t().contiguous().t()).sum() + (left.exp() * right).sum()
    expected = torch.autograd.grad(output, weight, retain_graph=True)[0]
    held = saved.num_bytes
    blocks = saved.take_out()
    assert sum(block.numel() for block in blocks) == held
    assert len({block.data_ptr() for block in blocks}) == len(blocks)
    assert weight.data_ptr() not in {block.data_ptr() for block in blocks}
    assert saved.num_bytes == 0
    with pytest.raises(RecomputationError, match="before what its forward dropped is recomputed and reloaded"):
        torch.autograd.grad(output, weight, retain_graph=True)
    host = FileMemory(NOBODY).keep(blocks)
    assert host.num_bytes == held
    del blocks
    saved.put_back(host.wait())
    assert torch.equal(torch.autograd.grad(output, weight)[0], expected)


def test_a_schedule_that_has_it_already() -> None:
    text = str(gpipe(1, 1, 2)).replace("0F0.1", "0OFFLOAD0.0 0F0.1").replace("0B0.0", "0RELOAD0.0 0B0.0")
    schedule = Schedule.parse(text)
    make_pipe(build(llama()), schedule, slices=2).step(tokens(), tokens())
    with pytest.raises(SlipstreamError, match=r"'?gpipe'? has 0OFFLOAD0.0 already, so OFFLOAD can't be added"):
        make_pipe(build(llama()), schedule, slices=2, offload=0.5)
