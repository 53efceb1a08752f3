"""Builds and runs architectures at toy size, whose behaviour shows in a second."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils import logging

from slipstream.errors import SlipstreamError
from slipstream.model.hooks.attention import POSITION_BIAS
from slipstream.model.hooks.crossing_tensors import TRAIN_WHOLE, hidden_states
from slipstream.model.hooks.length_dependent_rope import keep_frequencies
from slipstream.model.hooks.module_calls import ModuleCall, recorded_calls
from slipstream.model.tensors import has_parameters, storage_id, storage_ids
from slipstream.model.toy_sizes import (
    shrink_layers,
    shrink_number,
    shrink_other_parts,
    shrink_widths,
    take_layer_overrides,
    token_numbers,
    width_of,
)

REFERENCE_ATTENTION = "slipstream_reference"
_attending: ContextVar[list[nn.Module] | None] = ContextVar("slipstream_attending", default=None)


@contextmanager
def recorded_attention() -> Iterator[list[nn.Module]]:
    """Collects the modules that attend through the interface as attention here does, in order."""
    modules: list[nn.Module] = []
    token = _attending.set(modules)
    try:
        yield modules
    finally:
        _attending.reset(token)


class _NotedUpdates(DynamicCache):  # type: ignore[misc]
    """transformers' cache, which notes the layers that add keys and values."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.updated: set[int] = set()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.updated.add(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _reference_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Calls eager attention of the model's own file, so that it applies every switch that we might miss."""
    attending = _attending.get()
    if attending is not None and kwargs.get(POSITION_BIAS) is None:
        attending.append(module)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
    with full_precision():
        return eager(module, *args, **kwargs)  # type: ignore[no-any-return]


AttentionInterface.register(REFERENCE_ATTENTION, _reference_attention)
AttentionMaskInterface.register(REFERENCE_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


class float64_masks(TorchFunctionMode):  # noqa: N801  used as a context
    """Lets models mask scores in float64, whatever PyTorch's own dtype is.

    Some mask by the smallest number of their dtype without asking for a tensor of that dtype, which float32 can't hold.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.full and torch.finfo(torch.float64).min in (*args[1:], kwargs.get("fill_value")):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


class full_precision(float64_masks):  # noqa: N801  used as a context
    """Keeps float64 where models' own code rounds to float32: softmax of attention and router, some norms.

    Rounding inside hides every difference below about 1e-7; a comparison under this context shows it. It holds for the
    calls of this thread alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An attribute is read, as in most calls.
        if getattr(func, "__name__", "") == "__get__":
            return func(*args)
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is Tensor.float:
                return first
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()}
        if func is Tensor.matmul:
            # Rotary frequencies that stayed float64 are multiplied by positions, whole numbers that became float32.
            dtype = torch.promote_types(args[0].dtype, args[1].dtype)
            args = tuple(factor.to(dtype) for factor in args)
        return super().__torch_function__(func, types, args, kwargs)


def output_weights(output: Tensor) -> Tensor:
    """Returns fixed random weights of a toy's output, so that each of its numbers counts in the gradients."""
    return torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))


def relative_errors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 0.0
) -> dict[str, float]:
    """Returns each tensor's largest error over its largest number, or over `floor` of the largest number of all."""
    largest = {name: tensor.abs().max() for name, tensor in expected.items()}
    least = floor * max(largest.values())
    return {n: float((found[n] - tensor).abs().max() / max(largest[n], least)) for n, tensor in expected.items()}


TOY_LENGTH = 48  # tokens; all thresholds of the toy's architecture are lower


def toy_config(config: PretrainedConfig, shrinks_numbers: bool = True) -> PretrainedConfig:
    """Returns `config` with few small layers of every kind it has, and windows and rope thresholds below TOY_LENGTH.

    Head size, rope type and all switches stay as they are, and without `shrinks_numbers` all windows and blocks.
    """
    whole = copy.deepcopy(config)
    toy = whole.get_text_config()
    overrides = take_layer_overrides(toy)
    width = width_of(toy)
    shrink_widths(toy, overrides)
    overrides = shrink_layers(toy, overrides)
    for fields in (toy, *overrides.values()) if shrinks_numbers else ():
        for number in token_numbers(fields, TOY_LENGTH):
            if number.is_known:
                shrink_number(fields, number)
    _shrink_positions(toy)
    shrink_other_parts(whole, toy, width)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if getattr(toy, name, None) is not None:
            setattr(toy, name, 0)
    # RWKV would halve the toy's weights before stages take them.
    if getattr(toy, "rescale_every", 0):
        toy.rescale_every = 0
    if overrides:
        toy.per_layer_config = overrides
    toy.use_cache = whole.use_cache = False
    # The loss of routers isn't run, and it fails if a layer has no experts.
    if getattr(toy, "output_router_logits", False):
        toy.output_router_logits = False
    return whole


