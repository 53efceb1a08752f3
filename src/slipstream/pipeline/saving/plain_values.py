"""Values of Python as JSON can hold them, and back: JSON alone turns tuples into lists, and keys into text."""

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
        return [encode(each, f"{name}[{place}]") for place, each in enumerate(value)]
    if type(value) is _SEQUENCES.get(kind):
        return {kind: [encode(each, f"{name}[{place}]") for place, each in enumerate(value)]}
    if type(value) is _MAPPINGS.get(kind):
        return {
            kind: [[encode(key, f"a key of {name}"), encode(each, f"{name}[{key!r}]")] for key, each in value.items()]
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
    """Returns what `encode` was given; tensors are on the CPU."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return torch.tensor(content[0], dtype=getattr(torch, content[1]))
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(key): decode(each) for key, each in content})
    return _SEQUENCES[kind](decode(each) for each in content)
