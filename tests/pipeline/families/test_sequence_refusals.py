"""What can't be exact of an nn.Sequential is refused by the name of the layer, before anything runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from slipstream import Pipeline, Skip, SlipstreamError
from support.options import grouped
from support.pipelines import make_pipe
from support.sequences.random_layers import Mix, batch, build


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x).tanh())


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def pipeline(*layers: nn.Module, **settings: object) -> Pipeline:
    return Pipeline(nn.Sequential(*layers), **grouped(**{"num_ranks": 1, "num_microbatches": 2} | settings))  # type: ignore[arg-type]


def skips(make: Callable[[Skip], list[nn.Module]]) -> list[nn.Module]:
    return make(Skip("s"))


INPUTS, TARGETS = torch.randn(4, 4), torch.randint(0, 4, (4,))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([linear(), nn.Linear(5, 4)], r"layer 1 \(Linear\) fails on \(2, 4\) float32: RuntimeError: "),
        ([Twice()], r"layer 0 \(Twice\): a batch norm runs twice in one forward"),
        (
            [linear(), Skip("s").stash(0), nn.ReLU(inplace=True)],
            r"layer 1 \(SkipStash\): the skip 's' is never consumed",
        ),
        (
            skips(lambda s: [linear(), s.stash(2), s.pop(), Mix()]),
            r"layer 1 \(SkipStash\): stash\(2\) of the skip 's' is given \(2, 4\) float32",
        ),
    ],
)
def test_layers_that_cannot_run(layers: list[nn.Module], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        pipeline(*layers).step(INPUTS, TARGETS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: [s.pop(), Mix(), s.stash()], r"layer 0 \(SkipPop\): the skip 's' is popped before it is stashed"),
        (lambda s: [linear(), s.pop(), Mix()], r"layer 1 \(SkipPop\): the skip 's' is popped before it is stashed"),
        (lambda s: [s.stash(), s.stash(), s.pop()], r"layer 1 \(SkipStash\): the skip 's' is stashed twice"),
        (lambda s: [s.stash(), s.pop(), Mix(), s.pop()], r"layer 3 \(SkipPop\): the skip 's' is popped twice"),
        (lambda s: [s.stash(), Skip("s").pop()], r"layer 1 \(SkipPop\): two skips are called 's'"),
        (lambda s: [s.stash()], r"layer 0 \(SkipStash\): the skip 's' is never consumed. Add a layer skip.pop\(\)"),
        (lambda s: [nn.BatchNorm1d(4, track_running_stats=False)], "normalises by the batch in evaluation too"),
        (lambda s: [], "has no layers"),
    ],
)
def test_sequences_that_are_refused_when_built(make: Callable[[Skip], list[nn.Module]], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        pipeline(*skips(make))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ranks": 4}, r"4 stages, but the sequence has 3 layers, .* Use 3 stages or fewer"),
        ({"num_ranks": 2}, r"partition='auto' must know what the layers cost. Give example=.*costs=\[...\] of 3"),
        ({"costs": [1.0, 2.0]}, r"costs has 2 numbers, but the sequence has 3 layers, .*: layer 0 \(Linear\)"),
        ({"costs": [1.0, 0.0, 2.0]}, r"costs: layer 1.0 \(ReLU\) costs 0.0, but a cost is above 0"),
        ({"costs": [1.0, -1.0, 2.0]}, r"costs: layer 1.0 \(ReLU\) costs -1.0"),
        ({"costs": [1.0, float("nan"), 2.0]}, r"costs: layer 1.0 \(ReLU\) costs nan"),
        ({"partition": [2, 2], "num_ranks": 2}, r"partition=\[2, 2\] has 2 stages and 4 layers; it takes 2 stages"),
        ({"partition": [1.5, 1.5], "num_ranks": 2}, "it takes 2 stages of at least one layer"),
        ({"partition": "even"}, "partition='even': give 'auto' or the number of layers"),
        ({"slices": 4}, "slices=4: the layers of this nn.Sequential take whole microbatches"),
        ({"slices": "auto"}, "slices='auto': the layers of this nn.Sequential take whole microbatches"),
        ({"seq_len": 16}, "seq_len=16: an option of causal LMs"),
        ({"sequence_parallel": True}, "parallel.sequence_parallel=True: an option of causal LMs"),
        ({"tensor_plan": {"a": "colwise"}}, "parallel.tensor_plan=.*: an option of causal LMs"),
        ({"fused": True}, "runtime.fused=True: an option of causal LMs"),
        ({"memory_limit": 1e9}, "memory.limit=1000000000.0: not for an nn.Sequential"),
        ({"shard": "parameters"}, "parallel.shard='parameters': not for an nn.Sequential"),
        ({"recompute": "segments", "offload": 0.5}, "memory.recompute='segments' with memory.offload=0.5"),
        ({"recompute": 4}, "memory.recompute=4: give 'none', .* 'segments'"),
    ],
)
def test_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        pipeline(linear(), nn.Sequential(nn.ReLU(), linear()), **settings)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (INPUTS[:1], TARGETS[:1], "a batch of 1 rows can't be cut into 2 microbatches"),
        (INPUTS, TARGETS[:3], r"targets of shape \(3,\) for a batch of 4 rows"),
        (INPUTS, torch.randn(4), r"returns \(2, 4\) for targets of \(2,\) torch.float32, .* Give a loss_fn"),
        (INPUTS, torch.full((4,), -100), "no label of this batch counts"),
        ((INPUTS, INPUTS), TARGETS, r"layer 0 \(Linear\) fails on \(\(2, 4\) float32, \(2, 4\) float32\): TypeError"),
    ],
)
def test_batches(inputs: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        pipeline(linear()).step(inputs, targets)


def test_settings_of_sequences_are_not_for_language_models() -> None:
    from support.architectures import build as language_model
    from support.architectures import llama

    for setting in ({"costs": [1.0]}, {"example": INPUTS}, {"batch_norm_over_replicas": True}):
        with pytest.raises(SlipstreamError, match=f"{next(iter(setting))}=.*: an option of nn.Sequential models"):
            make_pipe(language_model(llama()), **setting)  # type: ignore[arg-type]


def test_what_a_sequence_does_not_have() -> None:
    pipe = pipeline(linear())
    with pytest.raises(SlipstreamError, match=r"torch.save\(pipe.state_dict\(\), path\)"):
        pipe.save_pretrained("nowhere")
    with pytest.raises(SlipstreamError, match="config is for models of transformers"):
        _ = pipe.config
    with pytest.raises(SlipstreamError, match="costs of the layers aren't known"):
        _ = pipe.balance
    with pytest.raises(SlipstreamError, match="position_ids and document_ids are for causal LMs"):
        pipe.step(INPUTS, TARGETS, position_ids=TARGETS)


def test_a_loss_function_that_counts_something_else() -> None:
    pipe = Pipeline(build(["conv"]), loss_fn=lambda outputs, targets: (outputs.sum(), torch.tensor(7)))
    with pytest.raises(SlipstreamError, match="loss_fn counted 7 tokens, but 3 targets are not -100"):
        pipe.step(*batch(4))
