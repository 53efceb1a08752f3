"""A mapping that a data collator of transformers makes, read as the batch of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED
from slipstream.parallel import Ranks

KEYS = ("input_ids", "labels", "attention_mask", "position_ids")
# Keys that collators without padding add for attention kernels: where documents begin, as in position_ids.
_OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
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

        Raises SlipstreamError, naming the key, for entries that a Pipeline doesn't take, or takes otherwise than the
        unsplit model would.
        """
        _check_keys(batch, needs_labels)
        for key in KEYS:
            _check_tensor(key, batch.get(key), batch["input_ids"])
        _check_documents(batch)
        ids = batch["input_ids"]
        mask = batch.get("attention_mask")
        positions = batch.get("position_ids")
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


def agreed_batch(
    ranks: Ranks, batch: Mapping[str, Any], lengths: Sequence[int] | None, needs_labels: bool
) -> CollatedBatch:
    """Returns the batch, with lengths where some rank's has padding: all ranks then plan a step of sequences.

    Collective. Raises SlipstreamError on every rank where one can't take its batch.
    """
    collated = problem = None
    try:
        collated = CollatedBatch.of(batch, needs_labels)
        if lengths is not None and collated.lengths is not None:
            raise SlipstreamError(
                "lengths=... given together with an attention_mask, which says the same. Give one of the two."
            )
    except SlipstreamError as error:
        problem = error
    state = torch.tensor([collated is not None and collated.has_padding, problem is not None], device=ranks.device)
    pads, is_refused = ranks.world.max(state.int()).tolist()
    if problem is not None:
        raise problem
    assert collated is not None
    if is_refused:
        raise SlipstreamError("the step can't run on this rank, as another rank refused its batch: see its message.")
    if not pads:
        return collated._replace(lengths=None)
    rows, longest = collated.input_ids.shape
    return collated._replace(lengths=torch.full((rows,), longest) if collated.lengths is None else collated.lengths)


def _check_keys(batch: Mapping[str, Any], needs_labels: bool) -> None:
    of_documents = _OF_DOCUMENTS if batch.get("position_ids") is not None else ()
    unknown = [key for key in batch if key not in (*KEYS, *of_documents)]
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


def _check_documents(batch: Mapping[str, Any]) -> None:
    """Raises SlipstreamError where other keys say otherwise of documents than position_ids."""
    keys = [key for key in _OF_DOCUMENTS if batch.get(key) is not None]
    if not keys:
        return
    positions = batch["position_ids"].flatten()
    starts = torch.nn.functional.pad((positions == 0).nonzero()[:, 0], (0, 1), value=len(positions))
    lengths = starts.diff()
    expected: dict[str, Tensor] = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts)
    expected |= dict.fromkeys(("max_length_q", "max_length_k"), lengths.max())
    expected["seq_idx"] = torch.repeat_interleave(torch.arange(len(lengths), device=positions.device), lengths)
    for key in keys:
        actual = torch.as_tensor(batch[key], device=positions.device).flatten()
        if not torch.equal(actual.to(torch.int64), expected[key].flatten()):
            raise SlipstreamError(
                f"batch[{key!r}] and batch['position_ids'] disagree on where documents start; position_ids are 0 "
                f"there. Make them agree, or leave {key!r} out."
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
            f"position_ids of row {rows[0]} don't count up in a batch with an attention_mask. For documents, at which "
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
