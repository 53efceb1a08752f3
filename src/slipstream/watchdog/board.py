"""A rank's current action, in memory that its watcher reads: writing it takes less than a microsecond per action.

The rank writes and never waits; the watcher reads whenever it likes, also while the rank's interpreter is held.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from enum import IntEnum
from typing import NamedTuple

_COUNTER = struct.Struct("<Q")
_FIELDS = struct.Struct("<iIBB96s160s")  # action, step, policy, state, phase, the awaited message
_START = _COUNTER.size
_SIZE = mmap.PAGESIZE
_ACTION = struct.Struct("<i")
_STEP = struct.Struct("<I")
_BYTES = struct.Struct("<BB")
_PHASE_AT, _WAIT_AT = _START + 10, _START + 106
_PHASE_BYTES, _WAIT_BYTES = 96, 160


class State(IntEnum):
    """The stage of a rank's life, by its own word: a dead rank says RUNNING for ever."""

    RUNNING, FINISHED, FAILED = range(3)


class StallPolicy(IntEnum):
    """The way to judge a rank that makes no progress."""

    ANY_LENGTH, COUNTED, LONG = range(3)  # unlimited; as stalled; as stalled, but only after ten times the limit


class RankStatus(NamedTuple):
    """The status on a board at one look. The counter changes whenever the rank gets on."""

    counter: int
    action: int  # index in the rank's order; -1 between steps
    step: int
    policy: StallPolicy
    state: State
    phase: str
    waits: str  # the awaited collective or message; empty outside of a wait


def anonymous_file(name: str) -> int:
    """Returns a descriptor of an empty file without a name, which ends with the processes that have it."""
    if hasattr(os, "memfd_create"):
        return int(os.memfd_create(name))
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Board:
    """The memory. The rank's main thread writes; any process that has the descriptor reads."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Makes the memory, or opens another process's."""
        self.descriptor = anonymous_file("slipstream-board") if descriptor is None else descriptor
        if descriptor is None:
            os.truncate(self.descriptor, _SIZE)
        self._memory = mmap.mmap(self.descriptor, _SIZE)
        self._counter = 0

    def set_action(self, index: int) -> None:
        """Notes that the action at this index of the rank's order begins; -1: no action."""
        _ACTION.pack_into(self._memory, _START, index)
        self._beat()

    def set_step(self, step: int) -> None:
        """Notes the number of the running step, from 1."""
        _STEP.pack_into(self._memory, _START + 4, step)
        self._beat()

    def set_state(self, state: State, policy: StallPolicy = StallPolicy.COUNTED) -> None:
        """Writes the rank's state, and how to judge it from now on where it makes no progress."""
        _BYTES.pack_into(self._memory, _START + 8, policy, state)
        self._beat()

    def set_phase(self, phase: str) -> None:
        """Writes the rank's phase outside of a schedule's actions."""
        self._write(_PHASE_AT, phase.encode()[: _PHASE_BYTES - 1].ljust(_PHASE_BYTES, b"\0"))

    def set_wait(self, text: bytes) -> None:
        """Writes the message or collective that the rank waits for; empty: none. At most 159 bytes count."""
        self._write(_WAIT_AT, text[: _WAIT_BYTES - 1] + b"\0")

    def look(self) -> RankStatus:
        """Returns the status as it is written now."""
        (counter,) = _COUNTER.unpack_from(self._memory, 0)
        action, step, policy, state, phase, waits = _FIELDS.unpack_from(self._memory, _START)
        return RankStatus(counter, action, step, StallPolicy(policy), State(state), _text(phase), _text(waits))

    def _write(self, at: int, data: bytes) -> None:
        self._memory[at : at + len(data)] = data
        self._beat()

    def _beat(self) -> None:
        self._counter += 1
        _COUNTER.pack_into(self._memory, 0, self._counter)


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode(errors="replace")
