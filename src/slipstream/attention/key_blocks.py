"""Where a microbatch's keys and values lie: on the device as whole buffers, or on the host as a block for each slice.

On the host, a slice attends to one block after the other, and the next one is on its way meanwhile; in a backward the
sums of a block's gradients come and go with it:

    device      own | block 2 | block 1 | block 0        outputs are merged by their log-sum-exps
    host        ....... block 2, block 1, block 0        pinned memory with a GPU, else an unnamed file
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from errno import EDQUOT, EFBIG, ENOMEM, ENOSPC
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.attention.masks import KeyRanges
from slipstream.errors import SlipstreamError
from slipstream.units import bytes_text


class KeyBlock(NamedTuple):
    """Some keys and values that a slice's queries see, and in a backward the sums of their gradients."""

    ranges: KeyRanges  # the keys visible to each query
    key: Tensor  # (B,Hkv,n,D), from the first key on that any query sees
    value: Tensor  # (B,Hkv,n,Dv)
    sums: tuple[Tensor, ...] = ()  # sums of both gradients in float32 or wider; empty in a forward


class HostBlock(Protocol):
    """One slice's keys and values on the host, with the sums of their gradients once there are any."""

    def begin(self, with_sums: bool) -> None:
        """Begins to bring the block to the device; the sums are zeros the first time."""
        ...

    def tensors(self) -> list[Tensor]:
        """Returns what was begun, on the device: key, value and perhaps their sums (B,Hkv,n,D)."""
        ...

    def put_back(self) -> None:
        """Returns the sums to the host, and leaves the device."""
        ...

    @property
    def num_bytes(self) -> int:
        """The bytes on the host."""
        ...


class HostMemory(Protocol):
    """Makes blocks on the host."""

    def keep(self, key: Tensor, value: Tensor) -> HostBlock:
        """Begins to write a slice's keys and values to the host."""
        ...


def context_on_host(device: torch.device) -> HostMemory:
    """Returns the host's memory for keys and values of a model on a device."""
    return PinnedMemory(device) if device.type == "cuda" else FileMemory()


_LARGER_DISK = "Set TMPDIR to a folder on a larger disk, or shorten the sequence."
_ADVICE: Mapping[int, str] = {
    ENOSPC: _LARGER_DISK,
    EDQUOT: _LARGER_DISK,
    EFBIG: _LARGER_DISK,
    ENOMEM: "Give fewer slices, of which each has two files in every layer, or raise the kernel's vm.max_map_count.",
}


class FileMemory:
    """The host's memory of a model on CPUs: files without a name, in TMPDIR.

    The operating system writes it to disk where memory is scarce, and deletes it when the tensor or the process ends,
    however that happens.
    """

    def keep(self, key: Tensor, value: Tensor) -> HostBlock:
        """See `HostMemory`."""
        return FileBlock(key, value)


class FileBlock:
    """A block in files that are mapped into memory, where kernels read and add to it."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self._kept = _mapped(key.dtype, key.shape, value.shape)
        for kept, each in zip(self._kept, (key, value), strict=True):
            kept.copy_(each)
        self._num_used = 0

    def begin(self, with_sums: bool) -> None:
        """See `HostBlock`."""
        if with_sums and len(self._kept) == 2:
            self._kept += _mapped(_wide(self._kept[0]), *(each.shape for each in self._kept))
        self._num_used = 4 if with_sums else 2

    def tensors(self) -> list[Tensor]:
        """See `HostBlock`."""
        return self._kept[: self._num_used]

    def put_back(self) -> None:
        """See `HostBlock`."""

    @property
    def num_bytes(self) -> int:
        """See `HostBlock`."""
        return sum(tensor.nbytes for tensor in self._kept)


def _mapped(dtype: torch.dtype, *shapes: torch.Size) -> list[Tensor]:
    """Returns zeros in an unnamed file, one for all shapes.

    Raises SlipstreamError where the disk has no room for them, or the process may map no more files.
    """
    sizes = [shape.numel() for shape in shapes]
    size = dtype.itemsize * sum(sizes)
    if not size:
        return [torch.empty(shape, dtype=dtype) for shape in shapes]
    try:
        with tempfile.TemporaryFile(prefix="slipstream-") as file:
            # A file with holes would end the process where a disk is full.
            os.posix_fallocate(file.fileno(), 0, size)
            mapping = mmap.mmap(file.fileno(), size)
    except OSError as error:
        if (advice := _ADVICE.get(error.errno or 0)) is None:
            raise
        raise SlipstreamError(
            f"memory.context=host: {bytes_text(size)} more keys and values don't fit in {tempfile.gettempdir()} "
            f"({error.strerror}). {advice}"
        ) from None
    parts = torch.split_with_sizes(torch.frombuffer(mapping, dtype=dtype), sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _wide(each: Tensor) -> torch.dtype:
    return torch.promote_types(each.dtype, torch.float32)


class PinnedMemory:
    """The host's memory of a GPU: pinned, with a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.inward: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.outward: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def keep(self, key: Tensor, value: Tensor) -> HostBlock:
        """See `HostMemory`."""
        return PinnedBlock(self, key, value)

    def copy_out(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> torch.cuda.Event:
        """Copies to the host what the current stream has computed; returns the event at the end."""
        self.outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.outward):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self.outward)
        done: torch.cuda.Event = self.outward.record_event()
        return done


