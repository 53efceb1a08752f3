""" "auto" learns the fastest order and slices from the first steps, and learning changes no gradient."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch

from slipstream import Memory, Op, Pipeline, Runtime, Schedule, SlipstreamError
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.tuning import Trial, Tuner
from slipstream.schedule import COMMUNICATION, one_f_one_b, split_backwards
from slipstream.simulator import TableCost, simulate
from slipstream.timeline import Timeline
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
from support.parameters import first_of

SECONDS = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.1, Op.W: 0.95}  # of 1000 tokens; splitting costs a little
HEAD = 1.4  # the last stage takes so much longer


def run(trial: Trial) -> Timeline:
    """A machine on which a slice costs a constant, its tokens, and the pairs of tokens that attend."""
    last = trial.schedule.num_stages - 1
    contexts = accumulate(trial.slices, initial=0)
    times = {
        (stage, i, op): seconds
        * (HEAD if stage == last else 1)
        * (0.02 + length / 1000 + (0 if op is Op.W else length * (context + length / 2) / 4e6))
        for i, (length, context) in enumerate(zip(trial.slices, contexts, strict=False))
        for stage in range(last + 1)
        for op, seconds in SECONDS.items()
    }
    return simulate(trial.schedule, TableCost(times))


def tuner_of(
    schedule: str | Schedule,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    slices: int | Sequence[int] | str,
    num_flushes: int = 1,
    compiled: Sequence[str] = (),
) -> Tuner:
    memory = Memory(num_flushes=num_flushes)
    options = PipelineOptions(schedule, num_microbatches, slices, stages_per_rank, memory=memory)
    return Tuner(options, num_ranks, compiled=compiled)


def settle(tuner: Tuner, length: int) -> tuple[Trial, int]:
    """Let the tuner learn to the end; how many steps that took."""
    num_steps = 0
    schedule = tuner.begin(length)
    while tuner.is_tuning:
        num_steps += 1
        assert tuner.listens_to(length)
        schedule = tuner.follow(tuner.decide(run(Trial(schedule, tuple(tuner.lengths(length))))))
    return Trial(schedule, tuple(tuner.lengths(length))), num_steps


def test_the_order_is_no_slower_than_hand_written_ones() -> None:
    trial, num_steps = settle(tuner_of("auto", 4, 4, 1, 4), 4096)
    assert num_steps == 7
    assert trial.slices == (1024,) * 4
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        other = split_backwards(tuner_of(name, 4, 4, 1, 4).schedule)
        assert run(trial).makespan <= run(Trial(other, trial.slices)).makespan + 1e-9


def test_the_order_on_a_v_is_no_slower_than_hand_written_ones() -> None:
    trial, _ = settle(tuner_of("auto-v", 3, 2, 2, 4), 4096)
    assert trial.schedule.placement == (0, 1, 2, 2, 1, 0)
    for name in ("zb-v", "v-half", "v-min"):
        other = split_backwards(tuner_of(name, 3, 2, 2, 4).schedule)
        assert run(trial).makespan <= run(Trial(other, trial.slices)).makespan + 1e-9


def test_a_v_has_two_stages_a_rank() -> None:
    with pytest.raises(SlipstreamError, match=r"'auto-v' has exactly 2"):
        tuner_of("auto-v", 2, 1, 1, 4)


@pytest.mark.more
@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_slices_are_shorter_first_and_beat_equal_ones(schedule: str) -> None:
    trial, _ = settle(tuner_of(schedule, 2, 1, 1, "auto"), 2048)
    assert sum(trial.slices) == 2048
    assert all(length % 64 == 0 for length in trial.slices)
    best = run(trial).makespan
    for count in (1, 2, 4, 8, 16):
        equal = Trial(tuner_of("1f1b", 2, 1, 1, count).schedule, (2048 // count,) * count)
        assert best < run(equal).makespan


def test_a_schedule_brings_its_own_number_of_slices() -> None:
    tuner = tuner_of(one_f_one_b(2, 1, 3), 2, 1, 1, 8)
    assert tuner.lengths(64) == [22, 21, 21]


def test_tuning_is_for_the_first_length_that_is_learned_from() -> None:
    tuner = tuner_of("1f1b", 2, 1, 1, "auto")
    tuner.begin(500)  # a step that failed
    schedule = tuner.begin(512)
    assert sum(tuner.lengths(512)) == 512
    tuner.follow(tuner.decide(run(Trial(schedule, tuple(tuner.lengths(512))))))
    tuner.begin(400)
    assert not tuner.listens_to(400)
    assert sum(tuner.lengths(400)) == 400
    assert tuner.listens_to(512)


def test_without_auto_there_is_nothing_to_learn() -> None:
    tuner = tuner_of("1f1b", 2, 1, 1, [3, 5])
    assert tuner.begin(8) is tuner.schedule
    assert not tuner.is_tuning
    assert not tuner.listens_to(8)
    assert tuner.lengths(8) == [3, 5]


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages_per_rank"),
    first_of([("auto", 2, 1), ("auto", 2, 2), ("auto", 1, 1), ("auto-v", 2, 2)], 1, "grid"),
)
def test_every_step_on_the_way_has_the_gradients_of_the_unsplit_model(
    schedule: str, ranks: int, stages_per_rank: int
) -> None:
    model = build(ARCHITECTURES["llama, tied"])
    pipe = Pipeline(
        copy.deepcopy(model),
        schedule=schedule,
        slices="auto",
        num_microbatches=2,
        num_ranks=ranks,
        stages_per_rank=stages_per_rank,
        runtime=Runtime(self_check=False),
    )
    num_steps = 0
    seen = set()
    while pipe.is_tuning:
        model.zero_grad()
        for parameter in pipe.parameters():
            parameter.grad = None
        inputs = tokens(seed=num_steps)
        loss = pipe.step(inputs, labels_of(inputs))
        assert abs(loss - unsplit_step(model, inputs, labels_of(inputs))) < BOUND
        assert gradient_error(gradients(model.named_parameters()), gradients(pipe.named_parameters())) < BOUND
        ran = {action for action in pipe.last_step.layout.training.positions if action.op not in COMMUNICATION}
        assert {span.action for span in pipe.timeline().compute_spans} == ran
        assert (sum(pipe.last_step.slices), len(pipe.last_step.slices)) == (
            64,
            pipe.last_step.layout.training.num_slices,
        )
        seen.add(pipe.layout.training.num_slices)
        num_steps += 1
    assert len(seen) > 2
    assert pipe.layout.training.name == "auto"
    shorter = tokens(length=40)  # the slices were found for another length
    with torch.no_grad():
        expected = unsplit_loss(model, shorter)
    assert abs(pipe.evaluate(shorter, shorter) - expected) < BOUND


def unsplit_loss(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())


@pytest.mark.more
@pytest.mark.parametrize("slices", [4, "auto"])
def test_auto_repeats_what_it_tries_in_every_flush(slices: int | str) -> None:
    tuner = tuner_of("auto", 2, 4, 1, slices, num_flushes=2)
    schedule = tuner.begin(2048)
    for _ in range(40):
        if not tuner.is_tuning:
            break
        assert schedule.num_microbatches == 4
        for row in schedule.actions:
            flushes = [action.microbatch // 2 for action in row]
            assert flushes == sorted(flushes)
        schedule = tuner.follow(tuner.decide(run(Trial(schedule, tuple(tuner.lengths(2048))))))
    assert not tuner.is_tuning
    assert schedule.num_microbatches == 4


@pytest.mark.parametrize("slices", [4, "auto"])
def test_auto_splits_no_backward_of_a_compiled_module(slices: int | str) -> None:
    tuner = tuner_of("auto", 2, 2, 1, slices, compiled=["layers.0.mlp"])
    schedule = tuner.begin(2048)
    while tuner.is_tuning:
        assert all(action.op in (Op.F, Op.B) for action in schedule.positions)
        schedule = tuner.follow(tuner.decide(run(Trial(schedule, tuple(tuner.lengths(2048))))))
    assert all(action.op in (Op.F, Op.B) for action in schedule.positions)


def test_a_given_schedule_that_splits_a_compiled_module_is_refused() -> None:
    split = split_backwards(one_f_one_b(2, 1, 3), everywhere=True)
    with pytest.raises(SlipstreamError, match=r"layers\.0\.mlp is compiled, so its backward is one piece"):
        tuner_of(split, 2, 1, 1, 3, compiled=["layers.0.mlp"])
    tuner_of(one_f_one_b(2, 1, 3), 2, 1, 1, 3, compiled=["layers.0.mlp"])


@pytest.mark.parametrize(("given", "near"), [("zbv", "zb-v"), ("atuo", "auto"), ("1f1p", "1f1b")])
def test_a_mistyped_schedule_is_told_the_nearest_and_that_auto_is_one(given: str, near: str) -> None:
    with pytest.raises(
        SlipstreamError, match=rf"schedule='{given}' is not known; did you mean '{near}'\?.*, auto, auto-v, or"
    ):
        tuner_of(given, 2, 1, 1, 4)


@pytest.mark.more
def test_learning_slices_takes_at_most_29_steps() -> None:
    _, num_steps = settle(tuner_of("1f1b", 2, 1, 1, "auto"), 2048)
    assert 20 <= num_steps <= 29
