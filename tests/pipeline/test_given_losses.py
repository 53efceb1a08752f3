"""Losses of one's own are divided by what counts in the batch, also over accumulated steps, or refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream import Pipeline, SequenceLoss, SlipstreamError
from slipstream.model import causal_cross_entropy
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    VOCABULARY,
    build,
    gradient_error,
    gradients,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.parameters import first_of
from support.pipelines import make_pipe
from support.refusals import refused

WEIGHTS = 10 ** torch.linspace(-2, 1, VOCABULARY, dtype=torch.float64)
COUNTS_FLOATS = "loss_fn's second values add up to"
INPUTS = tokens(3)
LABELS = labels_of(INPUTS)
VALID = LABELS[:, 1:][LABELS[:, 1:] != -100]
DIVISOR = float(WEIGHTS[VALID].sum())


def weighted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy with weights of classes, of which PyTorch's mean divides by their sum."""
    total = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), WEIGHTS, reduction="sum")
    return total, WEIGHTS[targets[targets != -100]].sum()


def unsplit(name: str, has_weights: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = build(ARCHITECTURES[name])
    if not has_weights:
        return unsplit_step(model, INPUTS, LABELS), gradients(model)
    logits = model(INPUTS).logits[:, :-1]
    loss = functional.cross_entropy(logits.flatten(0, 1), LABELS[:, 1:].flatten(), WEIGHTS)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize(
    "options",
    first_of(
        [
            {"schedule": "zb-h1", "slices": [30, 20, 14], "num_microbatches": 3},
            {"schedule": "gpipe", "slices": 1, "recompute": "full"},
            {"slices": 4, "master_dtype": torch.float64},
        ]
    ),
)
def test_weights_of_classes(options: dict[str, Any]) -> None:
    pipe = make_pipe(build(ARCHITECTURES["llama, tied"]), num_ranks=2, loss_fn=weighted, **options)
    with no_rounding_inside():  # gradients are divided after the model's own backward, and not before
        loss, expected = unsplit("llama, tied", has_weights=True)
        assert abs(pipe.evaluate(INPUTS, LABELS) - loss) < BOUND
        assert abs(pipe.step(INPUTS, LABELS, loss_scale=2.0**8) - loss) < BOUND
        assert gradient_error(expected, gradients(pipe)) < BOUND
        pipe.step(INPUTS, LABELS)
    twice = {name: 2 * gradient for name, gradient in expected.items()}
    assert gradient_error(twice, gradients(pipe)) < BOUND


# --- accumulated steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    first_of(
        [
            ("llama, tied", {"loss_fn": weighted, "slices": 3}),
            ("llama, tied", {"schedule": "zb-h1", "slices": [30, 20, 14], "loss_scale": 2.0**10}),
            ("llama", {"vocabulary": "spread", "slices": 3}),
            ("gpt2", {"schedule": "gpipe", "slices": 2}),
        ],
        3,
    ),
)
def test_steps_of_unequal_labels_add_up_to_one_batch(name: str, options: dict[str, Any]) -> None:
    loss, expected = unsplit(name, "loss_fn" in options)
    more = {
        "loss_scale": options.get("loss_scale", 1.0),
        "num_targets": DIVISOR if "loss_fn" in options else len(VALID),
    }
    options = {key: value for key, value in options.items() if key != "loss_scale"}
    pipe = make_pipe(build(ARCHITECTURES[name]), num_ranks=2, **options)
    losses = [pipe.step(INPUTS[part], LABELS[part], **more) for part in ([0], [1, 2])]
    assert abs(sum(losses) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND


@pytest.mark.parametrize("options", [{}, {"vocabulary": "spread"}], ids=str)
def test_batches_in_which_nothing_counts_add_nothing_to_accumulated_gradients(options: dict[str, Any]) -> None:
    """As in a training of transformers; without `num_targets` they are refused."""
    pipe = make_pipe(build(ARCHITECTURES["llama"]), num_ranks=2, slices=3, **options)
    assert pipe.step(INPUTS, LABELS, num_targets=len(VALID)) == pipe.step(INPUTS, LABELS) > 0
    expected, nothing = gradients(pipe), torch.full_like(LABELS, -100)
    assert pipe.step(INPUTS, nothing, num_targets=len(VALID)) == 0
    assert pipe.evaluate(INPUTS, nothing, num_targets=len(VALID)) == 0
    with refused("no label of this batch counts"):
        pipe.step(INPUTS, nothing)
    assert gradient_error(expected, gradients(pipe)) == 0


@pytest.mark.parametrize(
    ("loss_fn", "num_targets", "words"),
    [
        (None, 0, "num_targets=0: give the number of all batches' labels"),
        (None, 10, "num_targets=10, but 189 targets of this batch alone count"),
        (weighted, 189, "num_targets=189 with a loss_fn that says its own divisor"),
        (weighted, 0.5, f"num_targets=0.5, but {COUNTS_FLOATS} .. in this batch alone"),
        (SequenceLoss(lambda found: -found), 200, "num_targets with a SequenceLoss, .. leave it out"),
    ],
)
def test_numbers_of_targets_that_cannot_be(loss_fn: Any, num_targets: float, words: str) -> None:
    pipe = make_pipe(build(ARCHITECTURES["llama"]), slices=2, loss_fn=loss_fn)
    with refused(words):
        pipe.step(INPUTS, INPUTS, num_targets=num_targets)


# --- what is no loss function -----------------------------------------------------------------------------------------


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(5, (8,), generator=generator)
    targets[2] = -100
    return torch.randn(8, 6, generator=generator), targets


def layers(loss_fn: Any, num_microbatches: int = 1, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    return Pipeline(model, num_ranks=2, partition=[2, 1], loss_fn=loss_fn, num_microbatches=num_microbatches, **options)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum")


@pytest.mark.parametrize(
    ("loss_fn", "answer"),
    [
        (nn.CrossEntropyLoss(), r"loss_fn=CrossEntropyLoss\(\): torch's CrossEntropyLoss returns one number"),
        (functional.mse_loss, r"torch's mse_loss returns one number"),
        (functools.partial(functional.cross_entropy, reduction="sum"), r"torch's cross_entropy returns one number"),
        ("cross_entropy", r"loss_fn='cross_entropy': str can't be called"),
        (summed, r"loss_fn returned a tensor \(\)\. Give a function .* returns \(sum, count\)"),
        (lambda *given: {"loss": summed(*given)}, r"loss_fn returned a dict"),
        (lambda o, t: (functional.cross_entropy(o, t, reduction="none"), 7), r"first value .* is a tensor \(8,\)"),
        (lambda o, t: (summed(o, t).item(), 7), r"first value of loss_fn is a float"),
        (lambda o, t: (summed(o, t), t != -100), r"second value of loss_fn is a tensor \(8,\), not one number"),
        (lambda o, t: (summed(o, t), (t != -100).sum().bfloat16()), r"is of torch.bfloat16, too coarse"),
        (lambda o, t: (summed(o, t), (t != -100).sum() / 0), rf"{COUNTS_FLOATS} inf, by which"),
        (lambda o, t: (functional.cross_entropy(o, t), (t != -100).sum()), r"it is a mean, which would be divided"),
        (lambda o, t: (functional.nll_loss(o.log(), t), (t != -100).sum()), r"it is a mean, which would be divided"),
        (lambda o, t: (summed(o, t), t.numel()), r"loss_fn counted 8 tokens, but 7 targets are not -100"),
        (lambda o, t: (summed(o, t).detach(), 7), r"the sum that loss_fn returns has no gradient"),
    ],
)
def test_functions_that_are_no_loss_function(loss_fn: Any, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before anything runs."""
    runs: list[type] = []  # besides those of the fake tensors by which shapes are learnt
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: runs.append(type(x)) or x.tanh())
    with pytest.raises(SlipstreamError, match=answer):
        layers(loss_fn).step(*rows())
    assert Tensor not in runs


def left(pipe: Pipeline) -> list[str]:
    return [name for name, parameter in pipe.named_parameters() if parameter.grad is not None]


def test_what_is_known_after_a_step_leaves_no_gradient() -> None:
    """Of no earlier step either, so that no optimizer changes anything."""
    weights = [torch.tensor(1.0)]
    pipe = layers(lambda outputs, targets: (summed(outputs, targets), weights[0] * (targets != -100).sum()), 2)
    pipe.step(*rows())
    assert len(left(pipe)) == 4
    for weight, answer in ((0.0, "0.0, by which"), (-1.0, "-7.0, by which")):
        weights[0] = torch.tensor(weight)
        with pytest.raises(SlipstreamError, match=f"{COUNTS_FLOATS} {answer}"):
            pipe.step(*rows())
        assert left(pipe) == []
        weights[0] = torch.tensor(1.0)
        pipe.step(*rows())
        assert len(left(pipe)) == 4


def test_sums_without_a_gradient_evaluate() -> None:
    def num_right(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return (outputs.argmax(1) == targets).sum().double(), (targets != -100).sum()

    pipe = layers(num_right, 2)
    assert 0 <= pipe.evaluate(*rows()) <= 1
    with pytest.raises(SlipstreamError, match="the sum that loss_fn returns has no gradient"):
        pipe.step(*rows())


def test_losses_of_probabilities_are_tried_too() -> None:
    """Logits give them no numbers."""

    def mean_of_squares(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        assert outputs.min() > 0, "no probabilities"
        return outputs.square().mean(), (targets != -100).sum()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Softmax(1))
    pipe = Pipeline(model, loss_fn=mean_of_squares, num_microbatches=2)
    with pytest.raises(SlipstreamError, match=r"the sum that loss_fn returns is .* must be a sum over rows"):
        pipe.step(*rows())
    assert left(pipe) == []


def test_a_loss_that_mixes_tokens_is_refused_in_its_gradients_alone() -> None:
    def sums(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = weighted(outputs, targets)[0], (targets != -100).sum()
        return total + ((outputs - outputs.detach()) * outputs.detach().softmax(1)).sum(), count

    inputs = tokens()
    pipe = make_pipe(build(ARCHITECTURES["llama"]), slices=2, loss_fn=sums)
    with pytest.raises(SlipstreamError, match=r"the gradients of the sum .* differ between some tokens alone"):
        pipe.step(inputs, inputs)
    assert left(pipe) == []


def mean(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(outputs, targets), torch.ones(())


def contrasted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's loss depends on the others."""
    alike = outputs @ outputs.T
    return functional.cross_entropy(alike, torch.arange(len(alike)), reduction="sum"), (targets != -100).sum()


@pytest.mark.parametrize("loss_fn", [mean, contrasted])
def test_losses_that_are_no_sum_over_rows(loss_fn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """In one microbatch they are what they are; in several they would depend on how rows are divided."""
    inputs, targets = rows()
    pipe = layers(loss_fn)
    whole = copy.deepcopy(nn.Sequential(*(layer.module for layer in pipe._runtime.family._layers)))  # type: ignore[attr-defined]
    total, count = loss_fn(whole(inputs), targets)
    (total / count).backward()
    assert abs(pipe.step(inputs, targets) - (total / count).detach()) < 1e-6
    assert gradient_error(whole, pipe) < 1e-5
    with pytest.raises(SlipstreamError, match=r"the sum that loss_fn returns is .* must be a sum over rows"):
        layers(loss_fn, 2).step(inputs, targets)


def test_losses_that_look_at_neighbouring_tokens() -> None:
    def smooth(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        steps = (outputs[:, 1:] - outputs[:, :-1]).square().sum()
        return weighted(outputs, targets)[0] + steps, (targets != -100).sum()

    whole, sliced = (make_pipe(build(ARCHITECTURES["llama"]), slices=slices, loss_fn=smooth) for slices in (1, 2))
    assert whole.step(INPUTS, INPUTS) > 0
    with refused("the sum that loss_fn returns is .. must be a sum over tokens"):
        sliced.step(INPUTS, INPUTS)


def test_counts_that_become_divisors() -> None:
    counts: list[Any] = [7, 7.5]
    pipe = layers(lambda outputs, targets: (summed(outputs, targets), counts[0]))
    pipe.step(*rows())
    counts.pop(0)
    with pytest.raises(SlipstreamError, match="was an integer in earlier steps, and is a floating-point number now"):
        pipe.step(*rows())
    assert left(pipe) == []


def test_routers_beside_a_divisor() -> None:
    pipe = make_pipe(build(ARCHITECTURES["mixtral"]), slices=2, loss_fn=weighted, router_loss="per_layer")
    with refused("router_loss with a loss_fn that says its own divisor"):
        pipe.step(tokens(), tokens())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_targets_of_narrow_integers(dtype: torch.dtype) -> None:
    """Token ids are int64 in transformers too; class numbers of an nn.Sequential may be any integers."""
    inputs, targets = rows()
    targets = targets.clamp(min=0)
    assert layers(None).step(inputs, targets.to(dtype)) == layers(None).step(inputs, targets)


def test_nothing_that_is_trained() -> None:
    inputs, targets = rows()
    pipe = layers(None)
    for parameter in pipe.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(SlipstreamError, match=r"nothing would be trained: .* is_trainable=True"):
        pipe.step(inputs, targets)
    assert pipe.evaluate(inputs, targets) > 0
    model = build(ARCHITECTURES["llama"]).requires_grad_(False)
    pipe = make_pipe(model, slices=2, num_ranks=2)
    with pytest.raises(SlipstreamError, match=r"nothing would be trained: requires_grad is False"):
        pipe.step(tokens(), tokens())
    with pytest.raises(SlipstreamError, match=r"nothing would be trained: requires_grad is False"):
        pipe.step([*tokens()], [*tokens()])
    assert pipe.evaluate(tokens(), tokens()) > 0
    next(iter(pipe.parameters())).requires_grad_(True)
    pipe.step(tokens(), tokens())


@pytest.mark.parametrize("dtype", ["float64", torch.float64])
def test_a_configuration_may_name_its_dtype(dtype: str | torch.dtype) -> None:
    config = copy.deepcopy(ARCHITECTURES["llama"])
    config.dtype = dtype
    pipe = make_pipe(build(config), slices=2, loss_fn=causal_cross_entropy)
    pipe.step(tokens(), tokens())
