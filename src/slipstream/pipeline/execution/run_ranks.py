"""The pipeline's ranks in this process, one or all, each running its actions as far as it gets."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, closing

from slipstream.pipeline.batch import SplitBatch
from slipstream.pipeline.execution.executor import Executor
from slipstream.schedule import Action, Schedule, report_wait


def run_together(executors: list[Executor], schedule: Schedule, batch: SplitBatch) -> None:
    """Runs the ranks of this process alternately, each as far as it gets: one, or all of a pipeline."""
    with ExitStack() as stack:
        rows = [stack.enter_context(closing(executor.start(schedule, batch))) for executor in executors]
        awaiting: dict[Generator[Action], Action | None] = dict.fromkeys(rows)
        while awaiting:
            before = dict(awaiting)
            awaiting = {actions: action for actions in awaiting if (action := next(actions, None)) is not None}
            if awaiting == before:
                waiting = [action for action in awaiting.values() if action is not None]
                reports = [report_wait(schedule, schedule.placement[action.stage], action) for action in waiting]
                raise RuntimeError("\n".join(["no rank can continue:", *reports]))
