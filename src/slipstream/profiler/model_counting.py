"""Counts what a model computes, moves and saves, by running its own code on meta tensors: no memory, no hardware.

Each part (a layer of every kind, the embedding, the head with the loss) runs forward and backward at two lengths; the
difference is what a token costs, the rest what a slice costs however short. Attention's scores are left out of that and
described instead by heads, widths and the mask's window, as their number depends on what came before the slice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import ModelAnatomy, SavedStorages, find_anatomy, meta_model
from slipstream.pipeline.families import causal_cross_entropy
from slipstream.planner.costs import Amount, AttentionCall, AttentionWindow, ModelCount, OpCount, PartCount, find_window
from slipstream.profiler.layer_kinds import find_layer_kinds
from slipstream.profiler.operation_tally import OperationTally, counted_operations
from slipstream.schedule import Op

NAME = "slipstream-count"
_LENGTHS = (256, 512)  # tokens of the two counts
_META = torch.device("meta")


def count_model(config: PretrainedConfig, seq_len: int, dtype: torch.dtype = torch.bfloat16) -> ModelCount:
    """The operations of a causal LM with this configuration, in `dtype`; windows are looked for up to `seq_len`.

    Raises SlipstreamError for an architecture that can't be cut into stages, or whose attention can't be seen.
    """
    anatomy = find_anatomy(config)
    kinds, names = find_layer_kinds(config, anatomy)
    model = _meta_model(config, dtype)
    calls = [_record_calls(model, anatomy, length, seq_len) for length in _LENGTHS]
    layers = [f"{anatomy.layers}.{kinds.index(kind)}" for kind in range(len(names))]
    width = config.get_text_config().hidden_size
    counted = [_count_part(model, name, (layer,), calls, width) for name, layer in zip(names, layers, strict=True)]
    return ModelCount(
        kinds=kinds,
        layers=tuple(counted),
        embedding=_count_part(model, "embedding", anatomy.before, calls, width),
        head=_count_part(model, "head", anatomy.after, calls, width, loss=True),
        hidden_size=width,
        dtype=str(dtype).removeprefix("torch."),
        dtype_bytes=dtype.itemsize,
        tied=bool(anatomy.tied),
    )


def _meta_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    model = meta_model(config, dtype, attn_implementation=NAME)
    for module in model.modules():
        if hasattr(module, "rope_type"):  # undecorated: which frequencies depends on positions, which aren't there
            module.forward = inspect.unwrap(type(module).forward).__get__(module)
    return model.train()


# --- one run of the whole model, to see what its parts are called with ------------------------------------------------


@dataclass
class _ModelCalls:
    """What every module was called with, and the attention calls of every layer."""

    length: int
    seq_len: int
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    attentions: list[AttentionCall] = field(default_factory=list)


_current: list[_ModelCalls] = []


def _record_calls(model: PreTrainedModel, anatomy: ModelAnatomy, length: int, seq_len: int) -> _ModelCalls:
    watch = _ModelCalls(length, seq_len)
    names = [name for name, _ in model.get_submodule(anatomy.layers).named_children()]
    parts = [*anatomy.before, *(f"{anatomy.layers}.{name}" for name in names), *anatomy.after]

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            watch.arguments[name] = (args, kwargs)

        return hook

    hooks = [model.get_submodule(part).register_forward_pre_hook(note(part), with_kwargs=True) for part in parts]
    tokens = torch.zeros(1, length, dtype=torch.long, device=_META)
    positions = torch.zeros(1, length, dtype=torch.long, device=_META)
    # without a mask transformers looks for packed documents in positions that aren't there; masks count from this one
    ones = torch.ones(1, length, dtype=torch.long, device="cpu")
    _current.append(watch)
    try:
        with torch.no_grad(), counted_operations(0), _META:
            model(input_ids=tokens, position_ids=positions, attention_mask=ones, use_cache=False)
    finally:
        _current.pop()
        for handle in hooks:
            handle.remove()
    if not watch.attentions:
        raise SlipstreamError(
            f"model_type {model.config.model_type!r} doesn't attend through transformers' AttentionInterface, so its "
            "attention can't be counted; profile it instead with `slipstream profile`."
        )
    return watch


def _mask(*args: Any, mask_function: Callable[..., Tensor], **kwargs: Any) -> AttentionWindow:
    """The window of a mask, from what a few queries see first; transformers hands it to every layer."""
    last = _current[-1].seq_len - 1
    with torch.device("cpu"), _MetaAsZeros():  # type: ignore[no-untyped-call]
        probes = {at: _first_key(mask_function, at) for at in {last, max(0, last - 1), last // 2, last // 3}}
        probes |= {first - 1: _first_key(mask_function, first - 1) for first in {probes[last]} if first > 0}
    return find_window(probes)


def _first_key(mask_function: Callable[..., Tensor], query: int) -> int:
    zero, keys = torch.tensor(0), torch.arange(query + 1)
    return int(torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(query + 1).int().argmax())


class _MetaAsZeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Masks may hold tensors of the meta model: the padding on the left of each row, which is none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, _without_meta, (args, kwargs or {}))
        return func(*args, **kwargs)


def _without_meta(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Notes the call, and returns a (b, T, heads, value width) tensor that was not computed."""
    window = attention_mask if isinstance(attention_mask, AttentionWindow) else AttentionWindow()
    shapes = (query.shape[1], key.shape[1], key.shape[-1], value.shape[-1])
    _current[-1].attentions.append(AttentionCall(*shapes, window))
    output: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


