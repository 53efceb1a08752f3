"""A batch cut into microbatches and token slices, its labels shifted and its documents located before the cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED, PipelineStage, Tensors
from slipstream.model.hooks import TokenSlice
from slipstream.schedule import SlicedMicrobatch

_BATCH_TENSORS = 6  # ids, labels, positions and documents; labels and positions once more


def token_bytes(num_tokens: int) -> int:
    """Returns an upper bound of the bytes of a batch of token ids, cut and uncut."""
    return _BATCH_TENSORS * torch.int64.itemsize * num_tokens


@dataclass(frozen=True)
class WholeBatch:
    """A batch as a step is given it, on this rank's device; rows are dim 0 of every tensor."""

    inputs: Tensors
    is_tuple: bool  # whether the first layer takes the inputs as a tuple
    targets: Tensor
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    sequence_values: Tensor | None = None  # (B, ...), for a loss of whole sequences
    max_position: int | None = None  # that the unsplit model would see, where padding that was left out had more
    lone_lengths: Sequence[int] = ()  # of sequences that follow each other in one row, and are as if each were alone

    @classmethod
    def of(
        cls,
        device: torch.device,
        inputs: Tensor | Tensors,
        targets: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        sequence_values: Tensor | None = None,
    ) -> WholeBatch:
        """Moves the tensors to the device."""
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        for name, each in (*(("inputs", tensor) for tensor in given), ("targets", targets)):
            if not isinstance(each, Tensor):
                raise SlipstreamError(f"{name} are of type {type(each).__name__}: give a tensor, or a list of tensors.")
        moved = (None if each is None else each.to(device) for each in (position_ids, document_ids, sequence_values))
        positions, documents, values = moved
        batch = tuple(tensor.to(device) for tensor in given), given is inputs, targets.to(device)
        return cls(*batch, position_ids=positions, document_ids=documents, sequence_values=values)


@dataclass(frozen=True)
class MicrobatchSequences:
    """The sequences of a microbatch, for a loss of whole ones."""

    numbers: Sequence[Tensor]  # of each slice: which sequence a token is of, (b, T)
    count: int
    places: slice | list[int]  # in the whole batch
    values: Tensor | None  # (count, ...), as a step was given them


@dataclass(frozen=True)
class SplitBatch:
    """A batch as `slices[microbatch][slice]`, and the targets of each: for a causal LM (b, T), shifted.

    `num_valid` targets count in the whole batch, other replicas' rows included. Gradients are those of `loss_scale`
    times the loss, which is divided by `divisor`.
    """

    slices: Sequence[Sequence[Any]]  # a TokenSlice or BatchSlice each
    targets: list[list[Tensor]]
    num_valid: int
    loss_scale: float = 1.0
    num_targets: float | None = None  # in all batches whose gradients add up, where it isn't this one alone
    sequences: Sequence[MicrobatchSequences] = ()  # of each microbatch, where the loss is of whole ones

    @property
    def seed(self) -> int:
        """The step's seed."""
        seed: int = self.slices[0][0].seed
        return seed

    @property
    def max_position(self) -> int:
        """The largest position in sequences that one device would run together, -1 where each is as if alone."""
        together = (pieces[0] for pieces in self.slices if isinstance(pieces[0], TokenSlice))
        return max((each.max_position for each in together if not each.lone_sequences), default=-1)

    def with_max_position(self, largest: int) -> SplitBatch:
        """Returns the batch with the largest position that is found in all of it, other replicas' rows included."""
        if largest < 0:
            return self
        slices = [[replace(piece, max_position=largest) for piece in pieces] for pieces in self.slices]
        return replace(self, slices=slices)

    @property
    def divisor(self) -> float:
        """What the sum of losses is divided by (rule 9); 1 where nothing counts, so that the sum is zero."""
        return self.num_targets or self.num_valid or 1

    @property
    def loss_weight(self) -> float:
        """The weight of each valid target's loss in what gradients are of: its part of the global mean."""
        return 1.0 / (self.divisor / self.loss_scale)

    def twice(self, number: int) -> SplitBatch:
        """Returns a batch of two microbatches that are equal to this one's microbatch `number`."""
        slices, targets, sequences = self.slices[number], self.targets[number], self.sequences[number : number + 1]
        return replace(self, slices=[slices] * 2, targets=[targets] * 2, sequences=[*sequences] * 2)

    def with_loss_shares(self) -> SplitBatch:
        """Returns the batch of a causal LM, each slice with its microbatch's share of the scaled loss."""
        slices = []
        for pieces, targets in zip(self.slices, self.targets, strict=True):
            num_valid = sum(int((each != IGNORED).sum()) for each in targets)
            share = self.loss_scale * num_valid / self.divisor
            slices.append([replace(piece, loss_share=share) for piece in pieces])
        return replace(self, slices=slices)


