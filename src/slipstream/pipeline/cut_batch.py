"""A batch cut into microbatches and token slices, its labels shifted and its documents located before the cuts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED
from slipstream.model.hooks import TokenSlice
from slipstream.parallel import own_tokens, sequences_within, shared_slice
from slipstream.pipeline.batch import Batch, document_numbers
from slipstream.pipeline.pipeline_options import SequenceLoss
from slipstream.schedule import SlicedMicrobatch

_BATCH_TENSORS = 6  # ids, labels, positions and documents; labels and positions once more


def token_bytes(num_tokens: int) -> int:
    """Returns an upper bound of the bytes of a batch of token ids, cut and uncut."""
    return _BATCH_TENSORS * torch.int64.itemsize * num_tokens


@dataclass(frozen=True)
class MicrobatchSequences:
    """The sequences of a microbatch, for a loss of whole ones."""

    numbers: Sequence[Tensor]  # of each slice: which sum of which sequence a token's target is in, (b, T)
    count: int
    places: slice | list[int]  # in the whole batch
    values: Tensor | None  # (count, ...), as a step was given them
    num_sums: int = 1  # of each


@dataclass(frozen=True)
class SplitBatch:
    """A batch as `slices[microbatch][slice]`, and the targets of each: for a causal LM (b, T), shifted.

    `num_valid` targets count in the whole batch, other replicas' rows included. Gradients are those of `loss_scale`
    times the loss, which is divided by `divisor`.
    """

    slices: Sequence[Sequence[Any]]  # a TokenSlice or BatchSlice each
    targets: list[list[Tensor]]
    num_valid: int
    microbatches: Sequence[SlicedMicrobatch]
    groups: Sequence[Sequence[int]] = ()  # the sequences in each microbatch's row, where they were packed
    loss_scale: float = 1.0
    num_targets: float | None = None  # in all batches whose gradients add up, where it isn't this one alone
    sequences: Sequence[MicrobatchSequences] = ()  # of each microbatch, where the loss is of whole ones
    whole_targets: list[list[Tensor]] | None = None  # where ranks share slices, and `targets` are this one's

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
        targets = [[own_tokens(tensor, rank, size) for tensor in labels] for labels in self.targets]
        for pieces, own in zip(slices, targets, strict=True):
            own[:] = [t if piece.num_own else torch.full_like(t, IGNORED) for piece, t in zip(pieces, own, strict=True)]
        sequences = [
            replace(microbatch, numbers=[own_tokens(numbers, rank, size) for numbers in microbatch.numbers])
            for microbatch in self.sequences
        ]
        return replace(self, slices=slices, targets=targets, sequences=sequences, whole_targets=self.targets)

    def twice(self, number: int) -> SplitBatch:
        """Returns a batch of two microbatches that are equal to this one's microbatch `number`."""
        slices, targets, sequences = self.slices[number], self.targets[number], self.sequences[number : number + 1]
        return replace(self, slices=[slices] * 2, targets=[targets] * 2, sequences=[*sequences] * 2)

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
    check_rows(len(batch.inputs[0]), len(microbatches), "sequences")
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
    pieces, labels = [part.slices[0] for part in cut], [part.targets[0] for part in cut]
    joined = SplitBatch(pieces, labels, sum(part.num_valid for part in cut), microbatches, groups)
    return joined.with_max_position(joined.max_position)


def _cut_rows(batch: Batch, microbatches: Sequence[SlicedMicrobatch], seed: int, first: int = 0) -> SplitBatch:
    """Cuts rows (B, L) of one length into microbatches, which are numbered from `first` on."""
    inputs: Tensor = batch.inputs[0]  # type: ignore[assignment]
    targets: Tensor = batch.targets  # type: ignore[assignment]
    position_ids: Tensor | None = batch.position_ids  # type: ignore[assignment]
    document_ids: Tensor | None = batch.document_ids  # type: ignore[assignment]
    starts = _document_starts(inputs, position_ids, document_ids)  # (B, L) or None
    # The label of a token is the next one, unless another document begins there.
    following = torch.full_like(targets, IGNORED)
    following[:, :-1] = targets[:, 1:]
    if starts is not None:
        following[:, :-1][starts[:, 1:] != starts[:, :-1]] = IGNORED
    if position_ids is None:
        position_ids = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        position_ids = position_ids if starts is None else position_ids - starts
    largest, lone = _largest_positions(position_ids, batch.lone_lengths)
    if batch.max_position is not None:
        largest = batch.max_position
    pieces: list[list[TokenSlice]] = []
    labels: list[list[Tensor]] = []
    for row, microbatch in zip(rows_of(microbatches), microbatches, strict=True):
        pieces.append([])
        labels.append([])
        for a, b in pairwise(accumulate(microbatch.slices, initial=0)):
            piece = TokenSlice(
                inputs[row, a:b],
                position_ids[row, a:b],
                None if starts is None else starts[row, a:b],
                start=a,
                length=inputs.shape[1],
                max_position=largest,
                lone_sequences=sequences_within(lone, a, b) if lone else (),
                microbatch=first + len(pieces) - 1,
                index=len(pieces[-1]),
                seed=seed,
            )
            pieces[-1].append(piece)
            labels[-1].append(following[row, a:b])
    return SplitBatch(pieces, labels, int((following != IGNORED).sum()), microbatches)


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


def refuse_values(whole: Batch) -> None:
    """Raises SlipstreamError where values were given of sequences, as no loss takes them."""
    if whole.sequence_values is not None:
        raise SlipstreamError(
            "sequence_values without a SequenceLoss, whose function takes them. Leave them out, or give "
            "loss_fn=slipstream.SequenceLoss(function)."
        )


def check_sequences(loss: SequenceLoss, whole: Batch) -> None:
    """Raises SlipstreamError where a batch isn't of whole groups of sequences, each with a target that counts."""
    if whole.document_ids is not None or whole.position_ids is not None:
        raise SlipstreamError(
            "document_ids or position_ids with a SequenceLoss, for which each row is a sequence. Leave them out, and "
            "give sequences of different lengths as a list."
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
    if loss.prompts and (values is None or values.dim() != 2):
        raise SlipstreamError(
            "a SequenceLoss with prompts=True needs sequence_values of two dimensions, whose first column says how "
            "many targets each prompt has."
        )
    have_any = torch.stack([(targets[1:] != IGNORED).any() for targets in whole.targets]).tolist()
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
    sequences = []
    for slices, place in zip(batch.slices, places, strict=True):
        numbers, count = _numbered(slices)
        own_values = None if values is None else values[place]
        if loss.prompts and own_values is not None:
            numbers = _with_prompts_apart(numbers, own_values[:, 0])
        sequences.append(MicrobatchSequences(numbers, count, place, own_values, loss.num_sums))
    return replace(batch, sequences=sequences, num_valid=sum(m.count for m in sequences) // loss.group_size)


def _with_prompts_apart(numbers: Sequence[Tensor], num_targets: Tensor) -> list[Tensor]:
    """Returns twice the number of each token's sequence, and one more where its target is after the prompt; prompts
    have so many targets."""
    whole = torch.cat([*numbers], dim=1)
    begins = torch.zeros_like(whole, dtype=torch.bool)
    begins[:, 1:] = whole[:, 1:] != whole[:, :-1]
    index = torch.arange(whole.shape[1], device=whole.device)
    places = index - (index * begins).cummax(dim=1).values  # in the sequence
    parts = 2 * whole + (places >= num_targets.to(whole.device)[whole])
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
