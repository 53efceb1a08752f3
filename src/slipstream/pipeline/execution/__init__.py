"""Runs one rank's actions with real tensors and records when each ran."""

from slipstream.pipeline.execution.executor import Executor, RankStep, run_together
from slipstream.pipeline.execution.losses import (
    GivenLosses,
    KeptOutputs,
    Losses,
    SequenceLosses,
    SliceLosses,
    TokenOutputs,
)
from slipstream.pipeline.execution.spread_head import vocabulary_specs
from slipstream.pipeline.execution.step_graphs import StepGraphs
from slipstream.pipeline.execution.step_state import Observer, StepState, key_of
