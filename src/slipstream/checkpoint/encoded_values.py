"""Values of a training loop as JSON holds them in a checkpoint, tensors among them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError

_SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "set": set, "deque": deque}
_MAPPINGS: dict[str, type[Any]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}


def encode(value: Any, name: str) -> Any:
    """Returns the value as JSON can hold it: None, truth values, numbers, text, lists, tuples, sets, dicts and Counters
    with keys of these, and tensors on the CPU or a GPU.

    Raises:
        SlipstreamError: for any other value; `name` says what it is.
    """
    kind = type(value).__name__
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(item, f"{name}[{place}]") for place, item in enumerate(value)]
    if type(value) is _SEQUENCES.get(kind):
        return {kind: [encode(item, f"{name}[{place}]") for place, item in enumerate(value)]}
    if type(value) is _MAPPINGS.get(kind):
        return {
            kind: [[encode(key, f"a key of {name}"), encode(item, f"{name}[{key!r}]")] for key, item in value.items()]
        }
    if type(value) is defaultdict:
        return encode(dict(value), name)
    if type(value) is Tensor and not value.is_complex():
        return {"tensor": [value.tolist(), str(value.dtype).removeprefix("torch.")]}
    raise SlipstreamError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint can't hold. It holds "
        "None, numbers, text, tensors, and lists, tuples, sets and dicts of these."
    )


def decode(value: Any) -> Any:
    """Returns the argument of `encode`; tensors are on the CPU."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return torch.tensor(content[0], dtype=getattr(torch, content[1]))
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(key): decode(item) for key, item in content})
    return _SEQUENCES[kind](decode(item) for item in content)
