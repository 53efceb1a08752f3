"""Lists transformers' architectures with a causal language model, and says what kind each is."""

from __future__ import annotations

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto import CONFIG_MAPPING, modeling_auto

from benchmarks.zoo.outcomes import Kind

_GENERATE_FROM = (  # what decoders of other models read: text, speech, images
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
)
_OTHER_DECODERS = {"trocr", "moshi"}  # of TrOCR's images and of Moshi's audio, in none of these lists
_NEVER_ENCODERS = {"gpt_neox_japanese"}  # whose configurations have is_decoder=False all the same
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_RELEASED = {  # what released models have and the defaults lack: a number without which transformers fails, or layers
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 64},
    "nemotron": {"num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
}


def architectures() -> list[str]:
    """Returns the model types of transformers' causal language models, in alphabetical order."""
    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_name(model_type: str) -> str:
    """Returns the name of the model's class."""
    found = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return found if isinstance(found, str) else found[0]


def kind_of(model_type: str) -> Kind:
    """Returns the kind of an architecture, from the other lists of transformers that it is in."""
    if model_type in _OTHER_DECODERS or any(model_type in names for names in _GENERATE_FROM):
        return Kind.PART
    is_masked = model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    is_switched = getattr(CONFIG_MAPPING[model_type], "is_decoder", None) is False and model_type not in _NEVER_ENCODERS
    return Kind.ENCODER if is_masked or is_switched else Kind.PLAIN


def default_config(model_type: str) -> PretrainedConfig:
    """Returns the architecture's own default configuration, as a decoder, with what it can't run without."""
    decodes = {"is_decoder": True} if kind_of(model_type) is Kind.ENCODER else {}
    return AutoConfig.for_model(model_type, **decodes, **_RELEASED.get(model_type, {}))
