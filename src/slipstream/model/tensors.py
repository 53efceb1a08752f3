"""Tensors by their shapes and dtypes, before they exist, and the memory that they occupy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from slipstream.number_format import FORMATS

Tensors = tuple[Tensor, ...]


@overload
def torch_dtype(name: str) -> torch.dtype: ...
@overload
def torch_dtype(name: None) -> None: ...
def torch_dtype(name: str | None) -> torch.dtype | None:
    """Returns torch's dtype of a number format."""
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype


NARROW = tuple(torch_dtype(each.name) for each in FORMATS.values() if each.is_narrow)
"""The dtypes of sums that are kept in a wider one."""


class TensorSpec(NamedTuple):
    """The shape and type of a tensor that one stage sends to another."""

    shape: torch.Size
    dtype: torch.dtype
    needs_gradient: bool = True  # gradient sent back
    peer: int | None = None  # the other stage of a skip; None: a neighbour

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def copied_from_messages(tensors: Tensors, messages: Tensors) -> Tensors:
    """Returns the tensors, with detached copies of those that share memory with a message.

    A message's buffer is released before such a tensor is.
    """
    held = storage_ids(messages)
    safe = [*tensors]
    for place, tensor in enumerate(tensors):
        if storage_id(tensor) in held:
            safe[place] = _copy(tensor)
    return tuple(safe)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def storage_id(tensor: Tensor) -> int:
    """Returns the identity of the tensor's storage, while it is alive; on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


def storage_ids(tensors: Iterable[Tensor]) -> set[int]:
    """Returns the identities of the storages of tensors."""
    return set(map(storage_id, tensors))


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operator changes in place, of its arguments."""
    arguments = func._schema.arguments
    values = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    written = (values.get(argument.name) for argument in arguments if argument.is_write)
    return [value for value in written if isinstance(value, Tensor)]


def storage_bytes(tensors: Iterable[Tensor], apart_from: Iterable[int] = ()) -> int:
    """Returns the bytes of the storages of tensors, each storage once, without those of the given identities."""
    sizes = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes[identity] for identity in sizes.keys() - set(apart_from))


def tied_names(model: nn.Module) -> list[list[str]]:
    """Returns the names of each parameter: several where weights are tied."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [*names.values()]


def model_storages(model: nn.Module) -> set[int]:
    """Returns the identities of the storages of a model's parameters and buffers."""
    return storage_ids((*model.parameters(), *model.buffers()))


class SavedStorages:
    """The storages that autograd saves, those of `shared` tensors aside, each counted once.

    Its `pack` is the hook for `saved_tensors_hooks`.
    """

    def __init__(self, shared: Iterable[Tensor]) -> None:
        self._shared = storage_ids(shared)
        self._found: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Notes a tensor that is saved, and keeps it alive so that its storage's identity stays taken."""
        identity = storage_id(tensor)
        if identity not in self._shared:
            self._found.setdefault(identity, tensor)
        return tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages found so far."""
        return storage_bytes(self._found.values())

    def wide_bytes(self, width: int) -> int:
        """Returns the bytes of those that were first saved as rows of this width, such as (batch, tokens, width)."""
        return storage_bytes(t for t in self._found.values() if t.dim() in (2, 3) and t.shape[-1] == width)


def has_parameters(module: nn.Module) -> bool:
    """Returns whether a module has parameters; other stages' placeholders have none."""
    return next(module.parameters(), None) is not None
