"""Models of transformers as sequences have the outputs to the bit and gradients under 1e-10, or are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertForSequenceClassification,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from slipstream import Layers, Memory, Pipeline, SlipstreamError
from slipstream.extras.encoders import sequence_of
from support.architectures import BOUND, gradient_error, gradients, no_rounding_inside
from support.parameters import each_once, first_of

LENGTH = 11
_TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_VIT = ViTConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=4
)
_VIT_PLAN = {
    "embeddings": (["pixel_values"], ["hidden_states"]),
    "layers": (["hidden_states"], ["hidden_states"]),
    "layernorm": (["hidden_states"], ["hidden_states"]),
}
_T5GEMMA = _TEXT | {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}

BUILD: dict[str, Callable[[], PreTrainedModel]] = {
    "t5gemma": lambda: T5GemmaForConditionalGeneration(
        T5GemmaConfig(encoder=_T5GEMMA, decoder=_T5GEMMA, vocab_size=61, tie_word_embeddings=False, dropout_rate=0.0)
    ),
    "eurobert": lambda: EuroBertForMaskedLM(EuroBertConfig(**_TEXT, mask_token_id=3)),
    "eurobert, classes": lambda: EuroBertForSequenceClassification(
        EuroBertConfig(**_TEXT, mask_token_id=3, classifier_pooling="mean", num_labels=5)
    ),
    "vit": lambda: ViTForImageClassification(copy.deepcopy(_VIT)),
}
SETTINGS: dict[str, dict[str, Any]] = {"vit": {"plan": _VIT_PLAN}}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return BUILD[name]().double().train()


def batch(name: str, rows: int = 4, padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator, dtype=torch.float64)}
    source = torch.randint(3, 61, (rows, LENGTH), generator=generator)
    mask = torch.ones_like(source)
    if padded:
        mask[::2, -4:] = 0
    inputs = {"input_ids": source, "attention_mask": mask}
    if name == "t5gemma":
        inputs["decoder_input_ids"] = torch.randint(3, 61, (rows, 7), generator=generator)
    return inputs


def cotangent(outputs: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """A loss in which every output counts, another for each."""
    weights = torch.randn(outputs.shape[1:], generator=torch.Generator().manual_seed(3), dtype=outputs.dtype)
    return (outputs * weights).sum(), torch.tensor(outputs.shape[0])


def owned_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("padded", [True, False])
def test_the_sequence_computes_what_the_model_does(name: str, padded: bool) -> None:
    """With every parameter of the model in exactly one layer; to the bit where there is a mask in both."""
    model, inputs = build(name), batch(name, padded=padded)
    expected = model(**inputs, use_cache=False).logits
    sequence = sequence_of(model, **SETTINGS.get(name, {}))
    values = tuple(inputs.values())
    found = sequence(values if len(values) > 1 else values[0])
    assert torch.equal(found, expected) if padded else torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    in_layers = [id(parameter) for layer in sequence for parameter in layer.parameters()]
    assert sorted(in_layers) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize(
    ("name", "schedule", "num_ranks", "num_microbatches", "recompute"),
    each_once(BUILD, [("1f1b", 3, 4, "none"), ("gpipe", 2, 3, "full")]),
)
def test_gradients_are_those_of_the_model(
    name: str, schedule: str, num_ranks: int, num_microbatches: int, recompute: str
) -> None:
    inputs = batch(name)
    rows = len(next(iter(inputs.values())))
    with no_rounding_inside():
        whole = build(name)
        for piece in torch.arange(rows).tensor_split(num_microbatches):
            outputs = whole(**{key: tensor[piece] for key, tensor in inputs.items()}, use_cache=False).logits
            (cotangent(outputs, outputs)[0] / rows).backward()
        model = build(name)
        names = owned_names(model)
        sequence = sequence_of(model, **SETTINGS.get(name, {}))
        values = tuple(inputs.values())
        parameters = dict(sequence.named_parameters())
        pipe = Pipeline(
            sequence,
            schedule=schedule,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            memory=Memory(recompute=recompute),
            layers=Layers(example=values if len(values) > 1 else values[0]),
            loss_fn=cotangent,
        )
        pipe.step(values if len(values) > 1 else values[0], torch.zeros(rows, dtype=torch.int64))
    found = {names[id(parameters[key])]: tensor for key, tensor in gradients(pipe).items()}
    expected = gradients(whole)
    assert found.keys() == expected.keys()
    assert gradient_error(expected, found) < BOUND


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: ViTForImageClassification(copy.deepcopy(_VIT)), "neither its config nor those of its parts have"),
        (
            lambda: ResNetForImageClassification(ResNetConfig(hidden_sizes=[8, 16, 24, 32], depths=[1] * 4)),
            "neither its config nor those of its parts have",
        ),
        (
            lambda: BartForConditionalGeneration(
                BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=20, encoder_ffn_dim=16)
            ),
            "neither its config nor those of its parts have",
        ),
    ],
)
def test_models_without_a_plan_are_refused_with_what_is_supported(
    model: Callable[[], PreTrainedModel], reason: str
) -> None:
    with pytest.raises(SlipstreamError, match=reason) as raised:
        sequence_of(model())
    assert "pipelined by microbatches only" in str(raised.value)
    assert "T5Gemma" in str(raised.value)


def test_the_vision_encoder_of_deepseek_ocr_2() -> None:
    """Its input is no token ids but embedded patches, and its forward takes a number that is no tensor."""
    module = pytest.importorskip("transformers.models.deepseek_ocr2.modeling_deepseek_ocr2")
    if not hasattr(module, "DeepseekOcr2VisionEncoderConfig"):
        pytest.skip("this version of transformers has no such encoder of its own")
    torch.manual_seed(0)
    config = module.DeepseekOcr2VisionEncoderConfig(**_TEXT)
    model = module.DeepseekOcr2VisionEncoder(config).double()
    patches = torch.randn(3, 9, 32, dtype=torch.float64)
    expected = model(inputs_embeds=patches, num_patches=5).last_hidden_state
    sequence = sequence_of(model, ["inputs_embeds"], num_patches=5)
    assert torch.allclose(sequence(patches), expected, rtol=1e-12, atol=1e-12)


def test_a_plan_that_leaves_something_out_is_refused() -> None:
    """Without the last norm in the plan it is no part of any layer but the end, where it belongs; without the embedding
    the images would be embedded again at the end."""
    plan = {key: value for key, value in _VIT_PLAN.items() if key != "embeddings"}
    with pytest.raises(SlipstreamError, match=r"embeddings|no place"):
        sequence_of(ViTForImageClassification(copy.deepcopy(_VIT)), plan=plan)
    with pytest.raises(SlipstreamError, match="exactly one must be a list of layers"):
        sequence_of(ViTForImageClassification(copy.deepcopy(_VIT)), plan={"embeddings": ((), ())})


def test_work_outside_the_plan_is_found_by_the_self_check() -> None:
    class Shifted(ViTForImageClassification):
        def forward(self, pixel_values: Tensor, **kwargs: Any) -> Any:
            output = super().forward(pixel_values, **kwargs)
            output.logits = output.logits + pixel_values.mean()
            return output

    with pytest.raises(SlipstreamError, match="its own forward does something between"):
        sequence_of(Shifted(copy.deepcopy(_VIT)), plan=_VIT_PLAN)


Change = Callable[[PreTrainedModel], None]


def _wrap(module: nn.Module, after: Callable[..., Any]) -> None:
    """Gives a module a forward of its own, which runs its class's and then `after` with the same arguments."""
    old = module.forward
    module.forward = lambda *args, **kwargs: after(old(*args, **kwargs), *args, **kwargs)


