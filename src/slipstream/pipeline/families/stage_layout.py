"""What runs where: a lowered schedule, its evaluation, and the layers of every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slipstream.errors import SlipstreamError
from slipstream.model import LayerRange
from slipstream.model.saving import RecomputePolicy
from slipstream.schedule import (
    Op,
    Schedule,
    add_communication,
    add_offload,
    add_recompute,
    add_reductions,
    check_communication,
    forward_only,
)


@dataclass(frozen=True)
class StageLayout:
    """Two lowered schedules over the same stages, and which layers each stage owns."""

    training: Schedule
    evaluation: Schedule
    layers: tuple[LayerRange, ...]
    recompute: RecomputePolicy | None = None  # what the R's of `training` recompute
    offload: float = 0.0  # the share of slices that wait in host memory
    reduces: bool = False  # whether gradients are summed over replicas, or over ranks that share layers

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        layers: tuple[LayerRange, ...],
        recompute: RecomputePolicy | None,
        offload: float,
        reduces: bool,
    ) -> StageLayout:
        """Lower the schedule, and prove that its communication ends."""
        schedule = _with_less_memory(schedule, recompute, offload)
        if reduces and not any(action.op is Op.REDUCE_GRAD for action in schedule.positions):
            schedule = add_reductions(schedule)
        lowered = schedule if schedule.is_lowered else add_communication(schedule)
        check_communication(lowered)
        evaluation = add_communication(forward_only(schedule))  # its order within a rank is that of training
        return cls(lowered, evaluation, layers, recompute, offload, reduces)

    def with_schedule(self, schedule: Schedule) -> StageLayout:
        """Returns the same stages in another order, with any number of slices."""
        return StageLayout.of(schedule, self.layers, self.recompute, self.offload, self.reduces)

    @property
    def num_ranks(self) -> int:
        return self.training.num_ranks

    def stages_of(self, ranks: Iterable[int]) -> list[int]:
        wanted = set(ranks)
        return [stage for stage, rank in enumerate(self.training.placement) if rank in wanted]


class ExecutedStep(NamedTuple):
    """The layout of a step, and the tokens of its slices."""

    layout: StageLayout
    slices: list[int]  # tokens of each


def check_lengths(schedule: Schedule, slices: int | Sequence[int]) -> None:
    if not isinstance(slices, int) and len(slices) != schedule.num_slices:
        raise SlipstreamError(
            f"slices={list(slices)} are {len(slices)} lengths, but the schedule {schedule.name!r} has "
            f"{schedule.num_slices} slices. Give {schedule.num_slices} lengths."
        )


def given_counts(
    partition: str | Sequence[float],
    num_stages: int,
    num_layers: int,
    are_allowed: Callable[[Sequence[float]], bool],
    allowed: str,
) -> list[Any] | None:
    """Returns how many layers each stage has, None for "auto". Raises SlipstreamError where these don't fit."""
    if partition == "auto":
        return None
    if isinstance(partition, str):
        raise SlipstreamError(f"partition={partition!r}: give 'auto' or the number of layers of every stage.")
    if len(partition) != num_stages or sum(partition) != num_layers or not are_allowed(partition):
        raise SlipstreamError(
            f"partition={list(partition)} has {len(partition)} stages and {sum(partition)} layers; needed are "
            f"{num_stages} stages of {allowed}, {num_layers} layers in all."
        )
    return [int(count) if count == int(count) else count for count in partition]


def _with_less_memory(schedule: Schedule, recompute: RecomputePolicy | None, offload: float) -> Schedule:
    """Returns the schedule with R, OFFLOAD and RELOAD, which a given schedule may have already."""
    given = next((action for action in schedule.positions if action.op is Op.R), None)
    if given is not None and recompute is None:
        raise SlipstreamError(
            f"the schedule {schedule.name!r} has {schedule.text(given)}, but memory.recompute='none'. Say what it "
            "recomputes: memory.recompute='full', 'selective', or a number of layers."
        )
    adds = {"memory.recompute": recompute is not None and given is None, "memory.offload": offload > 0}
    if schedule.is_lowered and any(adds.values()):
        setting = next(name for name, wanted in adds.items() if wanted)
        raise SlipstreamError(
            f"{setting} is set, but the schedule {schedule.name!r} has its sends and receives already, so nothing can "
            f"be added to it. Leave {setting} out, and it runs as it is, or give it without sends and receives."
        )
    if adds["memory.recompute"]:
        schedule = add_recompute(schedule)
    return add_offload(schedule, offload) if offload else schedule
