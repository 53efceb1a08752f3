"""What a Pipeline finds of a batch without training on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.pipeline.answers import PipelineFacts
from slipstream.pipeline.arguments import Inputs, given_batch, padded_as
from slipstream.pipeline.batch import WholeBatch
from slipstream.pipeline.evaluation.forward_only import label_log_probabilities, mean_loss, token_logits
from slipstream.pipeline.families.model_family import causal_lm
from slipstream.pipeline.sequences import Lengths, Rows, Sequences
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
        whole = self._batch(inputs, targets, *of_rows, plan is not None)
        return mean_loss(self._engine, whole, plan, num_targets)

    def sequence_log_probabilities(self) -> Tensor:
        """Returns the log-probability of each sequence of the last step or evaluation with a SequenceLoss, (sequences,)
        float64, in the order of the batch, on all ranks of a pipeline: what the loss's function was given. Collective.

        Raises SlipstreamError where the loss isn't a SequenceLoss, or nothing has run yet.
        """
        return self._engine.sequence_log_probabilities()

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
        whole = self._batch(inputs, None, position_ids, document_ids, lengths, needs_labels=False)
        outputs = token_logits(self._engine, whole)
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
        whole = self._batch(inputs, labels, position_ids, document_ids, lengths)
        return padded_as(label_log_probabilities(self._engine, whole), inputs)

    def _batch(self, inputs: Inputs, *others: Any, **options: Any) -> WholeBatch | Sequences:
        if isinstance(inputs, Mapping):
            causal_lm(self._engine.family, "a mapping as a batch", "Give step(inputs, targets).")
        return given_batch(self._engine.ranks, self.device, inputs, *others, **options)