class PinnedBlock:
    """A block in pinned memory. It is read again only after it was written."""

    def __init__(self, memory: PinnedMemory, key: Tensor, value: Tensor) -> None:
        self._memory = memory
        self._kept = [_pinned(each) for each in (key, value)]
        self._written = memory.copy_out((key, value), self._kept)
        self._there = [key, value]  # until the slice has attended to its own keys
        self._arrived: torch.cuda.Event | None = None

    def begin(self, with_sums: bool) -> None:
        """See `HostBlock`."""
        if self._there and not with_sums:
            return
        inward = self._memory.inward
        inward.wait_event(self._written)
        with torch.cuda.stream(inward):
            kept = self._kept if with_sums else self._kept[:2]
            self._there = [tensor.to(self._memory.device, non_blocking=True) for tensor in kept]
            if with_sums and len(kept) == 2:
                self._there += [torch.zeros_like(tensor, dtype=_wide(tensor)) for tensor in self._there]
        self._arrived = inward.record_event()

    def tensors(self) -> list[Tensor]:
        """See `HostBlock`."""
        current = torch.cuda.current_stream(self._memory.device)
        if self._arrived is not None:
            current.wait_event(self._arrived)
            for tensor in self._there:
                tensor.record_stream(current)
        return self._there

    def put_back(self) -> None:
        """See `HostBlock`."""
        if len(self._there) == 4:
            sums = self._there[2:]
            if len(self._kept) == 2:
                self._kept += [_pinned(each) for each in sums]
            self._written = self._memory.copy_out(sums, self._kept[2:])
        self._there = []

    @property
    def num_bytes(self) -> int:
        """See `HostBlock`."""
        return sum(tensor.nbytes for tensor in self._kept)


def _pinned(like: Tensor) -> Tensor:
    """Returns pinned memory for a tensor, with heads and tokens in the order in which the device has them."""
    return torch.empty_like(like, device="cpu", pin_memory=True)


def streamed(blocks: Sequence[tuple[int, HostBlock, KeyRanges]], with_sums: bool) -> Iterator[KeyBlock]:
    """Yields what queries see of blocks, on the device, the next block on its way; the sums of all but the first return
    to the host once they were added to.

    Args:
        blocks: the first token of each, and which of its keys each query sees.
        with_sums: whether gradients are added up.
    """
    for _, block, _ in blocks[:1]:
        block.begin(with_sums)
    for index, (start, block, ranges) in enumerate(blocks):
        if index + 1 < len(blocks):
            blocks[index + 1][1].begin(with_sums)
        seen = ranges.first - start, ranges.keys_end - ranges.first
        key, value, *sums = (tensor.narrow(2, *seen) for tensor in block.tensors())
        yield KeyBlock(ranges, key, value, tuple(sums))
        # The slice's own sums become final in its backward, and are needed here.
        if index or not with_sums:
            block.put_back()
