"""Where the time of a step goes: the phases of a pipeline's ranks, and what happens beside them."""

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
}
_WAITS = {Cause.MESSAGE: "communication_wait", Cause.COPY: "offload"}


@dataclass(frozen=True)
class Phases:
    """Seconds of one step, the mean over the ranks of a pipeline. All but the last two add up to its makespan.

    Collectives inside a layer (tensor parallelism) are part of the phase that runs them.
    """

    forward: float = 0.0
    backward: float = 0.0  # weight gradients too, where the schedule doesn't split them off
    weight_gradients: float = 0.0
    recomputation: float = 0.0
    communication_wait: float = 0.0  # what is awaited has been sent, and is on its way
    offload: float = 0.0  # waits for copies to or from host memory; those beside computing cost nothing
    gradient_reduction: float = 0.0
    idle: float = 0.0  # waits for other ranks to compute: the bubble, and what lies between actions
    optimizer: float = 0.0  # clipping and update
    data: float = 0.0  # the batch's preparation

    @classmethod
    def of(cls, timeline: Timeline, optimizer: float = 0.0, data: float = 0.0) -> Phases:
        """From what ran when, and the seconds that the trainer measured beside it."""
        seconds: Counter[str] = Counter()
        for span in timeline.compute_spans:
            seconds[_PHASE[span.action.op]] += span.seconds  # type: ignore[assignment]  # Counter is typed for int
        for causes in idle_by_cause(timeline):
            for cause, waited in causes.items():
                seconds[_WAITS.get(cause, "idle")] += waited  # type: ignore[assignment]
        means = {name: total / timeline.num_ranks for name, total in seconds.items()}
        return cls(**means, optimizer=optimizer, data=data)
