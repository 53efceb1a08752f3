"""Tensors that lie on the host while the device does without them.

    forward     keep --> host           begins to leave when it is handed over
    backward    host --> begin, wait    on its way while the device computes something else
                host <-- put_back       what was changed on the device, such as sums of gradients

With a GPU the host's memory is pinned, with a stream for each direction; tensors are cut from segments of it. On CPUs
it is files without a name in TMPDIR, mapped into memory, where kernels read and change them. The operating system
writes these to disk where memory is scarce, and deletes them when their tensors or the process end, however that
happens.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from errno import EDQUOT, EFBIG, EMFILE, ENFILE, ENOMEM, ENOSPC
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.pinned_segments import pinned_bytes, segment_of
from slipstream.units import bytes_text


class Tenant(NamedTuple):
    """The reason why tensors are on the host, for the error where it has no room."""

    setting: str  # the words that users type
    things: str  # what the tensors are
    smaller: str  # what to do for fewer bytes


class HostTensors(Protocol):
    """Some tensors on the host, which move together."""

    def begin(self) -> list[Tensor]:
        """Begins to bring them to the device, unless they are there; returns them, for use after `wait`."""
        ...

    def wait(self) -> list[Tensor]:
        """Makes whatever the device does from now on wait until they are there; returns them."""
        ...

    def put_back(self) -> None:
        """Begins to write to the host what the device has made of them, and leaves the device."""
        ...

    def leave(self) -> None:
        """Frees the device's memory, where it has changed nothing. Copies that were begun are finished first."""
        ...

    def on_host(self) -> list[Tensor]:
        """Returns the host's own tensors, once all that was begun is written to them: the caller may change them."""
        ...

    @property
    def num_bytes(self) -> int:
        """The bytes on the host."""
        ...


class HostMemory(Protocol):
    """Makes room on the host. Every method raises SlipstreamError where there is none."""

    def keep(self, tensors: Sequence[Tensor]) -> HostTensors:
        """Begins to write tensors of the device to the host; they stay on the device too, until they leave it."""
        ...

    def zeros(self, like: Sequence[Tensor], dtype: torch.dtype) -> HostTensors:
        """Returns zeros in the shapes of other tensors."""
        ...


def host_memory(device: torch.device, tenant: Tenant) -> HostMemory:
    """Returns the host's memory for tensors of a device."""
    return PinnedMemory(device, tenant) if device.type == "cuda" else FileMemory(tenant)


def return_freed_memory() -> None:
    """Has glibc return the memory of tensors to the system once they are freed, for as long as the process runs.

    It would keep the memory for later tensors, in pieces that these don't always fit, so that a process would grow with
    the number of slices. Other C libraries are left as they are.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _SMALL)


_MMAP_THRESHOLD = -3  # mallopt's name of the size from which memory is mapped, and unmapped once it is freed
_SMALL = 128 * 1024  # bytes


class FileMemory:
    """The host's memory of CPUs: files."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant

    def keep(self, tensors: Sequence[Tensor]) -> HostTensors:
        """See `HostMemory`."""
        kept = _mapped(tensors, self._tenant)
        for there, tensor in zip(kept, tensors, strict=True):
            there.copy_(tensor)
        return FileTensors(kept)

    def zeros(self, like: Sequence[Tensor], dtype: torch.dtype) -> HostTensors:
        """See `HostMemory`."""
        return FileTensors(_mapped(like, self._tenant, dtype))


class FileTensors:
    """Tensors in a file, which are on host and device alike."""

    def __init__(self, kept: list[Tensor]) -> None:
        self._kept = kept

    def begin(self) -> list[Tensor]:
        """See `HostTensors`."""
        return self._kept

    def wait(self) -> list[Tensor]:
        """See `HostTensors`."""
        return self._kept

    def put_back(self) -> None:
        """See `HostTensors`."""

    def leave(self) -> None:
        """See `HostTensors`."""

    def on_host(self) -> list[Tensor]:
        """See `HostTensors`."""
        return self._kept

    @property
    def num_bytes(self) -> int:
        """See `HostTensors`."""
        return sum(tensor.nbytes for tensor in self._kept)


