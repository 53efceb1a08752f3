"""The trained weights of a model: all but the frozen ones, or an adapter of PEFT, each rank's own part."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.keyed_draws import keyed_seed
from slipstream.model.quantised import quantise, quantised_names
from slipstream.model.tensors import tied_names
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
# PEFT saves parameters under their names with this before them.
_PREFIX = "base_model.model."
_ORTHOGONAL = "orthogonal"  # the initialisation of both factors at once, whose product is zero
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
    if not isinstance(init, bool) and init not in ("gaussian", _ORTHOGONAL):
        raise SlipstreamError(
            f"init_lora_weights={init!r} {_INITS_FROM_WEIGHTS}, or needs data. Give true, false, 'gaussian' or "
            f"{_ORTHOGONAL!r}."
        )
    odd = [rank for rank in (config.r, *config.rank_pattern.values()) if rank % 2]
    if init == _ORTHOGONAL and odd:
        raise SlipstreamError(
            f"init_lora_weights={init!r} with r={odd[0]}: PEFT draws both factors from pairs of rows. Give an even r."
        )
    if init == _ORTHOGONAL and config.target_parameters:
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


_INSIDE = ("base_layer", "original_module")  # of a module with an adapter, and of one with a trained copy
_COPIES = "modules_to_save"
# The factors of PEFT's methods, and along which dimension each has the output and the input features of its layer.
_FACTORS: dict[str, tuple[int | None, int | None]] = {
    "lora_A": (None, 1),
    "lora_B": (0, None),
    "lora_embedding_A": (None, 1),
    "lora_embedding_B": (0, None),
    "lora_magnitude_vector": (0, None),
    "hada_w1_a": (0, None),
    "hada_w1_b": (None, 1),
    "hada_w2_a": (0, None),
    "hada_w2_b": (None, 1),
    "ia3_l": (0, 1),  # one of the two has size 1
}


class AdaptedName(NamedTuple):
    """The parts of a parameter's name in an adapted model."""

    layer: str  # of the model's own module that PEFT wraps: "model.layers.0.mlp.up_proj"
    factor: str | None  # such as "lora_A"; None where it is the module's own parameter, or that of a trained copy
    rest: str  # the parameter's name within: "weight"; of a factor's bias "bias"

    @property
    def of_layer(self) -> str:
        """The name of the same parameter in the model without an adapter."""
        return f"{self.layer}.{self.rest}"


def parse_name(name: str) -> AdaptedName:
    """Returns the parts of a parameter's name; one that PEFT hasn't wrapped is its module's own."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        layer = ".".join(parts[:place])
        if part in _INSIDE:
            return AdaptedName(layer, None, ".".join(parts[place + 1 :]))
        if part == _COPIES:  # then the adapter's name
            return AdaptedName(layer, None, ".".join(parts[place + 2 :]))
        if part in _FACTORS:
            return AdaptedName(layer, part, ".".join(parts[place + 2 :]) or "weight")
    return AdaptedName(name.rpartition(".")[0], None, parts[-1])


def features_of(factor: str, shape: tuple[int, ...]) -> tuple[int | None, int | None]:
    """Returns the dimensions along which a factor has its layer's output and input features; None where it has not."""
    outputs, inputs = _FACTORS[factor]
    if factor == "ia3_l":
        return (None, 1) if shape[0] == 1 else (0, None)
    return outputs, inputs


def is_wrapper(module: nn.Module) -> bool:
    """Returns whether PEFT has put this module around one of the model's."""
    return any(name in module._modules for name in _INSIDE)


def own_module(module: nn.Module) -> nn.Module:
    """Returns the model's own module, around which PEFT may have put others."""
    for name in _INSIDE:
        if name in module._modules:
            return own_module(module.get_submodule(name))
    return module


def inner_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the model's own module and its trained copies, or the module itself where PEFT hasn't wrapped it."""
    yield own_module(module)
    copies = module._modules.get(_COPIES)
    yield from copies.children() if copies is not None else ()


def adapter_dropouts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the dropouts of the input of an adapter's factors."""
    dropouts = module._modules.get("lora_dropout")
    yield from (child for child in dropouts.children() if isinstance(child, nn.Dropout)) if dropouts is not None else ()


