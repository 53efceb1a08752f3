"""Cases of test_processes: sequences of different lengths on meshes, against the unsplit model."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import Parallelism, Pipeline, SequenceLoss, SlipstreamError, make_mesh
from support.architectures import ARCHITECTURES, BOUND, build, gradients, no_rounding_inside
from support.parallel.group_cases import by_name
from support.pipelines import make_pipe
from support.preferences import log_probabilities, preference, references
from support.ragged_batches import MODELS, ORDERS, batch_of, one_by_one, random_plan

NUM_CASES = int(os.environ.get("SLIPSTREAM_TESTS_RANDOM_CASES", "40"))


def pipeline(name: str, mesh: Any, **options: Any) -> Pipeline:
    return make_pipe(ARCHITECTURES[name], 0, mesh=mesh, dtype=torch.float64, **options)


def error(pipe: Pipeline, expected: dict[str, Tensor]) -> float:
    """The design's measure of this rank's pieces of the gradients, each against the size of the whole parameter's."""
    floor = 1e-6 * max(tensor.abs().max() for tensor in expected.values())
    errors = [0.0]
    for piece in pipe.parameter_shards():
        if piece.parameter.requires_grad and piece.parameter.numel():
            whole, own = expected[piece.name], piece.parameter.grad
            assert own is not None, piece.name
            rows = piece.share.take(whole)[piece.first_row :][: len(own)]
            errors.append(float((own - rows).abs().max() / max(whole.abs().max(), floor)))
    return max(errors)


def check(seed: int, mesh: Any, dp: int, num_steps: int = 1) -> None:
    """Random batches of each replica, of which some have plans at random, have the gradients of all."""
    random = Random(seed)
    name, (schedule, v) = random.choice(sorted(MODELS)), random.choice(ORDERS)
    options: dict[str, Any] = {"schedule": schedule, "stages_per_rank": v, "slices": random.randint(1, 4)}
    options["num_microbatches"] = random.randint(1, 2)
    options["parallel"] = Parallelism(shard="optimizer" if dp > 1 and random.random() < 0.5 else "none")
    pipe = pipeline(name, mesh, **options)
    order = pipe.order
    for step in range(num_steps):
        for parameter in pipe.parameters():
            parameter.grad = None
        all_lengths = [[random.randint(2, 40) for _ in range(random.randint(2, 5))] for _ in range(dp)]
        batches = [batch_of(lengths, seed + step) for lengths in all_lengths]
        plans = [random_plan(random, lengths, order) for lengths in all_lengths]
        joined = [[row for batch in batches for row in batch[which]] for which in (0, 1)]
        if all((label[1:] == -100).all() for label in joined[1]):
            continue
        loss, expected = one_by_one(name, *joined)
        inputs, labels = batches[pipe.replica]
        plan = plans[pipe.replica] if random.random() < 0.7 else None
        pipe.prepare(all_lengths[pipe.replica])
        assert abs(pipe.step(inputs, labels, plan=plan) - loss) < BOUND, (seed, name, schedule, v)
        assert error(pipe, expected) < BOUND, (seed, name, schedule, v)


def stages() -> None:
    mesh = make_mesh(pp=2)
    for seed in range(0, NUM_CASES, 2):
        check(2000 + seed, mesh, 1, num_steps=2)


def lone_replicas() -> None:
    """Of one stage, or of several on one rank, each with sequences of its own."""
    mesh = make_mesh(pp=1, dp=2)
    for seed in range(0, NUM_CASES, 2):
        check(3000 + seed, mesh, 2, num_steps=2)


def replicas() -> None:
    """Two pipelines of two ranks, each with its own sequences, microbatches and schedules."""
    mesh = make_mesh(pp=2, dp=2)
    for seed in range(NUM_CASES):
        check(seed, mesh, 2)