# Where a tensor of any dtype, and a line of the processor's cache, may begin.
_ALIGNMENT = 64
_OPEN_FILES = "/proc/self/fd/"
_LARGER_DISK = "Set TMPDIR to a folder on a larger disk, or {smaller}."
_MORE_FILES = "Raise the limit of open files, ulimit -n."
_ADVICE: Mapping[int, str] = {
    ENOSPC: _LARGER_DISK,
    EDQUOT: _LARGER_DISK,
    EFBIG: _LARGER_DISK,
    ENOMEM: "Give fewer slices, each of which has files of its own, or raise the kernel's vm.max_map_count.",
    EMFILE: _MORE_FILES,
    ENFILE: _MORE_FILES,
}


def _mapped(like: Sequence[Tensor], tenant: Tenant, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Returns zeros in the shapes of other tensors, all in one unnamed file.

    Raises SlipstreamError where the disk has no room for them, or the process may map no more files.
    """
    places = list[int]()  # the first byte of each
    size = 0
    for tensor in like:
        places.append(size)
        num_bytes = tensor.numel() * (dtype or tensor.dtype).itemsize
        size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    mapping = _mapped_file(size, tenant) if size else torch.empty(0, dtype=torch.uint8)
    mapped = list[Tensor]()
    for tensor, place in zip(like, places, strict=True):
        chosen = dtype or tensor.dtype
        part = mapping[place : place + tensor.numel() * chosen.itemsize]
        mapped.append(part.view(chosen).view(tensor.shape))
    return mapped


def _mapped_file(size: int, tenant: Tenant) -> Tensor:
    """Returns the zeros of a new file, (size,) bytes, which holds no file descriptor."""
    try:
        with tempfile.TemporaryFile(prefix="slipstream-") as file:
            # A file with holes would end the process where a disk is full.
            os.posix_fallocate(file.fileno(), 0, size)
            try:
                return torch.from_file(f"{_OPEN_FILES}{file.fileno()}", shared=True, size=size, dtype=torch.uint8)
            except RuntimeError:
                # PyTorch's error has the number in its text alone; the file is open, so no mapping was left.
                raise OSError(ENOMEM, os.strerror(ENOMEM)) from None
    except OSError as error:
        if (advice := _ADVICE.get(error.errno or 0)) is None:
            raise
        raise SlipstreamError(
            f"{tenant.setting}: {bytes_text(size)} more {tenant.things} don't fit in {tempfile.gettempdir()} "
            f"({error.strerror}). {advice.format(smaller=tenant.smaller)}"
        ) from None


def lies_in_file(tensor: Tensor) -> bool:
    """Returns whether a tensor of the CPU lies in a file of the host's memory, which takes none of the device's."""
    name = tensor.untyped_storage().filename
    return name is not None and name.startswith(_OPEN_FILES)


class HostSegments:
    """Memory of the host for copies of a device's tensors, pinned where that is a GPU.

    Tensors are cut from segments, one after the other. A segment returns to PyTorch with the last of its tensors, once
    their copies are done, and until then the places of the others stay empty.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._open = self._segment(0)  # the segment that new tensors are cut from
        self._end = 0  # its first byte that none has had

    def like(self, tensor: Tensor) -> Tensor:
        """Returns memory for a tensor, with its dims in the order in which the device has them."""
        strides = torch.empty_like(tensor, device="meta").stride()
        return self.take(tensor.nbytes).view(tensor.dtype).as_strided(tensor.shape, strides)

    def take(self, size: int) -> Tensor:
        """Returns memory of some bytes, (size,)."""
        segment, num_tensors = segment_of(size)
        if num_tensors == 1:
            return _part(self._segment(size), 0, size)
        if self._end + size > self._open.nbytes():
            self._open = self._segment(int(segment))
            self._end = 0
        taken = _part(self._open, self._end, size)
        self._end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return taken

    def _segment(self, size: int) -> torch.UntypedStorage:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned).untyped_storage()


def _part(segment: torch.UntypedStorage, start: int, size: int) -> Tensor:
    """Returns some bytes of a segment; unlike a slice, they have a version of their own."""
    part = torch.empty(0, dtype=torch.uint8, device="cpu")
    return part.set_(segment, start, (size,), (1,))


