"""Sequences of different lengths: checked, and packed one after the other into microbatches of one row each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED, Tensors
from slipstream.model.hooks import TokenSlice
from slipstream.pipeline.batch import MicrobatchSequences, SplitBatch, WholeBatch, check_rows, document_numbers
from slipstream.pipeline.pipeline_options import SequenceLoss
from slipstream.schedule import SlicedMicrobatch

Lengths = Sequence[int] | None  # the tokens of each row of padded tensors
Rows = Tensor | list[Tensor]  # one length for all sequences, or each its own


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch, each of its own number of tokens (T,), on this rank's device.

    Inputs are token ids, or what the first layer of an nn.Sequential takes: tensors or tuples of tensors.
    """

    inputs: Sequence[Any]
    targets: Sequence[Tensor]
    document_ids: Sequence[Tensor] | None = None
    sequence_values: Tensor | None = None  # (sequences, ...), for a loss of whole ones
    are_rows: bool = False  # of one batch, which the unsplit model runs together; else each is as if it were alone
    position_ids: Sequence[Tensor] | None = None  # of rows, where they don't count from 0
    max_position: int | None = None  # of rows with their padding; None: that of their tokens

    @classmethod
    def of(
        cls,
        device: torch.device,
        inputs: Tensor | Sequence[Tensor] | Sequence[Tensors],
        targets: Tensor | Sequence[Tensor],
        document_ids: Tensor | Sequence[Tensor] | None = None,
        lengths: Lengths = None,
        sequence_values: Tensor | None = None,
    ) -> Sequences:
        """Takes lists of (T,) tensors, or with `lengths` padded ones (batch, longest), whose padding is left out.

        Raises SlipstreamError where they aren't as many.
        """
        given = {"inputs": inputs, "targets": targets, "document_ids": document_ids}
        lists = {name: _listed(name, each, lengths) for name, each in given.items() if each is not None}
        if not lists["inputs"]:
            raise SlipstreamError("inputs are a list without a sequence: give at least one, or leave the step out.")
        for name, each in lists.items():
            if len(each) != len(lists["inputs"]):
                raise SlipstreamError(f"{name} are {len(each)} sequences, inputs {len(lists['inputs'])}: give as many.")
        moved: dict[str, Any] = {name: [_moved(each, device) for each in given] for name, given in lists.items()}
        values = None if sequence_values is None else sequence_values.to(device)
        return cls(**moved, sequence_values=values)

    def as_rows(self, width: int, lengths: Sequence[int], position_ids: Tensor | None) -> Sequences:
        """Returns these rows of a batch that was `width` tokens wide: each token keeps its position, and the unsplit
        model, which is given the padding, finds the largest in it."""
        if position_ids is None:  # they restart in documents, which padding has none of
            return replace(self, are_rows=True, max_position=width - 1 if self.document_ids is None else None)
        device = self.targets[0].device
        rows = [row[:length].to(device) for row, length in zip(position_ids, lengths, strict=True)]
        counts = all(torch.equal(row, torch.arange(len(row), device=device)) for row in rows)
        largest = int(position_ids.max())
        return replace(self, are_rows=True, position_ids=None if counts else rows, max_position=largest)

    @property
    def token_ids(self) -> list[Tensor]:
        """The inputs of a causal LM, (T,) int64 each. Raises SlipstreamError where they aren't."""
        for name in ("inputs", "targets", "document_ids"):
            for row, tensor in enumerate(getattr(self, name) or ()):
                _check(name, row, tensor, self.inputs[row])
        return [*self.inputs]

    def packed(self, groups: Sequence[Sequence[int]]) -> list[WholeBatch]:
        """Returns the batch of each microbatch: a row of these sequences, each of them its own documents."""
        return [self._row(group) for group in groups]

    def _row(self, group: Sequence[int]) -> WholeBatch:
        def joined(rows: Sequence[Tensor]) -> Tensor:
            return torch.cat([rows[number] for number in group])[None]

        row = WholeBatch(
            (joined(self.inputs),),
            False,
            joined(self.targets),
            position_ids=None if self.position_ids is None else joined(self.position_ids),
            max_position=self.max_position,
            lone_lengths=() if self.are_rows else [len(self.targets[number]) for number in group],
        )
        own = self.document_ids
        if own is None and self.position_ids is not None:
            own = [document_numbers(each) for each in self.position_ids]
        if len(group) == 1 and own is None:
            return row
        own = own or [torch.zeros_like(each) for each in self.targets]
        documents = [2 * own[number] + place % 2 for place, number in enumerate(group)]  # differ where a sequence ends
        return replace(row, document_ids=torch.cat(documents)[None])


def _listed(name: str, given: Any, lengths: Lengths) -> list[Any]:
    """Returns the sequences of a list, or of a padded tensor."""
    if lengths is None:
        each_is = (Tensor, tuple) if name == "inputs" else Tensor
        if isinstance(given, Tensor) or not all(isinstance(each, each_is) for each in given):
            raise SlipstreamError(f"{name} must be a list of tensors, one for each sequence, as inputs are.")
        return [*given]
    if not isinstance(given, Tensor) or given.dim() != 2 or len(given) != len(lengths):
        shape = tuple(given.shape) if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise SlipstreamError(
            f"{name} are {shape} for {len(lengths)} lengths: with lengths=..., give tensors (batch, longest), padded."
        )
    lengths = [int(length) for length in lengths]
    for row, length in enumerate(lengths):
        if not 0 <= length <= given.shape[1]:
            raise SlipstreamError(f"lengths[{row}]={length}, but {name} have room for {given.shape[1]} tokens.")
    return [row[:length] for row, length in zip(given, lengths, strict=True)]


