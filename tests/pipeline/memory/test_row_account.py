"""What rows of any length hold follows from a few that were rehearsed; steps are planned within the limit by it."""

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
from slipstream.pipeline.memory import rehearse
from slipstream.simulator import memory_of
from support.architectures import ARCHITECTURES, tokens
from support.options import grouped


def pipeline(name: str = "llama", **settings: Any) -> Pipeline:
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
    pipe = pipeline(name, memory_limit=1e9, **settings)
    for batch in (sequences(64, 20, 33, 5, 45, 63), sequences(64), sequences(7, 1)):
        pipe.step(batch, batch)
        slices = [each.slices for each in pipe.last_step.microbatches]
        known = max(pipe._runtime.memory_limit.peak_memory_of_rows(pipe.layout.training, slices))
        real = rehearsed(pipe)
        assert 0.999 * real <= known <= 1.15 * real


@pytest.mark.more
def test_steps_are_planned_within_the_limit() -> None:
    batch = sequences(64, 20, 33, 5, 45, 63)
    free = pipeline(memory_limit=1e9)
    free.step(batch, batch)
    limit = 0.75 * rehearsed(free)
    pipe = pipeline(memory_limit=limit)
    assert torch.isfinite(pipe.step(batch, batch))
    assert rehearsed(pipe) <= limit


@pytest.mark.more
def test_a_sequence_that_is_too_long_is_named_before_anything_runs() -> None:
    batch = sequences(5, 64, 7)
    with pytest.raises(SlipstreamError, match=r"inputs\[1\] has 64 tokens, too many for memory.limit=.*Cut it") as why:
        pipeline(memory_limit=350_000).step(batch, batch)
    needed = int(re.findall(r"give memory.limit=(\d+)", str(why.value))[0])
    assert torch.isfinite(pipeline(memory_limit=needed).step(batch, batch))