def toy_model(config: PretrainedConfig) -> PreTrainedModel:
    """Returns a reference model of the architecture at toy size, with eager attention where it takes no other."""
    try:
        return reference_model(toy_config(config))
    except KeyError as error:
        if REFERENCE_ATTENTION not in str(error):
            raise
        return reference_model(toy_config(config), attention="eager")


def shapes_model(config: PretrainedConfig) -> PreTrainedModel:
    """Returns the whole model on the meta device, which takes no memory and computes shapes alone."""
    with torch.device("meta"):
        # The products of "batched_mm" have the same shapes whatever the routing.
        model = reference_model(config, experts="batched_mm")
    keep_frequencies(model)
    return model


def reference_model(
    config: PretrainedConfig, attention: str | None = REFERENCE_ATTENTION, experts: str = "eager"
) -> PreTrainedModel:
    """Returns a model in float64 on the CPU, with the model's own eager attention, in evaluation mode.

    Some models do more than attend where the implementation is called "eager", such as selecting keys: give that name
    to compare with them, leave it out to see which modules attend, and give None for the config's own.
    """
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),  # a copy, as from_config writes the dtype into it
            # The dtype of parameters only: rope's tables, and some routers, stay float32.
            dtype=torch.float64,
            attn_implementation=attention,
            # Grouped matrix products don't support float64.
            experts_implementation=experts,
        )
    widen_parameters(model)
    return model.eval()


def widen_parameters(model: nn.Module) -> None:
    """Makes float64 of parameters that some models make in float32 whatever the dtype is, such as those of routers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.double()


def perturb_parameters(model: nn.Module) -> None:
    """Adds a little noise to every parameter: initial scales of 1 and biases of 0 would hide mistakes."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            # Drawing in float32 is five times as fast.
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.1)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppresses transformers' messages and progress bars about steps the user did not ask for."""
    # Of handlers, as hundreds of transformers' loggers forget what they know where the level of theirs is set.
    levels = [(handler, handler.level) for handler in logging.get_logger().handlers]
    shows_progress = logging.is_progress_bar_enabled()
    for handler, level in levels:
        handler.setLevel(max(level, logging.ERROR))
    logging.disable_progress_bar()
    try:
        yield
    finally:
        for handler, level in levels:
            handler.setLevel(level)
        if shows_progress:
            logging.enable_progress_bar()


def toy_tokens(config: PretrainedConfig, length: int = TOY_LENGTH) -> torch.Tensor:
    """Returns random token ids (2, length) for a toy of `config`."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = toy_config(config).get_text_config().vocab_size
    return torch.randint(1, vocabulary, (2, length), generator=generator)


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


_SIZES = re.compile(r"num|dim|size|heads|experts|rank|types|parameters|width|top_?k")


def toy_failure(config: PretrainedConfig, error: Exception) -> str:
    """Returns the reason why `error` was raised, as the end of a sentence about the model."""
    if isinstance(error, ImportError):
        return f"transformers needs a package for it that isn't installed here: {' '.join(str(error).split())}"
    # A failure on a None is the model's own, as the toy has no None that the model hasn't.
    failure = error if "NoneType" in str(error) else _own_failure(config)
    if failure is not None:
        return f"transformers' own code fails with this configuration ({_text(failure)}){_unset(config)}"
    return f"a small copy of it, made to see how it runs, fails in transformers' code ({_text(error)})"


def _own_failure(config: PretrainedConfig) -> Exception | None:
    """Returns transformers' error when it makes the model at its own size, without memory; None if there is none."""
    try:
        with torch.device("meta"), quiet_transformers():
            AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except Exception as error:  # the model's own code
        return error
    return None


def _unset(config: PretrainedConfig) -> str:
    fields = vars(config.get_text_config()).items()
    names = [name for name, value in fields if value in (None, {}) and _SIZES.search(name) and not name.startswith("_")]
    return f"; it leaves {', '.join(names)} open" if names else ""


def _text(error: Exception) -> str:
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first_line}"


