"""The batch of a step: rows of one length, sequences of different ones, or a mapping that is one or the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED, Tensors
from slipstream.parallel import Ranks
from slipstream.pipeline.batch import WholeBatch
from slipstream.pipeline.sequences import Lengths, Rows, Sequences

Inputs = Tensors | Rows | list[Tensors] | Mapping[str, Any]


def given_batch(
    ranks: Ranks,
    device: torch.device,
    inputs: Inputs,
    targets: Rows | None,
    position_ids: Tensor | None = None,
    document_ids: Rows | None = None,
    lengths: Lengths = None,
    sequence_values: Tensor | None = None,
    is_planned: bool = False,
    needs_labels: bool = True,
) -> WholeBatch | Sequences:
    """Returns the batch: rows of one length, or, of lists and with `lengths`, of different ones. Of a mapping it is
    rows of one length where no rank's has padding; with an attention_mask that is found out by one small message.

    Collective. Raises SlipstreamError where the tensors don't say which batch is meant.
    """
    if isinstance(inputs, Mapping):
        _refuse_twice(targets=targets, position_ids=position_ids)
        inputs, targets, position_ids, found = _agreed(ranks, inputs, lengths, needs_labels)
        if found is not None:
            without_padding = Sequences.of(device, inputs, targets, document_ids, found.tolist(), sequence_values)
            return without_padding.as_rows(inputs.shape[1], found.tolist(), position_ids)
    elif targets is None:
        if needs_labels:
            raise SlipstreamError("targets are missing: give step(inputs, targets), or a mapping that has 'labels'.")
        targets = inputs[0] if isinstance(inputs, tuple) else inputs  # type: ignore[assignment]
    assert targets is not None
    is_list = isinstance(inputs, list) or isinstance(targets, list) or isinstance(document_ids, list)
    if not is_list and lengths is None:
        if is_planned:
            raise SlipstreamError(
                "plan=... is for sequences of different lengths: give lists, or padded with lengths=..."
            )
        of_rows = position_ids, document_ids, sequence_values
        return WholeBatch.of(device, inputs, targets, *of_rows)  # type: ignore[arg-type]
    if position_ids is not None or isinstance(inputs, tuple):
        name = "a tuple of inputs" if isinstance(inputs, tuple) else "position_ids"
        raise SlipstreamError(
            f"{name} with sequences of different lengths: each is token ids, whose positions begin at 0. Leave it out."
        )
    return Sequences.of(device, inputs, targets, document_ids, lengths, sequence_values)


def padded_as(outputs: Tensor | list[Tensor], inputs: Inputs) -> Tensor | list[Tensor]:
    """Returns what was found of tokens in the form of the inputs: of padded ones (batch, sequence, ...), zeros at
    padding."""
    given = inputs["input_ids"] if isinstance(inputs, Mapping) else inputs
    if isinstance(outputs, Tensor) or not isinstance(given, Tensor):
        return outputs
    rows = outputs[0].new_zeros(*given.shape, *outputs[0].shape[1:])
    for row, found in zip(rows, outputs, strict=True):
        row[: len(found)] = found
    return rows


def _refuse_twice(**others: object) -> None:
    for name, given in others.items():
        if given is not None:
            raise SlipstreamError(f"{name}=... beside a mapping, which has its own. Give one of the two.")


def _agreed(ranks: Ranks, batch: Mapping[str, Any], lengths: Lengths, needs_labels: bool) -> CollatedBatch:
    """Returns the batch, with lengths where some rank's has padding: all ranks then plan a step of sequences.

    Raises SlipstreamError on every rank where one can't take its batch.
    """
    found = problem = None
    try:
        found = CollatedBatch.of(batch, needs_labels)
        if lengths is not None and found.lengths is not None:
            raise SlipstreamError("lengths=... beside an attention_mask, which says them. Give one of the two.")
    except SlipstreamError as error:
        problem = error
    state = torch.tensor([found is not None and found.has_padding, problem is not None], device=ranks.device)
    pads, is_refused = ranks.world.max(state.int()).tolist()
    if problem is not None:
        raise problem
    assert found is not None
    if is_refused:
        raise SlipstreamError("the step can't run on this rank, as another rank refused its batch: see its message.")
    if not pads:
        return found._replace(lengths=None)
    rows, longest = found.input_ids.shape
    return found._replace(lengths=torch.full((rows,), longest) if found.lengths is None else found.lengths)


KEYS = ("input_ids", "labels", "attention_mask", "position_ids")
_LABELS = (
    "For a causal LM give transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False), or type "
    "batch['labels'] = batch['input_ids'].masked_fill(batch['attention_mask'] == 0, -100)."
)


class CollatedBatch(NamedTuple):
    """The tensors of a mapping, (batch, sequence) each, and how many tokens of each row aren't padding."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None
    lengths: Tensor | None  # (batch,); None without a mask

    @classmethod
    def of(cls, batch: Mapping[str, Any], needs_labels: bool) -> Self:
        """Reads a mapping; without labels, those that aren't needed are the tokens.

        Raises SlipstreamError, naming the key, for what a Pipeline doesn't take, or takes otherwise than the unsplit
        model would.
        """
        _check_keys(batch, needs_labels)
        for key in KEYS:
            _check_tensor(key, batch.get(key), batch["input_ids"])
        ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
        labels = batch["labels"] if needs_labels else ids
        if mask is None:
            return cls(ids, labels, positions, None)
        lengths = _lengths(mask)
        if positions is not None:
            _check_positions(positions, mask)
        if needs_labels:
            _check_padding(labels, mask)
        return cls(ids, labels, positions, lengths)

    @property
    def has_padding(self) -> bool:
        """Whether some row is shorter than the tensors."""
        return self.lengths is not None and bool((self.lengths < self.input_ids.shape[1]).any())


