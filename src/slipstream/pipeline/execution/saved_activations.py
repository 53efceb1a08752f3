"""Keeps the saved tensors of forwards for a later R or OFFLOAD, and moves them to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from slipstream.attention import ContextStore
from slipstream.host_memory import HostMemory, HostTensors
from slipstream.model import (
    PipelineStage,
    RecomputePolicy,
    SavedTensors,
    SliceReplay,
    Tensors,
    activations_on_host,
    model_storages,
    storage_ids,
)
from slipstream.pipeline.execution.rank_program import ProgramStep, SliceKey
from slipstream.pipeline.execution.step_state import StepState


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
        host: where they go.
        offloaded: holds those that are there.
    """

    def __init__(self, host: HostMemory, offloaded: dict[SliceKey, HostTensors]) -> None:
        self._host = host
        self._offloaded = offloaded

    def offload(self, key: SliceKey, take_out: Callable[[], list[Tensor]]) -> None:
        """See `BlockMoves`."""
        blocks = self._offloaded[key] = self._host.keep(take_out())
        blocks.leave()

    def reload(self, key: SliceKey, put_back: Callable[[list[Tensor]], None]) -> None:
        """See `BlockMoves`."""
        put_back(self._offloaded[key].begin())

    def await_reload(self, key: SliceKey) -> None:
        """See `BlockMoves`."""
        if key in self._offloaded:
            self._offloaded.pop(key).wait()


class SavedActivations:
    """The saved activations of one rank; without R and OFFLOAD in the schedule, saving is left to autograd."""

    def __init__(
        self, stages: Mapping[int, PipelineStage], recompute: RecomputePolicy | None, device: torch.device
    ) -> None:
        self._stages = stages
        self._recompute = recompute or RecomputePolicy(by_stage=True)
        self._host = activations_on_host(device)

    def begin(self, state: StepState, moves: BlockMoves | None) -> None:
        """Begins a step; without `moves` they are eager."""
        self._moves = moves or EagerMoves(self._host, state.offloaded)
        self._state = state
        self._storages = {stage_index: model_storages(stage.model) for stage_index, stage in self._stages.items()}

    @property
    def repeats_graph(self) -> bool:
        """Whether an R makes the graph of the backward, and F's is dropped."""
        return self._recompute.repeats_graph

    def around_forward(self, step: ProgramStep, inputs: Tensors, store: ContextStore) -> AbstractContextManager[None]:
        """Prepares for the R and OFFLOAD of a forward."""
        g, m, i = step.key
        shared = self._storages[g] | storage_ids((*self._state.batch.tensors_of(m, i), *store.carried.values))
        what = self._recompute if step.is_recomputed else None
        replay = SliceReplay(SavedTensors(shared), what, inputs)
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
