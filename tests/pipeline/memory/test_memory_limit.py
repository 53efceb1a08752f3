"""Steps keep to a memory limit, whose account knows rows of any length, or are refused before they run."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import Pipeline, SlipstreamError
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.cut_batch import token_bytes
from slipstream.pipeline.execution import step_graphs
from slipstream.pipeline.memory import rehearse
from slipstream.simulator import memory_of
from support.architectures import ARCHITECTURES, BOUND, build, gradient_error, llama, tokens, unsplit_step
from support.live_memory import rehearsed_bytes
from support.options import grouped
from support.parameters import first_of
from support.pipelines import make_pipe
from support.recorded_ops import RecordedOps


def pipeline(**settings: Any) -> Pipeline:
    return Pipeline.from_config(
        ARCHITECTURES["llama"],
        **grouped(**{"num_ranks": 2, "num_microbatches": 4, "slices": 4, "self_check": False} | settings),
    )


def settle(pipe: Pipeline, inputs: Tensor) -> int:
    """Steps until all is planned."""
    for num_steps in range(60):
        if not pipe.is_tuning:
            return num_steps
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.step(inputs, inputs)
    raise AssertionError("still not planned")


@pytest.mark.parametrize(
    "settings",
    first_of(
        [
            {"schedule": "gpipe"},
            {"schedule": "zb-h2", "recompute": "full", "vocabulary": "spread"},
        ]
    ),
    ids=["whole", "recomputed, spread"],
)
def test_a_schedule_that_holds_too_much_is_refused_before_it_runs(settings: dict[str, Any]) -> None:
    inputs = tokens(batch=4)
    needed = rehearsed_bytes(pipeline(**settings), inputs)
    pipeline(memory_limit=needed, **settings).step(inputs, inputs)
    pipe = pipeline(memory_limit=needed - 1, **settings)
    with pytest.raises(
        SlipstreamError, match=r"rank \d would hold .*, 1.00 B too much .*, in the schedule.*num_flushes.*auto"
    ):
        pipe.step(inputs, inputs)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    pipe.step(tokens(batch=4, length=32), tokens(batch=4, length=32))  # shorter sequences hold less


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        ({"slices": 2, "recompute": "selective"}, "Try memory.recompute='full', memory.offload"),
        ({"slices": 2, "recompute": "full"}, "Try memory.recompute='stage+full', memory.offload"),
        ({"slices": 1, "recompute": "full"}, "Try memory.offload"),  # no slice waits, so R's would be none
        ({"slices": 2, "recompute": "stage+full"}, "Try memory.offload"),
    ],
    ids=str,
)
def test_what_is_set_is_not_advised(settings: dict[str, Any], advised: str) -> None:
    inputs = tokens()
    pipe = pipeline(num_ranks=1, num_microbatches=1, schedule="gpipe", memory_limit=1e5, **settings)
    with pytest.raises(SlipstreamError, match=re.escape(advised)):
        pipe.step(inputs, inputs)


def test_what_graphs_keep_of_offloaded_slices_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where steps aren't to be recorded."""
    inputs, settings = tokens(batch=4), {"schedule": "gpipe", "offload": 1.0, "slices": 2}
    eager = rehearsed_bytes(pipeline(**settings), inputs)
    assert rehearsed_bytes(pipeline(cuda_graphs=True, **settings), inputs) == eager  # a CPU has none
    monkeypatch.setattr(step_graphs, "recorder_of", lambda _: RecordedOps())
    assert rehearsed_bytes(pipeline(cuda_graphs=True, **settings), inputs) > eager
    settings["offload"] = 0.0
    assert rehearsed_bytes(pipeline(cuda_graphs=True, **settings), inputs) == rehearsed_bytes(
        pipeline(**settings), inputs
    )


@pytest.mark.more
@pytest.mark.parametrize(("schedule", "stages_per_rank"), first_of([("auto", 1), ("auto-v", 2)], 1, "grid"))
def test_auto_uses_the_room_there_is(schedule: str, stages_per_rank: int) -> None:
    """And begins again after it found none."""
    inputs, settings = tokens(batch=4), {"schedule": schedule, "stages_per_rank": stages_per_rank, "slices": 2}
    with pytest.raises(SlipstreamError, match=r"no order fits.*one microbatch at a time rank") as raised:
        pipeline(memory_limit=1000, **settings).step(inputs, inputs)
    least = float(re.findall(r"Give memory.limit=(\d+)", str(raised.value))[0])
    pipe = pipeline(memory_limit=least - 1, **settings)
    for _ in range(2):
        with pytest.raises(SlipstreamError, match="no order fits"):
            pipe.step(inputs, inputs)
    assert settle(pipe, tokens(batch=4, length=32)) == 4
    held = []
    for limit in (least, 1.5 * least, None):
        pipe = pipeline(memory_limit=limit, **settings)
        assert settle(pipe, inputs) <= 4
        held.append(rehearsed_bytes(pipe, inputs))
        assert limit is None or held[-1] <= limit
    assert held[0] < held[1] < held[2]


