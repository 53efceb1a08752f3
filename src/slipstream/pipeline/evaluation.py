"""Forward alone: the loss of a batch, and what the model says of its tokens, over slices and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED, token_cross_entropy
from slipstream.parallel import RankGroup
from slipstream.parallel.tensor import TensorParallel, gather_vocabulary, vocabulary_token_losses
from slipstream.pipeline.batch import Inputs, Lengths, Rows, Sequences, WholeBatch, padded_as
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.execution import TokenOutputs
from slipstream.pipeline.families.model_family import causal_lm
from slipstream.pipeline.introspection import PipelineFacts
from slipstream.pipeline.runtime import PipelineRuntime
from slipstream.planner.steps import StepPlan


class PipelineEvaluation(PipelineFacts):
    """The part of a Pipeline that runs batches forward only."""

    def evaluate(
        self,
        inputs: Inputs,
        targets: Rows | None = None,
        document_ids: Rows | None = None,
        *,
        lengths: Lengths = None,
        sequence_values: Tensor | None = None,
        plan: StepPlan | None = None,
        num_targets: float | None = None,
    ) -> Tensor:
        """Runs one batch forward only, in evaluation mode, and returns the global mean loss. Collective; arguments,
        result and errors are those of `step`, though nothing needs to be trained."""
        of_rows = None, document_ids, lengths, sequence_values
        whole = self._runtime.read_batch(inputs, targets, *of_rows, plan is not None)
        return mean_loss(self._runtime, whole, plan, num_targets)

    def sequence_log_probabilities(self) -> Tensor:
        """Returns the log-probability of each sequence of the last step or evaluation with a SequenceLoss, (sequences,)
        float64, in the order of the batch, on all ranks of a pipeline: what the loss's function was given. Collective.

        Raises SlipstreamError where the loss isn't a SequenceLoss, or nothing has run yet.
        """
        return self._runtime.sequence_log_probabilities()

    def logits(
        self,
        inputs: Inputs,
        position_ids: Tensor | None = None,
        document_ids: Rows | None = None,
        *,
        lengths: Lengths = None,
    ) -> Tensor | list[Tensor] | None:
        """Runs a batch of token ids forward, in evaluation mode, and returns the logits of every token. Collective.

        Arguments are those of `step`; labels of a mapping are left alone. All logits of the batch are held at once on
        the rank that has the last stage, twice while they are put together; every other rank holds what `evaluate`
        does. For the log-probabilities of some labels, `log_probabilities` needs a slice's logits at a time.

        Returns:
            (batch, sequence, vocabulary) in the model's dtype, of a list a list of (tokens, vocabulary); zeros at
            padding. Only on ranks that have the last stage, with tp on each of those; None on the others. With dp the
            logits of this replica's own share.

        Raises:
            SlipstreamError: as `step`, and where no rank has all logits, with vocabulary="spread".
        """
        whole = self._runtime.read_batch(inputs, None, position_ids, document_ids, lengths, needs_labels=False)
        outputs = token_logits(self._runtime, whole)
        return None if outputs is None else padded_as(outputs, inputs)

    def log_probabilities(
        self,
        inputs: Inputs,
        labels: Rows | None = None,
        position_ids: Tensor | None = None,
        document_ids: Rows | None = None,
        *,
        lengths: Lengths = None,
    ) -> Tensor | list[Tensor]:
        """Runs a batch forward, in evaluation mode, and returns the log-probability of every label. Collective.

        Arguments are those of `step`. No rank holds more than in `evaluate`, but for the result: the last stage has
        the logits of one slice at a time.

        Returns:
            (batch, sequence) float64, of a list a list of (tokens,), on every rank: of each label, its log-probability
            given the tokens before it. Zero where none counts, at -100 and at the first token of a row or document, so
            that a row's sum is that of the sequence. With dp those of this replica's own share.

        Raises:
            SlipstreamError: as `step`, though a batch without a label that counts is fine, and with
                vocabulary="spread".
        """
        if labels is None and not isinstance(inputs, Mapping):
            raise SlipstreamError("labels are missing: give log_probabilities(tokens, labels), or a mapping with both.")
        whole = self._runtime.read_batch(inputs, labels, position_ids, document_ids, lengths)
        return padded_as(label_log_probabilities(self._runtime, whole), inputs)


def mean_loss(
    runtime: PipelineRuntime,
    whole: WholeBatch | Sequences,
    plan: StepPlan | None = None,
    num_targets: float | None = None,
) -> Tensor:
    """Returns the global mean loss of a batch, or the sum over `num_targets`. Collective. `plan` is for sequences
    alone."""
    with _evaluating(runtime, "evaluate"):
        batch, _ = runtime.cut_to_evaluate(whole, plan, num_targets is None)
        return runtime.run_forward(batch, num_targets)


def token_logits(runtime: PipelineRuntime, whole: WholeBatch | Sequences) -> TokenRows | None:
    """Returns each token's logits on ranks that have the last stage, None on the others. Collective."""
    outputs, batch, places = _kept(runtime, whole, "logits", gathered_logits(runtime.tensor_parallel))
    return places.joined(outputs, batch) if outputs else None