def _check_keys(batch: Mapping[str, Any], needs_labels: bool) -> None:
    unknown = [key for key in batch if key not in KEYS]
    if unknown:
        allowed = ", ".join(KEYS)
        raise SlipstreamError(
            f"the batch has {', '.join(map(repr, unknown))}; a Pipeline takes {allowed}. Leave "
            f"{'it' if len(unknown) == 1 else 'them'} out: {{key: batch[key] for key in batch if key in {KEYS}}}."
        )
    if batch.get("input_ids") is None:
        raise SlipstreamError("the batch has no 'input_ids': token ids, (batch, sequence) int64.")
    if needs_labels and batch.get("labels") is None:
        raise SlipstreamError(f"the batch has no 'labels': unshifted, -100 where none counts. {_LABELS}")


def _check_tensor(key: str, given: object, ids: Any) -> None:
    if given is None:
        return
    if not isinstance(given, Tensor):
        raise SlipstreamError(
            f"batch[{key!r}] is a {type(given).__name__}; expected a tensor (batch, sequence): give the tokenizer or "
            "the collator return_tensors='pt', or step(...) lists of tensors instead of a mapping."
        )
    if given.dim() != 2 or given.shape != ids.shape:
        raise SlipstreamError(
            f"batch[{key!r}] is {tuple(given.shape)}, batch['input_ids'] {tuple(ids.shape)}; expected one shape, "
            "(batch, sequence)."
        )


def _lengths(mask: Tensor) -> Tensor:
    """Returns the tokens of each row, (batch,). Raises SlipstreamError unless its padding is all at the right."""
    lengths = (mask != 0).sum(1)
    places = torch.arange(mask.shape[1], device=mask.device)
    wrong = ((places < lengths[:, None]) != (mask == 1)).any(1).nonzero()[:, 0].tolist()
    if not wrong:
        return lengths
    row = wrong[0]
    if mask[row, -1] == 1 and (mask[row, -int(lengths[row]) :] == 1).all():
        raise SlipstreamError(
            f"attention_mask pads row {row} at the left, where the unsplit model counts positions from the padding. "
            "Give tokenizer.padding_side = 'right'."
        )
    raise SlipstreamError(
        f"attention_mask of row {row} isn't ones followed by zeros: a Pipeline leaves out padding at the right, and "
        "masks nothing else. Give documents by document_ids=..., and without attention_mask."
    )


def _check_positions(positions: Tensor, mask: Tensor) -> None:
    """Raises SlipstreamError where positions aren't those that a step gives the rows."""
    follows = (positions[:, 1:] == positions[:, :-1] + 1) | (mask[:, 1:] == 0)
    rows = (~follows.all(1)).nonzero()[:, 0].tolist()
    if rows:
        raise SlipstreamError(
            f"position_ids of row {rows[0]} don't count on, beside an attention_mask. For documents, at which "
            "positions restart, leave attention_mask out: with it the unsplit model attends across them."
        )
    if (mask == 0).any() and (positions[:, 0] != 0).any():
        raise SlipstreamError(
            "position_ids that don't begin at 0 in a batch with padding: those of a shorter row do. Leave position_ids "
            "out."
        )


def _check_padding(labels: Tensor, mask: Tensor) -> None:
    """Raises SlipstreamError where padding has labels that count."""
    rows = ((mask == 0) & (labels != IGNORED)).any(1).nonzero()[:, 0].tolist()
    if rows:
        raise SlipstreamError(
            f"labels of row {rows[0]} count where attention_mask is 0, at its padding. Type batch['labels'] = "
            "batch['labels'].masked_fill(batch['attention_mask'] == 0, -100)."
        )
