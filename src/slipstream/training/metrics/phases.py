"""The phases of a step: how much of its time goes where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from slipstream.schedule import Op
from slipstream.timeline import Cause, Timeline, idle_by_cause

_PHASE = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward",
    Op.W: "weight_gradients",
    Op.R: "recomputation",
    Op.REDUCE_GRAD: "gradient_reduction",
    Op.V: "forward",  # with a part of the backward
    Op.L: "forward",
    Op.VW: "weight_gradients",
    Op.E: "forward",
    Op.EW: "weight_gradients",
}
_WAITS = {Cause.MESSAGE: "communication_wait", Cause.COPY: "offload"}


@dataclass(frozen=True)
class Phases:
    """The seconds of each phase of a step, as the mean over the ranks of a pipeline.

    All but the last two add up to the makespan. Collectives inside a layer (tensor parallelism) are part of the phase
    that runs them.
    """

    forward: float = 0.0
    backward: float = 0.0  # with weight gradients, unless the schedule splits them off
    weight_gradients: float = 0.0
    recomputation: float = 0.0
    communication_wait: float = 0.0  # waits for messages that have been sent
    offload: float = 0.0  # waits for copies to or from host memory; copies during computation cost nothing
    gradient_reduction: float = 0.0
    idle: float = 0.0  # waits for other ranks to compute (the bubble), and time between actions
    optimizer: float = 0.0  # clipping and update
    data: float = 0.0  # preparation of the batch

    @staticmethod
    def computed(timeline: Timeline, rank: int, optimizer: float, data: float) -> dict[str, float]:
        """Returns the seconds of each phase in which a rank computed, without waits for others."""
        seconds = {"optimizer": optimizer, "data": data}
        for span in timeline.compute_spans:
            if span.rank == rank and span.action.op is not Op.REDUCE_GRAD:  # in which replicas wait for each other
                seconds[_PHASE[span.action.op]] = seconds.get(_PHASE[span.action.op], 0.0) + span.seconds
        return seconds

    @classmethod
    def of(cls, timeline: Timeline, optimizer: float = 0.0, data: float = 0.0) -> Phases:
        """Returns the phases of a timeline, and the seconds that the trainer measured outside of it."""
        seconds: Counter[str] = Counter()
        for span in timeline.compute_spans:
            seconds[_PHASE[span.action.op]] += span.seconds  # type: ignore[assignment]  # Counter is typed for int
        for causes in idle_by_cause(timeline):
            for cause, waited in causes.items():
                seconds[_WAITS.get(cause, "idle")] += waited  # type: ignore[assignment]
        means = {name: total / timeline.num_ranks for name, total in seconds.items()}
        return cls(**means, optimizer=optimizer, data=data)
