"""Code of a user's that reaches weights elsewhere is refused by name, and a Pipeline leaves what it takes as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, PreTrainedModel

from slipstream import Pipeline, Runtime, SequenceLoss
from slipstream.model import causal_cross_entropy
from support.architectures import ARCHITECTURES, build, llama, tokens
from support.exact_steps import exact_pipe
from support.refusals import refused

IDS = tokens()
UNCHECKED = Runtime(self_check=False)
WEIGHT = "model.layers.3.mlp.up_proj.weight"


def scaled_by(weight: Tensor, module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * (1 + weight.mean())


class ScaledBy:
    def __init__(self, linear: Any) -> None:
        self.linear = linear

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        return scaled_by(self.linear.weight, module, args, output)


def in_a_closure(linear: Any) -> Callable[..., Any]:
    return lambda *given: scaled_by(linear.weight, *given)


def as_a_default(linear: Any) -> Callable[..., Any]:
    return lambda module, args, output, weight=linear.weight: scaled_by(weight, module, args, output)


def as_a_keyword(linear: Any) -> Callable[..., Any]:
    return lambda *given, weights=(linear.weight,): scaled_by(weights[0].detach(), *given)


def in_a_partial(linear: Any) -> Callable[..., Any]:
    return partial(scaled_by, linear.weight)


@pytest.mark.parametrize("hook", [in_a_closure, as_a_default, as_a_keyword, in_a_partial, ScaledBy])
def test_code_that_reads_a_weight_of_another_stage(hook: Callable[[Any], Any]) -> None:
    model: Any = build(llama())
    model.model.layers[0].register_forward_hook(hook(model.model.layers[3].mlp.up_proj))
    for options in ({}, {"runtime": UNCHECKED}):
        with refused(f"code of model.layers.0 reads {WEIGHT}, a weight of another stage .. Give a partition"):
            Pipeline(copy.copy(model), slices=1, num_ranks=2, schedule="1f1b", **options)


def test_it_is_exact_on_the_weights_own_stage() -> None:
    model: Any = build(llama())
    model.model.layers[2].register_forward_hook(in_a_partial(model.model.layers[3].mlp.up_proj))
    whole, slices = build(llama()), [31, 20, 13]
    whole.model.layers[2].register_forward_hook(in_a_partial(whole.model.layers[3].mlp.up_proj))
    total, count = causal_cross_entropy(whole(input_ids=IDS).logits[:, :-1], IDS[:, 1:])
    (total / count).backward()
    pipe = Pipeline(model, slices=slices, num_ranks=2, schedule="1f1b", partition=[2, 2])
    pipe.step(IDS, IDS)
    expected = dict(whole.named_parameters())
    for name, parameter in pipe.named_parameters():
        wanted = expected[name].grad
        assert (parameter.grad - wanted).abs().max() < 1e-6 * wanted.abs().max(), name


def test_a_backward_hook_that_reads_one() -> None:
    model: Any = build(llama())
    weight = model.lm_head.weight
    model.model.layers[0].register_full_backward_hook(
        lambda module, inner, outer: tuple(each * (1 + weight.mean()) for each in inner)
    )
    with refused("code of model.layers.0 reads lm_head.weight"):
        Pipeline(model, slices=1, num_ranks=2, schedule="1f1b")


def test_a_pipeline_leaves_gradients_as_they_were() -> None:
    """Those of the model, of another layer's weight in a closure, and of a parameter that no module has."""
    model: Any = build(llama())
    own, weight = nn.Parameter(torch.zeros((), dtype=torch.float64)), model.model.layers[3].mlp.up_proj.weight
    given = weight.grad = torch.ones_like(weight)
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * (1 + own + weight.mean()))
    Pipeline(model, slices=2)
    assert own.grad is None
    assert weight.grad is given
    assert torch.equal(given, torch.ones_like(weight))
    assert [name for name, each in model.named_parameters() if each.grad is not None] == [WEIGHT]


# --- losses -----------------------------------------------------------------------------------------------------------


def with_penalty(*weights: Tensor) -> Callable[[Tensor, Tensor], Any]:
    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = causal_cross_entropy(outputs, targets)
        return total + sum(weight.square().sum() for weight in weights), count

    return loss


