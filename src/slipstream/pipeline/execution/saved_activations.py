"""Keeps what forwards save for a later R or OFFLOAD, and moves it to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from slipstream.attention import ContextStore
from slipstream.model import Tensors, model_storages, storage_ids
from slipstream.model.autograd_memory import RecomputePolicy, SavedTensors, SliceReplay
from slipstream.pipeline.batch import Stage
from slipstream.pipeline.execution.step_state import OffloadedBlocks, SliceKey, StepState, host_memory_of, key_of
from slipstream.schedule import Action, Op, Schedule


class BlockMoves(Protocol):
    """Moves blocks to the host and back in one step of a rank, by stage, microbatch and slice."""

    def offload(self, key: SliceKey, take_out: Callable[[], list[Tensor]]) -> None:
        """Begins to move to the host what `take_out` returns and nobody else holds."""

    def reload(self, key: SliceKey, put_back: Callable[[list[Tensor]], None]) -> None:
        """Begins to bring blocks back, and calls `put_back` with what may be used after `await_reload`."""

    def await_reload(self, key: SliceKey) -> None:
        """Makes whatever the device does from now on wait for blocks, if they were offloaded."""


class EagerMoves:
    """Moves blocks when it is asked to, each time to other memory.

    Args:
        to_host: begins to move blocks.
        offloaded: holds what is on the host.
    """

    def __init__(
        self, to_host: Callable[[list[Tensor]], OffloadedBlocks], offloaded: dict[SliceKey, OffloadedBlocks]
    ) -> None:
        self._to_host, self._offloaded = to_host, offloaded

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

    def __init__(self, stages: Mapping[int, Stage], recompute: RecomputePolicy | None, device: torch.device) -> None:
        self._stages, self._recompute = stages, recompute or RecomputePolicy()
        self._to_host = host_memory_of(device)

    def begin(self, schedule: Schedule, rank: int, state: StepState, moves: BlockMoves | None) -> None:
        """Begins a step; without `moves` they are eager."""
        self._moves = moves or EagerMoves(self._to_host, state.offloaded)
        self._schedule, self._state = schedule, state
        saves = any(action.op in (Op.R, Op.OFFLOAD) for action in schedule.actions[rank])
        self._storages = {number: model_storages(stage.model) for number, stage in self._stages.items() if saves}

    def around_forward(
        self, action: Action, inputs: Tensors, needs_gradient: Sequence[bool], store: ContextStore
    ) -> AbstractContextManager[None]:
        """Prepares for the forward's R and OFFLOAD, if it has them."""
        recomputed = self._is_scheduled(Op.R, action)
        if not recomputed and not self.is_offloaded(action):
            return nullcontext()
        g, m, i = key = key_of(action)
        stage, piece, targets = self._stages[g], self._state.batch.slices[m][i], self._state.batch.targets[m][i]
        shared = self._storages[g] | storage_ids((*piece.tensors, targets, *store.carried.values))
        what = self._recompute if recomputed else None
        replay = SliceReplay(SavedTensors(shared), what, stage.layers_here, inputs, needs_gradient)
        self._state.replays[key] = replay
        return replay.forward(store)

    def is_offloaded(self, action: Action) -> bool:
        """Returns whether the slice of an action on its stage goes to the host."""
        return self._is_scheduled(Op.OFFLOAD, action)

    def offload(self, action: Action) -> None:
        """Begins to move a slice to the host."""
        key = key_of(action)
        self._moves.offload(key, lambda: self._state.replays[key].saved.take_out())

    def reload(self, action: Action) -> None:
        """Begins to bring a slice back; `await_reload` ends it."""
        key = key_of(action)
        self._moves.reload(key, lambda blocks: self._state.replays[key].saved.put_back(blocks))

    def await_reload(self, key: SliceKey) -> None:
        """Waits for a slice that comes back, if it was offloaded."""
        self._moves.await_reload(key)

    def _is_scheduled(self, op: Op, action: Action) -> bool:
        return action.with_op(op) in self._schedule.positions