def _moved(tensors: Tensor | Tensors, device: torch.device) -> Tensor | Tensors:
    return tensors.to(device) if isinstance(tensors, Tensor) else tuple(tensor.to(device) for tensor in tensors)


def _check(name: str, row: int, tensor: Tensor | Tensors, own: Tensor | Tensors) -> None:
    """Raises SlipstreamError where this isn't token ids, as many as the inputs of the sequence."""
    if not isinstance(tensor, Tensor) or not isinstance(own, Tensor):
        raise SlipstreamError(f"inputs[{row}] is a tuple; a causal LM takes token ids, (tokens,) int64.")
    if tensor.dim() != 1 or tensor.dtype != torch.int64 or tensor.shape != own.shape:
        raise SlipstreamError(
            f"{name}[{row}] is {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}; expected int64 of "
            f"the sequence's {own.shape[0] if own.dim() else 1} tokens, such as inputs[{row}]."
        )
    if len(tensor) == 0:
        raise SlipstreamError(f"inputs[{row}] is an empty sequence. Leave it out.")


def consecutive_groups(lengths: Sequence[int], number: int) -> tuple[tuple[int, ...], ...]:
    """Returns the numbers of consecutive sequences in `number` groups, none empty, of which the longest has the fewest
    tokens. Raises SlipstreamError where there are fewer sequences."""
    check_rows(len(lengths), number, "sequences")
    limits = range(max(lengths), sum(lengths) + 1)
    least = bisect_left(limits, True, key=lambda limit: len(_filled(lengths, number, limit)) <= number)
    ends = accumulate(map(len, _filled(lengths, number, limits[least])), initial=0)
    return tuple(tuple(range(begin, end)) for begin, end in pairwise(ends))


def _filled(lengths: Sequence[int], number: int, limit: int) -> list[list[int]]:
    """Returns groups of at most `limit` tokens, filled one after the other; later ones keep a sequence at least."""
    groups: list[list[int]] = [[]]
    for row, length in enumerate(lengths):
        left = len(lengths) - row
        if groups[-1] and (sum(groups[-1]) + length > limit or left <= number - len(groups)):
            groups.append([])
        groups[-1].append(length)
    return groups


def check_sequences(loss: SequenceLoss | None, whole: WholeBatch | Sequences) -> None:
    """Raises SlipstreamError where a batch isn't of whole groups of sequences, each with a target that counts."""
    if loss is None:
        refuse_values(whole)
        return
    if whole.document_ids is not None or getattr(whole, "position_ids", None) is not None:
        raise SlipstreamError(
            "document_ids or position_ids with a SequenceLoss, to which a row is a sequence. Leave them out, and give "
            "sequences of different lengths as a list."
        )
    if len(whole.targets) % loss.group_size:
        raise SlipstreamError(
            f"a batch of {len(whole.targets)} sequences with SequenceLoss(group_size={loss.group_size}): give a "
            "multiple of it, the sequences of a group next to each other."
        )
    values = whole.sequence_values
    if values is not None and (values.dim() == 0 or len(values) != len(whole.targets)):
        raise SlipstreamError(
            f"sequence_values are {tuple(values.shape)} for {len(whole.targets)} sequences: give one, or one row, for "
            "each."
        )
    have_any = torch.stack([(targets[1:] != IGNORED).any() for targets in whole.targets]).tolist()
    if not all(have_any):
        raise SlipstreamError(
            f"targets[{have_any.index(False)}] has no label that counts: all are -100 after the first, which nothing "
            "predicts. Leave such sequences out, with those of their group."
        )


def refuse_values(whole: WholeBatch | Sequences) -> None:
    """Raises SlipstreamError where values were given of sequences, and no loss takes them."""
    if whole.sequence_values is not None:
        raise SlipstreamError(
            "sequence_values without a SequenceLoss, whose function takes them. Leave them out, or give "
            "loss_fn=slipstream.SequenceLoss(function)."
        )


def check_groups(loss: SequenceLoss, microbatches: Sequence[SlicedMicrobatch]) -> None:
    """Raises SlipstreamError where a microbatch's rows aren't whole groups."""
    rows = [each.num_sequences for each in microbatches]
    if any(number % loss.group_size for number in rows):
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
    return [[number * size + place for number in group for place in range(size)] for group in groups]


def with_sequences(
    batch: SplitBatch, loss: SequenceLoss | None, whole: WholeBatch | Sequences, places: Sequence[slice | list[int]]
) -> SplitBatch:
    """Returns the batch with the sequences of each microbatch, which are at these places of the whole batch; what
    counts are its groups. Without a loss of sequences, returns the batch."""
    if loss is None:
        return batch
    values = whole.sequence_values
    pairs = zip(batch.slices, places, strict=True)
    sequences = [
        MicrobatchSequences(*_numbered(slices), place, None if values is None else values[place])
        for slices, place in pairs
    ]
    return replace(batch, sequences=sequences, num_valid=sum(each.count for each in sequences) // loss.group_size)


def _numbered(slices: Sequence[TokenSlice]) -> tuple[list[Tensor], int]:
    """Returns which sequence each token of a microbatch is of, (b, T) for each slice, and the number of sequences.

    Sequences are its rows, or the documents of its one row.
    """
    first = slices[0]
    if first.document_start is None:
        rows = torch.arange(len(first.input_ids), device=first.input_ids.device)[:, None]
        return [rows.expand_as(each.input_ids) for each in slices], len(rows)
    starts = torch.cat([each.document_start for each in slices if each.document_start is not None], dim=1)
    numbers = torch.zeros_like(starts)
    numbers[:, 1:] = (starts[:, 1:] != starts[:, :-1]).cumsum(1)
    bounds = [each.input_ids.shape[1] for each in slices]
    return list(torch.split(numbers, bounds, dim=1)), int(numbers.max()) + 1
