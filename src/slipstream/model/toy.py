"""Builds an architecture at toy size, for the self-checks and to see in which order its parts run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from math import gcd

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from slipstream.model.toy_comparison import REFERENCE_ATTENTION
from slipstream.model.toy_numbers import shrink_number, token_numbers

TOY_LENGTH = 48  # tokens; every threshold of the architecture is brought below it
_NUM_LAYERS = 4
_NUM_HEADS = 2
_FEATURES = ("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size")
_MOST = {  # sizes that change no code path: largest toy value -> names
    128: ("vocab_size", "vocab_size_per_layer_input"),
    32: (*_FEATURES, "intermediate_size_mlp", "decoder_ffn_dim", "encoder_ffn_dim"),
    4: ("decoder_layers", "encoder_layers", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    2: ("decoder_attention_heads", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    1: ("n_group", "topk_group", "index_n_heads"),
}
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_STATE_SPACE_HEADS = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
_STATE_SPACE_HEAD_SIZES = ("mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
_STATE_SPACE_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_PER_LAYER_LISTS = ("layer_types", "no_rope_layers", "mlp_layer_types")
_LAYER_INDICES = ("moe_layers", "mlp_only_layers")  # numbers of layers, perhaps as many as there are layers


def toy_config(config: PretrainedConfig, shrinks_numbers: bool = True) -> PretrainedConfig:
    """Returns `config` with few small layers of every kind it has, and windows and rope thresholds below TOY_LENGTH.

    Head size, rope type and all switches stay as they are, and without `shrinks_numbers` all windows and blocks.
    """
    whole = copy.deepcopy(config)
    toy = whole.get_text_config()
    _shrink_heads(toy)
    _shrink_state_spaces(toy)
    for most, names in _MOST.items():
        for name in names:
            if isinstance(size := getattr(toy, name, None), int):
                setattr(toy, name, min(most, size))
    _shrink_layers(toy)
    if shrinks_numbers:
        for number in token_numbers(toy, TOY_LENGTH):
            if number.is_known:
                shrink_number(toy, number)
    _shrink_positions(toy)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(toy, name, None) is not None:
            setattr(toy, name, 0)
    toy.use_cache = whole.use_cache = False
    return whole


def toy_model(config: PretrainedConfig) -> PreTrainedModel:
    """Returns a reference model of the architecture at toy size."""
    return reference_model(toy_config(config))


def reference_model(config: PretrainedConfig, attention: str = REFERENCE_ATTENTION) -> PreTrainedModel:
    """Returns a model in float64 on the CPU, with the model's own eager attention, in evaluation mode.

    Some models do more than attend where the implementation is called "eager", such as selecting keys: give that name
    to compare with what they compute, and leave it out to see which modules attend.
    """
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),  # from_config writes the dtype into it
            dtype=torch.float64,  # of the parameters; rope's tables stay float32
            attn_implementation=attention,
            experts_implementation="eager",  # grouped matrix products don't support float64
        )
    return model.eval()


def perturb_parameters(model: nn.Module) -> None:
    """Adds a little noise to every parameter: initial scales of 1 and biases of 0 would hide mistakes."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator), alpha=0.1)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppresses transformers' messages and progress bars about steps the user did not ask for."""
    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def toy_tokens(config: PretrainedConfig, length: int = TOY_LENGTH) -> torch.Tensor:
    """Returns random token ids (2, length) for a toy of `config`."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = toy_config(config).get_text_config().vocab_size
    return torch.randint(1, vocabulary, (2, length), generator=generator)


def _shrink_heads(toy: PretrainedConfig) -> None:
    """Reduces the number of heads, not their size: rope tables and scalings depend on the head size alone."""
    heads, width = _first(toy, _HEAD_COUNTS), _first(toy, _WIDTHS)
    if heads is None or width is None:
        return
    num_heads = getattr(toy, heads)
    key_value_heads = getattr(toy, "num_key_value_heads", None)
    if isinstance(key_value_heads, int):
        toy.num_key_value_heads = max(1, _NUM_HEADS * key_value_heads // num_heads)
    setattr(toy, width, getattr(toy, width) // num_heads * _NUM_HEADS)
    if hasattr(toy, "word_embed_proj_dim"):
        toy.word_embed_proj_dim = getattr(toy, width)
    setattr(toy, heads, _NUM_HEADS)


def _shrink_state_spaces(toy: PretrainedConfig) -> None:
    """Keeps as many of Mamba 2's heads, whose width is a multiple of the model's, as fit its smaller width."""
    expand, width = _first(toy, ("mamba_expand", "expand")), _first(toy, _WIDTHS)
    heads, size = _first(toy, _STATE_SPACE_HEADS), _first(toy, _STATE_SPACE_HEAD_SIZES)
    if expand is None or width is None or heads is None or size is None or getattr(toy, "mamba_d_ssm", None):
        return
    num_heads = max(1, getattr(toy, expand) * getattr(toy, width) // getattr(toy, size))
    setattr(toy, heads, num_heads)
    setattr(toy, size, getattr(toy, expand) * getattr(toy, width) // num_heads)
    groups = _first(toy, _STATE_SPACE_GROUPS)
    if groups is not None:
        setattr(toy, groups, gcd(getattr(toy, groups), num_heads))


def _shrink_layers(toy: PretrainedConfig) -> None:
    """Keeps as many layers as show every kind twice, so that kinds meet across slices and stages."""
    name = _first(toy, _LAYER_COUNTS)
    if name is None:
        return
    lists = {key: value for key, value in vars(toy).items() if isinstance(value, list)}
    per_layer = [
        key
        for key, each in lists.items()
        if key in _PER_LAYER_LISTS or (len(each) == getattr(toy, name) and key not in _LAYER_INDICES)
    ]
    kinds = [repr(kind) for kind in zip(*(lists[key] for key in per_layer), strict=False)]
    last_new = max(map(kinds.index, kinds), default=0)
    num_layers = min(getattr(toy, name), max(_NUM_LAYERS, 1 + last_new))
    for key in per_layer:
        setattr(toy, key, lists[key][:num_layers])
    for key in lists.keys() & _LAYER_INDICES:
        setattr(toy, key, [index for index in lists[key] if index < num_layers])
    setattr(toy, name, num_layers)


def _shrink_positions(toy: PretrainedConfig) -> None:
    """Lets rope types that change beyond a trained length change within the toy: after its first slice."""
    threshold = TOY_LENGTH // 2
    rope = getattr(toy, "rope_parameters", None) or {}
    for parameters in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        if "original_max_position_embeddings" in parameters:
            parameters["original_max_position_embeddings"] = threshold
        if parameters.get("rope_type") == "dynamic":
            toy.max_position_embeddings = threshold
    if hasattr(toy, "original_max_position_embeddings"):
        toy.original_max_position_embeddings = threshold


def _first(config: PretrainedConfig, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(getattr(config, name, None), int)), None)
