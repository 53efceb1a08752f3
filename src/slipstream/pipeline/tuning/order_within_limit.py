"""Orders that keep to a memory limit: the fastest found whose peaks are within it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from slipstream.errors import SlipstreamError
from slipstream.pipeline.tuning.trials import Trial, TrialMemory, TrialRequest, TrialResult, holdings_of
from slipstream.schedule import Schedule
from slipstream.simulator import TableCost, simulate

_ATTEMPTS = 6  # orders that are searched for
_EFFORT = 5e6  # of find_order, for each
_KINDS = "parameters, gradients, AdamW's state, messages, activations, keys and values"


def order_within(
    limit: float, frugal: Trial, cost: TableCost, splits: bool
) -> Generator[TrialRequest, TrialResult, Schedule]:
    """The fastest order found, by simulation, of those whose peaks are within the limit, as `frugal` is.

    `find_order` counts activations alone, from their forward to the end of their backward. What is held besides is
    guessed to be what `frugal` holds besides; the room that this leaves over one microbatch is halved, and halved
    again towards the most that keeps to the limit.
    """
    from slipstream.planner.order.best_order import find_order  # its compiled code takes a while to load

    start = frugal.schedule
    held = yield from holdings_of(frugal)
    least = _of_a_microbatch(start, held)
    sized = replace(cost, activations=held.units)
    fitting, (low, high), share = [start], (0.0, 1.0), 1.0
    for _ in range(_ATTEMPTS):
        room = [size + share * (limit - peak) for size, peak in zip(least, held.peaks, strict=True)]
        counts = start.placement, start.num_microbatches, start.num_slices
        order = find_order(*counts, sized, memory_limit=room, split=splits, effort=_EFFORT)
        if max((yield from holdings_of(Trial(order, frugal.slices))).peaks) > limit:
            high = share
        elif share == 1:
            return order
        else:
            fitting.append(order)
            low = share
        share = (low + high) / 2
    return min(fitting, key=lambda order: simulate(order, cost).makespan)


def _of_a_microbatch(schedule: Schedule, held: TrialMemory) -> list[float]:
    """Returns the bytes that all slices of one microbatch hold on each rank: the least that any order holds."""
    sizes = [0.0] * schedule.num_ranks
    for (stage, _), size in held.units.items():
        sizes[schedule.placement[stage]] += size
    return sizes


def nothing_fits(limit: float, peaks: Sequence[float]) -> SlipstreamError:
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    return SlipstreamError(
        f"memory.limit={limit:.6g} bytes, but no order fits: with one microbatch at a time rank {rank} holds "
        f"{peaks[rank]:.0f} bytes ({_KINDS}). Give memory.limit={peaks[rank]:.0f} or more, or "
        "memory.recompute='full', memory.offload=0.5, smaller microbatches or more ranks."
    )
