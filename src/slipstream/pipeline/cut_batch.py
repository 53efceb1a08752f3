"""A batch cut into microbatches and token slices, its labels shifted and its documents located before the cuts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED, Tensors
from slipstream.model.hooks import TokenSlice
from slipstream.parallel import own_tokens, part_bounds, sequences_within, shared_slice
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.token_values import (
    DOCUMENTS,
    LABELS,
    POSITIONS,
    TokenRule,
    TokenValues,
    document_numbers,
)
from slipstream.schedule import SlicedMicrobatch

_BATCH_TENSORS = 6  # ids, labels, positions and documents; labels and positions once more


def token_bytes(num_tokens: int) -> int:
    """Returns an upper bound of the bytes of a batch of token ids, cut and uncut."""
    return _BATCH_TENSORS * torch.int64.itemsize * num_tokens


@dataclass(frozen=True)
class MicrobatchSequences:
    """The sequences of a microbatch, for a loss of whole ones."""

    count: int
    places: slice | list[int]  # indices in the whole batch
    values: Tensor | None  # (count, ...), the caller's `sequence_values`
    num_sums: int = 1  # sums per sequence


@dataclass(frozen=True)
class SlicedValues:
    """The values of tokens as `slices[microbatch][slice]`, (b, T, ...) each."""

    rule: TokenRule
    slices: list[list[Tensor]]

    @classmethod
    def of(
        cls, rule: TokenRule, rows: Tensor, microbatches: Sequence[SlicedMicrobatch], by_tokens: bool = True
    ) -> SlicedValues:
        """Cuts rows (B, T, ...) into those of each microbatch, and, unless they aren't `by_tokens`, into its slices."""
        slices: list[list[Tensor]] = []
        first = 0
        for microbatch in microbatches:
            own = rows[first : first + microbatch.num_sequences]
            first += microbatch.num_sequences
            slices.append([] if by_tokens else [own])
            if by_tokens:
                for a, b in pairwise(accumulate(microbatch.slices, initial=0)):
                    slices[-1].append(own[:, a:b])
        return cls(rule, slices)

    def part(self, rank: int, size: int) -> SlicedValues:
        """Returns one of `size` ranks' values of the slices that they share: an added token's where it has no token."""

        def own(tensor: Tensor) -> Tensor:
            begin, end = part_bounds(tensor.shape[1], size, rank)
            mine = own_tokens(tensor, rank, size)
            return mine if begin < end else torch.full_like(mine, self.rule.fill)

        return self.changed(own)

    def changed(self, change: Callable[[Tensor], Tensor]) -> SlicedValues:
        """Returns the values with every slice's changed."""
        return replace(self, slices=[[change(tensor) for tensor in tensors] for tensors in self.slices])

    def chosen(self, microbatches: Iterable[int]) -> SlicedValues:
        """Returns the values of these microbatches."""
        return replace(self, slices=[self.slices[number] for number in microbatches])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's value."""
        return self.slices[0][0][:1, :1].nbytes