class WatchedToy:
    """The calls of a toy in one forward.

    `layers` is the name of its list of layers, `outside` has the largest modules that neither contain the layers nor
    lie in them, by name.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor) -> None:
        self.model = model
        self._tokens = tokens
        modules = dict(model.named_modules(remove_duplicate=False))
        with torch.no_grad(), full_precision(), recorded_attention() as attended, recorded_calls(modules) as calls:
            model(input_ids=tokens, use_cache=False)
        self._attended = set(attended)
        self.layers = _largest_list(model, {call.name for call in calls})
        self.outside = _outside(model, self.layers)
        layers = {f"{self.layers}.{name}" for name, _ in model.get_submodule(self.layers).named_children()}
        self.layer_calls: list[ModuleCall] = []
        self._outer_calls: dict[str, list[ModuleCall]] = {name: [] for name in self.outside}
        # Numbers of layers that had run before each call.
        self._places: dict[str, set[int]] = {name: set() for name in self.outside}
        for call in calls:
            if call.name in layers:
                self.layer_calls.append(call)
            elif call.name in self.outside:
                self._outer_calls[call.name].append(call)
                self._places[call.name].add(len(self.layer_calls))

    @property
    def every_layer(self) -> list[nn.Module]:
        return list(self.model.get_submodule(self.layers).children())

    def runs_after(self, name: str) -> bool:
        """Returns whether a module outside of the layers ran after the last of them alone."""
        return self._places[name] == {len(self.every_layer)}

    def runs_before(self, name: str) -> bool:
        """Returns whether the module ran only before the first layer, or not at all."""
        return self._places[name] <= {0}

    def takes_other_tensors(self, name: str) -> bool:
        """Returns whether the module took several tensors that don't come from the last layer."""
        call = self._outer_calls[name][-1]
        taken = _tensors((call.args, call.kwargs))
        return len(taken) > 1 and not storage_ids(taken) <= storage_ids(_tensors(self.layer_calls[-1].output))

    def gives_layers_constants(self, name: str) -> bool:
        """Returns whether all of the module's parameters are frozen, and layers took its outputs in addition to hidden
        states."""
        module = self.outside[name]
        if not has_parameters(module) or any(parameter.requires_grad for parameter in module.parameters()):
            return False
        taken = {
            storage_id(tensor)
            for call in self.layer_calls
            for tensor in _tensors((call.args, call.kwargs))
            if tensor is not hidden_states(call.args, call.kwargs)
        }
        return any(not taken.isdisjoint(storage_ids(_tensors(call.output))) for call in self._outer_calls[name])

    def attends_itself(self) -> bool:
        """Returns whether some layer keeps keys and values in a cache that it doesn't attend to through the
        interface."""
        layers = self.every_layer
        through_interface = {index for index, layer in enumerate(layers) if set(layer.modules()) & self._attended}
        if len(through_interface) == len(layers):
            return False
        cache = _NotedUpdates(config=self.model.config)
        try:
            with torch.no_grad(), full_precision():
                self.model(input_ids=self._tokens, past_key_values=cache, use_cache=True)
        # The model's own code may have another cache, or none.
        except Exception:
            return False
        return not cache.updated <= through_interface


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _largest_list(model: nn.Module, called: set[str]) -> str:
    """Returns the name of the model's list of decoder layers: of the lists that run on tokens, the largest.

    Models of images and text have a list for images, too.
    """
    lists: dict[str, nn.ModuleList] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and any(f"{name}.{child}" in called for child, _ in module.named_children())
    }
    if not lists:
        raise SlipstreamError(
            f"{type(model).__name__} has no nn.ModuleList of layers, so it can't be cut into stages. {TRAIN_WHOLE}"
        )
    return max(sorted(lists), key=lambda name: sum(p.numel() for p in lists[name].parameters()))


def _outside(model: nn.Module, layers: str) -> dict[str, nn.Module]:
    modules: dict[str, nn.Module] = {}
    path = layers.split(".")
    for depth in range(len(path)):
        prefix = ".".join(path[:depth])
        for name, child in model.get_submodule(prefix).named_children():
            if name != path[depth]:
                modules |= _called(f"{prefix}.{name}" if prefix else name, child)
    return modules


def _called(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """Returns the module, or those in a list, which isn't called itself."""
    if not isinstance(module, nn.ModuleList):
        return {name: module}
    inside = (_called(f"{name}.{child_name}", child) for child_name, child in module.named_children())
    return dict(chain.from_iterable(calls.items() for calls in inside))