@pytest.mark.grid
@pytest.mark.parametrize("schedule", ["auto", pytest.param("1f1b", marks=pytest.mark.grid)])
def test_slices_are_chosen_within_the_limit_and_gradients_stay_exact(schedule: str) -> None:
    config, inputs = llama(attention_dropout=0.0), tokens(batch=4)
    free = pipeline(schedule="1f1b", slices=8)
    limit = rehearsed_bytes(free, inputs) * 1.02
    pipe = pipeline(schedule=schedule, slices="auto", memory_limit=limit, dtype=torch.float64)
    with pytest.raises(SlipstreamError, match=r"no order fits|that is given holds more"):
        pipe.step(inputs, inputs)  # float64 needs twice as much
    pipe = pipeline(schedule=schedule, slices="auto", memory_limit=2 * limit, dtype=torch.float64)
    model = build(config)
    settle(pipe, inputs)
    for parameter in pipe.parameters():
        parameter.grad = None
    model.zero_grad()
    assert abs(pipe.step(inputs, inputs) - unsplit_step(model, inputs, inputs)) < BOUND
    assert gradient_error(model, pipe) < BOUND
    assert rehearsed_bytes(pipe, inputs) <= 2 * limit


def test_measuring_changes_no_number() -> None:
    inputs = tokens(batch=4)
    config = llama(attention_dropout=0.3)
    losses = []
    for limit in (None, 1e12):
        torch.manual_seed(7)
        pipe = make_pipe(config, slices=4, num_ranks=2, memory_limit=limit)
        losses.append([float(pipe.step(inputs, inputs)) for _ in range(2)])
        losses[-1].append(float(torch.rand(())))
    assert losses[0] == losses[1]


def limited(name: str = "llama", **settings: Any) -> Pipeline:
    options = {"schedule": "auto", "slices": "auto", "num_ranks": 2, "self_check": False} | settings
    config = copy.deepcopy(ARCHITECTURES[name])
    config.max_position_embeddings = 512  # of rows of several sequences, too
    return Pipeline.from_config(config, **grouped(**options))


def rehearsed(pipe: Pipeline) -> float:
    """What the fullest rank would hold in the last step, every row rehearsed by itself."""
    runtime, tables = pipe._runtime, []
    for each in pipe.last_step.microbatches:
        ids = tokens(batch=1, length=sum(each.slices))
        batch = runtime.family.split(Batch.of(runtime.device, ids, ids), [each], 0)
        tables.append(rehearse(runtime.memory_limit.rehearsed(runtime.layout, batch, [each])))
    num_tokens = sum(sum(each.slices) for each in pipe.last_step.microbatches)
    return max(rank.peak for rank in memory_of(pipe.layout.training, tables)) + token_bytes(num_tokens)


def sequences(*lengths: int) -> list[Tensor]:
    return [tokens(batch=1, length=length)[0] for length in lengths]


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        pytest.param("gpt2", {"schedule": "auto-v", "stages_per_rank": 2}, marks=pytest.mark.grid),
        pytest.param("llama", {"recompute": "stage"}, marks=pytest.mark.grid),
        ("gpt2", {"schedule": "v-half", "slices": 4, "stages_per_rank": 2, "vocabulary": "spread"}),
    ],
    ids=str,
)
def test_a_few_rows_tell_what_all_hold(name: str, settings: dict[str, Any]) -> None:
    """So that steps are planned within the limit."""
    pipe, most = limited(name, memory_limit=1e9, **settings), []
    batches = sequences(64, 20, 33, 5, 45, 63), sequences(64), sequences(7, 1)
    for batch in batches:
        pipe.step(batch, batch)
        slices = [each.slices for each in pipe.last_step.microbatches]
        known = max(pipe._runtime.memory_limit.peak_memory_of_rows(pipe.layout.training, slices))
        most.append(rehearsed(pipe))
        assert 0.999 * most[-1] <= known <= 1.15 * most[-1]
    if not settings:
        pipe = limited(name, memory_limit=0.75 * most[0])
        assert torch.isfinite(pipe.step(batches[0], batches[0]))
        assert rehearsed(pipe) <= 0.75 * most[0]


@pytest.mark.more
def test_a_sequence_that_is_too_long_is_named_before_anything_runs() -> None:
    batch = sequences(5, 64)
    with pytest.raises(SlipstreamError, match=r"inputs\[1\] has 64 tokens, too many for memory.limit=.*Cut it") as why:
        limited(memory_limit=350_000).step(batch, batch)
    needed = int(re.findall(r"give memory.limit=(\d+)", str(why.value))[0])
    assert torch.isfinite(limited(memory_limit=needed).step(batch, batch))
