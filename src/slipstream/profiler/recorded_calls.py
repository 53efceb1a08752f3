"""Runs a model on meta tensors and records with what its parts and its attention are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from slipstream.attention import ContextStore
from slipstream.errors import SlipstreamError
from slipstream.model import ModelAnatomy, meta_model
from slipstream.model.adapters import TrainedWeights
from slipstream.model.hooks.layer_arguments import Arguments
from slipstream.model.hooks.length_dependent_rope import keep_frequencies
from slipstream.model.hooks.mask_tables import MaskTables
from slipstream.model.hooks.slice_cache import CarriedState, SliceCache, cache_name
from slipstream.model.hooks.token_slice import SliceContext, TokenSlice, active_forward
from slipstream.planner.costs import AttentionCall, AttentionWindow, find_windows
from slipstream.profiler.operation_tally import counted_operations

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
    state_bytes: Counter[str] = field(default_factory=Counter)  # by layer: what a slice of one row leaves to the next


_current: list[ModelCalls] = []  # the innermost recording is the last


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
    """Runs the whole model once, without computing anything.

    Raises SlipstreamError where it neither attends through transformers' AttentionInterface nor carries states instead.
    """
    calls = ModelCalls(length, seq_len)
    names = [name for name, _ in model.get_submodule(anatomy.layers).named_children()]
    parts = [*anatomy.before, *(f"{anatomy.layers}.{name}" for name in names), *anatomy.after]

    def record(part: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.arguments[part] = args, kwargs

    zeros = torch.zeros(1, length, dtype=torch.long, device=META)
    # without a mask transformers would look for packed documents in positions, which have no values
    ones = torch.ones(1, length, dtype=torch.long, device="cpu")
    try:
        with recording(ModelCalls(length, seq_len)), counted_operations(0):
            states = _states_left(model, zeros, ones)
        with ExitStack() as hooks, recording(calls), torch.no_grad(), counted_operations(0), META:
            for part in parts:
                module = model.get_submodule(part)
                hooks.enter_context(module.register_forward_pre_hook(partial(record, part), with_kwargs=True))
            model(input_ids=zeros, position_ids=zeros.clone(), attention_mask=ones, use_cache=False)
    except Exception as error:  # of attention that takes a mask apart, which here has no values
        if anatomy.attends_itself:
            raise SlipstreamError(uncountable(model.config, _ATTENDS_ITSELF)) from error
        raise
    if not calls.attentions and not states:
        raise SlipstreamError(uncountable(model.config, _ATTENDS_ITSELF))
    for call, state in states.items():
        calls.state_bytes[f"{anatomy.layers}.{names[call.layer]}"] += state.nbytes
    return calls


def uncountable(config: PretrainedConfig, problem: str) -> str:
    """Returns what an error says of a model whose operations can't be counted."""
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
    zero, keys = torch.tensor(0), torch.arange(query + 1)
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
    has_gradient = any(each.requires_grad for each in (query, key, value))
    _current[-1].attentions.append(AttentionCall(*shapes, window, has_gradient))
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
