"""Steps that are recorded as graphs have the gradients of eager ones, or say why they aren't recorded.

On a CPU operations are recorded in place of kernels; the tests marked `gpu` record CUDA graphs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from slipstream import Pipeline
from slipstream.keyed_draws import PlaceSeed
from slipstream.model import causal_cross_entropy
from slipstream.pipeline.execution import step_graphs
from slipstream.pipeline.execution.action_graphs import CountedDraws
from slipstream.schedule import Op
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    no_rounding_inside,
    tokens,
    unsplit_step,
    with_dropout,
)
from support.options import grouped
from support.parameters import each_once, first_of
from support.pipelines import make_pipe
from support.recorded_ops import RecordedOps

SETTINGS = {"slices": [5, 40, 19], "num_microbatches": 2, "num_ranks": 2, "self_check": False, "cuda_graphs": True}
CUTS: Mapping[str, Mapping[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zb-v": {"schedule": "zb-v", "stages_per_rank": 2, "partition": [1] * 4},
    "gpipe, half offloaded, recomputed": {"schedule": "gpipe", "offload": 0.5, "recompute": "full"},
    "zb-h1, offloaded, selective": {"schedule": "zb-h1", "offload": 1.0, "recompute": "selective"},
    # What these don't have together already, `make test-all` has.
    "interleaved": {"schedule": "interleaved-1f1b", "stages_per_rank": 2, "partition": [1] * 4, "recompute": 1},
    "zb-h1, all recomputed": {"schedule": "zb-h1", "recompute": "full"},
    "1f1b, selective": {"schedule": "1f1b", "recompute": "selective"},
    "1f1b, offloaded": {"schedule": "1f1b", "offload": 1.0},
}
DROPPING = {"halves": {"schedule": "1f1b", "partition": [1.5, 2.5]}}
DROPPING |= {name: CUTS[name] for name in ("gpipe, half offloaded, recomputed", "zb-h1, offloaded, selective")}
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def named(
    names: Sequence[str], cuts: Mapping[str, Mapping[str, Any]], num_cuts: int | None = None
) -> pytest.MarkDecorator:
    """Every architecture with every cut; `make test` runs a few, `make test-all` each of the first ones."""
    parts = [*islice(cuts, num_cuts)], [*islice(cuts, num_cuts or len(cuts), None)]
    ids = [f"{name}-{cut}" for part in parts for name in names for cut in part]
    first, rest = ([cuts[each] for each in part] for part in parts)
    combined = [*each_once(names, first, len(names) // 2), *each_once(names, rest, 0)]
    return pytest.mark.parametrize(("name", "cut"), combined, ids=ids)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device whose steps can be recorded."""
    if request.param == "cpu":
        monkeypatch.setattr(step_graphs, "recorder_of", lambda _: RecordedOps())
    return str(request.param)


def batch(number: int, device: str) -> tuple[Tensor, Tensor]:
    """Token ids and labels, of which another number counts in every batch."""
    torch.manual_seed(number)
    inputs = torch.randint(0, 60, tokens().shape)
    labels = inputs.clone()
    labels[0, : 3 * number] = -100
    return inputs.to(device), labels.to(device)


def num_recorded(pipe: Pipeline) -> int:
    graphs = pipe._runtime.graphs
    assert graphs is not None
    return graphs.num_recorded


def refusal(pipe: Pipeline) -> str | None:
    assert pipe._runtime.graphs is not None
    return pipe._runtime.graphs.refusal


def zero_gradients(pipe: Pipeline) -> None:
    for parameter in pipe.parameters():
        parameter.grad = None


def assert_exact_step(pipe: Pipeline, whole: Any, inputs: Tensor, labels: Tensor) -> None:
    whole.zero_grad(), zero_gradients(pipe)
    with no_rounding_inside():
        expected = unsplit_step(whole, inputs, labels)
        assert abs(float(pipe.step(inputs, labels) / expected - 1)) < BOUND
    assert gradient_error(whole, pipe) < BOUND


def exact_pair(name: str, device: str, **cut: Any) -> tuple[Pipeline, Any]:
    """A pipeline that records its steps, and the unsplit model."""
    model = build(ARCHITECTURES[name]).to(device)
    whole = copy.deepcopy(model)
    return make_pipe(model, device=device, **SETTINGS | cut), whole