def scaled_loss(scale: Tensor, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return causal_cross_entropy(outputs * scale, targets)


def of_scaled_count(scale: Tensor, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total, count = scaled_loss(scale, outputs, targets)
    return total, count.double()


def of_large_logits(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total, _ = causal_cross_entropy(outputs, targets)
    return total, outputs.square().sum()


def failing_on_made_up(weight: Tensor, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    raise ValueError(weight)


def test_a_loss_that_reads_a_weight_of_another_stage() -> None:
    for of in (with_penalty, lambda weight: with_penalty(weight.detach()), lambda w: partial(failing_on_made_up, w)):
        model: Any = build(llama())
        pipe = Pipeline(model, slices=1, num_ranks=2, schedule="1f1b", loss_fn=of(model.model.embed_tokens.weight))
        with refused("loss_fn reads model.embed_tokens.weight, a weight of another stage .. train on one stage"):
            pipe.step(IDS, IDS)
        assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_loss_that_reads_weights_of_the_last_stage_is_taken() -> None:
    model, whole = build(llama()), build(llama())
    total, count = with_penalty(whole.lm_head.weight)(whole(input_ids=IDS).logits[:, :-1], IDS[:, 1:])
    (total / count).backward()
    pipe = Pipeline(model, slices=1, num_ranks=2, schedule="1f1b", loss_fn=with_penalty(model.lm_head.weight))
    pipe.step(IDS, IDS)
    found, wanted = dict(pipe.named_parameters())["lm_head.weight"].grad, whole.lm_head.weight.grad
    assert found is not None
    assert (found - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_a_loss_of_an_nn_sequential_that_reads_its_first_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    inputs, targets = torch.randn(4, 3), torch.randn(4, 5)

    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        penalty = len(targets) * model[0].weight.square().sum()  # a part for each row
        return (outputs - targets).square().sum() + penalty, torch.tensor(len(targets))

    with refused("loss_fn reads 0.weight, a weight of another stage than the last"):
        Pipeline(model, num_ranks=2, partition=[1, 2], loss_fn=loss).step(inputs, targets)


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        (
            scaled_loss,
            {"loss_scale": 4.0},
            "loss_scale=4, but loss_fn has a parameter of its own, () .. Leave loss_scale",
        ),
        (of_scaled_count, {}, "loss_fn has a parameter of its own, (), and says a divisor of its own .. Count"),
        (lambda scale, *given: of_large_logits(*given), {}, "the second value of loss_fn has a gradient .. .detach()"),
    ],
)
def test_a_gradient_of_a_loss_that_would_not_be_whole(loss: Any, options: dict[str, Any], words: str) -> None:
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    pipe = Pipeline(build(llama()), slices=2, loss_fn=partial(loss, scale))
    with refused(words):
        pipe.step(IDS, IDS, **options)
    assert scale.grad is None
    pipe.evaluate(IDS, IDS)


def test_a_parameter_of_a_loss_gets_its_gradient() -> None:
    scales = [nn.Parameter(torch.full((), 1.5, dtype=torch.float64)) for _ in range(2)]
    total, count = scaled_loss(scales[0], build(llama())(input_ids=IDS).logits[:, :-1], IDS[:, 1:])
    (total / count).backward()
    pipe = Pipeline(
        build(llama()),
        slices=4,
        num_ranks=2,
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=partial(scaled_loss, scales[1]),
    )
    pipe.step(IDS, IDS)
    assert float(scales[1].grad) == pytest.approx(float(scales[0].grad), rel=1e-6)  # type: ignore[arg-type]
    with refused("loss_scale=2, but loss_fn has a parameter of its own"):
        pipe.step(IDS, IDS, loss_scale=2.0)


def test_a_parameter_of_a_sequence_loss_is_refused() -> None:
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    for function in (
        lambda sums: -sums * scale,
        nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 1).double(), nn.Flatten(0)),
    ):
        pipe = Pipeline(build(llama()), slices=2, loss_fn=SequenceLoss(function))
        with refused("the function of the SequenceLoss reads a parameter, ( .. would get no gradient"):
            pipe.step(IDS, IDS)
    Pipeline(build(llama()), slices=2, loss_fn=SequenceLoss(lambda sums: -sums * scale.detach())).step(IDS, IDS)


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "name"), [(torch.no_grad, "no_grad"), (torch.inference_mode, "inference_mode")])
def test_steps_without_gradients(mode: Any, name: str) -> None:
    with torch.no_grad():
        pipe = Pipeline(build(llama()), slices=2, num_ranks=2, schedule="1f1b")
    with mode():
        ids = IDS.clone()
        with refused(f"step within torch.{name}() would give no gradients .. pipe.evaluate"):
            pipe.step(ids, ids)
        with refused(f"step within torch.{name}() would give no gradients"):
            pipe.step([ids[0], ids[1, :20]], [ids[0], ids[1, :20]])
        expected = float(pipe.evaluate(ids, ids))
    assert float(pipe.step(ids, ids)) == pytest.approx(expected)


def test_what_is_made_in_inference_mode_is_not_trained() -> None:
    with torch.inference_mode():
        model = build(llama())
        with refused("a Pipeline within torch.inference_mode() couldn't be trained"):
            Pipeline(model)
    with refused("model was made within torch.inference_mode() .. outside"):
        Pipeline(model)


def test_layers_in_evaluation_mode_stay_so() -> None:
    def half_trained() -> PreTrainedModel:
        config = GPT2Config(
            vocab_size=61, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.0, attn_pdrop=0.0
        )
        model = build(config).train()
        for block in model.transformer.h:
            block.eval()
        return model

    pipe = Pipeline(half_trained(), slices=2, num_ranks=2, schedule="1f1b")
    expected = float(pipe.evaluate(IDS, IDS))
    for again in (lambda: None, pipe.train, lambda: pipe.eval().train()):
        again()
        assert float(pipe.step(IDS, IDS)) == pytest.approx(expected, rel=1e-12)
    drops = Pipeline(half_trained().eval(), slices=2, num_ranks=2, schedule="1f1b")  # as `from_pretrained` returns it
    assert abs(float(drops.step(IDS, IDS)) - expected) > 1e-3


def test_a_batch_norm_in_evaluation_mode_keeps_its_averages() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    model[1].eval()
    pipe = Pipeline(model, num_ranks=2, partition=[1, 2], num_microbatches=2)
    pipe.step(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
    assert torch.equal(model[1].running_mean, torch.zeros(4))


def test_documents_that_influence_each_other_are_refused_without_the_self_check() -> None:
    config = copy.deepcopy(ARCHITECTURES["llama4_text"])
    config.floor_scale = 64  # positions are scaled from the sequence's start
    pipe = Pipeline(build(config), slices=2, runtime=UNCHECKED)
    with refused("several documents in a sequence of 64 tokens, but 'llama4_text' counts positions .. one document"):
        pipe.step(IDS, IDS, document_ids=torch.arange(64).div(20, rounding_mode="floor").expand_as(IDS))
    exact_pipe(build(llama()), IDS, slices=2, self_check=False)
