"""Keeps the saved tensors of forwards for a later R or OFFLOAD, and moves them to the host and back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from slipstream.attention import ContextStore
from slipstream.model import (
    PipelineStage,
    RecomputePolicy,
    SavedTensors,
    SliceReplay,
    Tensors,
    TensorSpec,
    model_storages,
    storage_ids,
)
from slipstream.pipeline.execution.rank_program import ProgramStep, SliceKey
from slipstream.pipeline.execution.step_state import OffloadedBlocks, StepState


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
        # The copies start once the tensors have been computed.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._pinned = [torch.empty(block.shape, dtype=block.dtype, pin_memory=True) for block in blocks]
            for block, pinned in zip(blocks, self._pinned, strict=True):
                pinned.copy_(block, non_blocking=True)
                # The allocator keeps the block for this stream until its copy is done.
                block.record_stream(stream)

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


class BlockMoves(Protocol):
    """Moves blocks to the host and back in one step of a rank, by stage, microbatch and slice."""

    def offload(self, key: SliceKey, take_out: Callable[[], list[Tensor]]) -> None:
        """Begins to move to the host the blocks that `take_out` returns and nobody else holds."""

    def reload(self, key: SliceKey, put_back: Callable[[list[Tensor]], None]) -> None:
        """Begins to bring blocks back, and calls `put_back` with blocks that may be used after `await_reload`."""

    def await_reload(self, key: SliceKey) -> None:
        """Makes whatever the device does from now on wait for blocks, if they were offloaded."""


class EagerMoves:
    """Moves blocks when it is asked to, each time to other memory.

    Args:
        to_host: begins to move blocks.
        offloaded: holds the blocks on the host.
    """

    def __init__(
        self, to_host: Callable[[list[Tensor]], OffloadedBlocks], offloaded: dict[SliceKey, OffloadedBlocks]
    ) -> None:
        self._to_host = to_host
        self._offloaded = offloaded

    def offload(self, key: SliceKey, take_out: Callable[[], list[Tensor]]) -> None:
        """See `BlockMoves`."""
        self._offloaded[key] = self._to_host(take_out())

    def reload(self, key: SliceKey, put_back: Callable[[list[Tensor]], None]) -> None:
        """See `BlockMoves`."""
        put_back(self._offloaded[key].load())

    def await_reload(self, key: SliceKey) -> None:
        """See `BlockMoves`."""
        if key in self._offloaded:
            blocks = self._offloaded.pop(key)
            blocks.wait()
            blocks.close()


class SavedActivations:
    """The saved activations of one rank; without R and OFFLOAD in the schedule, saving is left to autograd."""

    def __init__(
        self, stages: Mapping[int, PipelineStage], recompute: RecomputePolicy | None, device: torch.device
    ) -> None:
        self._stages = stages
        self._recompute = recompute or RecomputePolicy(by_stage=True)
        self._to_host = host_memory_of(device)

    def begin(self, state: StepState, moves: BlockMoves | None) -> None:
        """Begins a step; without `moves` they are eager."""
        self._moves = moves or EagerMoves(self._to_host, state.offloaded)
        self._state = state
        self._storages = {stage_index: model_storages(stage.model) for stage_index, stage in self._stages.items()}

    def around_forward(
        self, step: ProgramStep, inputs: Tensors, specs: Sequence[TensorSpec], store: ContextStore
    ) -> AbstractContextManager[None]:
        """Prepares for the R and OFFLOAD of a forward."""
        g, m, i = step.key
        shared = self._storages[g] | storage_ids((*self._state.batch.tensors_of(m, i), *store.carried.values))
        what = self._recompute if step.is_recomputed else None
        needs_gradient = [spec.needs_gradient for spec in specs]
        replay = SliceReplay(SavedTensors(shared), what, inputs, needs_gradient)
        self._state.replays[step.key] = replay
        return replay.forward(store)

    def offload(self, step: ProgramStep) -> None:
        """Begins to move a slice to the host."""
        self._moves.offload(step.key, lambda: self._state.replays[step.key].saved.take_out())

    def reload(self, step: ProgramStep) -> None:
        """Begins to bring a slice back; `await_reload` ends it."""
        self._moves.reload(step.key, lambda blocks: self._state.replays[step.key].saved.put_back(blocks))

    def await_reload(self, step: ProgramStep) -> None:
        """Waits for a slice that comes back."""
        self._moves.await_reload(step.key)
