"""Models that run their layers in another way are refused by name, and whole sequences train where slices can't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BioGptConfig,
    ElectraConfig,
    OpenAIGPTConfig,
    OPTConfig,
    PretrainedConfig,
    TrOCRConfig,
    WhisperConfig,
    XGLMConfig,
    XLMRobertaConfig,
)

from slipstream import Pipeline, Runtime
from support.architectures import ARCHITECTURES, VOCABULARY, build, llama, tokens
from support.exact_steps import exact_pipe
from support.refusals import refused

UNCHECKED = Runtime(self_check=False)
_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 48, "is_decoder": True}
DROPPING: list[tuple[type[PretrainedConfig], str, dict[str, Any]]] = [
    (OPTConfig, "layerdrop", {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "ffn_dim": 48}),
    (XGLMConfig, "layerdrop", {"d_model": 32, "num_layers": 2, "attention_heads": 2, "ffn_dim": 48}),
    (BioGptConfig, "layerdrop", {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}),
    (BartConfig, "decoder_layerdrop", _DECODER),
    (TrOCRConfig, "decoder_layerdrop", _DECODER),
    (WhisperConfig, "decoder_layerdrop", _DECODER | {"decoder_start_token_id": 1}),
]


@pytest.mark.parametrize(("kind", "field", "sizes"), DROPPING, ids=lambda each: getattr(each, "__name__", ""))
def test_layers_that_are_left_out_at_random(kind: Any, field: str, sizes: dict[str, Any]) -> None:
    config = kind(**_COMMON, **sizes, num_attention_heads=2, **{field: 0.25})
    for options in ({"slices": 1}, {"slices": 2, "num_ranks": 2}, {"slices": 1, "runtime": UNCHECKED}):
        with refused(f"with a probability of 0.25 (LayerDrop) .. Set {field}=0.0 in its configuration"):
            Pipeline.from_config(config, **options)


def test_layers_that_a_model_in_memory_leaves_out() -> None:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "ffn_dim": 48}
    model: Any = AutoModelForCausalLM.from_config(OPTConfig(**_COMMON, **sizes, num_attention_heads=2))
    model.model.decoder.layerdrop = 0.5
    with refused("model.decoder .. Set model.model.decoder.layerdrop = 0.0"):
        Pipeline(model, slices=1)


def checkpointed(name: str) -> Any:
    model = build(llama())
    part: Any = model.get_submodule(name)
    inner = part.forward
    part.forward = lambda *args, **options: checkpoint(inner, *args, use_reentrant=False, **options)
    return model


def test_a_checkpoint_of_the_users_around_a_layer() -> None:
    for options in ({"slices": 1}, {"slices": 2, "num_ranks": 2}):
        with refused("model.layers.1 has a forward of its own, which calls a layer again .. Memory(recompute='full')"):
            Pipeline(checkpointed("model.layers.1"), **options)
    pipe = Pipeline(checkpointed("model.layers.1"), slices=1, runtime=UNCHECKED)
    with refused("outside of a Pipeline's forward .. torch.utils.checkpoint .. Memory(recompute='full')"):
        pipe.step(tokens(), tokens())


def test_a_checkpoint_of_the_users_around_an_mlp_is_exact() -> None:
    expected = exact_pipe(build(llama()), tokens(), slices=3)
    found = Pipeline(checkpointed("model.layers.1.mlp"), slices=3, num_ranks=2, schedule="1f1b")
    found.step(tokens(), tokens())
    wanted = dict(expected.named_parameters())
    for name, parameter in found.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, wanted[name].grad, rtol=1e-6), name  # type: ignore[arg-type]


def test_a_whole_model_that_is_compiled() -> None:
    for name, named in ("", "the model"), ("model", "model"):
        model: Any = build(llama())
        model.get_submodule(name).compile()
        with refused(f"torch.compile runs {named}, which has all layers .. layer.compile()"):
            Pipeline(model)


@pytest.mark.parametrize("kind", [XLMRobertaConfig, BertConfig, ElectraConfig, "llama, tied", "gpt2"])
def test_a_state_has_every_name_of_the_model(kind: Any) -> None:
    """So that the model that it is of loads it."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = ARCHITECTURES.get(kind) if isinstance(kind, str) else kind(**_COMMON, **sizes, is_decoder=True)
    whole: Any = build(config)  # type: ignore[arg-type]
    for num_ranks in (1, 2):
        pipe = Pipeline(build(config), slices=2, num_ranks=num_ranks)  # type: ignore[arg-type]
        build(config, seed=1).load_state_dict(pipe.state_dict(), strict=True)  # type: ignore[arg-type]
        assert all(torch.equal(whole.state_dict()[name], each) for name, each in pipe.state_dict().items())


def test_whole_sequences_of_a_model_that_has_no_slices_are_checked_and_exact() -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = OpenAIGPTConfig(vocab_size=VOCABULARY, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ids = tokens()
    pipe = exact_pipe(build(config), ids, slices=1, num_microbatches=2)
    with refused("'openai-gpt' can't be trained in token slices"):
        pipe.step(ids, ids, document_ids=torch.arange(64).div(20, rounding_mode="floor").expand_as(ids))
    with refused(
        "'openai-gpt' can't be trained in token slices .. Give whole sequences, in microbatches: slices=1."
    ) as error:
        Pipeline(build(config), slices=2)
    assert "self_check" not in str(error.value)
