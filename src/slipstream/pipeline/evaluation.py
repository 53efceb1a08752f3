"""Forward alone: the loss of a batch, and the logits and log-probabilities of its tokens, over slices and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED, in_evaluation, token_cross_entropy
from slipstream.parallel import RankGroup
from slipstream.parallel.tensor import gather_vocabulary, vocabulary_token_losses
from slipstream.pipeline.batch import Batch, Inputs, Lengths, padded_as
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.execution import TokenOutputs
from slipstream.pipeline.introspection import PipelineFacts, refuse_arguments
from slipstream.pipeline.token_values import Rows
from slipstream.planner.ragged import StepPlan


class PipelineEvaluation(PipelineFacts):
    """The part of a Pipeline that runs batches forward only."""

    def evaluate(
        self,
        inputs: Inputs | None = None,
        labels: Rows | None = None,
        document_ids: Rows | None = None,
        *,
        targets: Rows | None = None,
        lengths: Lengths = None,
        sequence_values: Tensor | None = None,
        plan: StepPlan | None = None,
        num_targets: float | None = None,
        **others: object,
    ) -> Tensor:
        """Runs one batch forward only, in evaluation mode, and returns the global mean loss. Collective; arguments,
        result and errors are those of `step`, though nothing needs to be trained."""
        if inputs is None or others:
            refuse_arguments("evaluate", inputs, labels, others)
        whole = self._runtime.read_batch(
            inputs,
            labels,
            document_ids=document_ids,
            lengths=lengths,
            sequence_values=sequence_values,
            is_planned=plan is not None,
            targets=targets,
        )
        with self._evaluating("evaluate"):
            batch = self._runtime.cut_to_evaluate(whole, plan, num_targets is None)
            return self._runtime.run_forward(batch, num_targets)

    def sequence_log_probabilities(self) -> Tensor:
        """Returns the log-probability of each sequence of the last step or evaluation with a SequenceLoss, (sequences,)
        float64, in the order of the batch, on all ranks of a pipeline: the argument of the loss's function, (sequences,
        2) where that has prompts apart. Collective.

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
        the rank that has the last stage, twice while they are put together; every other rank needs as much memory as in
        `evaluate`. For the log-probabilities of some labels, `log_probabilities` needs a slice's logits at a time.

        Returns:
            (batch, sequence, vocabulary) in the model's dtype, of a list a list of (tokens, vocabulary); zeros at
            padding. Only on ranks that have the last stage, with tp on each of those; None on the others. With dp the
            logits of this replica's own share.

        Raises:
            SlipstreamError: as `step`, and where no rank has all logits, with vocabulary="spread".
        """
        whole = self._runtime.read_batch(
            inputs, None, position_ids=position_ids, document_ids=document_ids, lengths=lengths, needs_labels=False
        )
        tensor = self._runtime.tensor_parallel

        def gathered(logits: Tensor, targets: Tensor) -> Tensor:
            return logits if tensor is None else gather_vocabulary(logits, tensor.group, tensor.num_ids)

        collected = self._collected(whole, "logits", gathered)
        return padded_as(collected.joined(collected.outputs), inputs) if collected.outputs else None

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
        whole = self._runtime.read_batch(
            inputs, labels, position_ids=position_ids, document_ids=document_ids, lengths=lengths
        )
        tensor = self._runtime.tensor_parallel
        losses: TokenOutputs = token_cross_entropy
        if tensor is not None:
            losses = vocabulary_token_losses(tensor.group, tensor.first_id, IGNORED)
        collected = self._collected(whole, "log_probabilities", lambda logits, t: -losses(logits, t).double())
        rows = collected.joined(collected.on_every_rank(self._runtime.ranks.pipeline))
        # the log-probabilities go to the places of the labels, one after the tokens
        if isinstance(rows, Tensor):
            return padded_as(functional.pad(rows[..., :-1], (1, 0)), inputs)
        return padded_as([functional.pad(row[:-1], (1, 0)) for row in rows], inputs)

    def _collected(self, whole: Batch, call: str, function: TokenOutputs) -> _CollectedTokens:
        """Returns the function's results on each slice's logits and targets here. Collective."""
        runtime = self._runtime
        runtime.family.check_has("what a model says of tokens", "Give evaluate(inputs, labels) a loss_fn.")
        if runtime.layout.spreads_vocabulary:
            raise SlipstreamError(
                "no rank has all logits, as the rows of the head are spread over the ranks. Give "
                "Pipeline(vocabulary='whole'), or use evaluate(inputs, labels)."
            )
        with self._evaluating(call):
            batch = runtime.cut_to_evaluate(whole, needs_targets=False)
            outputs = runtime.collect_outputs(function, batch)
        return _CollectedTokens(outputs, batch, whole.token_counts)

    @contextmanager
    def _evaluating(self, call: str) -> Iterator[None]:
        """Sets evaluation mode, without gradients, for the method `call`; each stage's own mode is as before in the
        end."""
        runtime = self._runtime
        runtime.calls.name = call
        with in_evaluation(stage.model for stage in runtime.stages.values()), torch.no_grad():
            yield
        runtime.parameters.release()


SliceOutputs = Mapping[tuple[int, int], Tensor]  # (microbatch, slice) -> (b, T, ...)


@dataclass(frozen=True)
class _CollectedTokens:
    """The results on a batch's slices, whose tokens are in microbatches of rows next to each other, or each a row of
    sequences."""

    outputs: SliceOutputs  # empty on ranks without the last stage
    batch: SplitBatch
    lengths: Sequence[int]  # tokens of each sequence, by its number

    def joined(self, outputs: SliceOutputs) -> Tensor | list[Tensor]:
        """Returns outputs by row, (batch, sequence, ...), or by sequence, (T, ...) each."""
        counts = map(len, self.batch.slices)
        rows = [torch.cat([outputs[m, i] for i in range(count)], dim=1) for m, count in enumerate(counts)]
        if not self.batch.groups:
            return torch.cat(rows)
        cut: dict[int, Tensor] = {}
        for (row,), group in zip(rows, self.batch.groups, strict=True):
            lengths = [self.lengths[number] for number in group]
            cut.update(zip(group, torch.split(row[: sum(lengths)], lengths), strict=True))
        return [cut[number] for number in range(len(cut))]

    def on_every_rank(self, pipeline: RankGroup) -> SliceOutputs:
        """Returns the outputs of the last stage's rank, (b, T) float64 of each slice. Collective over the pipeline."""
        whole = self.batch.whole_targets or self.batch.targets
        targets = {(m, i): each for m, row in enumerate(whole) for i, each in enumerate(row)}
        mine = [self.outputs.get(key, t.new_zeros(t.shape, dtype=torch.float64)) for key, t in targets.items()]
        total = pipeline.sum(torch.cat([tensor.flatten() for tensor in mine]))
        parts = torch.split(total, [tensor.numel() for tensor in mine])
        return {key: part.view_as(t) for (key, t), part in zip(targets.items(), parts, strict=True)}