@named(["llama", "gpt2", "gemma2"], CUTS, 4)
def test_replayed_steps_are_exact(name: str, cut: Mapping[str, Any], device: str) -> None:
    with no_rounding_inside():
        pipe, whole = exact_pair(name, device, **cut)
    for number in range(4):
        assert_exact_step(pipe, whole, *batch(number, device))
        assert (num_recorded(pipe) > 0) == (number >= 2), refusal(pipe)


def test_another_shape_runs_eagerly_until_it_repeats(device: str) -> None:
    (pipe, whole), seen = exact_pair("llama", device, slices=3), []
    for length in (64, 64, 64, 40, 64, 40, 40, 40):
        inputs = batch(0, device)[0][:, :length]
        assert_exact_step(pipe, whole, inputs, inputs)
        seen.append(num_recorded(pipe) > 0)
    assert seen == [False, False, True, False, False, False, False, True]


def test_parameters_that_lie_elsewhere_are_noticed(device: str) -> None:
    pipe, whole = exact_pair("llama", device)
    for number in range(5):
        if number == 3:
            for parameter in (*pipe.parameters(), *whole.parameters()):
                parameter.data = parameter.data * 1.1
        assert_exact_step(pipe, whole, *batch(0, device))
        assert (num_recorded(pipe) > 0) == (number == 2)


def eager_and_recorded(config: PretrainedConfig, device: str, **options: Any) -> list[Pipeline]:
    """Two pipelines of one model, of the same seed."""
    return [pipeline(config, device, cuda_graphs=graphs, **options) for graphs in (False, True)]


def pipeline(config: PretrainedConfig, device: str, **options: Any) -> Pipeline:
    """A pipeline of the model of one seed."""
    return make_pipe(build(config, seed=3).to(device), device=device, **SETTINGS | options)


@named(["gpt2", "llama"], DROPPING, 2)
def test_replayed_steps_drop_what_eager_ones_drop(name: str, cut: Mapping[str, Any], device: str) -> None:
    """To the bit on a CPU; steps on the same batch differ, as each has another seed."""
    pipes, losses = eager_and_recorded(with_dropout(name, 0.1), device, **cut), []
    inputs, labels = batch(0, device)
    for number in range(4):
        for pipe in pipes:
            zero_gradients(pipe)
        loss, replayed = (float(pipe.step(inputs, labels)) for pipe in pipes)
        eager, found = (gradients(pipe) for pipe in pipes)
        assert abs(replayed / loss - 1) < (BOUND if device == "cuda" else 1e-300)
        assert gradient_error(eager, found) < (BOUND if device == "cuda" else 1e-300)
        assert (num_recorded(pipes[1]) > 0) == (number >= 2), refusal(pipes[1])
        losses.append(loss)
    assert all(abs(a / b - 1) > 1e-6 for a, b in pairwise(losses))


