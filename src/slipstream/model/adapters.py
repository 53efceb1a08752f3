"""The adapters of PEFT with which training is exact, and why it is not with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.adapted_modules import is_wrapper
from slipstream.number_format import BasePrecision

# Their output for a token depends on that token alone, and of the weights on those of one module alone.
EXACT_METHODS = ("LORA", "IA3", "LOHA", "LOKR", "OFT", "HRA")

_PROMPTS = "it puts tokens or keys before each sequence, which only the first slice would have"
_REASONS = {
    **dict.fromkeys(("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT"), _PROMPTS),
    **dict.fromkeys(("ADAPTION_PROMPT", "CARTRIDGE"), _PROMPTS),
    "LN_TUNING": "let the norms' own weights be trained instead, by requires_grad",
    "ADALORA": "it adds a term over all layers to the loss, and lowers ranks during training",
    **dict.fromkeys(
        ("VERA", "PVERA", "VBLORA", "RANDLORA", "UNILORA", "TINYLORA"),
        "its layers share weights, which several ranks would hold",
    ),
}

# Whose factors tensor ranks can share as they share the weights, and why not those of others.
_SHARED_METHODS = ("LORA", "IA3", "LOHA")
_NOT_SHARED = {
    "LOKR": "its factors are blocks of the weight, not rows and columns",
    "OFT": "it rotates blocks of features, of which ranks would have only parts",
    "HRA": "it reflects all input features together",
}

# Settings of LoraConfig with which it is exact; any other must be as it is by default.
_LORA_SETTINGS = frozenset(
    {
        "r", "target_modules", "target_parameters", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out",
        "bias", "use_rslora", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern",
        "rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "runtime_config",
    }
)  # fmt: skip
_OF_ANY_CONFIG = frozenset(
    {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}
)
ORTHOGONAL = "orthogonal"  # initialisation of both factors together, their product being zero
_INITS_FROM_WEIGHTS = "changes the base model's weights, so the adapter would not fit the model it was made for"


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model: its name, which is part of its parameters' names, and its configuration of PEFT."""

    name: str
    config: Any  # peft.PeftConfig
    base_precision: BasePrecision = "full"

    @property
    def on_4_bits(self) -> bool:
        """Whether the linear layers beneath are kept in 4 bits (QLoRA)."""
        return self.base_precision != "full"

    @property
    def method(self) -> str:
        """The method's name in PEFT, such as "LORA"."""
        return str(self.config.peft_type.value)

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers for it."""
        return any(value for name, value in vars(self.config).items() if name.endswith("dropout"))


def adapter_of(model: object) -> tuple[object, Adapter | None]:
    """Returns the model of transformers that a model of PEFT consists of, and its adapter; another as it is.

    Raises SlipstreamError, with the reason, for an adapter that can't be trained exactly.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(model, nn.Module) or not isinstance(configs, Mapping) or not configs:
        return model, None
    if len(configs) > 1:
        raise SlipstreamError(
            f"the model has {len(configs)} adapters, {', '.join(configs)}; one can be trained. Remove the others by "
            "delete_adapter(name), or merge them into the model by merge_and_unload()."
        )
    ((name, config),) = configs.items()
    check_method(config)
    wrapper: Any = model
    base: PreTrainedModel = model if isinstance(model, PreTrainedModel) else wrapper.get_base_model()
    if any(getattr(module, "merged", False) for module in base.modules()):
        raise SlipstreamError(
            f"the adapter {name!r} is merged into the model's weights, where it can't be trained. Call "
            "unmerge_adapter() first; or merge_and_unload() and train all weights."
        )
    if any(getattr(module, "disable_adapters", False) is True for module in base.modules()):
        raise SlipstreamError(f"the adapter {name!r} is disabled. Call enable_adapter_layers() first.")
    check_tied(base)
    return base, Adapter(name, config)