def _share(model: Any) -> None:
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def _delete(model: Any) -> None:
    del model.model.layers[1]


def _replace(model: Any) -> None:
    model.model.layers[1].mlp = nn.Sequential(nn.Linear(32, 7), nn.Tanh(), nn.Linear(7, 32)).double()


EXACT: dict[str, Change] = {
    "patched forward of a layer": lambda model: _wrap(model.model.layers[1], lambda out, *_, **__: out * 0.9),
    "patched forward of the model": lambda model: _wrap(model.model, _doubled),
    "shared weights": _share,
    "forward pre-hook": lambda model: (
        _first(model).register_forward_pre_hook(lambda _, args: (args[0] * 0.5,)) and None
    ),
    "forward hook": lambda model: _first(model).register_forward_hook(lambda _, args, out: out * 0.5) and None,
    "backward pre-hook": lambda model: _first(model).register_full_backward_pre_hook(_halved) and None,
    "backward hook": lambda model: (
        _first(model).register_full_backward_hook(lambda _, given, __: _halved(_, given)) and None
    ),
    "deleted layer": _delete,
    "weight_norm": lambda model: weight_norm(_first(model).mlp.up_proj) and None,
    "replaced module": _replace,
}


def _first(model: Any) -> Any:
    return model.model.layers[0]


