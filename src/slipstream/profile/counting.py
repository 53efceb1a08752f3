"""Counts a model's operations, memory traffic and saved bytes, by running its code on meta tensors, without memory or
hardware.

Each part (a layer of every kind, the embedding, the head with the loss) runs forward and backward at two lengths; the
difference is the cost of a token, the rest the cost of a slice of any length. Attention's scores are left out of that
and described instead by heads, widths and the mask's window, as their number depends on the slice's context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from slipstream.attention import ContextStore
from slipstream.cost import Amount, AttentionCall, AttentionWindow, ModelCount, OpCount, PartCount, find_windows
from slipstream.errors import SlipstreamError
from slipstream.model import (
    ALL_WEIGHTS,
    LayerHalf,
    LayerPart,
    ModelAnatomy,
    ModelEnd,
    SavedStorages,
    TrainedWeights,
    causal_cross_entropy,
    copy_with_shared_weights,
    fuse_kernels,
    keep_half,
    keep_layers,
    meta_model,
    storage_id,
    watched_kernels,
)
from slipstream.model.anatomy import expert_modules, find_anatomy
from slipstream.model.hooks.crossing_tensors import Arguments, first_output, hidden_states, with_hidden_states
from slipstream.model.hooks.length_dependent_rope import keep_frequencies
from slipstream.model.hooks.masks import MaskTables
from slipstream.model.hooks.module_calls import recorded_calls
from slipstream.model.hooks.slice_cache import CarriedState, SliceCache, cache_name
from slipstream.model.hooks.token_slice import SliceContext, TokenSlice, active_forward
from slipstream.model.operation_counter import OperationCounter, OperationTally
from slipstream.model.quantised import QuantisedLinear
from slipstream.profile.layer_kinds import anatomy_with_halves, find_layer_kinds, trained_parts
from slipstream.schedule import Op

_LENGTHS = (256, 512)  # tokens of the two counts


def count_model(
    config: PretrainedConfig,
    seq_len: int,
    dtype: torch.dtype = torch.bfloat16,
    trained: TrainedWeights = ALL_WEIGHTS,
    fused: bool = False,
    halves: bool = True,
) -> ModelCount:
    """Returns the operations of a causal LM with this configuration. Not collective; takes seconds and little memory.

    Args:
        config: the model's configuration.
        seq_len: the length of a sequence in tokens, up to which attention windows are looked for.
        dtype: the dtype of parameters and activations.
        trained: the trained parameters. Layers below the lowest trained one have forwards alone, frozen ones above the
            input gradient alone; an adapter's operations are counted too.
        fused: whether norms, activations and rotary embeddings are fused kernels, as by `fuse_kernels`.
        halves: whether the halves of layers are counted by themselves, where they can be cut.

    Raises:
        SlipstreamError: it can't be cut into stages, or its attention, its code or its adapter's can't be counted.
    """
    try:
        return _counted(config, seq_len, dtype, trained, fused, halves)
    except SlipstreamError:
        raise
    # The model's code, or PEFT's, may raise anything on the meta device.
    except Exception as error:
        if trained.adapter is None:
            problem = f"its code doesn't run without values ({type(error).__name__}: {error})"
            raise SlipstreamError(uncountable(config, problem)) from error
        raise SlipstreamError(f"an adapter by {trained.adapter.method} can't be counted: {error}") from error


def _counted(
    config: PretrainedConfig, seq_len: int, dtype: torch.dtype, trained: TrainedWeights, fused: bool, halves: bool
) -> ModelCount:
    anatomy = anatomy_with_halves(config) if halves else find_anatomy(config)
    model = counting_model(config, dtype, trained)
    if fused:
        fuse_kernels(model)
    places = _Places(trained_parts(model, anatomy), 2 if anatomy.halves else 1)
    structures, names = find_layer_kinds(config, anatomy, model)
    placed = [(kind, places.of_layer(layer)) for layer, kind in enumerate(structures)]
    distinct = list(dict.fromkeys(placed))
    # No layer reads another one's tensors or weights.
    if anatomy.hidden is None and not anatomy.shared:
        keep_layers(model, anatomy, {*map(placed.index, distinct), len(placed) - 1, *ModelEnd})
    calls = [record_calls(model, anatomy, length, seq_len) for length in _LENGTHS]
    width = config.get_text_config().hidden_size
    last = len(places.trained) - 1
    layers = {f"{anatomy.layers}.{placed.index(layer)}": layer for layer in distinct}
    counted = [
        _count_part(model, names[kind], (layer,), calls, width, gets[0]) for layer, (kind, gets) in layers.items()
    ]
    in_halves = zip(counted, layers.items(), strict=True) if anatomy.halves else ()
    return ModelCount(
        kinds=tuple(map(distinct.index, placed)),
        layers=tuple(counted),
        embedding=_count_part(model, "embedding", anatomy.before, calls, width, places.gets_gradient(0)),
        head=_count_part(model, "head", anatomy.after, calls, width, places.gets_gradient(last)),
        hidden_size=width,
        dtype=str(dtype).removeprefix("torch."),
        dtype_bytes=dtype.itemsize,
        tied=bool(anatomy.tied),
        halves=tuple(
            _count_halves(part, model, layer, anatomy.halves, calls, width, gets)
            for part, (layer, (_, gets)) in in_halves
        ),
    )


@dataclass(frozen=True)
class _Places:
    """The places of a model's parts, above or below the lowest trained one."""

    trained: list[bool]  # per part: True if it has a trained parameter
    units_per_layer: int

    def gets_gradient(self, part: int) -> bool:
        """Returns whether the input of a part has a gradient; the embedding, which has none, counts as if it had."""
        return any(self.trained[:part]) if part else self.trained[0]

    def of_layer(self, layer: int) -> tuple[bool, ...]:
        """Returns whether the inputs of a layer's units have gradients."""
        first = 1 + layer * self.units_per_layer
        return tuple(map(self.gets_gradient, range(first, first + self.units_per_layer)))