def dora_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that scale the rows of an adapted weight by DoRA."""
    layers = module._modules.get("lora_magnitude_vector")
    yield from layers.children() if layers is not None else ()


_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def read_adapter_config(folder: str | Path, base: str | None = None, setting: str = "lora") -> Any:
    """Returns PEFT's configuration of an adapter in a folder, to be trained further.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        base: where the model is that the adapter is trained on from now on. None: as the folder says.
        setting: the one that gave the folder, for messages.

    Raises:
        SlipstreamError: where there is none, or it can't be trained exactly.
    """
    from peft import PeftConfig

    place = Path(folder)
    for name in (_CONFIG, _WEIGHTS):
        if not (place / name).is_file():
            raise SlipstreamError(
                f"{setting}={folder} has no {name}; give a folder that `save_pretrained` of PEFT, or a run's export "
                "(its folder `adapter/`), has written."
            )
    try:
        config = PeftConfig.from_pretrained(str(place))
    except (ValueError, TypeError, KeyError) as error:
        raise SlipstreamError(f"{place / _CONFIG} can't be read by the installed PEFT: {error}") from None
    if config.peft_type.value != "LORA":
        raise SlipstreamError(
            f"{setting}={folder} is an adapter by {config.peft_type.value}; only one by LORA can be loaded here. Load "
            "it with peft.PeftModel.from_pretrained(..., is_trainable=True), and give that model to the Pipeline."
        )
    check_method(config)
    config.inference_mode = False
    config.base_model_name_or_path = base or config.base_model_name_or_path
    return config


def saved_names(adapted: Any, adapter: Adapter) -> dict[str, str]:
    """Returns under which name PEFT saves each parameter of an adapter, by the names in the model inside `adapted`, a
    whole PeftModel that may be on the meta device."""
    from peft.utils import get_peft_model_state_dict

    state = adapted.state_dict(keep_vars=True)
    name = adapter.name
    saved = get_peft_model_state_dict(adapted, state_dict=state, adapter_name=name, save_embedding_layers=False)
    by_tensor = {id(tensor): key for key, tensor in saved.items()}
    named = adapted.get_base_model().named_parameters(remove_duplicate=False)
    return {name: by_tensor[id(parameter)] for name, parameter in named if id(parameter) in by_tensor}


def check_saved_weights(folder: str | Path, adapted: Any, adapter: Adapter) -> None:
    """Raises SlipstreamError unless a folder's weights are those of the adapter of a whole model, by name and shape."""
    names = saved_names(adapted, adapter)
    base = adapted.get_base_model()
    expected = {key: tuple(base.get_parameter(name).shape) for name, key in names.items()}
    with _opened(folder) as saved:
        shapes = {key: tuple(saved.get_slice(key).get_shape()) for key in saved.keys()}  # noqa: SIM118
    ends = {_PREFIX + name: tuple(base.get_parameter(name).shape) for name in _base_weights_of_ends(base)}
    expected |= {key: shape for key, shape in ends.items() if key in shapes}
    for problem, keys in {
        "lacks": expected.keys() - shapes.keys(),
        "has in addition": shapes.keys() - expected.keys(),
        "has in another shape": {key for key in expected.keys() & shapes.keys() if expected[key] != shapes[key]},
    }.items():
        if keys:
            raise SlipstreamError(
                f"{Path(folder) / _WEIGHTS} isn't an adapter of this model: it {problem} {min(keys)}. Give the "
                "model that the adapter was trained on."
            )


def load_saved_weights(folder: str | Path, model: nn.Module, names: Mapping[str, str]) -> None:
    """Fills the adapter's parameters that a part of a model has; `names` are those of `saved_names`. PEFT saves the
    weights that an embedding and a head with an adapter had, and loads them, too."""
    with _opened(folder) as saved, torch.no_grad():
        every = set(saved.keys())
        for name, parameter in model.named_parameters():
            key = names.get(name, _PREFIX + name)
            if key in every:
                parameter.copy_(saved.get_tensor(key))


def saves_ends(model: PreTrainedModel) -> bool:
    """Returns whether PEFT saves the weights beneath adapters of the embedding and of the head: where these have the
    names that it knows."""
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    return any(name.split(".")[-3] in EMBEDDING_LAYER_NAMES for name in _base_weights_of_ends(model))


def _base_weights_of_ends(model: PreTrainedModel) -> list[str]:
    """Returns the names of the weights beneath adapters of the embedding and of the head."""
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if hasattr(end, "base_layer")]
    modules = ((name, module) for name, module in model.named_modules() if any(module is end for end in ends))
    return [
        f"{name}.base_layer.{parameter}"
        for name, module in modules
        for parameter, _ in module.base_layer.named_parameters()
    ]


