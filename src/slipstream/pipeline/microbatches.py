"""The rows and the token slices of each microbatch: as even as they can be, or as they were given."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.schedule import SlicedMicrobatch

_EXAMPLE = "[[2, [704, 688, 656]], [1, [2048]]] for 3 rows of 2048 tokens"


def even_microbatches(num_rows: int, num_microbatches: int, slices: Sequence[int]) -> list[SlicedMicrobatch]:
    """Returns microbatches of nearly equal numbers of rows, the larger ones first, all in the same slices."""
    rows, more = divmod(num_rows, num_microbatches)
    return [SlicedMicrobatch(rows + (number < more), tuple(slices)) for number in range(num_microbatches)]


def given_microbatches(given: Any) -> tuple[SlicedMicrobatch, ...]:
    """Returns the microbatches of a setting: what `slice_batch` returns, or pairs of rows and slice lengths.

    Raises SlipstreamError where it is neither, or rows differ in their tokens.
    """
    listed = getattr(given, "microbatches", given)
    try:
        found = tuple(SlicedMicrobatch(index(rows), tuple(map(index, slices))) for rows, slices in listed)
    except (TypeError, ValueError):
        found = ()
    if not found or any(min(each.num_sequences, *each.slices, len(each.slices)) < 1 for each in found):
        raise SlipstreamError(
            f"microbatches={given!r}: give each one's rows and the tokens of its slices, such as {_EXAMPLE}."
        )
    for number, each in enumerate(found):
        if sum(each.slices) != sum(found[0].slices):
            raise SlipstreamError(
                f"microbatches[{number}] has slices of {sum(each.slices)} tokens in all, microbatches[0] of "
                f"{sum(found[0].slices)}: the rows of a batch have one length. Make them equal."
            )
    return found


def check_microbatches(
    given: Sequence[SlicedMicrobatch], num_rows: int, length: int, rows_of: str = "the batch", tokens_of: str = "it"
) -> None:
    """Raises SlipstreamError where microbatches don't add up to a batch of `num_rows` sequences of `length` tokens."""
    rows, tokens = sum(each.num_sequences for each in given), sum(given[0].slices)
    shown = [[each.num_sequences, [*each.slices]] for each in given]
    if rows != num_rows:
        raise SlipstreamError(f"microbatches={shown} have {rows} rows, but {rows_of} has {num_rows}. Make them equal.")
    if tokens != length:
        raise SlipstreamError(
            f"microbatches={shown} have slices of {tokens} tokens in all, but {tokens_of} has rows of {length}. Make "
            "them equal."
        )