def _count_part(
    model: PreTrainedModel,
    name: str,
    modules: Sequence[str],
    recorded: Sequence[ModelCalls],
    width: int,
    gets_gradient: bool,
    cut: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> PartCount:
    """Returns the counts of a part, whose modules, once cut, run one after the other at both lengths."""
    short, long = (_PartRun(model, modules, calls, width, name == "head", gets_gradient, cut) for calls in recorded)
    num_tokens = long.own.length - short.own.length

    def line(op: Op, key: str) -> Amount:
        less, more = vars(short.ops[op])[key], vars(long.ops[op])[key]
        per_token = (more - less) / num_tokens
        return Amount(max(0.0, less - per_token * short.own.length), per_token)

    ops = {}
    for op, tally in long.ops.items():
        names = (
            *("flops", "unaligned_flops", "matmul_bytes", "hidden_depth", "other_depth"),
            *("wide_bytes", "other_bytes"),
        )
        amounts: dict[str, Any] = {name: line(op, name) for name in names}
        ops[op] = OpCount(**amounts, num_matmuls=tally.num_matmuls, num_kernels=tally.num_kernels)
    itemsize = long.itemsize
    calls = long.own.attentions
    # Bytes of the output and the log-sum-exp.
    attended = sum(c.num_heads * (c.value_width * itemsize + 4) for c in calls)
    return PartCount(
        name=name,
        num_parameters=sum(p.numel() for p in long.parameters) + long.num_packed,
        ops=ops,
        attentions=tuple(calls),
        activation_bytes=(long.saved_bytes - short.saved_bytes) / num_tokens,
        product_bytes=line(Op.F, "product_bytes").per_token + attended,
        state_bytes=sum(recorded[-1].state_bytes[name] for name in modules),
        num_untrained=sum(p.numel() for p in long.parameters if not p.requires_grad) + long.num_packed,
        num_quantised=sum(linear.num_weights for linear in long.quantised),
        dequantised_bytes=itemsize * max((linear.num_weights for linear in long.quantised), default=0),
        has_backward=long.has_backward,
        wide_activation_bytes=(long.wide_bytes - short.wide_bytes) / num_tokens,
        num_in_experts=sum(p.numel() for p in long.in_experts),
        num_trained_in_experts=sum(p.numel() for p in long.in_experts if p.requires_grad),
        num_trained_tensors=sum(p.requires_grad for p in long.parameters),
        num_experts=long.num_experts,
        experts_per_token=long.experts_per_token,
    )


def _count_halves(
    whole: PartCount,
    model: PreTrainedModel,
    layer: str,
    parts: Sequence[LayerPart],
    recorded: Sequence[ModelCalls],
    width: int,
    gets: Sequence[bool],
) -> tuple[PartCount, PartCount]:
    """Returns the counts of a layer's halves, which add up to those of the whole layer.

    A half that runs alone also adds the -0.0 that stands in for the other one. Both do, so it cancels in
    (half + whole - other half) / 2.
    """

    def cut_to(half: LayerHalf, module: nn.Module) -> nn.Module:
        copied = copy_with_shared_weights(module)
        keep_half(copied, parts, half)
        return copied

    attention, other = (
        _count_part(model, f"{whole.name}, {half.value} half", (layer,), recorded, width, has, partial(cut_to, half))
        for half, has in zip(LayerHalf, gets, strict=True)
    )
    alone = attention.mixed(other, whole, lambda half_cost, others, both: (half_cost + both - others) / 2)
    rest = other.mixed(alone, whole, lambda _, others, both: both - others)
    return replace(alone, attentions=whole.attentions, is_half=True), replace(rest, attentions=(), is_half=True)


class _PartRun:
    """A part's F, I and W at one length, alone, on meta tensors.

    W is a backward to weights and input minus one to the input; where that has no gradient, I is the rest that runs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Sequence[str],
        calls: ModelCalls,
        width: int,
        loss: bool,
        gets_gradient: bool,
        cut: Callable[[nn.Module], nn.Module],
    ) -> None:
        names = [name for name in calls.arguments if name in modules]  # names in the order of their calls
        self._modules = [(cut(model.get_submodule(name)), *calls.arguments[name]) for name in names]
        self._width = width
        self._loss = loss
        self.parameters = list({id(p): p for module, *_ in self._modules for p in module.parameters()}.values())
        inner = [m for module, *_ in self._modules for m in module.modules()]
        self.quantised = list({id(m.weight): m for m in inner if type(m) is QuantisedLinear}.values())
        self.num_packed = sum(linear.num_weights - linear.weight.numel() for linear in self.quantised)
        self.itemsize = next(p.dtype.itemsize for p in self.parameters if p.is_floating_point())
        experts = [expert for module, *_ in self._modules for _, expert in expert_modules(module)]
        self.num_experts = max((int(expert.num_experts) for expert in experts), default=0)
        self.in_experts = list({id(p): p for expert in experts for p in expert.parameters()}.values())
        # rotary tables and the like, which all layers share
        self._shared = [t for _, *arguments in self._modules for t in _tensors(arguments)[1:]]
        self.own = ModelCalls(calls.length, calls.seq_len)
        self._trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.has_backward = gets_gradient or bool(self._trained)
        with recorded_calls({str(place): expert for place, expert in enumerate(experts)}) as chosen:
            forward, inputs = self._pass(weights=False)
        self.experts_per_token = max((_num_chosen(*call.args, **call.kwargs) for call in chosen), default=0)
        _, backward = self._pass(weights=True)
        weights = backward - inputs
        if not gets_gradient:
            _, backward = self._pass(weights=True, gets_gradient=False)
            inputs = backward - weights
        self.ops = {Op.F: forward, Op.I: inputs, Op.W: weights if self._trained else OperationTally()}

    def _pass(self, weights: bool, gets_gradient: bool = True) -> tuple[OperationTally, OperationTally]:
        """Returns the tallies of the forward and the backward."""
        self.own.attentions.clear()
        self._gets_gradient = gets_gradient
        for parameter in self._trained:
            parameter.requires_grad_(weights)
            parameter.grad = torch.zeros_like(parameter) if weights else None
        saved = SavedStorages([*self.parameters, *self._shared])
        with (
            recording(self.own),
            counted_operations(self._width) as forward,
            saved_tensors_hooks(saved.pack, lambda tensor: tensor),
            META,
        ):
            output, source = self._forward()
        if not output.requires_grad:
            self.saved_bytes = self.wide_bytes = 0
            return forward, OperationTally()
        saved.pack(source)
        self.saved_bytes, self.wide_bytes = saved.num_bytes, saved.wide_bytes(self._width)
        with counted_operations(self._width) as backward, META:
            output.backward(torch.empty_like(output))  # type: ignore[no-untyped-call]
        return forward, backward

    def _forward(self) -> tuple[Tensor, Tensor]:
        """Returns the part's output and its first input."""
        results: list[Tensor] = []
        source = None
        for module, args, kwargs in self._modules:
            args, kwargs = _fresh(args, self._gets_gradient), _fresh(kwargs, self._gets_gradient)
            # The head reads the norm's output.
            if self._loss and results:
                args, kwargs = with_hidden_states(args, kwargs, results[-1])
            source = hidden_states(args, kwargs) if source is None else source
            results.append(first_output(module(*args, **kwargs)))
        assert source is not None
        if self._loss:
            targets = torch.zeros(results[-1].shape[:-1], dtype=torch.long)
            return causal_cross_entropy(results[-1], targets)[0], source
        return results[0] if len(results) == 1 else sum(results[1:], results[0]), source


def _num_chosen(_hidden_states: Tensor, top_k_index: Tensor, *_: Any, **__: Any) -> int:
    return top_k_index.shape[-1]


def _fresh(value: Any, gets_gradient: bool) -> Any:
    """Returns the arguments as leaves, which get a gradient where they can."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(gets_gradient and value.is_floating_point() and value.dim() == 3)
    if isinstance(value, tuple):
        is_pair = len(value) == 2
        return tuple(i.detach() if is_pair and isinstance(i, Tensor) else _fresh(i, gets_gradient) for i in value)
    return {key: _fresh(item, gets_gradient) for key, item in value.items()} if isinstance(value, dict) else value


def _tensors(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


NAME = "slipstream-count"
_ATTENDS_ITSELF = "it doesn't attend through transformers' AttentionInterface"
META = torch.device("meta")


@dataclass
class ModelCalls:
    """The arguments of every part of a model in one forward of `length` tokens, and the attention calls."""

    length: int
    seq_len: int
    arguments: dict[str, Arguments] = field(default_factory=dict)
    attentions: list[AttentionCall] = field(default_factory=list)
    # Per layer: bytes of the states left by a slice of one row.
    state_bytes: Counter[str] = field(default_factory=Counter)


_current: list[ModelCalls] = []  # running recordings, innermost last


@contextmanager
def recording(calls: ModelCalls) -> Iterator[None]:
    """Adds the attention calls that are made within it to `calls`."""
    _current.append(calls)
    try:
        yield
    finally:
        _current.pop()


def counting_model(config: PretrainedConfig, dtype: torch.dtype, trained: TrainedWeights) -> PreTrainedModel:
    """Returns the model on the meta device, with its adapter, and with attention that `record_calls` sees."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    model = trained.apply(meta_model(config, dtype, attn_implementation=NAME))
    keep_frequencies(model)
    return model.train()


def record_calls(model: PreTrainedModel, anatomy: ModelAnatomy, length: int, seq_len: int) -> ModelCalls:
    """Runs the model once, without computing anything.

    Raises SlipstreamError where it neither attends through transformers' AttentionInterface nor carries states instead.
    """
    calls = ModelCalls(length, seq_len)
    names = [name for name, _ in model.get_submodule(anatomy.layers).named_children()]
    parts = [*anatomy.before, *(f"{anatomy.layers}.{name}" for name in names), *anatomy.after]
    zeros = torch.zeros(1, length, dtype=torch.long, device=META)
    # without a mask transformers would look for packed documents in positions, which have no values
    ones = torch.ones(1, length, dtype=torch.long, device="cpu")
    try:
        with recording(ModelCalls(length, seq_len)), counted_operations(0):
            states = _states_left(model, zeros, ones)
        modules = {part: model.get_submodule(part) for part in parts}
        with recorded_calls(modules) as run, recording(calls), torch.no_grad(), counted_operations(0), META:
            model(input_ids=zeros, position_ids=zeros.clone(), attention_mask=ones, use_cache=False)
    # Attention may look into its mask, which has no values here.
    except Exception as error:
        if anatomy.attends_itself:
            raise SlipstreamError(uncountable(model.config, _ATTENDS_ITSELF)) from error
        raise
    calls.arguments |= {call.name: (call.args, call.kwargs) for call in run}
    if not calls.attentions and not states:
        raise SlipstreamError(uncountable(model.config, _ATTENDS_ITSELF))
    for call, state in states.items():
        calls.state_bytes[f"{anatomy.layers}.{names[call.layer]}"] += state.nbytes
    return calls


def uncountable(config: PretrainedConfig, problem: str) -> str:
    """Returns an error's text on a model whose operations can't be counted."""
    return (
        f"what a model of model_type {config.model_type!r} computes can't be counted, as {problem}: profile it instead "
        "with `slipstream profile`."
    )


def _states_left(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> dict[CarriedState, Tensor]:
    """Returns the states that a slice of these tokens leaves to the next one; none where slices can't carry them."""
    tokens = TokenSlice(ids, ids, None, start=0, length=ids.shape[1], max_position=ids.shape[1] - 1)
    context = SliceContext(tokens, ContextStore(ids.shape[1]), MaskTables(META))
    cache = {cache_name(model): SliceCache(context)}
    with torch.no_grad(), META, active_forward(context), suppress(SlipstreamError):
        model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False, **cache)
    return {call: state for call, state in context.states.items() if isinstance(call, CarriedState)}


def _mask(*args: Any, mask_function: Callable[..., Tensor], **kwargs: Any) -> AttentionWindow:
    """Returns a mask's window, found from the first keys that a few queries see; every layer is given it."""
    with torch.device("cpu"), _MetaAsZeros():  # type: ignore[no-untyped-call]
        (window,) = find_windows(lambda query: [_first_key(mask_function, query)], _current[-1].seq_len)
    return window


def _first_key(mask_function: Callable[..., Tensor], query: int) -> int:
    zero = torch.tensor(0)
    keys = torch.arange(query + 1)
    return int(torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(query + 1).int().argmax())


class _MetaAsZeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces meta tensors in a mask function, which hold the padding on the left of each row, by zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, _without_meta, (args, kwargs or {}))
        return func(*args, **kwargs)


