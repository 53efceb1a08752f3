"""The order that is given, by itself or by its name."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import SlipstreamError
from slipstream.schedule import Op, Schedule, SliceCounts, make_schedule, split_backwards


def given_order(
    schedule: str | Schedule, placement: Sequence[int], num_microbatches: int, num_slices: SliceCounts, split: bool
) -> Schedule:
    """Returns the order that is given by itself or by its name, in this case with its backwards split where they may
    be.

    Raises:
        SlipstreamError: where its stages are on other ranks.
    """
    order = schedule
    if isinstance(order, str):
        most = max(placement.count(rank) for rank in placement)
        order = make_schedule(order, max(placement) + 1, num_microbatches, num_slices, most)
        if split and Op.W not in order.ops:
            order = split_backwards(order)
    if order.placement != tuple(placement):
        raise SlipstreamError(
            f"schedule={order.name!r} has its stages on the ranks {[*order.placement]}, but placement={[*placement]}. "
            "Make them equal."
        )
    return order
