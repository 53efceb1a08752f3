"""Microbatches with their own rows and slices have the gradients of the unsplit model, and bad ones are refused."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slipstream import Memory, Pipeline, Runtime, SlipstreamError, find_order, make_schedule, slice_batch
from slipstream.model import causal_cross_entropy
from slipstream.schedule import SCHEDULES
from slipstream.simulator import UnitCost
from slipstream.train.config.run_config import dump_config, parse_config
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    labels_of,
    tokens,
    unsplit_step,
)
from support.examples import examples
from support.live_memory import limit_that_would_do
from support.pipelines import make_pipe
from support.sequences.sliced_layers import CASES, ROWS, TARGET

LENGTH = 24
MODELS = {name: build(ARCHITECTURES[name]) for name in ("llama, tied", "gpt2", "mistral, window of 7")}
ORDERS = [(name, v) for name in SCHEDULES for v in (1, 2) if v in SCHEDULES[name].stages_per_rank]
UNCHECKED = Runtime(self_check=False)
CONFIG: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"corpus": "python-stdlib"},
    "training": {"output": "out", "seq_len": 64, "batch_size": 6, "steps": 1},
    "parallel": {"data": 2},
}

Microbatches = list[tuple[int, list[int]]]


@st.composite
def microbatches(draw: st.DrawFn, num_rows: int, length: int, most_slices: int = 5) -> Microbatches:
    """Any rows to each, and of each any slices."""

    def parts(whole: int, most: int) -> list[int]:
        cuts = draw(st.sets(st.integers(1, whole - 1), max_size=most - 1))
        return [b - a for a, b in pairwise([0, *sorted(cuts), whole])]

    return [(rows, parts(length, most_slices)) for rows in parts(num_rows, num_rows)]


@examples(125, thin=3)
@given(st.data())
def test_gradients_are_those_of_the_unsplit_model(data: st.DataObject) -> None:
    given = data.draw(microbatches(4, LENGTH))
    schedule, v = data.draw(st.sampled_from(ORDERS))
    name, num_ranks = data.draw(st.sampled_from(sorted(MODELS))), data.draw(st.integers(1, 2))
    inputs = tokens(batch=4, length=LENGTH, seed=data.draw(st.integers(0, 99)))
    documents = torch.randint(0, 2, inputs.shape).cumsum(dim=1) // 6 if data.draw(st.booleans()) else None
    labels = labels_of(inputs)
    settings = {"schedule": schedule, "stages_per_rank": v, "num_ranks": num_ranks, "microbatches": given}
    settings |= {"recompute": data.draw(st.sampled_from(["none", "full", "selective"]))}
    settings |= {"offload": data.draw(st.sampled_from([0.0, 0.5]))}
    pipe = make_pipe(copy.deepcopy(MODELS[name]), **settings)
    loss = pipe.step(inputs, labels, document_ids=documents)
    assert pipe.layout.training.slice_counts == tuple(len(slices) for _, slices in given)
    assert pipe.evaluate(inputs, labels, documents) == pytest.approx(float(loss), rel=1e-9)
    if documents is None:
        whole = copy.deepcopy(MODELS[name])
        assert abs(loss - unsplit_step(whole, inputs, labels)) < BOUND
        expected = gradients(whole)
    else:
        whole = make_pipe(copy.deepcopy(MODELS[name]), slices=1)
        assert abs(loss - whole.step(inputs, labels, document_ids=documents)) < BOUND
        expected = gradients(whole)
    assert gradient_error(expected, gradients(pipe)) < BOUND


@pytest.mark.more
@examples(50)
@given(st.data())
def test_layers_behind_cut_tokens_have_the_gradients_of_the_sequence(data: st.DataObject) -> None:
    name, (schedule, v) = data.draw(st.sampled_from(sorted(CASES))), data.draw(st.sampled_from(ORDERS))
    num_ranks, num_layers = data.draw(st.integers(1, 2)), CASES[name].num_layers
    num_stages = num_ranks * v
    ends = data.draw(st.sets(st.integers(1, num_layers - 1), min_size=num_stages - 1, max_size=num_stages - 1))
    inputs, targets = CASES[name].batch()
    pipe = make_pipe(
        CASES[name].model(),
        schedule,
        microbatches=data.draw(microbatches(ROWS, TARGET, 3)),
        stages_per_rank=v,
        num_ranks=num_ranks,
        partition=[b - a for a, b in pairwise([0, *sorted(ends), num_layers])],
        loss_fn=causal_cross_entropy,
    )
    loss, expected = CASES[name].unsplit(1)
    assert abs(pipe.step(inputs, targets) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND


@pytest.mark.more
def test_what_slice_batch_returns_runs_as_it_is_by_name_and_in_a_found_order() -> None:
    found = slice_batch(lambda rows, tokens, context: 1 + rows * tokens * (tokens + 2 * context), 5, LENGTH, 2)
    counts = [len(each.slices) for each in found.microbatches]
    inputs = tokens(batch=5, length=LENGTH)
    whole = copy.deepcopy(MODELS["gpt2"])
    unsplit_step(whole, inputs, inputs)
    order = find_order([0, 1], len(counts), counts, UnitCost(), effort=1e4)
    for schedule in ("1f1b", order):
        pipe = make_pipe(copy.deepcopy(MODELS["gpt2"]), schedule, microbatches=found, num_ranks=2)
        pipe.step(inputs, inputs)
        assert gradient_error(whole, pipe) < BOUND
        assert list(pipe.last_step.microbatches) == list(found.microbatches)


@pytest.mark.more
def test_each_microbatch_has_its_own_memory() -> None:
    """The limit is checked against a table for each: the largest microbatch decides, wherever it stands."""
    inputs = tokens(batch=4, length=LENGTH)

    def pipeline(limit: float, *sizes: int) -> Pipeline:
        given = [[rows, [12, 12] if rows > 1 else [LENGTH]] for rows in sizes]
        options: dict[str, Any] = {"num_ranks": 2, "runtime": UNCHECKED, "memory": Memory(limit=limit)}
        return Pipeline(copy.deepcopy(MODELS["gpt2"]), "gpipe", microbatches=given, **options)

    needed = []
    for sizes in ((3, 1), (1, 3)):
        with pytest.raises(SlipstreamError, match=r"memory\.limit=1000 \(1\.00 kB\), but rank . would hold") as problem:
            pipeline(1000, *sizes).step(inputs, inputs)
        held = limit_that_would_do(problem.value)
        assert pipeline(held, *sizes).step(inputs, inputs) > 0
        needed.append(held)
    assert needed[0] == pytest.approx(needed[1], rel=0.1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"microbatches": [[2, [12, 12]], [1, [24]]]}, "have 3 rows, but the batch has 4. Make them equal"),
        ({"microbatches": [[2, [12, 12]], [2, [23]]]}, "microbatches[1] has slices of 23 tokens in all, microb"),
        ({"microbatches": [[2, [12, 11]], [2, [23]]]}, "slices of 23 tokens in all, but it has rows of 24"),
        ({"microbatches": [[2, [24]], [2, []]]}, "give each one's rows and the tokens of its slices, such as [[2, ["),
        ({"microbatches": [[0, [24]]]}, "give each one's rows"),
        ({"microbatches": []}, "microbatches=[]: give each one's rows"),
        ({"microbatches": [4, 24]}, "microbatches=[4, 24]: give each one's rows"),
        ({"microbatches": [[4, [24]]], "num_microbatches": 2}, "with num_microbatches=2: give one of the two"),
        ({"microbatches": [[4, [24]]], "slices": 8}, "microbatches=... with slices=8: give one of the two"),
        ({"microbatches": [[4, [24]]], "memory": Memory(num_flushes=2)}, "with memory.num_flushes=2: give one of"),
        ({"microbatches": [[4, [24]]], "schedule": "auto"}, "which is planned for microbatches that are alike"),
        (
            {"microbatches": [[2, [24]], [2, [9, 15]]], "schedule": make_schedule("gpipe", 1, 2, 2)},
            "the schedule 'gpipe' has microbatches of [2, 2] slices. Give microbatches=... with as many, not [1, 2]",
        ),
        (
            {"schedule": make_schedule("gpipe", 1, 2, [1, 2]), "slices": [9, 15]},
            "the schedule 'gpipe' has microbatches of [1, 2] slices. Give microbatches=... with as many.",
        ),
    ],
)
def test_what_does_not_add_up_is_refused(given: dict[str, Any], words: str) -> None:
    inputs = tokens(batch=4, length=LENGTH)
    with pytest.raises(SlipstreamError) as problem:
        Pipeline(copy.deepcopy(MODELS["gpt2"]), **{"runtime": UNCHECKED} | given).step(inputs, inputs)
    assert words in str(problem.value)


def test_layers_without_cut_tokens_take_whole_microbatches() -> None:
    with pytest.raises(SlipstreamError, match=r"(?s)take whole microbatches\. Put.*CutTokens"):
        Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2)), microbatches=[[1, [2, 1]], [1, [3]]])


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        ({"microbatches": [[2, [64]], [2, [32, 32]]]}, "have 4 rows, but a replica's batch has 3"),
        ({"microbatches": [[3, [32]]]}, "slices of 32 tokens in all, but training.seq_len has rows of 64"),
        ({"microbatches": [[3, [64]]], "slices": 8}, "pipeline.microbatches says what pipeline.slices does"),
        ({"microbatches": [[3, [64]]], "num_microbatches": 1}, "what pipeline.num_microbatches does; give one of"),
        ({"microbatches": [[3, [0, 64]]]}, "pipeline.microbatches[0][1][0]=0: give"),
    ],
)
def test_a_configuration_is_refused_before_anything_runs(pipeline: dict[str, Any], words: str) -> None:
    with pytest.raises(SlipstreamError) as problem:
        parse_config(CONFIG | {"pipeline": pipeline})
    assert words in str(problem.value)


def test_a_configuration_is_read_back() -> None:
    config = parse_config(CONFIG | {"pipeline": {"microbatches": [[2, [40, 24]], [1, [64]]]}})
    options = config.pipeline_options()
    assert (options["microbatches"], options["slices"]) == ([(2, [40, 24]), (1, [64])], None)
    assert parse_config(yaml.safe_load(dump_config(config))) == config