def counted(targets: Tensor) -> int:
    """Returns how many targets count: of numbers, the rows."""
    return targets.shape[0] if targets.is_floating_point() else int((targets != IGNORED).sum())


def cut_batch(batch: WholeBatch, microbatches: Sequence[SlicedMicrobatch], seed: int) -> SplitBatch:
    """Cuts (B, L) inputs and unshifted targets into microbatches, each of some rows, in slices of its own lengths.

    Documents are runs of equal document_ids, or, as in transformers, of consecutive position_ids: positions restart
    with each, and its last token predicts nothing (rule 12).
    """
    check_shapes(batch, microbatches)
    (inputs,), position_ids = batch.inputs, batch.position_ids
    starts = _document_starts(batch)  # (B, L) or None
    targets = _shift(batch.targets, starts)
    if position_ids is None:
        position_ids = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        position_ids = position_ids if starts is None else position_ids - starts
    largest, *ends = torch.cat([position_ids.max()[None], _largest_of_each(position_ids, batch.lone_lengths)]).tolist()
    lone = list(zip(batch.lone_lengths, ends, strict=True))
    if batch.max_position is not None:
        largest = batch.max_position
    rows = rows_of(microbatches)
    bounds = [list(pairwise(accumulate(each.slices, initial=0))) for each in microbatches]
    pieces = [
        [
            TokenSlice(
                inputs[row, a:b],
                position_ids[row, a:b],
                None if starts is None else starts[row, a:b],
                start=a,
                length=inputs.shape[1],
                max_position=largest,
                lone_sequences=_within(lone, a, b),
                microbatch=microbatch,
                index=index,
                seed=seed,
            )
            for index, (a, b) in enumerate(bounds[microbatch])
        ]
        for microbatch, row in enumerate(rows)
    ]
    labels = [[targets[row, a:b] for a, b in cuts] for row, cuts in zip(rows, bounds, strict=True)]
    return SplitBatch(pieces, labels, int((targets != IGNORED).sum()))


