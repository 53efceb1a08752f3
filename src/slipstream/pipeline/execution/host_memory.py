"""Host memory for offloaded activations: pinned buffers and a separate stream on CUDA, a file on the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

_Key = tuple[int, int, int]  # stage, microbatch, slice


class OffloadedBlocks(Protocol):
    """Blocks of bytes on the host. The device's memory is free as soon as the caller drops what was offloaded."""

    def load(self) -> list[Tensor]:
        """Begins to copy the blocks into new memory of the device. Use them after `wait`."""

    def wait(self) -> None:
        """Makes whatever the device does from now on wait until the loaded blocks are there."""

    def close(self) -> None:
        """Frees the host's memory, whether the blocks were loaded or not."""


class BlockMoves(Protocol):
    """Moves blocks to the host and back in one step of a rank, by stage, microbatch and slice."""

    def offload(self, key: _Key, take_out: Callable[[], list[Tensor]]) -> None:
        """Begins to move to the host what `take_out` returns and nobody else holds."""

    def reload(self, key: _Key, put_back: Callable[[list[Tensor]], None]) -> None:
        """Begins to bring blocks back, and calls `put_back` with what may be used after `await_reload`."""

    def await_reload(self, key: _Key) -> None:
        """Makes whatever the device does from now on wait for blocks, if they were offloaded."""


class EagerMoves:
    """Moves blocks when it is asked to, each time to other memory.

    Args:
        to_host: begins to move blocks.
        offloaded: holds what is on the host.
    """

    def __init__(
        self, to_host: Callable[[list[Tensor]], OffloadedBlocks], offloaded: dict[_Key, OffloadedBlocks]
    ) -> None:
        self._to_host, self._offloaded = to_host, offloaded

    def offload(self, key: _Key, take_out: Callable[[], list[Tensor]]) -> None:
        """See `BlockMoves`."""
        self._offloaded[key] = self._to_host(take_out())

    def reload(self, key: _Key, put_back: Callable[[list[Tensor]], None]) -> None:
        """See `BlockMoves`."""
        put_back(self._offloaded[key].load())

    def await_reload(self, key: _Key) -> None:
        """See `BlockMoves`."""
        if key in self._offloaded:
            blocks = self._offloaded.pop(key)
            blocks.wait()
            blocks.close()


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
