"""Turns a vision model or encoder-decoder of transformers into an nn.Sequential, where its pipeline plan allows.

The model's own forward runs everything before, between and after its stacks of layers.

    inputs -> StackConnector 0 -> (hidden, extras, inputs) -> layer -> ... -> layer -> StackConnector 1 -> ...

A StackConnector runs the model's whole forward with placeholders: the layers of the stack behind return the hidden
states that came in, those of the stack ahead record their arguments, and the last of them ends the forward.

Makes attention masks of one shape whatever is padded, so that a pipeline knows its messages in advance.

transformers omits the mask of a batch without padding. In a pipeline only some microbatches may have padding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from transformers import AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutput

from slipstream.errors import SlipstreamError
from slipstream.model import (
    Change,
    Placeholder,
    copy_with_shared_weights,
    find_changes,
    has_parameters,
    quiet_transformers,
    toy_config,
)
from slipstream.model.hooks import Arguments, first_output, hidden_states

PipelinePlan = Mapping[str, Any]  # a base_model_pp_plan: module -> (inputs, outputs), in running order
_TOY_LENGTH = 12  # tokens
SUPPORTED = (
    "Sequences are pipelined by microbatches only. Plans allow T5Gemma (encoder and decoder), EuroBERT, ESMC, "
    "UltraBERT and the vision encoder of DeepSeek-OCR-2. Give a vision model without a plan one: for ViT "
    "plan={'embeddings': (['pixel_values'], ['hidden_states']), 'layers': (['hidden_states'], ['hidden_states']), "
    "'layernorm': (['hidden_states'], ['hidden_states'])}. Causal LMs go to slipstream.Pipeline as they are"
)


def sequence_of(
    model: PreTrainedModel,
    inputs: Sequence[str] = (),
    *,
    plan: PipelinePlan | None = None,
    self_check: bool = True,
    **constants: Any,
) -> nn.Sequential:
    """Returns an nn.Sequential over the model's own modules, to be pipelined by microbatches.

    Its attention sees whole sequences or images, so it takes no token slices. The sequence takes a tuple of the tensors
    named `inputs` (one tensor if there is one name) and returns the output of the model's forward: its logits or,
    without a head, the last hidden states. Between two layers travel the hidden states and all else that the layers
    need (masks, positions, the encoder's output), which the model's own code computes once. The sequence shares layers
    and weights with `model`: don't use the model elsewhere. Not collective.

    Args:
        model: a model of transformers whose config, or the configs of its encoder and decoder, have a
            `base_model_pp_plan`.
        inputs: the names of its forward's tensors; by default those it needs, and the attention mask.
        plan: a plan for a model whose config has none: modules of the base model in the order in which they run, one of
            them the list of layers, each with the names of its inputs and outputs.
        self_check: whether to compare the sequence with the model's own forward, at toy size in float64, and where the
            model's modules differ from those of its configuration, on two short rows as the model is.
        constants: further arguments of the forward, the same for all batches.

    Returns:
        The sequence; `nn.Sequential` runs it on one device, and `slipstream.Pipeline` on several.

    Raises:
        SlipstreamError: the plan doesn't describe the model, or a change to the model passes its layers by.
    """
    inputs = tuple(inputs) or default_inputs(model)
    if self_check:
        check_sequence(model, inputs, plan, constants)
    sequence = _build(model, inputs, plan, constants)
    if self_check and (changes := find_changes(model)):
        _check_changes(changes, model, sequence, inputs, constants)
    return sequence


def default_inputs(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the names of a model's inputs: its main input, with masks for tokens and the decoder's tokens."""
    main = str(model.main_input_name)
    if main != "input_ids":
        return (main,)
    tokens = ("input_ids", "attention_mask")
    return (*tokens, "decoder_input_ids") if model.config.is_encoder_decoder else tokens


def check_sequence(
    model: PreTrainedModel, inputs: Sequence[str], plan: PipelinePlan | None, constants: Mapping[str, Any]
) -> None:
    """Raises SlipstreamError unless a toy of the model returns, in float64, the output of its sequence."""
    find_stacks(model, plan)
    try:
        toy = toy_of(model)
        tensors = tuple(toy_inputs(toy, inputs).values())
        with torch.no_grad():
            wanted = main_output(toy(**dict(zip(inputs, tensors, strict=True)), **constants, use_cache=False))
            output = _build(toy, tuple(inputs), plan, constants)(tensors if len(inputs) > 1 else tensors[0])
    except SlipstreamError:
        raise
    except Exception as error:
        raise refusal(model, f"a toy of it could not be run ({type(error).__name__}: {error})") from error
    if output.shape != wanted.shape or not torch.equal(output, wanted):
        raise refusal(model, "its own forward does something between the modules of its plan that the plan leaves out")


def _check_changes(
    changes: Sequence[Change],
    model: PreTrainedModel,
    sequence: nn.Sequential,
    inputs: Sequence[str],
    constants: Mapping[str, Any],
) -> None:
    """Raises SlipstreamError unless the sequence returns the changed model's output, and each of its layers the same by
    itself, after other layers have run on other inputs."""
    tensors = tuple(toy_inputs(model, inputs).values())
    modes = {module: module.training for network in (model, sequence) for module in network.modules()}
    try:
        with torch.no_grad(), torch.random.fork_rng():
            model.eval()
            sequence.eval()
            wanted = main_output(model(**dict(zip(inputs, tensors, strict=True)), **constants, use_cache=False))
            values: list[Any] = [tensors if len(tensors) > 1 else tensors[0]]
            for layer in sequence:
                values.append(layer(values[-1]))
            flipped = tuple(tensor.flip(0) for tensor in tensors)
            sequence(flipped if len(flipped) > 1 else flipped[0])
            pairs = zip(sequence, values, values[1:], strict=False)
            again = [(layer(arguments), output) for layer, arguments, output in [*pairs][::-1]]
    except Exception as error:  # the user's own code
        raise refusal(model, f"{changes[0]}, and it could not be run ({type(error).__name__}: {error})") from error
    finally:
        for module, training in modes.items():
            module.training = training
    actual = values[-1]
    bound = min(1e3 * torch.finfo(wanted.dtype).eps, 0.05) * float(wanted.abs().max())
    if actual.shape != wanted.shape or not float((actual - wanted).abs().max()) <= bound:
        raise refusal(model, f"{changes[0]}, and computes something between the modules of its plan or beside them")
    if not all(torch.equal(*pair) for pairs in again for pair in zip(*map(tree_leaves, pairs), strict=True)):
        reason = "returns something else when a layer runs by itself: layers share more than what travels between them"
        raise refusal(model, f"{changes[0]}, and {reason}, or draw random numbers")


def find_stacks(model: PreTrainedModel, plan: PipelinePlan | None) -> list[LayerStack]:
    """Returns the model's stacks of layers in the order in which they run; raises SlipstreamError without a plan."""
    parts = dict(_parts(model, plan))
    if not parts:
        raise refusal(model, "neither its config nor those of its parts have a base_model_pp_plan")
    if len(parts) > 2:
        names = ", ".join(parts)
        raise refusal(model, f"it has stacks of layers in {names}; expected one, or an encoder and a decoder")
    return [_stack(model, prefix, part_plan) for prefix, part_plan in parts.items()]


def _parts(model: PreTrainedModel, plan: PipelinePlan | None) -> Iterator[tuple[str, PipelinePlan]]:
    """Yields the name and plan of each part of the model with a plan and a list of layers."""
    base = model.base_model
    if plan is not None:
        yield next(name for name, module in model.named_modules() if module is base), plan
        return
    prefixes: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(name.startswith(outer) for outer in prefixes):
            own_plan = module.config.base_model_pp_plan
            if own_plan and isinstance(getattr(module, "layers", None), nn.ModuleList):
                prefixes.append(f"{name}." if name else "")
                yield name, own_plan


def _stack(model: PreTrainedModel, prefix: str, plan: PipelinePlan) -> LayerStack:
    names = [f"{prefix}.{name}" if prefix else name for name in plan]
    modules = dict(model.named_modules(remove_duplicate=False))
    have = [name for name in names if name in modules]
    lists = [name for name in have if isinstance(modules[name], nn.ModuleList)]
    if len(lists) != 1:
        raise refusal(model, f"of the plan's modules {', '.join(names)} exactly one must be a list of layers")
    place = have.index(lists[0])
    return LayerStack(lists[0], tuple(have[:place]), tuple(have[place + 1 :]))


def _build(
    model: PreTrainedModel, inputs: tuple[str, ...], plan: PipelinePlan | None, constants: Mapping[str, Any]
) -> nn.Sequential:
    """Returns begin, layers, end; or begin, encoder's layers, middle, decoder's layers, end."""
    stacks = find_stacks(model, plan)
    trial = toy_inputs(model, inputs)
    described = {name: tensor.shape[1:] for name, tensor in trial.items()}
    tensors = tuple(trial.values())
    behind = None
    sequence: dict[str, nn.Module] = {}
    for place, stack in enumerate(stacks):
        connector = StackConnector(copy_with_shared_weights(model), stacks, place, described, constants, behind)
        with torch.no_grad(), torch.random.fork_rng():
            tensors = connector(tensors)
        behind = connector.layer_calls
        sequence["middle" if place else "begin"] = connector
        name = ("encoder", "decoder")[place] if len(stacks) == 2 else "layer"
        layers = model.get_submodule(stack.layers).children()
        calls = connector.layer_calls.arguments if connector.layer_calls else ()
        sequence |= {f"{name}{i}": StackLayer(*pair) for i, pair in enumerate(zip(layers, calls, strict=True))}
    sequence["end"] = StackConnector(copy_with_shared_weights(model), stacks, len(stacks), described, constants, behind)
    return nn.Sequential(OrderedDict(sequence))


def refusal(model: PreTrainedModel, reason: str) -> SlipstreamError:
    return SlipstreamError(f"{type(model).__name__} can't be made a sequence of layers: {reason}. {SUPPORTED}.")


def toy_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same class with few small layers and random weights, in float64 and evaluation mode."""
    config = _shrunk(model.config)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        return type(model)(config).double().eval()


def toy_inputs(model: PreTrainedModel, names: Sequence[str]) -> dict[str, Tensor]:
    """Returns a random tensor of two rows for each name; the last tokens of the second row are padding."""
    generator = torch.Generator().manual_seed(0)
    return {name: _input(model, name, generator).to(model.device) for name in names}


def _input(model: PreTrainedModel, name: str, generator: torch.Generator) -> Tensor:
    config: Any = model.config
    if name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return torch.randn(2, config.num_channels, height, width, generator=generator).to(model.dtype)
    if name == "inputs_embeds":
        return torch.randn(2, _TOY_LENGTH, config.get_text_config().hidden_size, generator=generator).to(model.dtype)
    if name.endswith("attention_mask"):
        return (torch.arange(_TOY_LENGTH) < torch.tensor([[_TOY_LENGTH], [_TOY_LENGTH - 3]])).long()
    return torch.randint(1, config.get_text_config().vocab_size, (2, _TOY_LENGTH), generator=generator)


def _shrunk(config: PretrainedConfig) -> PretrainedConfig:
    toy: Any = toy_config(config)
    for name, value in list(vars(toy).items()):
        if isinstance(value, PretrainedConfig):
            setattr(toy, name, _shrunk(value))
    encoder = getattr(toy, "encoder", None)
    if encoder is not None and hasattr(getattr(toy, "decoder", None), "cross_attention_hidden_size"):
        toy.decoder.cross_attention_hidden_size = encoder.hidden_size
    return toy


class StackLayer(nn.Module):
    """One layer of the model: (hidden, extras, inputs) -> (its output, extras, inputs)."""

    def __init__(self, layer: nn.Module, arguments: Arguments) -> None:
        super().__init__()
        self.layer = layer
        self._arguments = arguments

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        args, kwargs = with_tensors(self._arguments, tensors)
        return first_output(self.layer(*args, **kwargs)), *tensors[1:]


class StackConnector(nn.Module):
    """The model's forward from stack `place` - 1, or the beginning, to stack `place`, or the end.

    It has the weights that are used there, and no others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stacks: Sequence[LayerStack],
        place: int,
        inputs: Mapping[str, Sequence[int]],
        constants: Mapping[str, Any],
        calls_behind: LayerCalls | None,
    ) -> None:
        """`model` is a copy of the modules that shares the weights, and is cut in place; `inputs` are the names and
        shapes, without the batch, of the model's inputs; `calls_behind` is the layout of the stack behind. The
        first forward finds that of the stack ahead."""
        super().__init__()
        self.layer_calls: LayerCalls | None = None
        self._calls_behind = calls_behind
        self._inputs = inputs
        self._constants = constants
        self._skips_encoder = place == 2
        behind = stacks[place - 1] if place else None
        ahead = stacks[place] if place < len(stacks) else None
        self._running = ForwardState()
        remove_unused_weights(model, stacks, behind, ahead)
        always_build_masks(model)
        if behind is not None:
            first = next(model.get_submodule(behind.layers).children())
            replace_module(model, behind.layers, nn.ModuleList([HiddenPlaceholder(self._running, first)]))
            for name in behind.before:
                replace_module(model, name, HiddenPlaceholder(self._running, model.get_submodule(name)))
        if ahead is not None:
            layers = list(model.get_submodule(ahead.layers).children())
            recorders = [CallRecorder(self._running, layer, layer is layers[-1]) for layer in layers]
            replace_module(model, ahead.layers, nn.ModuleList(recorders))
        self.model = model

    def forward(self, tensors: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Returns the model's output or, if there is a stack ahead, its first layer's input.

        The inputs travel on, except images and embeddings: they are large, and later the model's code reads their shape
        alone.
        """
        tensors = tensors if isinstance(tensors, tuple) else (tensors,)
        if self._calls_behind is None:
            arguments: dict[str, Any] = dict(zip(self._inputs, tensors, strict=True))
            carried = tuple(tensor for tensor in tensors if not tensor.is_floating_point())
        else:
            self._running.hidden = hidden = tensors[0]
            carried = tensors[1 + self._calls_behind.num_extras :]
            arguments = self._restored(carried, hidden)
            if self._skips_encoder:
                # after the decoder nothing reads the encoder's output, but the model's code reads its shape
                encoding = hidden.new_zeros(()).expand(*arguments["input_ids"].shape, hidden.shape[-1])
                arguments["encoder_outputs"] = BaseModelOutput(encoding)
        try:
            return main_output(self.model(**arguments, **self._constants, use_cache=False))
        except LayersReachedError:
            calls = self._running.calls
        finally:
            self._running.hidden = None
            self._running.calls = []
        if self.layer_calls is None:
            self.layer_calls, known = LayerCalls.of(calls)
        else:
            known = self.layer_calls.tensors(calls)
        return (*known, *carried)

    def _restored(self, carried: Sequence[Tensor], hidden: Tensor) -> dict[str, Any]:
        """Returns all inputs by name; those that didn't travel are replaced by tensors that take no memory."""
        left = iter(carried)
        stand_ins = {
            "inputs_embeds": hidden,
            "pixel_values": hidden.new_zeros(()).expand(len(hidden), *self._inputs.get("pixel_values", ())),
        }
        return {name: stand_ins[name] if name in stand_ins else next(left) for name in self._inputs}


def main_output(output: Any) -> Tensor:
    """Returns a forward's tensor: its logits, or the last hidden states."""
    tensor = output if isinstance(output, Tensor) else output.get("logits", output.get("last_hidden_state"))
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{type(output).__name__} has neither logits nor last_hidden_state")
    return tensor


@dataclass(frozen=True)
class LayerStack:
    """The names of one stack of layers in a model, and of the modules that the plan puts before and after it."""

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return *self.before, self.layers, *self.after


class LayersReachedError(Exception):
    """Ends the model's forward once the layers ahead have been called."""


@dataclass
class ForwardState:
    """The hidden states that came in, and the arguments with which layers ahead were called."""

    hidden: Tensor | None = None
    calls: list[Arguments] = field(default_factory=list)


class HiddenPlaceholder(Placeholder):
    """Replaces the layers behind and the embedding before them: returns the hidden states that came in.

    Models read the dtype of their embedding's weights, so these are there as buffers that take no memory.
    """

    def __init__(self, running: ForwardState, original: nn.Module) -> None:
        super().__init__(original)
        self._running = running
        _copy_without_memory(original, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.hidden


class CallRecorder(Placeholder):
    """Replaces a layer ahead: records its arguments, and ends the forward if it is the last one."""

    def __init__(self, running: ForwardState, original: nn.Module, is_last: bool) -> None:
        super().__init__(original)
        self._running = running
        self._is_last = is_last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._running.calls.append((args, kwargs))
        if self._is_last:
            raise LayersReachedError
        return hidden_states(args, kwargs)


class AbsentModule(Placeholder):
    """Replaces a module that is computed elsewhere, and raises SlipstreamError where it is called here."""

    def __init__(self, name: str, original: nn.Module) -> None:
        super().__init__(original)
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise SlipstreamError(f"{self.name} is used where the pipeline plan has no place for it")


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts `module` at `name`, unless all around it is absent."""
    parent, _, child = name.rpartition(".")
    holder = model.get_submodule(parent)
    if isinstance(holder, nn.ModuleList):
        holder[int(child)] = module
    elif not isinstance(holder, AbsentModule):
        setattr(holder, child, module)


def remove_unused_weights(
    model: nn.Module, stacks: Sequence[LayerStack], behind: LayerStack | None, ahead: LayerStack | None
) -> None:
    """Removes the weights that aren't used between the stacks `behind` and `ahead`.

    Those are the plan's other modules and, unless the forward ends here, all that the plan doesn't name: the head.
    """
    planned = [name for stack in stacks for name in stack.names]
    planned_names = [*(behind.names if behind else ()), *((*ahead.before, ahead.layers) if ahead else ())]
    for name in planned:
        if name not in planned_names:
            replace_module(model, name, AbsentModule(name, model.get_submodule(name)))
    for name, module in list(model.named_modules()) if ahead else ():
        is_kept = any(f"{name}.".startswith(f"{planned_name}.") for planned_name in planned_names)
        holds = not name or any(planned_name.startswith(f"{name}.") for planned_name in planned)
        if not is_kept and not holds and has_parameters(module):
            replace_module(model, name, AbsentModule(name, module))


def _copy_without_memory(original: nn.Module, copy: nn.Module) -> None:
    """Gives `copy` the names of all weights inside `original`, as buffers of the same shapes that share one zero."""
    for name, child in original.named_children():
        setattr(copy, name, nn.Module())
        _copy_without_memory(child, copy.get_submodule(name))
    for name, weight in original.named_parameters(recurse=False):
        copy.register_buffer(name, weight.new_zeros(()).expand(weight.shape), persistent=False)


class TensorIndex(int):
    """An index into the tuple of tensors that travels between layers; it stands in a layer's arguments."""


@dataclass(frozen=True)
class LayerCalls:
    """The arguments with which a model calls the layers of one stack.

    `arguments[i]` are those of layer i, with a TensorIndex for each tensor: 0 is the hidden states, and 1 to
    `num_extras` are masks, positions and whatever else the layers take.
    """

    arguments: tuple[Arguments, ...]
    num_extras: int

    @classmethod
    def of(cls, calls: Sequence[Arguments]) -> tuple[LayerCalls, tuple[Tensor, ...]]:
        """Returns the layout of these calls, one for each layer, and the tensors in its order."""
        known = [hidden_states(*calls[0])]  # the hidden states, followed by the extras

        def index(tensor: Tensor) -> TensorIndex:
            place = next((i for i, other in enumerate(known) if other is tensor), len(known))
            known.extend([tensor] if place == len(known) else [])
            return TensorIndex(place)

        arguments = tree_map_only(Tensor, index, tuple(calls))
        return cls(arguments, len(known) - 1), tuple(known)

    def tensors(self, calls: Sequence[Arguments]) -> tuple[Tensor, ...]:
        """Returns the tensors of new calls, in this layout's order.

        Raises SlipstreamError where a call differs from this layout in anything but its tensors.
        """
        wanted, wanted_layout = tree_flatten(self.arguments)
        values, layout = tree_flatten(tuple(calls))
        if layout != wanted_layout:
            raise _other_call(layout, wanted_layout)
        tensors: dict[int, Tensor] = {}
        for index, value in zip(wanted, values, strict=True):
            if isinstance(index, TensorIndex) and isinstance(value, Tensor):
                tensors.setdefault(index, value)
            elif isinstance(value, Tensor) or index != value:
                raise _other_call(value, index)
        return tuple(tensors[i] for i in range(1 + self.num_extras))


def with_tensors(arguments: Arguments, tensors: Sequence[Tensor]) -> Arguments:
    """Returns the arguments with each TensorIndex replaced by its tensor."""
    filled: Arguments = tree_map_only(TensorIndex, tensors.__getitem__, arguments)
    return filled


def _other_call(found: object, wanted: object) -> SlipstreamError:
    return SlipstreamError(
        f"a layer is called with {found!r}, but was called with {wanted!r} when the sequence was made. Give inputs of "
        "the same kind."
    )


_PREFIX = "slipstream_whole_"


def always_build_masks(model: PreTrainedModel) -> None:
    """Makes `model`'s own code build a mask whenever it is given an attention mask. Its attention stays the same.

    Raises SlipstreamError for attention implementations whose masks aren't tensors of one shape.
    """
    configs = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    for config in configs.values():
        name = str(config._attn_implementation or "eager")
        if "flash" in name or "flex" in name:
            raise SlipstreamError(
                f"attn_implementation={name!r} builds masks that aren't tensors of one shape. Use 'sdpa' or 'eager'."
            )
        AttentionMaskInterface.register(_PREFIX + name, _never_skipping(ALL_MASK_ATTENTION_FUNCTIONS[name]))
        config._attn_implementation_internal = _PREFIX + name


def _never_skipping(build: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        if attention_mask is not None:
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return build(*args, attention_mask=attention_mask, **kwargs)

    return mask