def _largest_of_each(position_ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns the largest position of each sequence of a row, in a few kernels however many there are."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    zeros = position_ids.new_zeros(len(lengths))
    return zeros.scatter_reduce(0, numbers.to(zeros.device), position_ids[0, : len(numbers)], "amax")


def _within(sequences: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[tuple[int, int], ...]:
    """Returns the tokens between two places of each sequence that has some there, and its largest position."""
    bounds = pairwise(accumulate((length for length, _ in sequences), initial=0))
    found = ((min(b, end) - max(a, begin), each[1]) for (a, b), each in zip(bounds, sequences, strict=True))
    return tuple(each for each in found if each[0] > 0)


def cut_rows(parts: Sequence[WholeBatch], microbatches: Sequence[SlicedMicrobatch], seed: int) -> SplitBatch:
    """Cuts the batch of each microbatch, whose rows have a length of their own, into its slices."""
    cut = [cut_batch(part, [each], seed) for part, each in zip(parts, microbatches, strict=True)]
    slices = [[replace(piece, microbatch=number) for piece in batch.slices[0]] for number, batch in enumerate(cut)]
    found = SplitBatch(slices, [batch.targets[0] for batch in cut], sum(batch.num_valid for batch in cut))
    return found.with_max_position(found.max_position)


def rows_of(microbatches: Sequence[SlicedMicrobatch]) -> list[slice]:
    """Returns the rows of the batch that each microbatch has."""
    return [slice(a, b) for a, b in pairwise(accumulate((each.num_sequences for each in microbatches), initial=0))]


def slice_lengths(slices: int | Sequence[int], length: int) -> list[int]:
    """Returns the tokens of every slice: a count cuts evenly, with the first slices one token longer if need be.

    Raises SlipstreamError where they don't add up to the sequence length.
    """
    if isinstance(slices, int):
        if not 1 <= slices <= length:
            raise SlipstreamError(f"slices={slices}: a sequence of {length} tokens takes 1 to {length} slices.")
        return [length // slices + (i < length % slices) for i in range(slices)]
    if sum(slices) != length or min(slices) < 1:
        difference = length - sum(slices)
        raise SlipstreamError(
            f"slices={list(slices)} add up to {sum(slices)} tokens, but the sequence has {length}: all must be "
            f"positive and sum to it. {'Add' if difference > 0 else 'Take away'} {abs(difference)}, or give a count."
        )
    return list(slices)


def check_shapes(batch: WholeBatch, microbatches: Sequence[SlicedMicrobatch]) -> None:
    """Raises SlipstreamError where the tensors of a step don't fit each other or the pipeline."""
    inputs = batch.inputs[0]
    if inputs.dim() != 2 or inputs.dtype != torch.int64:
        raise SlipstreamError(f"inputs are {_describe(inputs)}; expected token ids, (batch, sequence) int64.")
    if batch.targets.dtype != torch.int64:
        raise SlipstreamError(f"targets are {_describe(batch.targets)}; expected token ids or -100, int64.")
    for name in ("targets", "position_ids", "document_ids"):
        tensor = getattr(batch, name)
        if tensor is not None and tensor.shape != inputs.shape:
            raise SlipstreamError(
                f"{name} are {_describe(tensor)}, inputs {_describe(inputs)}: they must have one shape."
            )
    for each in microbatches:
        slice_lengths(each.slices, inputs.shape[1])
    check_rows(inputs.shape[0], len(microbatches), "sequences")


def check_rows(num_rows: int, num_microbatches: int, name: str) -> None:
    """Raises SlipstreamError where some microbatch would be empty."""
    if num_rows < num_microbatches:
        raise SlipstreamError(
            f"a batch of {num_rows} {name} can't be cut into {num_microbatches} microbatches. Give at least "
            f"{num_microbatches} {name} or set num_microbatches={num_rows}."
        )


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _document_starts(batch: WholeBatch) -> Tensor | None:
    """Returns where the document of each token starts, (B, L); None where every sequence is one document."""
    (inputs,), position_ids, document_ids = batch.inputs, batch.position_ids, batch.document_ids
    begins = torch.zeros_like(inputs, dtype=torch.bool)
    if document_ids is None and position_ids is not None:
        document_ids = document_numbers(position_ids)
    if document_ids is not None:
        begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    if not begins.any():
        return None
    index = torch.arange(inputs.shape[1], device=inputs.device)
    return (index * begins).cummax(dim=1).values


def document_numbers(position_ids: Tensor) -> Tensor:
    """Returns the number of each token's document, (..., T): a new one begins where positions don't count on."""
    numbers = torch.zeros_like(position_ids)
    numbers[..., 1:] = (position_ids[..., 1:] != position_ids[..., :-1] + 1).cumsum(-1)
    return numbers


def _shift(targets: Tensor, starts: Tensor | None) -> Tensor:
    """Returns each token's label (B, L): that of the next token, unless another document begins there."""
    shifted = torch.full_like(targets, IGNORED)
    shifted[:, :-1] = targets[:, 1:]
    if starts is not None:
        shifted[:, :-1][starts[:, 1:] != starts[:, :-1]] = IGNORED
    return shifted


Stage = PipelineStage
