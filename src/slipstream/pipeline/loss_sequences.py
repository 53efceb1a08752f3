"""The sequences of a batch for a loss of whole ones: which a batch may have, and which sum each token's belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED
from slipstream.model.hooks import TokenSlice
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.cut_batch import MicrobatchSequences, SlicedValues, SplitBatch
from slipstream.pipeline.pipeline_options import SequenceLoss
from slipstream.pipeline.token_values import DOCUMENTS, POSITIONS, TokenRule
from slipstream.schedule import SlicedMicrobatch

NO_FUNCTION_OF_VALUES = (
    "sequence_values without a SequenceLoss, whose function takes them. Leave them out, or give "
    "loss_fn=slipstream.SequenceLoss(function)."
)

SUMS = TokenRule("sums of sequences")
"""The sum of its microbatch that a token's target adds to, (b, T)."""


def check_sequences(loss: SequenceLoss, whole: Batch) -> None:
    """Raises SlipstreamError where a batch isn't of whole groups of sequences, each with a target that counts."""
    if DOCUMENTS.name in whole.companions or POSITIONS.name in whole.companions:
        raise SlipstreamError(
            "document_ids or position_ids with a SequenceLoss, for which each row is a sequence. Leave them out, and "
            "give sequences of different lengths as a list."
        )
    if len(whole.labels) % loss.group_size:
        raise SlipstreamError(
            f"a batch of {len(whole.labels)} sequences with SequenceLoss(group_size={loss.group_size}): give a "
            "multiple of it, the sequences of a group next to each other."
        )
    values = whole.sequence_values
    if values is not None and (values.dim() == 0 or len(values) != len(whole.labels)):
        raise SlipstreamError(
            f"sequence_values are {tuple(values.shape)} for {len(whole.labels)} sequences: give one, or one row, for "
            "each."
        )
    if loss.prompts and (values is None or values.dim() != 2):
        raise SlipstreamError(
            "a SequenceLoss with prompts=True needs sequence_values of two dimensions, whose first column says how "
            "many targets each prompt has."
        )
    have_any = torch.stack([(labels[1:] != IGNORED).any() for labels in whole.labels]).tolist()
    if not all(have_any):
        raise SlipstreamError(
            f"targets[{have_any.index(False)}] has no label that counts: all are -100 after the first, which nothing "
            "predicts. Leave such sequences out, with those of their group."
        )


def check_groups(loss: SequenceLoss, microbatches: Sequence[SlicedMicrobatch]) -> None:
    """Raises SlipstreamError where a microbatch's rows aren't whole groups."""
    rows = [microbatch.num_sequences for microbatch in microbatches]
    if any(count % loss.group_size for count in rows):
        raise SlipstreamError(
            f"microbatches of {rows} rows with SequenceLoss(group_size={loss.group_size}), whose sequences share a "
            f"microbatch: give batches of a multiple of {len(rows) * loss.group_size} rows, or fewer microbatches."
        )


def grouped_lengths(loss: SequenceLoss | None, lengths: Sequence[int]) -> list[int]:
    """Returns the tokens of each group of sequences, which a step plans as one."""
    size = 1 if loss is None else loss.group_size
    return [sum(lengths[first : first + size]) for first in range(0, len(lengths), size)]


def ungrouped(loss: SequenceLoss | None, groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the numbers of the sequences in each microbatch, of the numbers of its groups."""
    size = 1 if loss is None else loss.group_size
    return [[index * size + place for index in group for place in range(size)] for group in groups]


def with_sequences(
    batch: SplitBatch, loss: SequenceLoss, whole: Batch, places: Sequence[slice | list[int]]
) -> SplitBatch:
    """Returns the batch with the sequences of each microbatch, which are at these places of the whole batch; its
    `num_valid` is the number of their groups."""
    values = whole.sequence_values
    sequences, sums = [], []
    for slices, place in zip(batch.slices, places, strict=True):
        numbers, count = _numbered(slices)
        own_values = None if values is None else values[place]
        if loss.prompts and own_values is not None:
            numbers = _with_prompts_apart(numbers, own_values[:, 0])
        sequences.append(MicrobatchSequences(count, place, own_values, loss.num_sums))
        sums.append(numbers)
    with_sums = {**batch.values, SUMS.name: SlicedValues(SUMS, sums)}
    num_valid = sum(m.count for m in sequences) // loss.group_size
    return replace(batch, values=with_sums, sequences=sequences, num_valid=num_valid)


def _with_prompts_apart(numbers: Sequence[Tensor], num_targets: Tensor) -> list[Tensor]:
    """Returns 2 s for each token of sequence s whose target is in its prompt, and 2 s + 1 after it; the prompt of
    sequence s has `num_targets[s]` targets."""
    whole = torch.cat([*numbers], dim=1)
    begins = torch.zeros_like(whole, dtype=torch.bool)
    begins[:, 1:] = whole[:, 1:] != whole[:, :-1]
    index = torch.arange(whole.shape[1], device=whole.device)
    places_in_sequence = index - (index * begins).cummax(dim=1).values
    parts = 2 * whole + (places_in_sequence >= num_targets.to(whole.device)[whole])
    return list(torch.split(parts, [slice_numbers.shape[1] for slice_numbers in numbers], dim=1))


def _numbered(slices: Sequence[TokenSlice]) -> tuple[list[Tensor], int]:
    """Returns which sequence each token of a microbatch is of, (b, T) for each slice, and the number of sequences.

    Sequences are its rows, or the documents of its one row.
    """
    first = slices[0]
    if first.document_start is None:
        rows = torch.arange(len(first.input_ids), device=first.input_ids.device)[:, None]
        return [rows.expand_as(piece.input_ids) for piece in slices], len(rows)
    starts = torch.cat([piece.document_start for piece in slices if piece.document_start is not None], dim=1)
    numbers = torch.zeros_like(starts)
    numbers[:, 1:] = (starts[:, 1:] != starts[:, :-1]).cumsum(1)
    bounds = [piece.input_ids.shape[1] for piece in slices]
    return list(torch.split(numbers, bounds, dim=1)), int(numbers.max()) + 1
