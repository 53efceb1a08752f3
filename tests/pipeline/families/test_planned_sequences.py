"""An nn.Sequential is planned from what its layers take on the example, and the planned step is exact."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slipstream import Layers, Pipeline
from slipstream.cost import OPS, Work
from slipstream.model import causal_cross_entropy
from slipstream.pipeline.families import sequence_costs
from slipstream.pipeline.families.sequence_costs import (
    MeasuredLayers,
    SequenceCosts,
    bytes_between,
    measure_layers,
    runs_between,
)
from slipstream.schedule import Op
from slipstream.sequential import BatchSlice, ShapeTracer, flatten_layers
from support.architectures import BOUND, gradient_error, gradients
from support.exact_steps import exact_until_planned
from support.pipelines import make_pipe
from support.refusals import refused
from support.sequences.sliced_layers import CASES

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "slices"),
    [
        (name, slices)
        if name == "mixed" and slices
        else pytest.param(name, slices, marks=pytest.mark.more if name == "mixed" else pytest.mark.grid)
        for name in CASES
        for slices in ("auto", None)
    ],
)
def test_a_planned_step_is_exact(name: str, slices: str | None) -> None:
    inputs, targets = CASES[name].batch()
    loss, expected = CASES[name].unsplit(2)
    model = CASES[name].model()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    torch.manual_seed(0)
    drawn = torch.rand(())
    torch.manual_seed(0)
    pipe = make_pipe(model, "auto", 2, slices, num_ranks=2, loss_fn=causal_cross_entropy, example=inputs)
    assert torch.rand(()) == drawn
    assert all(torch.equal(tensor, before[key]) for key, tensor in pipe.state_dict().items())
    assert pipe.plan is not None
    assert not pipe.is_tuning
    assert [len(stage) for stage in pipe.layout.layers] == list(pipe.plan.partition)
    assert pipe.order.actions == pipe.plan.schedule.actions
    assert abs(pipe.step(inputs, targets) - loss) < BOUND
    assert pipe.last_step.slices == ([*pipe.plan.slices] if slices else [1])
    assert gradient_error(expected, gradients(pipe)) < BOUND


def test_layers_that_share_a_weight_stay_together() -> None:
    """The second and the fifth of six; and no cut that would part them is left to the search."""
    layers = [nn.Linear(8, 8) for _ in range(6)]
    layers[4].weight = layers[1].weight
    pipe = Pipeline(nn.Sequential(*layers), "auto", 2, num_ranks=2, layers=Layers(example=torch.randn(2, 8)))
    place = {layer: stage for stage, owned in enumerate(pipe.layout.layers) for layer in owned.layers}
    assert place[1] == place[4]
    assert pipe.plan is not None
    assert pipe.plan.costs is not None
    assert pipe.plan.costs.num_layers == 1  # of the units 0, 1 to 4 and 5 the inner one
    rows = torch.randn(4, 8)
    assert torch.isfinite(pipe.step(rows, rows[:, 0].long().clamp(0, 7)))


def test_costs_that_were_given_are_balanced_and_not_measured() -> None:
    layers = Layers(example=torch.randn(2, 8), costs=[1, 1, 1, 3])
    pipe = Pipeline(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), "auto", 2, num_ranks=2, layers=layers)
    assert pipe.plan is None
    assert pipe.is_tuning
    assert [len(stage) for stage in pipe.layout.layers] == [3, 1]


def test_without_an_example_steps_are_timed() -> None:
    case, options = CASES["language model"], {"num_ranks": 2, "partition": [4, 5], "loss_fn": causal_cross_entropy}
    pipe = make_pipe(case.model(), "auto", 2, "auto", **options)
    assert exact_until_planned(pipe, *case.batch(), *case.unsplit(2))[:-1] == [8, 8, 8, 4, 4]


def measured(name: str, budget: float) -> tuple[MeasuredLayers, float]:
    case = CASES[name]
    layers = flatten_layers(case.model())
    tracer = ShapeTracer(layers, CPU)
    cut = [type(layer.module).__name__ for layer in layers].index("CutTokens")
    whole = BatchSlice(case.batch()[0])
    length = tracer.trace(whole, training=True).boundaries[cut].specs[0].shape[1]
    piece = BatchSlice(whole.value, tokens=range(length), length=length)
    trace = tracer.trace(piece, training=True)
    return measure_layers(layers, piece, trace, cut, CPU, budget), bytes_between(trace, cut)


def test_layers_after_the_cut_are_measured_at_every_point() -> None:
    found, num_bytes = measured("mixed", 600.0)
    assert num_bytes > 0
    sliced = [times for times in found.times[found.cut :] if any(times[Op.F])]
    assert sliced
    assert all(seconds > 0 for times in sliced for seconds in times[Op.F])
    assert all(not any(times[op][1:]) for times in found.times[: found.cut] for op in OPS)


def test_measuring_that_takes_too_long_ends(caplog: pytest.LogCaptureFixture) -> None:
    with refused("took longer than 0 s by layer 0"):
        measured("mixed", 0.0)
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]


def test_measuring_ends_within_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has run once is enough; a point that hasn't ends it, of whichever layer."""
    ran: list[range | None] = []
    run = sequence_costs._LayerBench._ops

    def ops(bench: Any, given: Any, tokens: range | None) -> Any:
        ran.append(tokens)
        return run(bench, given, tokens)

    monkeypatch.setattr(sequence_costs._LayerBench, "_ops", ops)
    measured("mixed", 600.0)
    number, seconds = len(ran), iter(range(10**6))
    ran.clear()
    clock = SimpleNamespace(perf_counter=lambda: next(seconds) if ran else 0)
    monkeypatch.setattr(sequence_costs, "time", clock)
    with refused("took longer than 5 s by layer"):
        measured("mixed", 5.0)
    assert 1 <= len(ran) <= 7 < number


def test_what_precedes_the_cut_runs_with_the_first_slice_alone() -> None:
    """Times are fitted exactly where they are sums of a constant, a part for each token and one for each pair."""
    points = [(8, 0), (1, 0), (2, 0), (2, 4), (4, 0), (4, 4)]

    def seconds(i: int, j: int) -> float:
        return 2.0 + 3.0 * i + 0.5 * (i * j + i * (i + 1) / 2)

    before = {op: [7.0, *(0.0 for _ in points[1:])] for op in OPS}
    after = {op: [seconds(*point) for point in points] for op in OPS}
    layers = MeasuredLayers((before, before, after, after), points, cut=2)
    costs = SequenceCosts(layers, runs_between(4, lambda place: place != 1), bytes_per_token=4.0)
    assert costs.runs == (range(2), range(2, 3), range(3, 4))
    work = Work(Op.F, np.array([3, 5]), np.array([0, 3]))
    found = costs.each_seconds(work)
    assert not costs.fixed_seconds(work).any()
    assert found == pytest.approx(np.array([[14.0, 0.0], *[[seconds(3, 0), seconds(5, 3)]] * 2]))
    assert costs.layers_of((0.0, 1.0)) == (2.0, 2.0)
    assert costs.message_bytes(np.array([3, 5])).tolist() == [12.0, 20.0]