class _Attention(torch.autograd.Function):
    """Saves what sliced attention saves: the query, the output and the log-sum-exp; K and V are in the store."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)  # as sliced attention stores it
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, output, logsumexp)
        ctx.shapes = [key.shape, value.shape]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, *_ = ctx.saved_tensors
        return (torch.empty_like(query), *(query.new_empty(shape) for shape in ctx.shapes))


# --- one part alone ---------------------------------------------------------------------------------------------------


def _count_part(
    model: PreTrainedModel,
    name: str,
    modules: Sequence[str],
    watches: Sequence[_ModelCalls],
    width: int,
    loss: bool = False,
) -> PartCount:
    """Run the modules one behind the other at both lengths."""
    modules = [each for each in watches[0].arguments if each in modules]  # in the order of their calls
    own = [model.get_submodule(each) for each in modules]
    parameters = {id(p): p for module in own for p in module.parameters()}
    runs = [_PartRun(list(zip(own, modules, strict=True)), watch, width, loss) for watch in watches]
    short, long = (run.count() for run in runs)
    lengths = [watch.length for watch in watches]
    calls = runs[-1].attentions
    kept = [run.saved_bytes for run in runs]
    itemsize = next(iter(parameters.values())).dtype.itemsize
    context = sum(c.num_key_value_heads * (c.key_width + c.value_width) for c in calls) * itemsize
    return PartCount(
        name=name,
        num_parameters=sum(p.numel() for p in parameters.values()),
        ops={op: _amounts(short[op], long[op], lengths) for op in short},
        attentions=tuple(calls),
        activation_bytes=(kept[1] - kept[0]) / (lengths[1] - lengths[0]),
        context_bytes=context,
        product_bytes=_line(short[Op.F], long[Op.F], lengths, "product_bytes").per_token
        + sum(c.num_heads * (c.value_width * itemsize + 4) for c in calls),  # attention's output and log-sum-exp
    )


def _amounts(short: OperationTally, long: OperationTally, lengths: Sequence[int]) -> OpCount:
    return OpCount(
        _line(short, long, lengths, "flops"),
        _line(short, long, lengths, "matmul_bytes"),
        _line(short, long, lengths, "wide_bytes"),
        _line(short, long, lengths, "other_bytes"),
        long.num_matmuls,
        long.num_kernels,
    )


def _line(short: OperationTally, long: OperationTally, lengths: Sequence[int], key: str) -> Amount:
    per_token = (vars(long)[key] - vars(short)[key]) / (lengths[1] - lengths[0])
    return Amount(max(0.0, vars(short)[key] - per_token * lengths[0]), per_token)


class _PartRun:
    """A part's F, I and W at one length, on meta tensors."""

    def __init__(self, modules: list[tuple[nn.Module, str]], watch: _ModelCalls, width: int, loss: bool) -> None:
        self._modules, self._watch, self._width, self._loss = modules, watch, width, loss
        self._parameters = {id(p): p for module, _ in modules for p in module.parameters()}
        # rotary tables and the like, which all layers share
        self._shared = [t for _, name in modules for t in _beyond_first(*watch.arguments[name])]
        self.attentions: list[AttentionCall] = []
        self.saved_bytes = 0

    def count(self) -> dict[Op, OperationTally]:
        """F, I and W; what the whole backward does beyond the input gradient is W's."""
        forward, inputs = self._pass(weights=False)
        _, backward = self._pass(weights=True)
        return {Op.F: forward, Op.I: inputs, Op.W: backward - inputs}

    def _pass(self, weights: bool) -> tuple[OperationTally, OperationTally]:
        for parameter in self._parameters.values():
            parameter.requires_grad_(weights)
            parameter.grad = torch.zeros_like(parameter) if weights else None
        local = _ModelCalls(self._watch.length, self._watch.seq_len)
        _current.append(local)
        saved = SavedStorages([*self._parameters.values(), *self._shared])
        try:
            with (
                counted_operations(self._width) as forward,
                saved_tensors_hooks(saved.pack, lambda tensor: tensor),
                _META,
            ):
                output, source = self._forward()
        finally:
            _current.pop()
        self.attentions = local.attentions
        saved.pack(source)
        self.saved_bytes = saved.num_bytes
        if not output.requires_grad:
            return forward, OperationTally()
        with counted_operations(self._width) as backward, _META:
            output.backward(torch.empty_like(output))  # type: ignore[no-untyped-call]
        return forward, backward

    def _forward(self) -> tuple[Tensor, Tensor]:
        """The part's output and its first input."""
        results: list[Tensor] = []
        source = None
        for module, name in self._modules:
            args, kwargs = self._watch.arguments[name]
            args, kwargs = (_fresh(args), _fresh(kwargs))
            if self._loss and results:  # the head reads the norm's output
                args, kwargs = _with_first(args, kwargs, results[-1])
            source = _first(args, kwargs) if source is None else source
            found = module(*args, **kwargs)
            results.append(found[0] if isinstance(found, tuple) else found)
        assert source is not None
        if self._loss:
            targets = torch.zeros(results[-1].shape[:-1], dtype=torch.long)
            return causal_cross_entropy(results[-1], targets)[0], source
        return results[0] if len(results) == 1 else sum(results[1:], results[0]), source


def _fresh(value: Any) -> Any:
    """The same arguments as leaves, which get a gradient where they can."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.is_floating_point() and value.dim() == 3)
    if isinstance(value, tuple):
        return tuple(item.detach() if isinstance(item, Tensor) and len(value) == 2 else _fresh(item) for item in value)
    return {key: _fresh(item) for key, item in value.items()} if isinstance(value, dict) else value


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))


def _beyond_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)][1:]


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (tensor, *args[1:]), kwargs
    key = next(key for key, each in kwargs.items() if isinstance(each, Tensor))
    return args, kwargs | {key: tensor}
