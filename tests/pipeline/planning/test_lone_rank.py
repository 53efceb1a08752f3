"""A rank that is alone in its pipeline cuts sequences into as many slices as it takes to fit, and is exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from slipstream import Pipeline, SlipstreamError
from slipstream.pipeline import ExpectedBatch
from slipstream.schedule import slice_lengths
from slipstream.simulator import memory_of
from slipstream.units import bytes_text
from support.architectures import ARCHITECTURES, BOUND, build, llama, tokens
from support.exact_steps import documents_error, exact_pipe, sequences_error
from support.pipelines import make_pipe

LENGTH = 256
LONG = llama(max_position_embeddings=LENGTH, num_hidden_layers=2)
PLANNED = "planned by counted operations: 16 slices of 16 tokens, as 8 slices would hold "


def lone(config: Any = LONG, **settings: Any) -> Pipeline:
    return make_pipe(build(config), **{"num_ranks": 1, "recompute": "stage"} | settings)


def with_positions(name: str) -> Any:
    """The configuration of an architecture that takes the length."""
    config = copy.deepcopy(ARCHITECTURES[name])
    config.max_position_embeddings = LENGTH
    config.num_hidden_layers = 2
    return config


def expecting(room: float, length: int = LENGTH, **others: Any) -> ExpectedBatch:
    """Rows for which a Pipeline is planned, on a device of which so many bytes may be used."""
    return ExpectedBatch(length, device_memory=room, **others)


def held(pipe: Pipeline) -> float:
    """The bytes of a step, by its own tensors."""
    inputs = tokens(1, LENGTH)
    pipe.step(inputs, inputs)
    return memory_of(pipe.layout.training, pipe.memory_table(inputs, inputs))[0].peak


@pytest.fixture(scope="module")
def usual() -> float:
    """The bytes of a step in the usual slices."""
    return held(lone())


def test_the_usual_slices_stay_where_they_fit(usual: float) -> None:
    pipe = exact_pipe(build(LONG), tokens(1, LENGTH), num_ranks=1, recompute="stage", seq_len=expecting(1.5 * usual))
    assert pipe.how_planned == ""
    assert pipe.slices(LENGTH) == slice_lengths(8, LENGTH)
    assert pipe.slices(30) == slice_lengths(8, 30)
    assert "plan" not in str(pipe)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama", {}),
        ("llama", {"num_microbatches": 2, "num_flushes": 2}),
        ("llama", {"offload": 0.5}),
        ("llama", {"schedule": "gpipe"}),
        ("mistral, window of 7", {}),
    ],
    ids=str,
)
def test_as_many_slices_as_it_takes_to_fit(usual: float, model: str, settings: dict[str, Any]) -> None:
    config, inputs = with_positions(model), tokens(settings.get("num_microbatches", 1), LENGTH)
    given = {"num_ranks": 1, "recompute": "stage", "seq_len": expecting(0.92 * usual)}
    pipe = exact_pipe(build(config), inputs, **given | settings)
    assert pipe.how_planned.startswith(PLANNED), pipe.how_planned
    assert f"and this machine has room for {bytes_text(0.92 * usual)}" in str(pipe)
    assert pipe.last_step.slices == [16] * 16
    assert pipe.slices(20) == slice_lengths(16, 20)


def test_documents_and_sequences_of_different_lengths(usual: float) -> None:
    settings = {"num_ranks": 1, "recompute": "stage", "num_microbatches": 1}
    expected = expecting(0.92 * usual)
    inputs = tokens(1, LENGTH)
    assert documents_error(build(LONG), inputs, [(100, 7, 149)], seq_len=expected, **settings) < BOUND
    several = expecting(0.92 * usual, 40, longest=LENGTH)
    assert sequences_error(build(LONG), (40, LENGTH, 33), seq_len=several, **settings) < BOUND
    pipe = lone(seq_len=several)
    assert pipe.how_planned.startswith(PLANNED)
    rows = [row[:length] for row, length in zip(tokens(2, LENGTH), (LENGTH, 40), strict=True)]
    pipe.step(rows, rows)
    assert len(pipe.last_step.slices) == 16


def test_what_fits_in_no_slices_is_refused_with_what_to_type(usual: float) -> None:
    room = 1.1 * usual
    refusal = (
        f"a microbatch of 1 sequence of {LENGTH} tokens doesn't fit, however it is sliced: by counted operations a "
        "step holds .* or more, and this machine has room for .*. Give memory.recompute=stage, with which 8 slices "
        "hold .*; or slices=8, to try it all the same."
    )
    with pytest.raises(SlipstreamError, match=refusal):
        lone(recompute="none", seq_len=expecting(room))
    assert lone(recompute="none", seq_len=expecting(room), slices=8).how_planned == ""
    assert lone(seq_len=expecting(room)).how_planned == ""
    with pytest.raises(SlipstreamError, match=r"Give memory\.context=host, with which 16 slices hold"):
        lone(seq_len=expecting(0.75 * usual))
    assert lone(context="host", seq_len=expecting(0.75 * usual)).how_planned.startswith(PLANNED)
    with pytest.raises(SlipstreamError, match="Give fewer tokens, or more ranks"):
        lone(seq_len=expecting(1000))


def test_a_limit_lets_a_plan_compute_again(usual: float) -> None:
    inputs, limit = tokens(1, LENGTH), 1.1 * usual
    pipe = exact_pipe(build(LONG), inputs, num_ranks=1, memory_limit=limit, seq_len=LENGTH, slices=None)
    assert "with memory.recompute=stage, as 8 slices without it would hold" in pipe.how_planned
    assert pipe.slices(LENGTH) == slice_lengths(8, LENGTH)
    assert memory_of(pipe.layout.training, pipe.memory_table(inputs, inputs))[0].peak <= limit


@pytest.mark.more
def test_a_limit_is_kept_by_the_bytes_that_are_measured(usual: float) -> None:
    """Also where the first batch says how long sequences are."""
    limit = 0.92 * usual
    pipe = lone(memory_limit=limit)
    assert held(pipe) <= limit
    assert pipe.last_step.slices == [16] * 16
    assert "and memory.limit is " in pipe.how_planned
    with pytest.raises(SlipstreamError, match=r"but rank 0 would hold .*more slices"):
        held(lone(memory_limit=0.4 * usual))


def test_what_isnt_counted_is_as_usual_and_says_why(usual: float) -> None:
    pipe = lone(recompute=2, seq_len=expecting(usual / 2))
    reason = "what memory.recompute=2 saves isn't counted"
    assert f"slices as usual, for nothing is planned: {reason}" in str(pipe)
    assert pipe.slices(LENGTH) == slice_lengths(8, LENGTH)
    pipe = lone(ARCHITECTURES["qwen2_moe"], seq_len=expecting(usual / 2))
    assert "for nothing is planned: what a model of model_type 'qwen2_moe' computes can't be counted" in str(pipe)