class PinnedMemory:
    """The host's memory of a GPU: pinned, with a stream for each direction."""

    def __init__(self, device: torch.device, tenant: Tenant) -> None:
        self._device = device
        self._tenant = tenant
        self._segments = HostSegments(device)
        self._inward: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._outward: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def keep(self, tensors: Sequence[Tensor]) -> HostTensors:
        """See `HostMemory`."""
        return PinnedTensors(self, [*tensors], is_new=True)

    def zeros(self, like: Sequence[Tensor], dtype: torch.dtype) -> HostTensors:
        """See `HostMemory`."""

        def make() -> list[Tensor]:
            return [torch.zeros_like(tensor, dtype=dtype, device=self._device) for tensor in like]

        there, arrived = self.bring(make, None)
        return PinnedTensors(self, there, is_new=False, arrived=arrived)

    def pinned(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Returns pinned memory for tensors, with their dims in the order in which the device has them."""
        try:
            return [self._segments.like(tensor) for tensor in like]
        except RuntimeError as error:
            size = sum(tensor.nbytes for tensor in like)
            raise SlipstreamError(
                f"{self._tenant.setting}: {bytes_text(size)} more {self._tenant.things} don't fit in the host's pinned "
                f"memory ({str(error).splitlines()[0]}). Use a host with more memory, or {self._tenant.smaller}."
            ) from None

    def write(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> torch.cuda.Event:
        """Begins to copy to the host what the current stream has computed; returns the event at the end."""
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
                # The allocator keeps the tensor for this stream until its copy is done.
                source.record_stream(self._outward)
        done: torch.cuda.Event = self._outward.record_event()
        return done

    def bring(
        self, make: Callable[[], list[Tensor]], written: torch.cuda.Event | None
    ) -> tuple[list[Tensor], torch.cuda.Event]:
        """Begins to make tensors on the device after an event; returns them and the event at the end."""
        if written is not None:
            self._inward.wait_event(written)
        with torch.cuda.stream(self._inward):
            there = make()
        arrived: torch.cuda.Event = self._inward.record_event()
        return there, arrived

    def read(self, kept: Sequence[Tensor], written: torch.cuda.Event) -> tuple[list[Tensor], torch.cuda.Event]:
        """Begins to copy the host's tensors to the device once they were written; returns as `bring`."""
        return self.bring(lambda: [tensor.to(self._device, non_blocking=True) for tensor in kept], written)

    def await_event(self, arrived: torch.cuda.Event, tensors: Sequence[Tensor]) -> None:
        """Makes the current stream wait for tensors that it will use."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        for tensor in tensors:
            tensor.record_stream(current)


class PinnedTensors:
    """Tensors in pinned memory. They are read again only after they were written.

    Zeros take host memory from their first `put_back` on.
    """

    def __init__(
        self, memory: PinnedMemory, there: list[Tensor], is_new: bool, arrived: torch.cuda.Event | None = None
    ) -> None:
        """`is_new` is whether the host is to get them now; `arrived` the event that ends their making."""
        self._memory = memory
        self._there = there
        self._arrived = arrived
        self._kept = list[Tensor]()
        self._written: torch.cuda.Event | None = None
        if is_new:
            self._write()

    def begin(self) -> list[Tensor]:
        """See `HostTensors`."""
        if self._kept and not self._there:
            assert self._written is not None
            self._there, self._arrived = self._memory.read(self._kept, self._written)
        return self._there

    def wait(self) -> list[Tensor]:
        """See `HostTensors`."""
        if self._arrived is not None:
            self._memory.await_event(self._arrived, self._there)
            self._arrived = None
        return self._there

    def put_back(self) -> None:
        """See `HostTensors`."""
        self._write()
        self.leave()

    def leave(self) -> None:
        """See `HostTensors`."""
        self._there = []
        self._arrived = None

    def on_host(self) -> list[Tensor]:
        """See `HostTensors`."""
        if not self._kept:
            self.wait()
            self._write()
        assert self._written is not None
        self._written.synchronize()
        return self._kept

    @property
    def num_bytes(self) -> int:
        """See `HostTensors`."""
        return round(sum(float(pinned_bytes(tensor.nbytes)) for tensor in self._kept))

    def _write(self) -> None:
        if not self._kept:
            self._kept = self._memory.pinned(self._there)
        self._written = self._memory.write(self._there, self._kept)
