"""With schedule, slices and partition "auto", a pipeline is planned from measured costs before its stages are made."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import Memory, Pipeline, Runtime, SlipstreamError
from slipstream.cost import MeasuredCosts, Profile, profile_behind
from slipstream.parallel import Ranks
from slipstream.pipeline.pipeline_options import ExpectedBatch
from slipstream.pipeline.planning import StartRequest, plan_before_training
from slipstream.planner.joint import JointPlan
from slipstream.planner.plan import Plan
from slipstream.profile import ProfileSettings, find_costs
from support.architectures import (
    ARCHITECTURES,
    build,
    gradient_error,
    gradients,
    llama,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.exact_steps import exact_until_planned
from support.live_memory import rehearsed_bytes
from support.parameters import first_of
from support.unusual_layers import CROSSING

LENGTH = 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def planned(**options: Any) -> Pipeline:
    free = {"schedule": "auto", "slices": "auto", "seq_len": LENGTH, "num_ranks": 2}
    model, config = options.pop("model", None), options.pop("config", llama())
    settings = {"runtime": Runtime(self_check=False), **free, **options}
    return Pipeline.from_config(config, **settings) if model is None else Pipeline(model, **settings)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """The costs that are measured for plans."""
    profiles: list[Profile] = []

    def measure(*arguments: Any) -> Profile:
        profiles.append(find_costs(*arguments))
        return profiles[-1]

    monkeypatch.setattr(plan_before_training, "find_costs", measure)
    return profiles


@pytest.mark.grid
def test_no_slice_is_longer_than_what_the_time_sufficed_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(config: Any, settings: ProfileSettings, *arguments: Any) -> Profile:
        return find_costs(config, dataclasses.replace(settings, longest_slice=16), *arguments)

    monkeypatch.setattr(plan_before_training, "find_costs", measure)
    plan = planned().plan
    assert plan is not None
    assert max(plan.slices) <= 16


@pytest.mark.grid
def test_what_it_does_is_told_now_and_then() -> None:
    said: list[str] = []
    request = StartRequest(seq_len=LENGTH, num_microbatches=1, num_ranks=2, dtype="float32")
    plan_before_training.plan_start(llama(), request, Ranks.of(), torch.device("cpu"), said.append, every=0.0)
    text = " ".join(said)
    assert "measuring what the model's parts cost: " in text
    assert "searching for the best plan: " in text


@pytest.mark.more
def test_layers_that_cannot_be_cut_in_half_are_planned_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Both branches of GPT-NeoX start from the same input."""
    with caplog.at_level(logging.INFO, "slipstream"):
        plan = planned(model=build(ARCHITECTURES["gpt_neox"])).plan
    assert plan is not None
    assert all(layers == int(layers) for layers in plan.partition)
    assert any(
        "layers are planned whole: model_type 'gpt_neox' can't be cut inside" in line for line in caplog.messages
    )


@pytest.mark.parametrize("num_ranks", first_of([2, 3], 1, "grid"))
def test_a_planned_step_has_the_gradients_of_the_whole_model(num_ranks: int) -> None:
    config, inputs = llama(), tokens(batch=2, length=LENGTH)
    whole = build(config).double()
    loss = unsplit_step(whole, inputs, inputs)
    pipe = planned(num_ranks=num_ranks, num_microbatches=2, model=build(config).double())
    assert isinstance(pipe.plan, JointPlan)
    assert not pipe.is_tuning
    assert pipe.slices(LENGTH) == list(pipe.plan.slices)
    assert [stage.stop - stage.start for stage in pipe.layout.layers] == list(pipe.plan.partition)
    assert pipe.order.actions == pipe.plan.schedule.actions
    assert pipe.step(inputs, inputs) == pytest.approx(float(loss), rel=1e-12)
    assert gradient_error(whole, pipe) < 1e-10


@pytest.mark.more
def test_a_plan_is_for_the_batches_that_are_expected() -> None:
    """Rows of a microbatch, and the longest of sequences that differ in length, whose stages the plan's rates know."""
    said: list[str] = []
    expected = ExpectedBatch(48, microbatch_size=2, num_microbatches=3, longest=LENGTH, say=said.append)
    pipe = planned(seq_len=expected)
    assert pipe.plan is not None
    profile = profile_behind(pipe.plan.costs)
    assert (profile.microbatch_size, profile.seq_len) == (2, LENGTH)
    assert (pipe.plan.schedule.num_microbatches, sum(pipe.plan.slices)) == (3, 48)
    assert pipe.rates is not None
    assert pipe.rates.num_stages == len(pipe.plan.partition)


@pytest.mark.more
def test_a_model_that_cannot_be_measured_is_planned_once_steps_ran() -> None:
    """Layers of Gemma 4 take more than hidden states from others, which no costs count."""
    model, said, inputs = build(CROSSING["gemma4_text"]), list[str](), tokens(length=LENGTH)
    whole = copy.deepcopy(model)
    with no_rounding_inside():
        loss = unsplit_step(whole, inputs, inputs)
        pipe = planned(model=model, seq_len=ExpectedBatch(LENGTH, say=said.append))
        assert pipe.plan is None
        assert any(
            "no plan can be made before the first step: layers of 'gemma4_text' take more" in each for each in said
        )
        assert len(exact_until_planned(pipe, inputs, inputs, loss, gradients(whole))) == 6


