"""Finds the first stages of which nothing is trained: they need no backward, and no gradient is sent to them."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.errors import SlipstreamError
from slipstream.parallel import Ranks
from slipstream.pipeline.families.stage_layout import StageLayout
from slipstream.pipeline.stage import Stage
from slipstream.schedule import AUTOMATIC, Schedule


class FrozenStages:
    """The stages below the lowest one with a trained parameter, as the ranks found when the pipeline was made."""

    def __init__(self, stages: Mapping[int, Stage], ranks: Ranks, schedule: Schedule) -> None:
        """Collective. `schedule` may have frozen stages by itself; raises SlipstreamError where these are trained."""
        self._stages = stages
        trained = [number for number, stage in stages.items() if _is_trained(stage)]
        every = [number for numbers in ranks.pipeline.gather(trained) for number in numbers]
        self.number = min(every, default=0)
        if schedule.num_frozen_stages > self.number:
            raise SlipstreamError(
                f"the schedule {schedule.name!r} has no backwards of its first {schedule.num_frozen_stages} stages, "
                f"but stage {self.number} has trained parameters. Freeze them, or give a schedule with all backwards."
            )

    def may_be_left_out(self, layout: StageLayout, schedule: str | Schedule) -> bool:
        """Returns whether the backwards of frozen stages may be left out of schedules.

        Not where "auto" measures them, nor of a schedule whose messages are given, nor where gradients go past stages.
        """
        is_searched = isinstance(schedule, str) and schedule in AUTOMATIC
        return not (is_searched or layout.order.is_lowered or layout.spreads_embedding)

    @property
    def trains_here(self) -> bool:
        """Whether a parameter of this process's stages is trained now."""
        return any(map(_is_trained, self._stages.values()))

    def check(self, layout: StageLayout) -> None:
        """Raises SlipstreamError where a parameter is trained now of a stage whose backwards are left out."""
        for number in range(layout.num_frozen_stages):
            if number in self._stages and _is_trained(self._stages[number]):
                names = [name for name, each in self._stages[number].named_parameters() if each.requires_grad]
                raise SlipstreamError(
                    f"requires_grad of {names[0]} was False when the Pipeline was made, so no gradient comes to stage "
                    f"{number}; now it is True. Let every parameter that is ever trained have requires_grad=True "
                    "before the Pipeline is made, and freeze it afterwards."
                )


def _is_trained(stage: Stage) -> bool:
    return any(parameter.requires_grad for _, parameter in stage.named_parameters())
