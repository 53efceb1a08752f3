"""Host memory for offloaded activations: pinned buffers and a separate stream on CUDA, a file on the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor


class OffloadedBlocks(Protocol):
    """Blocks of bytes on the host. The device's memory is free as soon as the caller drops what was offloaded."""

    def load(self) -> list[Tensor]:
        """Begins to copy the blocks into new memory of the device. Use them after `wait`."""

    def wait(self) -> None:
        """Makes whatever the device does from now on wait until the loaded blocks are there."""

    def close(self) -> None:
        """Frees the host's memory, whether the blocks were loaded or not."""


def host_memory_of(device: torch.device) -> Callable[[list[Tensor]], OffloadedBlocks]:
    """Returns a function that begins to move blocks of a device's memory to the host."""
    if device.type != "cuda":
        return BlocksInFile
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return partial(PinnedBlocks, stream=stream)


class BlocksInFile:
    """Blocks of the CPU's memory in a temporary file without a name, in TMPDIR.

    The operating system deletes it when it is closed, however the process ends.
    """

    def __init__(self, blocks: list[Tensor]) -> None:
        self._sizes = [block.numel() for block in blocks]
        self._file = tempfile.TemporaryFile(prefix="slipstream-")  # noqa: SIM115
        for block in blocks:
            self._file.write(block.numpy().data)

    def load(self) -> list[Tensor]:
        blocks = [torch.empty(size, dtype=torch.uint8) for size in self._sizes]
        self._file.seek(0)
        for block in blocks:
            self._file.readinto(block.numpy().data)
        return blocks

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self._file.close()


class PinnedBlocks:
    """Blocks in pinned memory, copied alongside the computing on one stream, in the order of the schedule."""

    def __init__(self, blocks: list[Tensor], stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._device = stream.device
        stream.wait_stream(torch.cuda.current_stream(self._device))  # what is copied must have been computed
        with torch.cuda.stream(stream):
            self._pinned = [torch.empty(block.shape, dtype=block.dtype, pin_memory=True) for block in blocks]
            for block, pinned in zip(blocks, self._pinned, strict=True):
                pinned.copy_(block, non_blocking=True)
                block.record_stream(stream)  # not given to others before the copy is done

    def load(self) -> list[Tensor]:
        with torch.cuda.stream(self._stream):
            blocks = [pinned.to(self._device, non_blocking=True) for pinned in self._pinned]
        for block in blocks:
            block.record_stream(torch.cuda.current_stream(self._device))
        self._loaded = self._stream.record_event()
        return blocks

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._loaded)

    def close(self) -> None:
        self._pinned.clear()
