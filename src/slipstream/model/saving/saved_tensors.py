"""Holds what autograd saves in the forward of one slice: kept, dropped until it is recomputed, or moved to the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from slipstream.model.storages import storage_bytes, storage_id

_autograd: Any = torch._C._autograd


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Lets autograd keep what is saved from here on: for code that differentiates in its forward, which needs it there,
    and by torch.func, which refuses hooks."""
    hooks: list[Any] = []
    while top := _autograd._top_saved_tensors_default_hooks(False):
        hooks.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


class RecomputationError(RuntimeError):
    """Raised where a forward did not repeat itself or a tensor is missing: a mistake of model or schedule."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class SavedTensorSlot:
    """Represents one saved tensor in the autograd graph, and is freed with the node that saved it."""

    tensor: Tensor | None  # without grad_fn, or the graph would keep itself alive; None: dropped, or moved to the host
    shape: torch.Size


@dataclass
class _MovedTensor:
    """The place of a tensor in its storage, while the storage is on the host."""

    slot: SavedTensorSlot
    block: int
    dtype: torch.dtype
    layout: tuple[int, torch.Size, tuple[int, ...]]  # offset, size and stride


class SavedTensors:
    """The saved tensors of one slice on one stage, from its forward to its backward.

    The graph holds the slots, so that a backward frees memory node by node as it does without this class. A repeated
    forward saves the same tensors in the same order, which is how a dropped one finds its slot again:

        forward   x  y  z  w     the graph keeps x and w, drops y and z
        replay    x' y' z'       y' and z' fill the slots; after the last dropped one the replay ends

    Args:
        shared: identities of storages that others keep anyway (parameters, the batch): never moved, not counted.
    """

    def __init__(self, shared: set[int]) -> None:
        self._shared = shared
        self._slots: list[weakref.ref[SavedTensorSlot]] = []
        self._held: list[weakref.ref[SavedTensorSlot]] = []
        self._moved: list[_MovedTensor] = []
        self.is_refilled = False

    def saving(
        self, keeps: Callable[[Tensor], bool], recompute: Callable[[], None] | None = None
    ) -> AbstractContextManager[object]:
        """Returns a context for the forward that keeps those saved tensors for which `keeps` is true, and drops the
        others.

        A backward that needs a dropped one calls `recompute`, if that is given, which must `refill` them all.
        """

        def pack(tensor: Tensor) -> SavedTensorSlot:
            slot = SavedTensorSlot(tensor.detach() if keeps(tensor) else None, tensor.shape)
            self._slots.append(weakref.ref(slot))
            return slot

        def unpack(slot: SavedTensorSlot) -> Tensor:
            if slot.tensor is None and recompute is not None:
                recompute()
            return _unpack(slot)

        return saved_tensors_hooks(pack, unpack)

    def hold(self, tensor: Tensor) -> SavedTensorSlot:
        """Returns a slot for a tensor that the caller needs for the replay: moved and counted like the graph's."""
        slot = SavedTensorSlot(tensor, tensor.shape)
        self._held.append(weakref.ref(slot))
        return slot

    def refill(self, run: Callable[[], object], at_once: bool = True) -> None:
        """Repeats the forward by calling `run`, until every slot that was dropped is filled: then `is_refilled`, and
        `run` ends `at_once` or by itself, by ReplayFinished or not.

        Raises RecomputationError where it saves different tensors from the first time.
        """
        slots = [reference() for reference in self._slots]
        dropped = {i: slot for i, slot in enumerate(slots) if slot is not None and slot.tensor is None}
        last, count = max(dropped, default=-1), 0
        self.is_refilled = False

        def pack(tensor: Tensor) -> None:
            nonlocal count
            if count in dropped:
                _fill(dropped[count], tensor)
            count += 1
            if count > last:
                self.is_refilled = True
                if at_once:
                    raise ReplayFinished

        if dropped:
            try:
                with saved_tensors_hooks(pack, _unpack):
                    run()
            except ReplayFinished:
                return
            if not self.is_refilled:
                raise RecomputationError(f"a forward saved {last + 1} tensors or more, its recomputation {count}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages that are kept here and nowhere else."""
        return storage_bytes((tensor for _, tensor in self._filled()), self._shared)

    def take_out(self) -> list[Tensor]:
        """Releases all tensors that aren't shared. Returns their storages, each once, as tensors of bytes."""
        blocks: list[Tensor] = []
        numbers: dict[int, int] = {}  # storage -> index in blocks
        for slot, tensor in self._filled():
            identity = storage_id(tensor)
            if identity in self._shared:
                continue
            if identity not in numbers:
                numbers[identity] = len(blocks)
                storage = tensor.untyped_storage()
                blocks.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            layout = int(tensor.storage_offset()), tensor.shape, tensor.stride()
            self._moved.append(_MovedTensor(slot, numbers[identity], tensor.dtype, layout))
            slot.tensor = None
        return blocks

    def put_back(self, blocks: list[Tensor]) -> None:
        """Undoes `take_out`, given the same bytes in new storages."""
        for moved in self._moved:
            tensor = torch.empty(0, dtype=moved.dtype, device=blocks[moved.block].device)
            moved.slot.tensor = tensor.set_(blocks[moved.block].untyped_storage(), *moved.layout)
        self._moved.clear()

    def _filled(self) -> Iterator[tuple[SavedTensorSlot, Tensor]]:
        slots = (reference() for reference in (*self._slots, *self._held))
        return ((slot, slot.tensor) for slot in slots if slot is not None and slot.tensor is not None)


class ReplayFinished(Exception):  # noqa: N818  not an error: the replay has done its work
    """Ends a replay."""


def _fill(slot: SavedTensorSlot, tensor: Tensor) -> None:
    if tensor.shape != slot.shape:
        raise RecomputationError(f"a forward saved {tuple(slot.shape)}, its recomputation {tuple(tensor.shape)}")
    slot.tensor = tensor.detach()


def _unpack(slot: SavedTensorSlot) -> Tensor:
    if slot.tensor is None:
        raise RecomputationError("a backward runs before what its forward dropped is recomputed and reloaded")
    return slot.tensor
