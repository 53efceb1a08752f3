"""The seconds of a pipeline's actions in some steps, as costs of the simulator."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from slipstream.schedule import Op
from slipstream.simulator import TableCost
from slipstream.timeline import Timeline


class ActionTimes:
    """Seconds of actions in some steps, over all microbatches, and of messages."""

    def __init__(self) -> None:
        self._actions: defaultdict[tuple[int, int, Op], list[float]] = defaultdict(list)
        self._messages: list[float] = []

    def add(self, timeline: Timeline) -> None:
        for span in timeline.compute_spans:
            self._actions[span.action.stage, span.action.slice, span.action.op].append(span.seconds)
        self._messages += [message.seconds for message in timeline.messages]

    def cost(self) -> TableCost:
        """Returns costs with each action's median time; a message takes its shortest, as longer ones had a receiver
        that came late."""
        latency = max(0.0, min(self._messages, default=0.0))
        return TableCost({key: median(seconds) for key, seconds in self._actions.items()}, latency=latency)
