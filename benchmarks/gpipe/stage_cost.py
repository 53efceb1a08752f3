"""What a sequence's stages cost, from the times of its layers; and GPipe's schedule with its ways to recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.gpipe.balance import stage_sums
from benchmarks.gpipe.layer_times import Times
from slipstream import simulate
from slipstream.schedule import Action, Op, Schedule, add_recompute, make_schedule
from slipstream.simulator import CostModel

NONE, LATE, EARLY = RECOMPUTE = ("none", "with each backward", "as early as it can")


@dataclass(frozen=True)
class Link:
    """A link between two accelerators; by default it takes no time."""

    latency: float = 0.0  # seconds
    seconds_per_byte: float = 0.0


@dataclass(frozen=True)
class StageCost(CostModel):
    """The costs of stages of `counts` layers, alike for all microbatches."""

    times: Times
    counts: Sequence[int]
    link: Link = Link()
    recomputes_in_backward: bool = False
    _forward: list[float] = field(init=False)
    _backward: list[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_forward", stage_sums(self.times.forward, self.counts))
        object.__setattr__(self, "_backward", stage_sums(self.times.backward, self.counts))

    def message_bytes(self, stage: int) -> int:
        """Returns the bytes that a stage passes to the next."""
        border = sum(self.counts[: stage + 1])
        return self.times.layers[border - 1].output_bytes + self._skip_bytes(border)

    def _skip_bytes(self, border: int) -> int:
        """Returns the bytes of all skips across a border.

        A skip over several stages counts at every border, although only its two ends see it.
        """
        return sum(skip.num_bytes for skip in self.times.skips if skip.stash < border <= skip.pop)

    def seconds(self, action: Action) -> float:
        """Returns the seconds of an action; of a backward that is split, I and W take half each."""
        if action.op in (Op.F, Op.R):
            return self._forward[action.stage]
        again = self._forward[action.stage] if self.recomputes_in_backward else 0.0
        shares = {Op.B: 1.0, Op.I: 0.5, Op.W: 0.5}
        return shares.get(action.op, 0.0) * (again + self._backward[action.stage])

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return self.link.latency + self.link_occupied(send, source, destination)

    def link_occupied(self, send: Action, source: int, destination: int) -> float:
        stage = send.stage if send.op is Op.SEND_F else send.stage - 1
        return self.message_bytes(stage) * self.link.seconds_per_byte

    def activation_bytes(self, forward: Action) -> float:
        return 0.0

    def kept_bytes(self, forward: Action) -> float:
        return 0.0


def schedule_of(num_stages: int, num_microbatches: int, recompute: str, cost: StageCost) -> Schedule:
    """Returns GPipe's schedule with one way to recompute.

    Nothing is recomputed, or everything: as part of B, once the gradient has arrived (then `cost` includes it), or as
    soon as the rank has time (section 2.3), except for a forward whose backward follows immediately.
    """
    plain = make_schedule("gpipe", num_stages, num_microbatches)
    return add_recompute(plain, seconds=cost.seconds) if recompute == EARLY else plain


def step_seconds(times: Times, counts: Sequence[int], link: Link, num_microbatches: int, recompute: str) -> float:
    """Returns the simulated seconds of a step."""
    cost = StageCost(times, counts, link, recomputes_in_backward=recompute == LATE)
    schedule = schedule_of(len(counts), num_microbatches, recompute, cost)
    return simulate(schedule, cost).makespan
