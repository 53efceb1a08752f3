"""Runs one rank's actions with real tensors and records when each ran."""

from slipstream.pipeline.execution.executor import Executor, RankStep, run_together
from slipstream.pipeline.execution.losses import (
    CollectedOutputs,
    LossDivisor,
    Losses,
    SliceLosses,
    StepLoss,
    TokenOutputs,
    checked_num_targets,
)
from slipstream.pipeline.execution.rank_program import key_of
from slipstream.pipeline.execution.sequence_losses import SequenceLosses
from slipstream.pipeline.execution.step_graphs import StepGraphs, graph_refusal
from slipstream.pipeline.execution.step_state import Observer, StepState