@pytest.mark.more
@pytest.mark.parametrize(
    ("vocabulary", "tied"), first_of([("whole", False), ("spread", True), ("spread", False)], 1, "grid")
)
@pytest.mark.parametrize("share", first_of([0.5, 1.02], 1, "grid"))
def test_a_planned_step_keeps_to_the_memory_limit(share: float, vocabulary: str, tied: bool) -> None:
    """A limit above what the plan without one holds leaves it room; a tighter one needs other slices or stages."""
    inputs = tokens(batch=4, length=LENGTH)
    options = {"num_microbatches": 4, "vocabulary": vocabulary, "config": llama(tie_word_embeddings=tied)}
    limit = share * rehearsed_bytes(planned(**options), inputs)
    pipe = planned(memory=Memory(limit=limit), **options)
    assert pipe.plan is not None
    assert pipe.plan.head == vocabulary
    assert rehearsed_bytes(pipe, inputs) <= limit
    pipe.step(inputs, inputs)


@pytest.mark.grid
def test_forwards_run_again_where_the_limit_asks_for_it_and_else_what_would_do_is_said() -> None:
    inputs = tokens(batch=4, length=LENGTH)
    with pytest.raises(
        SlipstreamError, match=r"memory.limit=1000 bytes, but .* The least that was found is .* on rank \d"
    ) as why:
        planned(num_microbatches=4, memory=Memory(limit=1000))
    least = int(re.findall(r"Give memory.limit=(\d+)", str(why.value))[0])
    pipe = planned(num_microbatches=4, memory=Memory(limit=least))
    assert pipe.plan is not None
    assert pipe.plan.recompute != "none"
    assert rehearsed_bytes(pipe, inputs) <= least
    pipe.step(inputs, inputs)


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "1f1b"},
        {"slices": 4},
        {"partition": [2, 2]},
        {"seq_len": None},
        {"memory": Memory(recompute="full")},
    ],
    ids=str,
)
def test_nothing_is_planned_where_anything_is_given(given: dict[str, object]) -> None:
    assert planned(**given).plan is None


@pytest.mark.more
@pytest.mark.parametrize(
    ("vocabulary", "tied"), first_of([("spread", True), ("whole", False), ("spread", False)], 1, "grid")
)
def test_what_a_plan_holds_is_known_before_it_runs(vocabulary: Any, tied: bool, measured: list[Profile]) -> None:
    """As it is rehearsed, with the parts of a head as without, and of tied weights."""
    pipe = planned(num_microbatches=4, vocabulary=vocabulary, config=llama(tie_word_embeddings=tied))
    costs = MeasuredCosts(measured[-1])
    request = StartRequest(seq_len=LENGTH, num_microbatches=4, num_ranks=2, dtype="float32")
    assert pipe.plan is not None
    counted = max(request.evaluate(costs, pipe.plan.plan).peaks())
    ratio = counted / rehearsed_bytes(pipe, tokens(batch=4, length=LENGTH))
    assert 0.95 < ratio < 1.1


@pytest.mark.more
def test_what_is_held_with_layers_that_are_computed_again_is_known(measured: list[Profile]) -> None:
    """One by one, on one slice and on several, with whole backwards and with split ones, which hold what W needs."""
    config = llama(hidden_size=64, intermediate_size=192, max_position_embeddings=4 * LENGTH)
    planned(config=config, seq_len=4 * LENGTH)
    costs, inputs = MeasuredCosts(measured[-1]), tokens(batch=2, length=2 * LENGTH)
    request, most = StartRequest(seq_len=2 * LENGTH, num_microbatches=2, num_ranks=2, dtype="float32"), {}
    for schedule, slices in (("1f1b", (128,)), ("1f1b", (48, 32, 48)), ("zb-h1", (48, 32, 48))):
        for recompute in ("none", "full", "stage+full") if schedule == "1f1b" and len(slices) > 1 else ("full",):
            options = {"schedule": schedule, "slices": [*slices], "partition": [2, 2], "num_microbatches": 2}
            memory, runtime = Memory(recompute=recompute), Runtime(self_check=False)
            pipe = Pipeline.from_config(config, num_ranks=2, memory=memory, runtime=runtime, **options)
            most[schedule, slices, recompute] = rehearsed_bytes(pipe, inputs)
            plan = Plan(recompute=recompute).closed(schedule=pipe.order, slices=slices, partition=(2, 2))
            counted = max(request.evaluate(costs, plan).peaks())
            assert 0.95 < counted / most[schedule, slices, recompute] < 1.1
    several = (48, 32, 48)
    split, whole = most["zb-h1", several, "full"], most["1f1b", several, "full"]
    assert whole < split < most["1f1b", several, "none"]
    assert max(whole, most["1f1b", (128,), "full"]) < 0.75 * most["1f1b", several, "none"]
