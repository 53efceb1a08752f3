"""Moves what a recorded step has saved to the host and back, between the same addresses in every replay.

Each copy is recorded like an action, in its place among them: an OFFLOAD's reads what its F left in the memory of the
graphs, a RELOAD's fills memory of theirs that nothing else has until the backward. Replayed copies run alongside the
actions, in their order, each after the actions before it. An action waits for those whose memory it may touch:

    F0  OFFLOAD0  F1        F2           ...  RELOAD0  B2  B1  B0
        copy out .........  waits: its                 copy in  waits: it reads
        of F0's memory      memory is free             ......   what came in

So an OFFLOAD's memory is freed an action later than the schedule says, or the copy would have none to run alongside;
`slipstream.simulator.memory_of` counts it with `frees_late`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.pipeline.execution.step_state import SliceKey
from slipstream.schedule import Action

_Recorded = Callable[[], None]  # a copy


class CopyLane(Protocol):
    """Runs copies alongside the actions, in order, each after the actions that were started before it."""

    def start(self, copy: Callable[[], None]) -> Any:
        """Starts a copy; returns what `wait` takes."""

    def wait(self, copy: Any) -> None:
        """Lets the actions from now on begin when a copy is done."""


class StreamLane:
    """A stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, copy: Callable[[], None]) -> torch.cuda.Event:
        """See `CopyLane`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        done: torch.cuda.Event = self._stream.record_event()
        return done

    def wait(self, copy: torch.cuda.Event) -> None:
        """See `CopyLane`."""
        torch.cuda.current_stream(self._device).wait_event(copy)


class RecordedMoves:
    """The copies of one rank's step: recorded when they are first asked for, and replayed from then on."""

    def __init__(self, record: Callable[[Callable[[], None]], _Recorded], lane: CopyLane, device: torch.device) -> None:
        self._record, self._lane, self._device = record, lane, device
        self._outward: dict[SliceKey, _Recorded] = {}
        self._inward: dict[SliceKey, _Recorded] = {}
        self._on_host: dict[SliceKey, list[Tensor]] = {}  # where the copies of offloaded blocks lie
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # memory of the host, by its size
        self._held: list[tuple[SliceKey, list[Tensor]]] = []  # blocks whose copy begins before the next action
        self._ending: list[tuple[SliceKey, list[Tensor]]] = []  # that began before the last one
        self._ends: dict[Action, list[SliceKey]] = {}  # the copies for which an action waits
        self._leaving: dict[SliceKey, Any] = {}  # by the lane
        self._arriving: dict[SliceKey, Any] = {}  # likewise

    def begin(self) -> None:
        """Begins a step: after copies of one that failed, whose memory its actions may take."""
        for copy in (*self._leaving.values(), *self._arriving.values()):
            self._lane.wait(copy)
        self._leaving, self._arriving = {}, {}

    def before(self, action: Action) -> None:
        """Frees the memory of blocks whose copies had an action's time, so that this action may take it."""
        if action not in self._ends:
            self._ends[action] = [key for key, _ in self._ending]
            self._ending, self._held = self._held, []
        for key in self._ends[action]:
            if key in self._leaving:
                self._lane.wait(self._leaving.pop(key))

    def offload(self, key: SliceKey, take_out: Callable[[], list[Tensor]]) -> None:
        """See `BlockMoves`."""
        if key in self._outward:
            self._leaving[key] = self._lane.start(self._outward[key])
            return
        blocks = take_out()
        self._on_host[key] = hosts = [self._host_memory(block.numel()) for block in blocks]
        self._outward[key] = self._record(partial(_copy, hosts, blocks)) if blocks else _nothing
        self._held.append((key, blocks))

    def reload(self, key: SliceKey, put_back: Callable[[list[Tensor]], None]) -> None:
        """See `BlockMoves`."""
        if key in self._inward:
            self._arriving[key] = self._lane.start(self._inward[key])
            return
        hosts, blocks = self._on_host.pop(key), list[Tensor]()
        self._inward[key] = self._record(partial(self._bring, hosts, blocks)) if hosts else _nothing
        for host in hosts:
            self._free[host.numel()].append(host)  # for later copies, which run after this one
        put_back(blocks)

    def await_reload(self, key: SliceKey) -> None:
        """See `BlockMoves`."""
        if key in self._arriving:
            self._lane.wait(self._arriving.pop(key))

    def _bring(self, hosts: Sequence[Tensor], blocks: list[Tensor]) -> None:
        """Copies to memory of the graphs, to which `blocks` will refer."""
        blocks += [torch.empty(host.numel(), dtype=torch.uint8, device=self._device) for host in hosts]
        _copy(blocks, hosts)

    def _host_memory(self, size: int) -> Tensor:
        if self._free[size]:
            return self._free[size].pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _nothing() -> None:
    """Copies nothing."""