@dataclass(frozen=True)
class SplitBatch:
    """A batch as `slices[microbatch][slice]`, and the values beside these that the loss is computed with, by name: the
    labels, for a causal LM (b, T) and shifted, and whatever else travels with the tokens.

    `num_valid` targets count in the whole batch, other replicas' rows included. Gradients are those of `loss_scale`
    times the loss, which is divided by `divisor`.
    """

    slices: Sequence[Sequence[Any]]  # a TokenSlice or BatchSlice each
    values: Mapping[str, SlicedValues]
    num_valid: int
    microbatches: Sequence[SlicedMicrobatch]
    groups: Sequence[Sequence[int]] = ()  # the sequence numbers in each microbatch's packed row; empty: not packed
    loss_scale: float = 1.0
    num_targets: float | None = None  # the divisor of the gradients; None: this batch's `num_valid`
    sequences: Sequence[MicrobatchSequences] = ()  # each microbatch's sequences, for a SequenceLoss
    whole_targets: list[list[Tensor]] | None = None  # all ranks' targets, for shared slices

    @property
    def targets(self) -> list[list[Tensor]]:
        """The labels of each slice, shifted where the model is a causal LM."""
        return self.values[LABELS.name].slices

    @property
    def num_tokens(self) -> int:
        return sum(microbatch.num_sequences * sum(microbatch.slices) for microbatch in self.microbatches)

    @property
    def seed(self) -> int:
        """The step's seed."""
        seed: int = self.slices[0][0].seed
        return seed

    @property
    def max_position(self) -> int:
        """The largest position in sequences that one device would run together, -1 where each is as if alone."""
        largest = -1
        for first, *_ in self.slices:
            if not first.lone_sequences:
                largest = max(largest, first.max_position)
        return largest

    def with_max_position(self, largest: int) -> SplitBatch:
        """Returns the batch with the largest position that is found in all of it, other replicas' rows included."""
        if largest < 0:
            return self
        slices = [[replace(piece, max_position=largest) for piece in pieces] for pieces in self.slices]
        return replace(self, slices=slices)

    @property
    def divisor(self) -> float:
        """The divisor of the sum of losses (rule 9); 1 where nothing counts, so that the sum is zero."""
        return self.num_targets or self.num_valid or 1

    @property
    def loss_weight(self) -> float:
        """The weight of each valid target's loss in the differentiated sum: its part of the global mean."""
        return 1.0 / (self.divisor / self.loss_scale)

    def part(self, rank: int, size: int) -> SplitBatch:
        """Returns the part of one of `size` ranks that share every slice of a causal LM: consecutive tokens of it, at
        most one more than another rank.

        A model can't run without tokens: where a slice has fewer than there are ranks, those that get none have one
        whose target doesn't count, and that attention doesn't see.
        """
        slices = [[shared_slice(piece, rank, size) for piece in pieces] for pieces in self.slices]
        values = {name: each.part(rank, size) for name, each in self.values.items()}
        return replace(self, slices=slices, values=values, whole_targets=self.targets)

    def twice(self, number: int) -> SplitBatch:
        """Returns a batch of two microbatches that are equal to this one's microbatch `number`."""
        values = {name: each.chosen([number] * 2) for name, each in self.values.items()}
        sequences = self.sequences[number : number + 1]
        return replace(
            self,
            slices=[self.slices[number]] * 2,
            values=values,
            microbatches=[self.microbatches[number]] * 2,
            sequences=[*sequences] * 2,
        )

    def tensors_of(self, microbatch: int, index: int) -> Tensors:
        """Returns the tensors of a slice and of all values beside it."""
        beside = (each.slices[microbatch][index] for each in self.values.values())
        return *self.slices[microbatch][index].tensors, *beside

    @property
    def further_bytes(self) -> int:
        """Bytes of the values that `token_bytes` leaves out, as they were given and as they are cut: of whole slices,
        also where ranks share them."""
        sizes = (each.bytes_per_token for name, each in self.values.items() if name != LABELS.name)
        return 2 * sum(sizes) * self.num_tokens

    def with_loss_shares(self) -> SplitBatch:
        """Returns the batch of a causal LM, each slice with its microbatch's share of the scaled loss."""
        slices = []
        for pieces, targets in zip(self.slices, self.whole_targets or self.targets, strict=True):
            num_valid = sum(int((target != IGNORED).sum()) for target in targets)
            share = self.loss_scale * num_valid / self.divisor
            slices.append([replace(piece, loss_share=share) for piece in pieces])
        return replace(self, slices=slices)


def counted(targets: Tensor) -> int:
    """Returns how many targets count: of numbers, the rows."""
    return targets.shape[0] if targets.is_floating_point() else int((targets != IGNORED).sum())


def cut_batch(
    batch: Batch, microbatches: Sequence[SlicedMicrobatch], seed: int, groups: Sequence[Sequence[int]] = ()
) -> SplitBatch:
    """Cuts a batch of token ids and unshifted targets into microbatches, each of some rows in slices of its own
    lengths. Sequences of different lengths are packed into a row for each microbatch: `groups` are their numbers; where
    they have fewer tokens than the slices, padding follows.

    Documents are runs of equal document_ids, or, as in transformers, of consecutive position_ids: positions restart
    with each, and its last token predicts nothing (rule 12).
    """
    if groups:
        lengths = batch.token_counts
        tokens = [sum(lengths[index] for index in group) for group in groups]
        missing = [sum(microbatch.slices) - count for microbatch, count in zip(microbatches, tokens, strict=True)]
        if not any(missing):
            return cut_groups(batch, microbatches, seed, groups, _cut_rows)
        rows = [(*group, len(lengths) + m) if missing[m] else group for m, group in enumerate(groups)]
        cut = cut_groups(batch.padded(missing), microbatches, seed, rows, _cut_rows)
        slices = [
            [replace(piece, is_padding=piece.start >= count) for piece in pieces]
            for pieces, count in zip(cut.slices, tokens, strict=True)
        ]
        return replace(cut, slices=slices, groups=groups)
    check_rows(len(batch.inputs[0].rows), len(microbatches), "sequences")
    return _cut_rows(batch, microbatches, seed)


def cut_groups(
    batch: Batch,
    microbatches: Sequence[SlicedMicrobatch],
    seed: int,
    groups: Sequence[Sequence[int]],
    cut_rows: Callable[[Batch, Sequence[SlicedMicrobatch], int, int], SplitBatch],
) -> SplitBatch:
    """Packs each group of sequences into the row of a microbatch, which `cut_rows` cuts: it is given the row, its
    microbatch, the seed and the microbatch's number."""
    rows = zip(batch.packed(groups), microbatches, strict=True)
    cut = [cut_rows(row, [microbatch], seed, index) for index, (row, microbatch) in enumerate(rows)]
    values = {
        name: replace(each, slices=[part.values[name].slices[0] for part in cut])
        for name, each in cut[0].values.items()
    }
    num_valid = sum(part.num_valid for part in cut)
    joined = SplitBatch([part.slices[0] for part in cut], values, num_valid, microbatches, groups)
    return joined.with_max_position(joined.max_position)