def _opened(folder: str | Path) -> Any:
    file = Path(folder) / _WEIGHTS
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise SlipstreamError(f"{file} is corrupt or truncated ({error}); copy or download it again.") from error


class Targets(NamedTuple):
    """The modules that an adapter is added to, by their names in the model with the adapter."""

    modules: list[str]  # that get factors
    parameters: dict[str, str]  # fused weights that get factors, by the names of modules around them
    copies: list[str]  # modules of which a copy is trained
    config: Any  # PEFT's, in which names of fused experts have become those of their parameters
    saved: dict[str, str]  # under which name PEFT saves each parameter


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silences warnings of an attribute of models that PEFT reads, and of patterns of fused weights, which it looks for
    among modules before weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        yield


def find_targets(whole: PreTrainedModel, config: Any) -> Targets:
    """Returns the modules that get an adapter. `whole` is changed; it may be on the meta device.

    Raises SlipstreamError where there is nothing, where PEFT refuses the configuration, and for a tied weight.
    """
    linear = sorted({name.rpartition(".")[2] for name, module in whole.named_modules() if hasattr(module, "weight")})
    modules = [name for name, _ in whole.named_modules()]
    for pattern in config.modules_to_save or ():
        if not any(name.endswith(pattern) for name in modules):  # as PEFT looks for them
            raise SlipstreamError(
                f"modules_to_save: the model has no module {pattern!r}. Its modules with weights are "
                f"{', '.join(linear)}."
            )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)  # is refused below
            adapted = adapted_model(whole, adapter := Adapter("default", config))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise SlipstreamError(
            f"the adapter can't be added to {type(whole).__name__}: {error} The model's modules with weights are "
            f"{', '.join(linear)}; or give target_modules=all-linear."
        ) from None
    check_tied(whole)
    targets = Targets([], {}, [], adapted.peft_config["default"], saved_names(adapted, adapter))
    for name, module in whole.named_modules():
        if hasattr(module, "parameter_name"):
            targets.parameters[name] = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
        elif hasattr(module, "lora_A"):
            targets.modules.append(name)
        elif hasattr(module, "modules_to_save"):
            targets.copies.append(name)
    return targets


def adapted_model(model: PreTrainedModel, adapter: Adapter) -> Any:
    """Returns PEFT's model around a whole model, which it takes over and which may be on the meta device."""
    from peft import get_peft_model

    config = copy.deepcopy(adapter.config)
    # PEFT takes the name from the model, and warns where another was in the configuration.
    model.name_or_path = config.base_model_name_or_path or ""
    config.base_model_name_or_path = model.name_or_path or None
    settings = {"adapter_name": adapter.name, "autocast_adapter_dtype": False, "low_cpu_mem_usage": True}
    with quiet_peft():
        return get_peft_model(model, config, **settings)


