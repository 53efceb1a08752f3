"""Runs a batch forward only, in evaluation mode: for its loss, or for what the model says of each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.pipeline.batch import SplitBatch, WholeBatch
from slipstream.pipeline.engine import Engine
from slipstream.pipeline.evaluation.token_outputs import gathered_logits, log_probabilities
from slipstream.pipeline.evaluation.token_rows import RowPlaces, TokenRows, aligned_with_labels, sum_over_stages
from slipstream.pipeline.execution import TokenOutputs
from slipstream.pipeline.families.model_family import causal_lm
from slipstream.pipeline.sequences import Sequences
from slipstream.planner.steps import StepPlan


def mean_loss(
    engine: Engine, whole: WholeBatch | Sequences, plan: StepPlan | None = None, num_targets: float | None = None
) -> Tensor:
    """Returns the global mean loss of a batch, or the sum over `num_targets`. Collective. `plan` is for sequences
    alone."""
    with _evaluating(engine, "evaluate"):
        batch, _ = engine.split_to_evaluate(whole, plan, num_targets is None)
        return engine.run_forward(batch, num_targets)


def token_logits(engine: Engine, whole: WholeBatch | Sequences) -> TokenRows | None:
    """Returns each token's logits on ranks that have the last stage, None on the others. Collective."""
    outputs, batch, places = _kept(engine, whole, "logits", gathered_logits(engine.tensor_parallel))
    return places.joined(outputs, batch) if outputs else None


def label_log_probabilities(engine: Engine, whole: WholeBatch | Sequences) -> TokenRows:
    """Returns each label's log-probability, on every rank. Collective."""
    outputs, batch, places = _kept(engine, whole, "log_probabilities", log_probabilities(engine.tensor_parallel))
    return aligned_with_labels(places.joined(sum_over_stages(outputs, batch, engine.ranks.pipeline), batch))


def _kept(
    engine: Engine, whole: WholeBatch | Sequences, call: str, function: TokenOutputs
) -> tuple[Mapping[tuple[int, int], Tensor], SplitBatch, RowPlaces]:
    """Returns what the function gives of each slice here, how the batch was split, and where its tokens are."""
    family = causal_lm(engine.family, "what a model says of tokens", "Give evaluate(inputs, targets) a loss_fn.")
    if engine.layout.spreads_vocabulary:
        raise SlipstreamError(
            "no rank has all logits, as the rows of the head are spread over the ranks. Give "
            "Pipeline(vocabulary='whole'), or use evaluate(inputs, targets)."
        )
    with _evaluating(engine, call):
        batch, plan = engine.split_to_evaluate(whole, needs_targets=False)
        outputs = engine.keep_outputs(function, batch)
    if plan is None:
        return outputs, batch, RowPlaces()
    lengths = [len(targets) for targets in whole.targets]
    return outputs, batch, RowPlaces(family.sequences_of(plan.groups), lengths)


@contextmanager
def _evaluating(engine: Engine, call: str) -> Iterator[None]:
    """Sets evaluation mode, without gradients, for the method `call`; each stage's own mode is as before in the end."""
    engine.calls.name = call
    modes = {stage: stage.model.training for stage in engine.stages.values()}
    engine.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for stage, training in modes.items():
            stage.model.train(training)
    engine.parameters.release()