def check_parallel(adapter: Adapter, tensor_ranks: int, shards_parameters: bool) -> None:
    """Raises SlipstreamError where an adapter's layers are to be shared by tensor ranks, or cut over replicas."""
    if shards_parameters:
        raise SlipstreamError(
            f"adapters ({adapter.method}) with parallel.shard='parameters', which hasn't been shown to be "
            "exact. Leave it out; shard='optimizer' is fine."
        )
    if tensor_ranks == 1:
        return
    if adapter.on_4_bits:
        raise SlipstreamError(
            f"lora.base_precision=nf4 with tensor parallelism of {tensor_ranks}: blocks of 64 weights share a scale, "
            "which ranks would cut. Use tp=1 (parallel.tensor=1), or lora.base_precision=full."
        )
    if adapter.method not in _SHARED_METHODS:
        raise SlipstreamError(
            f"adapters by {adapter.method} with tensor parallelism of {tensor_ranks}: {_NOT_SHARED[adapter.method]}. "
            f"Use tp=1 (parallel.tensor=1), or one of {', '.join(_SHARED_METHODS)}."
        )
    if adapter.method != "LORA" and adapter.draws:
        raise SlipstreamError(
            f"dropout of adapters by {adapter.method} with tensor parallelism of {tensor_ranks}: each rank would draw "
            "its own. Set it to 0, or use tp=1 (parallel.tensor=1)."
        )


def check_method(config: Any) -> None:
    """Raises SlipstreamError for a configuration of PEFT with which training can't be exact."""
    method = str(config.peft_type.value)
    if method not in EXACT_METHODS:
        why = _REASONS.get(method, "it hasn't been shown to be exact over slices and stages")
        raise SlipstreamError(
            f"adapters by {method} can't be trained here: {why}. Methods that can: {', '.join(EXACT_METHODS)}."
        )
    if method == "LORA":
        _check_lora(config)
    elif getattr(config, "trainable_token_indices", None):
        raise SlipstreamError(_not_supported("trainable_token_indices", config.trainable_token_indices))


def _check_lora(config: Any) -> None:
    kind = type(config)
    for name, value in vars(config).items():
        if name in _LORA_SETTINGS | _OF_ANY_CONFIG or name not in kind.__dataclass_fields__:
            continue
        if value != getattr(kind(), name):
            raise SlipstreamError(_not_supported(name, value))
    init = config.init_lora_weights
    if not isinstance(init, bool) and init not in ("gaussian", ORTHOGONAL):
        raise SlipstreamError(
            f"init_lora_weights={init!r} {_INITS_FROM_WEIGHTS}, or needs data. Give true, false, 'gaussian' or "
            f"{ORTHOGONAL!r}."
        )
    odd = [rank for rank in (config.r, *config.rank_pattern.values()) if rank % 2]
    if init == ORTHOGONAL and odd:
        raise SlipstreamError(
            f"init_lora_weights={init!r} with r={odd[0]}: PEFT draws both factors from pairs of rows. Give an even r."
        )
    if init == ORTHOGONAL and config.target_parameters:
        raise SlipstreamError(_not_supported("target_parameters", config.target_parameters))


def check_tied(model: PreTrainedModel) -> None:
    """Raises SlipstreamError where a weight that embedding and head share has an adapter, or one has a trained copy."""
    tied = {name.rpartition(".")[0] for pair in (model.all_tied_weights_keys or {}).items() for name in pair}
    for name in sorted(tied):
        module = model.get_submodule(name)
        if is_wrapper(module) and any(parameter.requires_grad for parameter in module.parameters()):
            raise SlipstreamError(
                f"{name} shares its weight with {', '.join(sorted(tied - {name}))}, so an adapter of it, or a copy in "
                "modules_to_save, would separate them. Leave it out."
            )


def _not_supported(name: str, value: object) -> str:
    return f"{name}={value!r}: adapters with it can't be trained here exactly. Leave it out."
