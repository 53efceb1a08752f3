"""Makes one kernel of what a model's rotary embeddings do to its queries, and one of what they do to its keys.

transformers' attention calls a function of its own file, whose operations run one by one:

    q, k, v ─ views ─ [q * cos + rotate_half(q) * sin, and the same of k] ─ attention

That function is traced, so none of its code is copied, whichever numbers it pairs and whatever part of a head it
rotates. It is called with tokens before heads, as they are in memory.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from functools import cache
from inspect import isfunction, signature
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.fusion.compiled_region import compiled_region

_Rotate = Callable[..., Any]  # queries, keys (B,H,T,D), cosines, sines (B or 1,T,d) -> both rotated
_ARGUMENTS = ["q", "k", "cos", "sin"]
_PLACE_OF_HEADS = "unsqueeze_dim"  # 1: (B,H,T,D); 2: (B,T,H,D)
_WIDTH = 8  # of the heads on which a function is tried


def fuse_rotary_embeddings(module: nn.Module) -> bool:
    """Replaces the rotary embeddings that this module's forward calls; returns whether there are any.

    The functions stay as they are in their file, for other models. Only this module's forward, in which nothing else is
    changed, calls fused ones, and these only for tensors that they can take: all else is left to the model's own.
    """
    forward = module.forward
    if not isinstance(forward, MethodType) or not isfunction(forward.__func__):
        return False
    function = forward.__func__
    names = {name: f"_slipstream_fused_{name}" for name in _rotations(function)}
    for name, fused in names.items():
        # beside the model's: the forward must see what is replaced in its file later, such as position biases
        function.__globals__[fused] = fused_rotation(function.__globals__[name])
    if names:
        module.forward = MethodType(_renamed(function, names), module)
    return bool(names)


@cache  # models of one family share kernels
def fused_rotation(function: _Rotate) -> _Rotate:
    """Returns a function that takes what `function` takes and returns the same, by few kernels where it can."""
    kernel = compiled_region(lambda q, k, cos, sin: tuple(function(q, k, cos, sin, **{_PLACE_OF_HEADS: 2})))

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **settings: Any) -> Any:
        if more or settings or not _are_usual(q, k, cos, sin):
            return function(q, k, cos, sin, *more, **settings)
        tables = cos.contiguous(), sin.contiguous()
        query, key = kernel(q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), *tables)
        return query.transpose(1, 2), key.transpose(1, 2)

    return rotate


def _are_usual(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Returns whether the shapes are like those that functions are tried on: angles of every token, queries and keys.

    A lone token isn't fused: its sizes of 1 would need separate code.
    """
    usual = q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3
    return usual and q.shape[2] == k.shape[2] == cos.shape[1] == sin.shape[1] > 1


def _rotations(forward: FunctionType) -> Iterator[str]:
    """Yields the names by which a forward calls rotary embeddings that can be fused."""
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        uses = {each.opname for each in dis.get_instructions(forward.__code__) if each.argval == name}
        if isfunction(function) and uses == {"LOAD_GLOBAL"} and is_rotation(function):
            yield name


@cache
def is_rotation(function: _Rotate) -> bool:
    """Returns whether a function rotates queries and keys, and does the same with tokens before heads.

    It is tried in float64, on tables that are as wide as a head and half as wide, of one row and of as many as there
    are: some functions rotate a part of each head. What one of its tries refuses, it would refuse in a model.
    """
    parameters = [*signature(function).parameters]
    if parameters[:4] != _ARGUMENTS or _PLACE_OF_HEADS not in parameters:
        return False
    tries = [_agrees(function, rows, width) for rows in (1, 2) for width in (_WIDTH, _WIDTH // 2)]
    return True in tries and False not in tries


@torch.no_grad()
def _agrees(function: _Rotate, rows: int, width: int) -> bool | None:
    """Returns whether both orders of tokens and heads give the same, and the inputs stay; None where it fails."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 5, _WIDTH), (2, 1, 5, _WIDTH), (rows, 5, width), (rows, 5, width)
    given = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes]
    q, k, *tables = (each.clone() for each in given)
    try:
        expected = function(q, k, *tables)
        found = function(q.transpose(1, 2), k.transpose(1, 2), *tables, **{_PLACE_OF_HEADS: 2})
        same = [_same(a, b.transpose(1, 2), c) for a, b, c in zip(expected, found, given[:2], strict=True)]
        unchanged = all(map(torch.equal, given, (q, k, *tables)))
    except Exception:  # a model's function may do anything with other shapes
        return None
    return unchanged and all(same)


def _same(expected: Tensor, found: Tensor, given: Tensor) -> bool:
    kind = expected.shape == found.shape == given.shape and expected.dtype == found.dtype == given.dtype
    return kind and torch.allclose(expected, found, rtol=0, atol=1e-12)


def _renamed(function: FunctionType, names: dict[str, str]) -> FunctionType:
    """Returns a function that reads other global variables, by names."""
    code = function.__code__.replace(co_names=tuple(names.get(each, each) for each in function.__code__.co_names))
    renamed = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    renamed.__kwdefaults__, renamed.__annotations__ = function.__kwdefaults__, function.__annotations__
    return renamed
