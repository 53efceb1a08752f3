"""Models of transformers as sequences have the outputs to the bit and gradients under 1e-10, or are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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
from support.parameters import each_once

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