def label_log_probabilities(runtime: PipelineRuntime, whole: WholeBatch | Sequences) -> TokenRows:
    """Returns each label's log-probability, on every rank. Collective."""
    outputs, batch, places = _kept(runtime, whole, "log_probabilities", log_probabilities(runtime.tensor_parallel))
    return aligned_with_labels(places.joined(sum_over_stages(outputs, batch, runtime.ranks.pipeline), batch))


def _kept(
    runtime: PipelineRuntime, whole: WholeBatch | Sequences, call: str, function: TokenOutputs
) -> tuple[Mapping[tuple[int, int], Tensor], SplitBatch, RowPlaces]:
    """Returns what the function gives of each slice here, how the batch was split, and where its tokens are."""
    family = causal_lm(runtime.family, "what a model says of tokens", "Give evaluate(inputs, targets) a loss_fn.")
    if runtime.layout.spreads_vocabulary:
        raise SlipstreamError(
            "no rank has all logits, as the rows of the head are spread over the ranks. Give "
            "Pipeline(vocabulary='whole'), or use evaluate(inputs, targets)."
        )
    with _evaluating(runtime, call):
        batch, plan = runtime.cut_to_evaluate(whole, needs_targets=False)
        outputs = runtime.collect_outputs(function, batch)
    if plan is None:
        return outputs, batch, RowPlaces()
    lengths = [len(targets) for targets in whole.targets]
    return outputs, batch, RowPlaces(family.sequences_of(plan.groups), lengths)


@contextmanager
def _evaluating(runtime: PipelineRuntime, call: str) -> Iterator[None]:
    """Sets evaluation mode, without gradients, for the method `call`; each stage's own mode is as before in the end."""
    runtime.calls.name = call
    modes = {stage: stage.model.training for stage in runtime.stages.values()}
    runtime.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for stage, training in modes.items():
            stage.model.train(training)
    runtime.parameters.release()


def gathered_logits(tensor: TensorParallel | None) -> TokenOutputs:
    """Returns the function that keeps logits, (b, T, vocabulary). Calling it is collective over the tensor ranks."""

    def gather(logits: Tensor, targets: Tensor) -> Tensor:
        return logits if tensor is None else gather_vocabulary(logits, tensor.group, tensor.num_ids)

    return gather


def log_probabilities(tensor: TensorParallel | None) -> TokenOutputs:
    """Returns the function that keeps each target's log-probability, (b, T) float64, zero where none counts. Calling it
    is collective over the tensor ranks."""
    losses: TokenOutputs = token_cross_entropy
    if tensor is not None:
        losses = vocabulary_token_losses(tensor.group, tensor.first_id, IGNORED)
    return lambda logits, targets: -losses(logits, targets).double()


TokenRows = Tensor | list[Tensor]  # (batch, sequence, ...), or of every sequence (T, ...)


@dataclass(frozen=True)
class RowPlaces:
    """Where a batch's tokens are: in microbatches of rows next to each other, or each a row of sequences."""

    groups: Sequence[Sequence[int]] = ()  # the sequences in each microbatch's row
    lengths: Sequence[int] = ()  # of each sequence, by its number

    def joined(self, outputs: Mapping[tuple[int, int], Tensor], batch: SplitBatch) -> TokenRows:
        """Returns the outputs by row or by sequence, of those of each (microbatch, slice), (b, T, ...)."""
        counts = map(len, batch.slices)
        rows = [torch.cat([outputs[m, i] for i in range(count)], dim=1) for m, count in enumerate(counts)]
        if not self.groups:
            return torch.cat(rows)
        cut: dict[int, Tensor] = {}
        for (row,), group in zip(rows, self.groups, strict=True):
            cut.update(zip(group, torch.split(row, [self.lengths[number] for number in group]), strict=True))
        return [cut[number] for number in range(len(cut))]


def sum_over_stages(
    outputs: Mapping[tuple[int, int], Tensor], batch: SplitBatch, pipeline: RankGroup
) -> dict[tuple[int, int], Tensor]:
    """Returns on every rank what the last stage's kept of each slice, (b, T) float64. Collective over the pipeline."""
    targets = {(m, i): each for m, row in enumerate(batch.targets) for i, each in enumerate(row)}
    mine = [outputs.get(key, each.new_zeros(each.shape, dtype=torch.float64)) for key, each in targets.items()]
    whole = pipeline.sum(torch.cat([each.flatten() for each in mine]))
    parts = torch.split(whole, [each.numel() for each in mine])
    return {key: part.view_as(each) for (key, each), part in zip(targets.items(), parts, strict=True)}


def aligned_with_labels(rows: TokenRows) -> TokenRows:
    """Returns what tokens say of the labels after them at these labels' places; zero at the first."""
    if isinstance(rows, Tensor):
        return functional.pad(rows[..., :-1], (1, 0))
    return [functional.pad(row[:-1], (1, 0)) for row in rows]