def test_between_replayed_steps_evaluations_drop_nothing_and_the_callers_random_state_stays(device: str) -> None:
    pipe, drawn, states, losses = pipeline(with_dropout("gpt2", 0.1), device), batch(0, device), [], []
    for _ in range(4):
        pipe.step(*drawn)
        losses.append(float(pipe.evaluate(*drawn)))
        states.append([torch.get_rng_state(), *(torch.cuda.get_rng_state() for _ in range(device == "cuda"))])
    assert num_recorded(pipe), refusal(pipe)
    assert f"CUDA graphs: {num_recorded(pipe)} actions recorded" in repr(pipe)
    assert max(losses) - min(losses) < 1e-12
    assert all(torch.equal(a, b) for one, other in pairwise(states) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("draws", [True, False])
def test_numbers_that_are_drawn_on_the_host_are_found(draws: bool) -> None:
    counted = CountedDraws(torch.device("cuda"))
    for _ in range(2):
        with counted.forked():
            counted.seed(PlaceSeed(1))
            counted.seed(PlaceSeed(2))
            torch.rand(int(draws))
        torch.rand(1)
    assert (counted.num_seeds, counted.are_on_host) == (4, draws)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_that_draws_on_the_host_runs_eagerly() -> None:
    model = build(with_dropout("gpt2", 0.1)).cuda()
    model.transformer.h[1].register_forward_pre_hook(lambda *_: torch.rand(1) and None)
    pipe = Pipeline(model, **grouped(**SETTINGS, device="cuda"))
    for _ in range(4):
        pipe.step(*batch(0, "cuda"))
    assert refusal(pipe) == "the model draws random numbers on the host"


@pytest.mark.parametrize(
    "options", first_of([{"master_dtype": "float64", "dtype": "float32"}, {}]), ids=["masters", ""]
)
def test_gradients_add_up_over_replayed_steps(options: Mapping[str, Any], device: str) -> None:
    """Also where a master took the tensors over to which graphs add, and where the loss is scaled."""
    pipes = eager_and_recorded(ARCHITECTURES["llama"], device, **options)
    for number in range(7):
        inputs, labels = batch(number, device)
        for pipe in pipes:
            if number == 3:
                zero_gradients(pipe)
            pipe.step(inputs, labels, loss_scale=2.0 if number == 5 else 1.0)
        eager, replayed = (gradients(pipe) for pipe in pipes)
        assert gradient_error(eager, replayed) < (1e-5 if options else BOUND)
    assert num_recorded(pipes[1]), refusal(pipes[1])


def test_weights_are_cast_again_after_the_autocast_of_the_recording(device: str) -> None:
    """Autocast keeps what it has cast until it ends: a graph that read it would miss every later update."""
    pipes, losses = eager_and_recorded(ARCHITECTURES["llama"], device, dtype="float32"), []
    inputs, labels = batch(0, device)
    for pipe in pipes:
        with torch.autocast(device, torch.bfloat16):
            before = [float(pipe.step(inputs, labels)) for _ in range(3)][-1]
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter *= 2
        with torch.autocast(device, torch.bfloat16):
            losses.append(float(pipe.step(inputs, labels)))
        assert abs(losses[-1] / before - 1) > 0.01
    assert num_recorded(pipes[1]), refusal(pipes[1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_cpu_says_that_it_has_none(caplog: pytest.LogCaptureFixture) -> None:
    pipe = Pipeline(build(ARCHITECTURES["llama"]), **grouped(**SETTINGS))
    inputs, labels = batch(0, "cpu")
    pipe.step(inputs, labels)
    assert "runs without CUDA graphs: cpu has none" in caplog.text
    assert "CUDA graphs: none, as cpu has none" in repr(pipe)


@pytest.mark.more
@pytest.mark.parametrize("cut", first_of(["zb-v", "zb-h1, offloaded, selective"]))
def test_the_timeline_of_a_replayed_step(cut: str, device: str) -> None:
    """The actions of an eager step, in its order on each rank, one after another and within the step."""
    pipes = eager_and_recorded(with_dropout("llama", 0.1), device, **CUTS[cut])
    inputs, labels = batch(0, device)
    orders = []
    for pipe in pipes:
        for _ in range(4):
            began = time.perf_counter()
            float(pipe.step(inputs, labels))
            ended = time.perf_counter()
        spans = [[span for span in pipe.timeline().spans if span.rank == rank] for rank in range(2)]
        orders.append([[span.action for span in each] for each in spans])
        for each in spans:
            computing = [span for span in each if span.computes and span.action.op is not Op.REDUCE_GRAD]
            assert began <= computing[0].start < computing[-1].end <= ended + 1e-3
            assert all(span.start < span.end for span in computing)
            assert all(a.end <= b.start for a, b in pairwise(computing))
    assert num_recorded(pipes[1]), refusal(pipes[1])
    assert orders[0] == orders[1]


REFUSED: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "waits for": ("gpt_oss", {}, {}),
    "several documents": ("llama", {}, {"document_ids": True}),
    "loss_fn may be any code": ("llama", {"loss_fn": causal_cross_entropy}, {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_recorded_is_named(reason: str, device: str, caplog: pytest.LogCaptureFixture) -> None:
    name, options, given = REFUSED[reason]
    pipe = Pipeline(build(ARCHITECTURES[name]).to(device), **grouped(device=device, **SETTINGS, **options))
    for _ in range(3):
        inputs, labels = batch(0, device)
        documents = torch.arange(inputs.shape[1], device=device).expand_as(inputs) // 20
        pipe.step(inputs, labels, document_ids=documents if given else None)
    assert num_recorded(pipe) == 0
    said = [record.getMessage() for record in caplog.records if "without CUDA graphs" in record.getMessage()]
    assert len(said) == 1
    assert reason in said[0]
    assert ("CUDA graphs: none, as" in repr(pipe)) == (refusal(pipe) is not None)