def _halved(_: nn.Module, gradients: Any) -> Any:
    return tuple(None if each is None else each * 0.5 for each in gradients)


def _doubled(output: Any, *_: Any, **__: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state * 2
    return output


@pytest.mark.parametrize("change", first_of(EXACT, 4))
def test_a_changed_model_is_the_one_that_is_pipelined(change: str) -> None:
    inputs = batch("eurobert")
    values = tuple(inputs.values())
    whole, model = build("eurobert"), build("eurobert")
    EXACT[change](whole)
    EXACT[change](model)
    model.load_state_dict(whole.state_dict())  # of replaced modules too
    with no_rounding_inside():
        (cotangent(whole(**inputs, use_cache=False).logits, values[0])[0] / 4).backward()
        names = owned_names(model)
        sequence = sequence_of(model)
        assert all(module.training for module in sequence.modules())
        parameters = dict(sequence.named_parameters())
        options = {"partition": [1, len(sequence) - 2, 1], "num_ranks": 3, "num_microbatches": 2}
        pipe = Pipeline(sequence, layers=Layers(example=values), loss_fn=cotangent, **options)
        pipe.step(values, torch.zeros(4, dtype=torch.int64))
    found = {names[id(parameters[key])]: each for key, each in gradients(pipe).items()}
    assert gradient_error(whole, found) < BOUND


def _add_words(output: Any, model: Any, **given: Any) -> Any:
    output.logits = output.logits + model.lm_head(model.model.embed_tokens(given["input_ids"]))
    return output


def _read_another_layer(model: Any, detached: bool = False) -> None:
    kept: dict[str, Tensor] = {}
    _first(model).register_forward_hook(lambda _, args, out: kept.update(out=out.detach() if detached else out))
    model.model.layers[2].mlp.register_forward_hook(lambda _, args, out: out + kept["out"])


PASSING: dict[str, tuple[Change, str]] = {
    "words again": (
        lambda model: _wrap(model, lambda out, **given: _add_words(out, model, **given)),
        "the model has a forward of its own, and computes something between the modules of its plan",
    ),
    "another layer": (_read_another_layer, "layers.0 has a forward hook, and returns something else when a layer runs"),
    "another layer, detached": (
        lambda model: _read_another_layer(model, detached=True),
        "layers.0 has a forward hook, and returns something else when a layer runs",
    ),
    "random numbers": (
        lambda model: _first(model).register_forward_hook(lambda _, args, out: out + torch.rand_like(out)) and None,
        "layers.0 has a forward hook, and computes something between",
    ),
}


@pytest.mark.parametrize("change", PASSING)
def test_changes_that_pass_the_layers_by_are_refused(change: str) -> None:
    model = build("eurobert")
    PASSING[change][0](model)
    with pytest.raises(SlipstreamError, match=PASSING[change][1]):
        sequence_of(model)


def _read_embedding(model: Any) -> None:
    embedding = model.model.embed_tokens
    model.model.norm.register_forward_hook(lambda _, args, output: output + embedding.weight[3])


@pytest.mark.parametrize("change", [_share, _read_embedding])
def test_changes_over_several_stages_are_refused(change: Change) -> None:
    """Of weights that layers on different ranks would have each for itself."""
    model = build("eurobert")
    change(model)
    sequence = sequence_of(model)
    with pytest.raises(SlipstreamError, match=r"but they are on stages \d and \d. Give a partition"):
        Pipeline(sequence, partition=[2, 2, 1], num_ranks=3, loss_fn=cotangent)