def _without_meta(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Records the call and returns a (b, T, heads, value width) tensor without computing it."""
    window = attention_mask if isinstance(attention_mask, AttentionWindow) else AttentionWindow()
    shapes = (query.shape[1], key.shape[1], key.shape[-1], value.shape[-1])
    has_gradient = any(tensor.requires_grad for tensor in (query, key, value))
    _current[-1].attentions.append(AttentionCall(*shapes, window, has_gradient))
    output: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


class _Attention(torch.autograd.Function):
    """Saves sliced attention's tensors: the query, the output and the log-sum-exp; K and V are in the store."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        # The output gets the layout of sliced attention.
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, output, logsumexp)
        ctx.shapes = [key.shape, value.shape]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, *_ = ctx.saved_tensors
        return (torch.empty_like(query), *(query.new_empty(shape) for shape in ctx.shapes))


_running: list[OperationCounter] = []  # running counts, innermost last


@contextmanager
def counted_operations(width: int) -> Iterator[OperationTally]:
    """Returns a tally that is complete when the block ends; tensors whose last dim is `width` count as wide."""
    _running.append(counter := OperationCounter(width))
    try:
        with counter, watched_kernels(_FusedKernel.apply):
            yield counter.tally
    finally:
        _running.pop()


class _FusedKernel(torch.autograd.Function):
    """A region that is one kernel forward, and one backward, which recomputes parts of the forward."""

    @staticmethod
    def forward(ctx: Any, plain: Callable[..., Any], *inputs: Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]
        leaves = [tensor.detach().requires_grad_(needs) for tensor, needs in zip(inputs, needed, strict=True)]
        saved: set[int] = set()

        def note(tensor: Tensor) -> Tensor:
            saved.add(storage_id(tensor))
            return tensor

        with _disable_current_modes(), torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = tuple(output.detach() for output in plain(*leaves))
        # all between inputs and outputs is computed again, from the inputs that have gradients
        between = not saved <= {storage_id(leaf) for leaf in leaves}
        is_kept = [storage_id(leaf) in saved or (between and leaf.requires_grad) for leaf in leaves]
        _running[-1].add([*inputs, *outputs])
        ctx.save_for_backward(*compress(inputs, is_kept))
        ctx.sources = [leaf if needs else None for leaf, needs in zip(leaves, needed, strict=True)]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        results = [None if source is None else torch.empty_like(source) for source in ctx.sources]
        _running[-1].add([*gradients, *ctx.saved_tensors, *(result for result in results if result is not None)])
        return (None, *results)
