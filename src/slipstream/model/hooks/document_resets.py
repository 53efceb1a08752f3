"""Runs layers that carry a state document by document, as their state is reset where a document begins.

transformers' own code keeps packed documents apart only with kernels for GPUs, so a slice is cut where a document of
some row begins, and what carries the state runs on each part. Everything else in a layer runs on the whole slice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from slipstream.model.hooks.layer_arguments import hidden_states
from slipstream.model.hooks.slice_cache import CACHE_NAMES
from slipstream.model.hooks.token_slice import TokenSlice, current_slice


@contextmanager
def recorded_carriers(layers: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Collects the modules that carry states in a forward: the innermost ones that are given the cache."""
    found: list[nn.Module] = []
    noted: set[Hashable] = set()

    def note(module: nn.Module, *_: Any) -> None:
        if new := current_slice().changed_states - noted:
            found.append(module)
            noted.update(new)

    with ExitStack() as hooks:
        for module in (module for layer in layers for module in layer.modules()):
            if not inspect.signature(module.forward).parameters.keys().isdisjoint(CACHE_NAMES):
                hooks.enter_context(module.register_forward_hook(note))
        yield found


def reset_at_documents(module: nn.Module) -> None:
    """Makes a module that carries states run document by document from now on."""
    module.forward = partial(_by_document, module.forward)


def _by_document(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    context = current_slice()
    begins = document_begins(context.token_slice)
    if begins is None:
        return forward(*args, **kwargs)
    length = hidden_states(args, kwargs).shape[1]
    outputs = []
    cuts = [0, *_inner_cuts(begins), length]
    for a, b in pairwise(cuts):
        context.fresh_rows = begins[:, a]
        own_args, own_kwargs = tree_map(partial(_tokens, a, b, length), (args, kwargs))
        outputs.append(forward(*own_args, **own_kwargs))
    context.fresh_rows = None
    return _joined(outputs, [b - a for a, b in pairwise(cuts)])


def _joined(outputs: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Returns what a module returned for parts of so many tokens, each tensor of tokens for all of them.

    It returns hidden states, or queries, keys and values in a tuple; what isn't of tokens stays as after the last part.
    """
    last = outputs[-1]
    if isinstance(last, (tuple, list)):
        return type(last)(_joined(items, lengths) for items in zip(*outputs, strict=True))
    is_per_token = all(isinstance(each, Tensor) and each.dim() > 1 for each in outputs)
    if is_per_token and [each.shape[1] for each in outputs] == [*lengths]:
        return torch.cat([*outputs], dim=1)
    return last


def document_begins(tokens: TokenSlice) -> Tensor | None:
    """Returns which tokens (b, T) begin a document; None where none does."""
    if tokens.document_start is None:
        return None
    positions = torch.arange(tokens.start, tokens.end, device=tokens.document_start.device)
    begins = tokens.document_start == positions
    return begins if begins.any() else None


def _inner_cuts(begins: Tensor) -> list[int]:
    cuts: list[int] = begins.any(0).nonzero().flatten().tolist()
    return [cut for cut in cuts if cut > 0]


def _tokens(begin: int, end: int, length: int, value: Any) -> Any:
    """Returns these tokens of a tensor (b, T, ...), and anything else as it is."""
    is_per_token = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
    return value[:, begin:end] if is_per_token else value