def add_adapter(
    model: PreTrainedModel, whole: PreTrainedModel, config: Any, seed: int, saved: str | Path | None = None
) -> None:
    """Adds an adapter by LoRA to a model or a part of one, in place, and freezes the rest.

    Each module's adapter is drawn by the seed and the module's name, so that any cut of the model gives the same; or it
    is read from the folder `saved`. `whole` is the model on the meta device, which is changed.
    """
    here = {name for name, module in model.named_modules() if next(module.parameters(), None) is not None}
    targets = find_targets(whole, config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    modules = [name for name in targets.modules if name in here]
    weights = {name: weight for name, weight in targets.parameters.items() if name.replace(".base_layer", "") in here}
    if modules or weights:
        _add_factors(model, targets.config, modules, sorted(weights.values()))
    for name in [*modules, *weights]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(keyed_seed(seed, name))
            _draw(model.get_submodule(name), config.init_lora_weights)
    for name in targets.copies:
        if name in here:
            _train_copy(model, name)
    if config.bias == "all":
        _train_biases(model)
    if saved is not None:
        load_saved_weights(saved, model, targets.saved)


def _draw(module: Any, init: bool | str) -> None:
    """Draws a module's factors. Those of an embedding have one distribution, whatever the linear layers' is."""
    if init == _ORTHOGONAL and "default" in module.lora_A:
        module.orthogonal_init("default")
    else:
        module.reset_lora_parameters("default", init)


def _add_factors(model: PreTrainedModel, config: Any, modules: list[str], weights: list[str]) -> None:
    import peft

    part = copy.deepcopy(config)
    part.target_modules, part.target_parameters = set(modules), weights or None
    part.exclude_modules = part.layers_to_transform = part.layers_pattern = None  # targets are those that remain
    part.modules_to_save = None
    with quiet_peft():
        peft.get_peft_model(model, part, autocast_adapter_dtype=False)


def _train_biases(model: PreTrainedModel) -> None:
    """Trains every bias, as PEFT does, but those of modules beside which a copy is trained: these aren't used."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias") and ".original_module." not in name:
            parameter.requires_grad_(True)


def _train_copy(model: PreTrainedModel, name: str) -> None:
    """Puts a trained copy beside a module, by itself: PEFT refuses names of modules that a rank doesn't have."""
    from peft.utils import ModulesToSaveWrapper

    parent, _, child = name.rpartition(".")
    wrapper: nn.Module = ModulesToSaveWrapper(model.get_submodule(name), "default")
    for parameter in wrapper.get_submodule("modules_to_save").parameters():
        parameter.requires_grad_(True)
    setattr(model.get_submodule(parent), child, wrapper)


def find_frozen(whole: nn.Module, patterns: Sequence[str], setting: str = "freeze") -> frozenset[str]:
    """Returns the names of the parameters that the patterns match, of a weight with several names each of them.

    Args:
        whole: the whole model; it may be on the meta device.
        patterns: of names, as `fnmatch` has them, such as `model.layers.0.*`.
        setting: the one that gave the patterns, for messages.

    Raises:
        SlipstreamError: for a pattern that matches no parameter, and where none is left to train.
    """
    weights = tied_names(whole)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for names in weights for name in names):
            raise SlipstreamError(_no_match(whole, pattern, setting))
    frozen = [names for names in weights if any(fnmatchcase(name, pattern) for name in names for pattern in patterns)]
    if weights and len(frozen) == len(weights):
        raise SlipstreamError(
            f"{setting}={[*patterns]} matches all of the model's parameters, so nothing would be trained. Give "
            f"patterns that leave some, such as {_below(weights[-1][0])}."
        )
    return frozenset(name for names in frozen for name in names)


def freeze(model: nn.Module, names: Collection[str]) -> None:
    """Freezes the parameters of these names, in place. The model may be a part of the one that they are from."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in names:
            parameter.requires_grad_(False)


def trained_text(whole: nn.Module) -> str:
    """Returns how many of a model's parameters are trained, in words."""
    trained = sum(parameter.numel() for parameter in whole.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in whole.parameters())
    return f"{trained:,} of {total:,} parameters train ({trained / total:.2%})"


def _no_match(whole: nn.Module, pattern: str, setting: str) -> str:
    """Returns a refusal of a pattern that matches no parameter, with the one that it may have been meant to be."""
    names = [name for name, _ in whole.named_parameters(remove_duplicate=False)]
    inside = [name for name in names if name.startswith(f"{pattern}.")]
    if inside:
        hint = f"; to freeze what is inside, give {pattern}.*"
    else:
        hint = did_you_mean(pattern, dict.fromkeys([*names, *map(_below, names)])).rstrip(".")
    shown = ", ".join([*names[:3], "...", names[-1]] if len(names) > 4 else names)
    return f"{setting}: {pattern!r} matches no parameter of the model{hint}. Its parameters are {shown}."


def _below(name: str) -> str:
    return f"{name.rpartition('.')[0]}.*"


@dataclass(frozen=True)
class TrainedWeights:
    """All weights, all but those of some names, or an adapter beside the frozen ones.

    Args:
        frozen: names of frozen parameters. Of a model with an adapter: besides those that PEFT freezes.
        adapter: what the model has in addition.
    """

    frozen: frozenset[str] = frozenset()
    adapter: Adapter | None = None

    @classmethod
    def of(cls, model: nn.Module, adapter: Adapter | None) -> TrainedWeights:
        """Returns the trained weights of a model in memory, which has this adapter already."""
        named = model.named_parameters(remove_duplicate=False)
        return cls(frozenset(name for name, parameter in named if not parameter.requires_grad), adapter)

    @property
    def are_all(self) -> bool:
        """Whether all weights are trained, and nothing is added to them."""
        return not self.frozen and self.adapter is None

    def apply(self, whole: PreTrainedModel) -> PreTrainedModel:
        """Returns the whole model, on the meta device, with its adapter and its frozen parameters; it is changed."""
        if self.adapter is not None:
            names = quantised_names(whole) if self.adapter.on_4_bits else ()
            whole = adapted_model(whole, self.adapter).get_base_model()
            quantise(whole, names)
        freeze(whole, self.frozen)
        return whole


ALL_WEIGHTS = TrainedWeights()
