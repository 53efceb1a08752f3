"""Assigns the layers of a sequence to stages: as the user says, or balanced by what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from slipstream.errors import SlipstreamError
from slipstream.model.sequential import SequentialLayer, ShapeTrace
from slipstream.pipeline.families.stage_layout import given_counts
from slipstream.planner.partition import partition_layers

FLOPS_PER_BYTE = 10  # what memory holds up a layer that computes little with what it reads: about that of a CPU's core


@dataclass(frozen=True)
class Balance:
    """How evenly the ranks are loaded: an imbalance of 1.0 means that all cost the same."""

    imbalance: float  # the slowest rank's cost over the mean
    rank: int  # the slowest
    layer: str  # the one of it that costs most: no cut goes through it
    share: float  # its part of the mean rank's cost

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is the slowest, {self.imbalance:.2f} times the mean; of its layers {self.layer} costs "
            f"most, {self.share:.2f} of what a rank does on average"
        )


def counted_costs(trace: ShapeTrace) -> list[float]:
    """Returns every layer's cost: operations of matrix products, convolutions and attention, and memory traffic."""
    return [1.0 + work.flops + FLOPS_PER_BYTE * work.num_bytes for work in trace.work]


def check_costs(costs: Sequence[float], layers: Sequence[SequentialLayer]) -> None:
    if len(costs) != len(layers):
        names = ", ".join(map(str, layers[:3]))
        raise SlipstreamError(
            f"costs has {len(costs)} numbers, but the sequence has {len(layers)} layers, nested ones counted one by "
            f"one: {names}{', ...' if len(layers) > 3 else ''}. Give {len(layers)} costs."
        )
    for layer, cost in zip(layers, costs, strict=True):
        if not 0 < cost < float("inf"):
            raise SlipstreamError(f"costs: {layer} costs {cost}, but a cost is above 0 and finite.")


def divide(
    layers: Sequence[SequentialLayer],
    partition: str | Sequence[float],
    costs: Sequence[float] | None,
    placement: Sequence[int],
) -> tuple[range, ...]:
    """Returns the layers of every stage. Raises SlipstreamError for an invalid partition, or too many stages."""
    num_stages = len(placement)
    if num_stages > len(layers):
        raise SlipstreamError(
            f"{num_stages} stages, but the sequence has {len(layers)} layers, nested ones counted one by one. Use "
            f"{len(layers)} stages or fewer."
        )
    allowed = "at least one layer, nested ones counted one by one"
    counts = given_counts(partition, num_stages, len(layers), _are_whole, allowed)
    if counts is None and num_stages == 1:
        counts = [len(layers)]
    elif counts is None:
        if costs is None:
            raise SlipstreamError(
                "partition='auto' must know what the layers cost. Give example=inputs like those of a microbatch, from "
                f"which operations are counted, costs=[...] of {len(layers)} layers, or partition=[...] of "
                f"{num_stages} stages."
            )
        counts = partition_layers(costs, num_stages, placement=placement)
    return tuple(range(a, b) for a, b in pairwise(accumulate(counts, initial=0)))


def _are_whole(counts: Sequence[float]) -> bool:
    return all(count == int(count) >= 1 for count in counts)


def balance_of(
    costs: Sequence[float], stages: Sequence[range], placement: Sequence[int], layers: Sequence[SequentialLayer]
) -> Balance:
    ranks = sorted(set(placement))
    owned = {
        rank: [i for stage, owner in zip(stages, placement, strict=True) if owner == rank for i in stage]
        for rank in ranks
    }
    totals = {rank: sum(costs[index] for index in indices) for rank, indices in owned.items()}
    mean = sum(totals.values()) / len(ranks)
    slowest = max(ranks, key=totals.__getitem__)
    dearest = max(owned[slowest], key=costs.__getitem__)
    return Balance(totals[slowest] / mean, slowest, str(layers[dearest]), costs[dearest] / mean)
