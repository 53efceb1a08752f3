"""The layout of stages: a lowered schedule, its evaluation, and the layers of every stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from slipstream.errors import SlipstreamError
from slipstream.model import LayerRange, PipelineStage, RecomputePolicy
from slipstream.parallel import Ranks
from slipstream.schedule import (
    Op,
    Schedule,
    SlicedMicrobatch,
    StageSkip,
    add_communication,
    add_offload,
    add_recompute,
    add_reductions,
    check_communication,
    forward_only,
    freeze_stages,
    spread_vocabulary,
    with_far_messages,
)


@dataclass(frozen=True)
class StageLayout:
    """A schedule as it was given or found, and which layers each stage owns; lowered for training and evaluation.

    Raises SlipstreamError where something can't be added to the schedule, or its communication doesn't end.
    """

    order: Schedule
    layers: tuple[LayerRange, ...]
    recompute: RecomputePolicy | None  # policy for backwards and for the R's of `training`
    offload: float  # share of slices in host memory between forward and backward
    reduces: bool  # gradients summed over replicas or over ranks with the same layers
    spreads_vocabulary: bool = False  # some rows of the head on every rank
    spreads_embedding: bool = False  # the tied embedding spread like the head
    num_frozen_stages: int = 0  # number of first stages without trained weights
    skips: tuple[StageSkip, ...] = ()  # tensors that skip stages
    context_on_host: float = 0.0  # share of keys and values on the host
    has_wide_sums: bool = True  # gradients of keys and values summed in float32 or wider

    def __post_init__(self) -> None:
        check_communication(self.training)

    @cached_property
    def training(self) -> Schedule:
        """The lowered schedule of a step."""
        lowered = self._extended if self._extended.is_lowered else add_communication(self._extended)
        return with_far_messages(lowered, self.skips)

    @cached_property
    def evaluation(self) -> Schedule:
        """The lowered schedule of forwards alone, in the order of training within a rank."""
        return with_far_messages(add_communication(forward_only(self._extended)), self.skips)

    @cached_property
    def with_all_backwards(self) -> StageLayout:
        """The same with backwards of frozen stages, which hold at least as much: memory of rows in any order is counted
        with them."""
        return replace(self, num_frozen_stages=0) if self.num_frozen_stages else self

    @cached_property
    def _extended(self) -> Schedule:
        schedule = self.order
        if not schedule.is_lowered:
            schedule = freeze_stages(schedule, self.num_frozen_stages)
        schedule = _with_less_memory(schedule, self.recompute, self.offload)
        if self.spreads_vocabulary and not schedule.spreads_vocabulary:
            schedule = spread_vocabulary(schedule, embedding=self.spreads_embedding)
        if self.reduces and not any(action.op is Op.REDUCE_GRAD for action in schedule.positions):
            return add_reductions(schedule)
        return schedule

    @property
    def num_ranks(self) -> int:
        return self.training.num_ranks

    def stages_of(self, ranks: Sequence[int]) -> list[int]:
        return [stage for stage, rank in enumerate(self.training.placement) if rank in ranks]


class ExecutedStep(NamedTuple):
    """The layout of a step, the rows and slices of its microbatches, and, where sequences were packed into rows, the
    numbers of those in each."""

    layout: StageLayout
    microbatches: Sequence[SlicedMicrobatch]
    groups: Sequence[Sequence[int]] = ()

    @property
    def slices(self) -> list[int]:
        """The tokens of each slice of a sequence; where microbatches differ, of the one with the most slices."""
        return [*max((microbatch.slices for microbatch in self.microbatches), key=len, default=())]


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
            f"partition={list(partition)} has {len(partition)} stages and {sum(partition)} layers; it takes "
            f"{num_stages} stages of {allowed}, {num_layers} layers in all."
        )
    return [int(count) if count == int(count) else count for count in partition]


def _with_less_memory(schedule: Schedule, recompute: RecomputePolicy | None, offload: float) -> Schedule:
    """Returns the schedule with R, OFFLOAD and RELOAD, which a given schedule may have already."""
    given = next((action for action in schedule.positions if action.op is Op.R), None)
    has_actions = recompute is not None and recompute.has_actions
    if given is not None and not has_actions:
        setting = "none" if recompute is None else recompute.setting
        raise SlipstreamError(
            f"the schedule {schedule.name!r} has {schedule.text(given)}, but memory.recompute={setting!r}. Say what it "
            "recomputes: memory.recompute='stage', 'stage+full' or 'selective'."
        )
    adds = {"memory.recompute": has_actions and given is None, "memory.offload": offload > 0}
    if schedule.is_lowered and any(adds.values()):
        setting = next(name for name, wanted in adds.items() if wanted)
        raise SlipstreamError(
            f"{setting} is set, but the schedule {schedule.name!r} has its sends and receives already, so nothing can "
            f"be added to it. Leave {setting} out, and it runs as it is, or give it without sends and receives."
        )
    if adds["memory.recompute"]:
        schedule = add_recompute(schedule)
    return add_offload(schedule, offload) if offload else schedule


def leave_out_frozen(
    layout: StageLayout, stages: Mapping[int, PipelineStage], ranks: Ranks, keeps_all: bool
) -> StageLayout:
    """Returns the layout without the backwards of the first stages, as far as these have no trained parameter; as it is
    with `keeps_all`. Collective.

    Raises:
        SlipstreamError: where the order has no backwards of a stage that is trained.
    """
    schedule = layout.order
    trained = [stage_index for stage_index, stage in stages.items() if _is_trained(stage)]
    every = [stage_index for numbers in ranks.pipeline.gather(trained) for stage_index in numbers]
    first = min(every, default=0)
    if schedule.num_frozen_stages > first:
        raise SlipstreamError(
            f"the schedule {schedule.name!r} has no backwards of its first {schedule.num_frozen_stages} stages, "
            f"but stage {first} has trained parameters. Freeze them, or give a schedule with all backwards."
        )
    return layout if keeps_all else replace(layout, num_frozen_stages=first)


def check_frozen(stages: Mapping[int, PipelineStage], schedule: Schedule) -> None:
    """Raises SlipstreamError where a parameter is trained now of a stage without backwards."""
    for stage_index, stage in stages.items():
        if not schedule.trains(stage_index) and _is_trained(stage):
            names = [name for name, parameter in stage.named_parameters() if parameter.requires_grad]
            raise SlipstreamError(
                f"requires_grad of {names[0]} was False when the Pipeline was made, so no gradient comes to stage "
                f"{stage_index}; now it is True. Let every parameter that is ever trained have requires_grad=True "
                "before the Pipeline is made, and freeze it afterwards."
            )


def _is_trained(stage: PipelineStage) -> bool:
    return any(parameter.requires_grad for _, parameter in stage.named_parameters())