def tensor_ranks() -> None:
    mesh = make_mesh(pp=2, tp=2)
    with no_rounding_inside():
        for seed in range(NUM_CASES):
            check(1000 + seed, mesh, 1)
        pipe = pipeline("llama, tied", mesh, schedule="auto", slices="auto")
        for lengths in ([9, 40, 3], [25, 25]):  # each step is planned for its own
            loss, expected = one_by_one("llama, tied", *batch_of(lengths))
            for parameter in pipe.parameters():
                parameter.grad = None
            assert abs(pipe.step(*batch_of(lengths)) - loss) < BOUND, lengths
            assert error(pipe, expected) < BOUND, lengths


def a_batch_that_one_replica_refuses() -> None:
    """All ranks raise, so that none waits for the others."""
    pipe = pipeline("gpt2", make_mesh(pp=1, dp=2))
    inputs, _ = batch_of([5, 9] if pipe.replica else [5, 65])
    words = "another rank has refused its batch" if pipe.replica else r"the length of inputs\[1\]=65 is more than"
    with pytest.raises(SlipstreamError, match=words):
        pipe.step(inputs, inputs)
    assert pipe.step(*[[row[:5] for row in inputs]] * 2) > 0


def ranks_that_plan_differently() -> None:
    """All ranks of a pipeline follow the first; other lengths on them are refused."""
    pipe = pipeline("gpt2", make_mesh(pp=2))
    lengths = [9, 30, 12]
    inputs, labels = batch_of(lengths)
    plans = [random_plan(Random(seed), lengths, pipe.order) for seed in (1, 2)]
    assert plans[0] != plans[1]
    loss, expected = one_by_one("gpt2", inputs, labels)
    assert abs(pipe.step(inputs, labels, plan=plans[pipe.rank]) - loss) < BOUND
    assert error(pipe, expected) < BOUND
    assert pipe.order == plans[0].schedule
    mine = [row[: len(row) - pipe.rank] for row in inputs]
    with pytest.raises(
        SlipstreamError, match=r"rank 0: sequences of \[9, 30, 12\] .*\n  rank 1: sequences of \[8, 29, 11\]"
    ):
        pipe.step(mine, mine)


def preferences() -> None:
    """A loss of pairs of sequences, over replicas and over tensor ranks, as rows and as a list."""
    for dp, tp in ((2, 1), (1, 2)):
        mesh = make_mesh(pp=2, dp=dp, tp=tp)
        for lengths in ([30] * 4, [30, 7, 12, 25]):
            loss_fn = SequenceLoss(preference, 2)
            pipe = pipeline("llama, tied", mesh, slices=3, num_microbatches=2, schedule="zb-h1", loss_fn=loss_fn)
            inputs, labels = batch_of(lengths * dp)
            values = references(len(inputs))
            loss, expected, found = unsplit_preferences(inputs, labels, values)
            mine = slice(4 * pipe.replica, 4 * pipe.replica + 4)
            batch: list[Any] = [inputs[mine], labels[mine]]
            if len(set(lengths)) == 1:
                batch = [torch.stack(each) for each in batch]
            with no_rounding_inside():
                assert abs(pipe.step(*batch, sequence_values=values[mine]) - loss) < BOUND, (dp, tp, lengths)
            assert error(pipe, expected) < BOUND, (dp, tp, lengths)
            off = (pipe.sequence_log_probabilities() - found[mine]).abs()
            assert float(off.max()) < BOUND * float(found.abs().max())


def unsplit_preferences(
    inputs: list[Tensor], labels: list[Tensor], values: Tensor
) -> tuple[float, dict[str, Tensor], Tensor]:
    whole = build(ARCHITECTURES["llama, tied"])
    with no_rounding_inside():
        rows = zip(inputs, labels, strict=True)
        found = torch.cat([log_probabilities(whole, *(each[None] for each in row)) for row in rows])
        loss = preference(found, values).mean()
        loss.backward()
    return loss.item(), gradients(whole), found.detach()


CASES = by_name(
    stages,
    lone_replicas,
    replicas,
    tensor_ranks,
    preferences,
    a_batch_that_one_replica_refuses,
    ranks_that_plan_differently,
)
