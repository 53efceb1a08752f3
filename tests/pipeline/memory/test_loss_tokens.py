"""With loss_tokens the head and the loss run on some tokens at a time, with the gradients of the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream import Pipeline, SequenceLoss, SlipstreamError
from slipstream.cost import ANY_HOST, CountedOperations, StateBytes
from slipstream.pipeline import held_beside
from slipstream.planner.find_plan import find_plan
from slipstream.planner.plan import ONE_DEVICE, Plan
from slipstream.planner.search import ClusterProblem, GlobalBatch, PlanOptions, evaluate
from slipstream.profile import count_model
from slipstream.profile.stage_bench import memory_meter, tensors_alive
from support.architectures import ARCHITECTURES, build, gradient_error, gradients, labels_of, llama, tokens
from support.exact_steps import exact_pipe
from support.options import grouped
from support.parameters import first_of
from support.pipelines import make_pipe
from support.small_clusters import SEQ_LEN, source

CUT: dict[str, Any] = {"slices": [5, 30, 17, 12], "num_microbatches": 2, "loss_tokens": 7}


@pytest.mark.parametrize(
    ("name", "settings"),
    first_of(
        [
            ("gemma2", {"schedule": "1f1b", "recompute": "stage"}),  # caps its logits
            ("llama, tied", {"schedule": "zb-h1"}),
            ("qwen2_moe", {"schedule": "gpipe", "recompute": "selective"}),
            ("gpt2", {"schedule": "interleaved-1f1b", "stages_per_rank": 2, "offload": 1.0}),
            ("gpt_neox", {"slices": 1, "recompute": "full"}),
        ],
        3,
    ),
)
def test_gradients_are_those_of_the_unsplit_model(name: str, settings: dict[str, Any]) -> None:
    inputs = tokens(batch=4)
    exact_pipe(build(ARCHITECTURES[name]), inputs, labels_of(inputs), **CUT | settings)


def test_what_is_said_of_tokens_is_the_same() -> None:
    """Losses, log-probabilities and logits; a loss of one's own, and one over whole sequences."""
    inputs = tokens(batch=4)

    def own(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        chosen = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return (chosen**2)[targets >= 0].sum(), (targets >= 0).sum()

    losses = (None, own, SequenceLoss(lambda sums: -sums))
    for loss_fn in losses:
        pipes = [make_pipe(build(llama()), slices=3, loss_fn=loss_fn, loss_tokens=each) for each in (None, 9)]
        whole, tiled = (pipe.step(inputs, inputs) for pipe in pipes)
        assert abs(whole - tiled) < 1e-10
        assert gradient_error(gradients(pipes[0]), gradients(pipes[1])) < 1e-10
        for found in ("log_probabilities", "evaluate"):
            expected, said = (getattr(pipe, found)(inputs, inputs) for pipe in pipes)
            torch.testing.assert_close(said, expected)
    torch.testing.assert_close(pipes[1].logits(inputs), pipes[0].logits(inputs))


@pytest.mark.parametrize("slices", [1, 2])
def test_few_logits_exist(slices: int) -> None:
    """Of float32 logits a step has at least themselves, their logarithms and their gradient."""
    config, ids = llama(vocab_size=4096, max_position_embeddings=256), tokens(batch=1, length=256)
    peaks = []
    for loss_tokens in (None, 16):
        pipe = make_pipe(build(config).float(), "gpipe", slices=slices, loss_tokens=loss_tokens, recompute="full")
        pipe.step(ids, ids)
        with memory_meter(torch.device("cpu"), tensors_alive()) as memory:
            before = memory.num_bytes
            pipe.step(ids, ids)
            peaks.append(memory.peak - before)
    logits = 256 // slices * 4096 * 4
    assert peaks[0] - peaks[1] > 2 * logits


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ("gpipe", {"slices": 1, "recompute": "full"}),
        ("gpipe", {"slices": 4}),
        ("1f1b", {"slices": 4, "recompute": "stage", "context": "host"}),
        ("zb-h1", {"slices": 2}),
    ],
    ids=str,
)
def test_plans_know_their_peak(schedule: str, settings: dict[str, Any]) -> None:
    """Within 5% of the bytes of tensors, where the logits of all tokens would be more than everything else."""
    config, ids = llama(vocab_size=4096, max_position_embeddings=256, num_hidden_layers=2), tokens(batch=1, length=256)
    pipe = make_pipe(build(config).float(), schedule, loss_tokens=16, **settings)
    optimizer = torch.optim.AdamW(pipe.parameters())
    for _ in range(2):
        pipe.step(ids, ids)
        optimizer.step()
        optimizer.zero_grad()
    with memory_meter(torch.device("cpu"), tensors_alive()) as memory:
        pipe.step(ids, ids)
    plan = ONE_DEVICE.closed(
        schedule=schedule,
        num_microbatches=1,
        slices=tuple(pipe.slices(256)),
        partition=(2,),
        recompute=settings.get("recompute", "none"),
        context=settings.get("context", "device"),
        loss_tokens=16,
    )
    costs = CountedOperations(count_model(config, 256, torch.float32))
    batch = GlobalBatch(256, 1)
    (counted,) = evaluate(plan, costs, batch, StateBytes.of("float32"), ANY_HOST, held_beside(256)).peaks()
    assert counted == pytest.approx(memory.peak, rel=0.05)


def test_a_plan_says_it_and_is_written_with_it() -> None:
    """Its step takes the head's forward again; a search tries the number that is given."""
    options = PlanOptions(pipeline_parallel=1, tensor_parallel=1, num_slices=1, recompute="none", offload=0.0)
    problem = ClusterProblem(source(), SEQ_LEN, 8, options)
    whole = find_plan(problem).best
    tiled = find_plan(replace(problem, options=options.changed(loss_tokens=16))).best
    assert "loss of 16 tokens at a time" in tiled.plan.describe()
    assert tiled.plan.dump()["memory"]["loss_tokens"] == 16
    assert "loss_tokens" not in whole.plan.dump()["memory"]
    assert Plan.load(tiled.plan.dump()).loss_tokens == 16
    assert tiled.peak_memory < whole.peak_memory
    assert tiled.step_seconds > whole.step_seconds
    with pytest.raises(SlipstreamError, match=r"loss_tokens=16,32: it isn't searched\. Give one number"):
        find_plan(replace(problem, options=options.changed(loss_tokens=(16, 32))))
    with pytest.raises(SlipstreamError, match=r"loss_tokens=-1: give the tokens of a slice .* or 0 for all"):
        PlanOptions(loss_tokens=-1)


def test_what_is_refused() -> None:
    with pytest.raises(SlipstreamError, match=r"loss_tokens=7 with a head whose rows are spread .* vocabulary='whole'"):
        make_pipe(build(llama()), loss_tokens=7, num_ranks=2, vocabulary="spread")
    with pytest.raises(SlipstreamError, match=r"memory.loss_tokens=7: an option of causal LMs, .* Leave it out"):
        Pipeline(nn.Sequential(nn.Linear(4, 4)), **grouped(loss_tokens=7))
