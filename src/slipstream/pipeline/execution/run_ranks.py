"""The pipeline's ranks in this process, one or all, each running its actions as far as it gets."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple

from slipstream.pipeline.batch import SplitBatch
from slipstream.pipeline.execution.action_graphs import ActionRunner, run_eagerly
from slipstream.pipeline.execution.executor import Executor
from slipstream.pipeline.execution.saved_activations import BlockMoves
from slipstream.pipeline.execution.step_state import StepState
from slipstream.schedule import Action, Schedule, report_wait


class RankStep(NamedTuple):
    """How a rank runs a step: by default eagerly, from an empty state."""

    run: ActionRunner = run_eagerly
    state: StepState | None = None
    moves: BlockMoves | None = None


def run_together(
    executors: Sequence[Executor], schedule: Schedule, batch: SplitBatch, steps: Sequence[RankStep] | None = None
) -> None:
    """Runs the ranks of this process alternately, each as far as it gets: one, or all of a pipeline."""
    pairs = zip(executors, steps or [RankStep()] * len(executors), strict=True)
    with ExitStack() as stack:
        rows = [stack.enter_context(closing(executor.start(schedule, batch, *step))) for executor, step in pairs]
        awaiting: dict[Generator[Action], Action | None] = dict.fromkeys(rows)
        while awaiting:
            before = dict(awaiting)
            awaiting = {actions: action for actions in awaiting if (action := next(actions, None)) is not None}
            if awaiting == before:
                waiting = [action for action in awaiting.values() if action is not None]
                reports = [report_wait(schedule, schedule.placement[action.stage], action) for action in waiting]
                raise RuntimeError("\n".join(["no rank can continue:", *reports]))
