"""An nn.Sequential takes every setting: recomputation, loss functions, replicas, shapes that change between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream import Layers, Memory, Pipeline, Skip
from slipstream.pipeline.batch import Batch
from slipstream.profile.stage_bench import LiveMemory, tensors_alive
from slipstream.sequential.stage import choose_segments
from support.architectures import BOUND, gradient_error, gradients
from support.exact_steps import exact_until_planned
from support.sequences.random_layers import Unsplit, batch, build


def deep(num_layers: int = 16, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Softplus()) for _ in range(num_layers)])


def peak(recompute: str, num_ranks: int = 1) -> int:
    """Bytes alive at most in a step of one microbatch."""
    pipe = Pipeline(
        deep(),
        "1f1b",
        num_microbatches=1,
        slices=1,
        memory=Memory(recompute=recompute),
        layers=Layers(costs=[1.0] * 48),
        num_ranks=num_ranks,
    )
    inputs, targets = torch.randn(4096, 32), torch.randint(0, 32, (4096,))
    pipe.step(inputs, targets)
    with LiveMemory(tensors_alive()) as memory:
        before = memory.num_bytes
        pipe.step(inputs, targets)
    return memory.peak - before


def test_segments_hold_less_than_all_or_nothing() -> None:
    """One microbatch: recomputing everything at once saves nothing, in segments about sqrt(l). The last rank, too,
    frees each segment before it recomputes the next: none of its backwards are split."""
    none = peak("none")
    assert peak("stage") > 0.8 * none
    assert peak("segments") < 0.45 * none
    assert peak("segments", num_ranks=2) < 0.45 * peak("none", num_ranks=2)


class CountProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        self.count += func in (torch.ops.aten.addmm.default, torch.ops.aten.convolution.default)
        return func(*args, **kwargs or {})  # type: ignore[operator, misc]


@pytest.mark.parametrize(
    ("recompute", "times"), [("none", 1), ("selective", 1), ("full", 2), ("stage", 2), ("segments", 2)]
)
def test_what_runs_again(recompute: str, times: int) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5), nn.Tanh()).double()
    pipe = Pipeline(model, "gpipe", num_microbatches=4, memory=Memory(recompute=recompute))
    inputs, targets = batch(8)
    pipe.step(inputs, targets)
    with CountProducts() as products:
        pipe.step(inputs, targets)
    recomputed = products.count / 8 - 1  # 2 products, 4 microbatches
    assert recomputed == pytest.approx(
        times - 1, abs=0.3
    )  # not what a backward follows at once, nor past the last saved


def test_the_number_of_segments() -> None:
    """c = sqrt(l A_intermediate / A_input)."""
    pipe = Pipeline(deep(16), num_microbatches=1)
    (stage,) = pipe._runtime.stages.values()
    inputs, targets = torch.randn(64, 32), torch.randint(0, 32, (64,))
    whole = Batch.of(pipe.device, inputs, targets)
    piece = pipe._runtime.rehearsed_step(whole).batch.slices[0][0]
    trace = stage._tracer.trace(piece, True)  # type: ignore[attr-defined]
    segments = choose_segments(range(48), trace)
    size = 64 * 32 * 4
    saved = sum(work.saved_bytes for work in trace.work)
    assert len(segments) == round((48 * (saved / 48) / size) ** 0.5)
    assert [index for segment in segments for index in segment] == list(range(48))


Loss = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


def assert_exact(
    pipe: Pipeline, whole: nn.Sequential, inputs: Any, targets: Tensor, loss_fn: Loss | None = None
) -> None:
    """Loss and gradients of a step are those of the unsplit sequence."""
    for parameter in (*pipe.parameters(), *whole.parameters()):
        parameter.grad = None
    outputs = whole(inputs)
    loss = (
        functional.cross_entropy(outputs, targets) if loss_fn is None else loss_fn(outputs, targets)[0] / len(targets)
    )
    loss.backward()
    assert abs(pipe.evaluate(inputs, targets) - loss) < BOUND
    assert abs(pipe.step(inputs, targets) - loss) < BOUND
    assert gradient_error(whole, pipe) < BOUND


def test_shapes_may_change_from_step_to_step() -> None:
    """Images of any size, microbatches of unequal rows."""
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)
    model = nn.Sequential(*layers).double()
    whole = copy.deepcopy(model)
    pipe = Pipeline(model, num_microbatches=3, num_ranks=3, partition=[1, 2, 1])
    for rows, size in ((7, 4), (3, 6), (8, 5)):
        inputs = torch.randn(rows, 2, size, size, dtype=torch.float64)
        assert_exact(pipe, whole, inputs, torch.randint(0, 5, (rows,)))


def test_a_loss_function_of_float_targets_and_tuples() -> None:
    """The count is that of the rows; outputs come as the last layer returns them."""

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        return ((outputs[0] - outputs[1]) ** 2).sum() + 0 * targets.sum(), torch.tensor(len(targets))

    skip = Skip("input")
    model = nn.Sequential(skip.stash(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4), skip.pop()).double()
    whole, inputs = copy.deepcopy(model), torch.randn(7, 4, dtype=torch.float64)
    pipe = Pipeline(model, num_microbatches=2, num_ranks=3, partition=[2, 2, 1], loss_fn=loss)
    assert_exact(pipe, whole, inputs, inputs, loss)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, mask = inputs
        return self.table(ids), mask


class Masked(nn.Module):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        hidden, mask = inputs
        return (hidden.tanh() * mask[..., None]).sum(1)


def test_inputs_as_a_tuple_with_token_ids() -> None:
    model = nn.Sequential(Embed(), Masked(), nn.Linear(4, 5)).double()
    whole, inputs = copy.deepcopy(model), (torch.randint(0, 9, (6, 7)), torch.rand(6, 7) > 0.3)
    pipe = Pipeline(model, num_microbatches=4, num_ranks=3, partition=[1, 1, 1])
    assert_exact(pipe, whole, inputs, torch.randint(0, 5, (6,)))


def test_frozen_layers_and_one_that_learns_later() -> None:
    model = build(["conv", "skip"])
    inputs, targets = batch(6)
    for parameter in model[:4].parameters():
        parameter.requires_grad = False
    expected = Unsplit(model, inputs, targets, 2)
    pipe = Pipeline(model, num_microbatches=2, num_ranks=2, partition=[3, len(model) - 3])
    pipe.step(inputs, targets)
    found = gradients(pipe)
    assert found.keys() == expected.gradients.keys()
    assert gradient_error(expected.gradients, found) < BOUND
    for parameter in pipe.parameters():
        parameter.grad, parameter.requires_grad = None, True
    pipe.step(inputs, targets)
    thawed = build(["conv", "skip"])
    assert gradient_error(Unsplit(thawed, inputs, targets, 2).gradients, gradients(pipe)) < BOUND


def test_offload_and_schedules_found_by_measuring() -> None:
    inputs, targets = batch(6)
    model = build(["conv", "skip"])
    expected = Unsplit(model, inputs, targets, 3)
    pipe = Pipeline(model, "gpipe", 3, num_ranks=2, memory=Memory(offload=1.0), layers=Layers(example=inputs))
    pipe.step(inputs, targets)
    assert gradient_error(expected.gradients, gradients(pipe)) < BOUND
    pipe = Pipeline(
        build(["conv", "skip"]), "auto", 3, num_ranks=2, memory=Memory(recompute="stage"), layers=Layers(example=inputs)
    )
    assert pipe.plan is None
    assert len(exact_until_planned(pipe, inputs, targets, expected.loss, expected.gradients)) == 4


def test_balance_names_the_layer_that_is_in_the_way() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 800), nn.Linear(800, 8)), nn.Linear(8, 8))
    pipe = Pipeline(model, "1f1b", slices=1, num_ranks=2, layers=Layers(costs=[1, 6, 1, 1]))
    assert (pipe.balance.rank, pipe.balance.layer, pipe.balance.imbalance) == (0, "layer 1.0 (Linear)", 7 / 4.5)
    counted = Pipeline(
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], Unchanged()),
        "1f1b",
        slices=1,
        layers=Layers(example=torch.randn(4, 8)),
        num_ranks=2,
    )
    assert [len(stage) for stage in counted.layout.layers] == [2, 3]


class Unchanged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    pipe = Pipeline(model, num_microbatches=2)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    pipe.step(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(torch.rand(3), expected)
