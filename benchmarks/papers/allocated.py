"""The memory that stages of Seq1F1B had allocated, beside the planner's account with what its code keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import few
from benchmarks.papers.tables import read
from slipstream.array_types import Floats
from slipstream.cost import ActionBytes, Mode, Stage
from slipstream.planner.search.evaluate import Evaluation
from slipstream.schedule import Op
from slipstream.simulator.memory_account import OrderBytes

if TYPE_CHECKING:
    from benchmarks.papers.measured_steps import Row

_GELU_TENSORS = 7  # that its backward holds, of those as wide as its input, before any is freed


@dataclass(frozen=True)
class JoinedKeys(Mode):
    """The bytes of Seq1F1B's code. The keys and values of all slices are in one tensor, whose gradients are added up in
    16 bits. TorchScript fuses nothing: so much of GELU's backward is there at once, less its output, which is freed
    before. The loss's F has the logits in 16 bits and twice in 32, of which it keeps one, in whose place its backward
    makes their gradient, and then another one in 16 bits.

    Args:
        feed_forward: the width of GELU's input.
        num_slices: of a sequence; the keys and values of a whole one are among its activations alone.
    """

    feed_forward: int
    num_slices: int

    @cached_property
    def each_context(self) -> Floats:
        return self.costs.each_context * (self.num_slices > 1)

    @cached_property
    def each_context_gradient(self) -> Floats:
        return self.each_context

    def action_bytes(self, stage: Stage, length: int) -> ActionBytes:
        counted = self.costs.action_bytes(stage, length)
        tokens = self.microbatch_size * length
        gradient = float(self.message_bytes(length)) * self.divided.wide
        wide = tokens * self.feed_forward * self.dtype_bytes / self.divided.width
        logits = self.logits_gradient_bytes(stage, length)
        most = max(counted.peaks[Op.B] - logits / 2, gradient + (_GELU_TENSORS - 1) * wide)
        return replace(counted, peaks={**counted.peaks, Op.F: counted.peaks[Op.F] + 1.5 * logits, Op.B: most})


MOMENT_BYTES = 8  # of a parameter, shared by the replicas


def evaluated(row: Row) -> Evaluation:
    """Returns what the planner says of a row of Seq1F1B, with the bytes of its code."""
    candidate = row.candidate(1.0)
    costs = JoinedKeys(candidate.cut.costs, row.number("ffn"), row.number("token_slices"))
    return replace(candidate, cut=replace(candidate.cut, costs=costs))


def allocated_peaks(table: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Returns what each stage of Seq1F1B had allocated at most in the first step, at whose end the optimizer's moments
    are made, and what the account says without these, with the buffers of all gradients from the start. Nobody else's
    memory is what was allocated.

    Args:
        table: the measured steps by their number.
    """
    peaks: dict[str, Floats] = {}
    found = []
    for each in few(read("seq1f1b_peaks"), 4):
        row, number, stage = table[each["id"]], each["id"], int(each["stage"])
        if number not in peaks:
            candidate = evaluated(row)
            account = with_keys_by_slice(candidate.bytes, candidate.times.slices)
            buffers = np.bincount(account.arrays.schedule.placement, account.made[0])
            if row.number("tp") > 1:  # one for the inputs that ranks gather
                buffers += 2 * max(candidate.times.slices) * row.number("hidden")
            without = replace(account, made=np.zeros_like(account.made), first=np.full_like(account.first, np.nan))
            peaks[number] = without.rank_peaks() + buffers
        counted = peaks[number][stage] - MOMENT_BYTES / row.replicas * int(each["parameters"])
        measured = float(each["max_allocated_mib"]) * 2**20
        about = {
            "id": number,
            "model": row.text["model"],
            "tokens": row.text["seq"],
            "slices": row.text["token_slices"],
        }
        found.append(about | {"stage": stage, "measured": measured, "bytes": counted, "error": counted / measured - 1})
    return found


def with_keys_by_slice(account: OrderBytes, slices: Sequence[int]) -> OrderBytes:
    """Returns the account with keys and values as Seq1F1B's code holds them.

    A slice but the first joins its own to those before in a new tensor, of which the whole stays until the last
    backward. A backward makes the gradients of all keys that it reads, in place of those of the backward before. And
    the variable that has the output of the last forward before the first backward is never set again: it keeps what
    belongs to its microbatch until the step ends.
    """
    arrays = account.arrays
    is_forward, is_backward = arrays.is_one_of(Op.F), arrays.is_one_of(Op.B)
    read = np.cumsum(slices) / sum(slices)  # the share of the keys that a slice reads
    joined = np.diff(np.append(0.0, read[1:]), prepend=0.0)
    made = np.diff(read[::-1], prepend=0.0)[::-1]
    forwards = arrays.schedule.num_ranks - arrays.rank + len(slices) - 2  # before a rank's first backward
    kept = arrays.microbatch == (forwards - 1) // len(slices)
    freed = (is_backward & (arrays.slice == 0) & ~kept) * (1 + read[0])
    changes = is_forward * joined[arrays.slice] + is_backward * made[arrays.slice] - freed
    # The account has the keys of a microbatch from its first forward, and their gradients from its first backward.
    began = is_forward & (arrays.slice == 0) | is_backward & (arrays.slice == len(slices) - 1)
    peaks = account.peaks + account.context * (is_forward * joined[arrays.slice] - began)
    nothing = np.zeros_like(account.context)
    leaves = account.leaves + account.context * changes
    return replace(account, leaves=leaves, peaks=peaks, context=nothing, context_gradients=nothing)
