"""Pipelines on a GPU are exact in float64, close in bfloat16, and timed by events; skipped without one."""

from __future__ import annotations

import copy

import pytest
import torch

from slipstream import Pipeline
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.options import grouped

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SETTINGS = {"slices": [5, 30, 17, 12], "num_microbatches": 2, "num_ranks": 2, "self_check": False, "device": "cuda"}


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "mistral, window of 7", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("zb-v", 2)])
def test_gradients_in_float64(name: str, schedule: str, stages_per_rank: int) -> None:
    model, inputs = build(ARCHITECTURES[name]).cuda(), tokens().cuda()
    whole, cut = copy.deepcopy(model), {"schedule": schedule, "stages_per_rank": stages_per_rank}
    with no_rounding_inside():
        expected = unsplit_step(whole, inputs, labels_of(inputs))
        pipe = Pipeline(model, **grouped(**SETTINGS, **cut), partition=[1] * 4 if stages_per_rank == 2 else "auto")
        loss = pipe.step(inputs, labels_of(inputs))
    assert abs(float(loss / expected - 1)) < BOUND
    assert gradient_error(whole, pipe) < BOUND


def test_bfloat16_takes_the_flash_kernels() -> None:
    """As far from float64 as the unsliced model in bfloat16 is, or twice as far."""
    reference, inputs = build(ARCHITECTURES["llama"]).cuda(), tokens().cuda()
    exact = copy.deepcopy(reference)
    unsplit_step(exact, inputs, labels_of(inputs))
    whole = copy.deepcopy(reference).bfloat16()
    whole.set_attn_implementation("sdpa")
    unsplit_step(whole, inputs, labels_of(inputs))
    pipe = Pipeline(reference.bfloat16(), **grouped(**SETTINGS))
    pipe.step(inputs, labels_of(inputs))
    wanted = gradients(exact)
    unsliced, sliced = (
        gradient_error(wanted, {k: g.double() for k, g in gradients(model).items()}) for model in (whole, pipe)
    )
    assert sliced < 2 * unsliced


@pytest.mark.parametrize("settings", [{"recompute": "full"}, {"recompute": "selective", "offload": 1.0}, {}], ids=str)
def test_auto_settles_on_measured_times(settings: dict[str, object]) -> None:
    model, inputs = build(ARCHITECTURES["llama"]).cuda(), tokens().cuda()
    whole = copy.deepcopy(model)
    expected = unsplit_step(whole, inputs, labels_of(inputs))
    pipe = Pipeline(model, **grouped(**SETTINGS | {"slices": "auto", "schedule": "auto"} | settings))
    while pipe.is_tuning:
        pipe.step(inputs, labels_of(inputs))
        for parameter in pipe.parameters():
            parameter.grad = None
    loss = pipe.step(inputs, labels_of(inputs))
    assert abs(float(loss / expected - 1)) < BOUND
    assert gradient_error(whole, pipe) < BOUND
    assert all(span.seconds >= 0 for span in pipe.timeline().compute_spans)
    assert sum(pipe.timeline().busy(rank) for rank in range(2)) > 0


def test_dropout_replays_in_recomputation() -> None:
    """Its random state is keyed by layer, microbatch and slice, so it doesn't matter who recomputes what."""
    config = copy.deepcopy(ARCHITECTURES["gpt2"])
    config.resid_pdrop = config.embd_pdrop = 0.2
    found = []
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        pipe = Pipeline(build(config), **grouped(recompute=recompute, **SETTINGS))
        inputs = tokens()
        found.append((float(pipe.step(inputs, inputs)), gradients(pipe)))
    assert found[0][0] == found[1][0]
    assert gradient_error(found[0][1], found[1][1]) < BOUND