def _cut_rows(batch: Batch, microbatches: Sequence[SlicedMicrobatch], seed: int, first: int = 0) -> SplitBatch:
    """Cuts rows (B, L) of one length into microbatches, which are numbered from `first` on."""
    (inputs,) = batch.inputs
    token_ids: Tensor = inputs.rows  # type: ignore[assignment]
    position_ids: Tensor | None = batch.given(POSITIONS)  # type: ignore[assignment]
    document_ids: Tensor | None = batch.given(DOCUMENTS)  # type: ignore[assignment]
    length = token_ids.shape[1]

    # 1. The documents, the positions, and the largest of these.
    starts = _document_starts(token_ids, position_ids, document_ids)  # (B, L) or None
    if position_ids is None:
        position_ids = torch.arange(length, device=token_ids.device).expand_as(token_ids)
        position_ids = position_ids if starts is None else position_ids - starts
    largest, lone = _largest_positions(position_ids, batch.lone_lengths)
    if batch.max_position is not None:
        largest = batch.max_position

    # 2. What the loss reads, as the token before has it.
    values: dict[str, SlicedValues] = {}
    num_valid = 0
    for name, companion in batch.companions.items():
        if companion.rule in (POSITIONS, DOCUMENTS):
            continue  # parts of the slices themselves
        shifted = _shifted(companion, starts)
        values[name] = SlicedValues.of(companion.rule, shifted, microbatches)
        if companion.rule == LABELS:
            num_valid = int((shifted != IGNORED).sum())

    # 3. The slices.
    ids = SlicedValues.of(inputs.rule, token_ids, microbatches).slices
    positions = SlicedValues.of(POSITIONS, position_ids, microbatches).slices
    begins = None if starts is None else SlicedValues.of(DOCUMENTS, starts, microbatches).slices
    pieces: list[list[TokenSlice]] = []
    for m, microbatch in enumerate(microbatches):
        pieces.append([])
        for i, (a, b) in enumerate(pairwise(accumulate(microbatch.slices, initial=0))):
            piece = TokenSlice(
                ids[m][i],
                positions[m][i],
                None if begins is None else begins[m][i],
                start=a,
                length=length,
                max_position=largest,
                lone_sequences=sequences_within(lone, a, b) if lone else (),
                microbatch=first + m,
                index=i,
                seed=seed,
            )
            pieces[-1].append(piece)
    return SplitBatch(pieces, values, num_valid, microbatches)


def _shifted(values: TokenValues, starts: Tensor | None) -> Tensor:
    """Returns values (B, L, ...) that belong to predictions at the tokens that predict, each the one before; an added
    token's where nothing is predicted: at the end of a row or document."""
    rows: Tensor = values.rows  # type: ignore[assignment]
    if not values.rule.is_shifted:
        return rows
    following = torch.full_like(rows, values.rule.fill)
    following[:, :-1] = rows[:, 1:]
    if starts is not None:
        following[:, :-1][starts[:, 1:] != starts[:, :-1]] = values.rule.fill
    return following


def _largest_positions(position_ids: Tensor, lengths: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
    """Returns the largest position, and the length and the largest position of each sequence of a row, in a few kernels
    however many there are."""
    largest = position_ids.max()
    if not lengths:
        return int(largest), []
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    zeros = position_ids.new_zeros(len(lengths))
    of_each = zeros.scatter_reduce(0, numbers.to(zeros.device), position_ids[0, : len(numbers)], "amax")
    largest_of_all, *ends = torch.cat([largest[None], of_each]).tolist()
    return largest_of_all, list(zip(lengths, ends, strict=True))


def rows_of(microbatches: Sequence[SlicedMicrobatch]) -> list[slice]:
    """Returns the rows of the batch that each microbatch has."""
    rows: list[slice] = []
    for microbatch in microbatches:
        first = rows[-1].stop if rows else 0
        rows.append(slice(first, first + microbatch.num_sequences))
    return rows


def check_rows(num_rows: int, num_microbatches: int, name: str) -> None:
    """Raises SlipstreamError where some microbatch would be empty."""
    if num_rows < num_microbatches:
        raise SlipstreamError(
            f"a batch of {num_rows} {name} can't be cut into {num_microbatches} microbatches. Give at least "
            f"{num_microbatches} {name} or set num_microbatches={num_rows}."
        )


def _document_starts(inputs: Tensor, position_ids: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
    """Returns where the document of each token starts, (B, L); None where every sequence is one document."""
    begins = torch.zeros_like(inputs, dtype=torch.bool)
    if document_ids is None and position_ids is not None:
        document_ids = document_numbers(position_ids)
    if document_ids is not None:
        begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    if not begins.any():
        return None
    index = torch.arange(inputs.shape[1], device=inputs.device)
    return (index * begins).cummax(dim=1).values


def even_microbatches(num_rows: int, num_microbatches: int, slices: Sequence[int]) -> list[SlicedMicrobatch]:
    """Returns microbatches of nearly equal numbers of rows, the larger ones first, all in the same slices."""
    rows, more = divmod(num_rows, num_microbatches)
    return [SlicedMicrobatch(rows + (index < more), tuple(slices)) for index in range(num_microbatches)]


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
