"""Turns the mask functions that a model builds into the range of keys that each query sees, exactly.

transformers describes a mask as a function of (batch, head, query, key). Slicing needs more structure: every causal
mask in use lets query q see a contiguous range first(q)..q (plain causal: 0; a sliding window: q-w+1; Llama 4's blocks:
the start of q's block). So each mask becomes a table `first`, found by evaluating the given function over all pairs;
the two commonest, transformers' own causal masks with and without a window, are known by their code. A mask that is not
such a range is refused as soon as a layer uses it, never approximated.

Packed documents are separate sequences to transformers: windows and blocks count from the document's start, so a table
is read at the position within the document and shifted by the document's start. Older versions count blocks from the
sequence's start; the installed version decides.

A model of images and text lets the tokens of one image see each other, by the images of the tokens that it was run on.
Masks here are evaluated once, for all pairs of a sequence, so all tokens must be text (`masks_of_text`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from slipstream.attention import KeyRanges
from slipstream.errors import SlipstreamError

MaskFunction = Callable[..., Tensor]
_COUNTS_WITHIN_DOCUMENTS = hasattr(masking_utils, "remap_positions_for_packed_sequence")
_ALL = slice(None)
_PAIRS_AT_ONCE = 1 << 24  # limits the memory of an evaluation to about 100 MB


def first_keys(mask_function: MaskFunction, length: int, device: torch.device) -> Tensor:
    """Returns the first key each of `length` queries sees: (length,) int64 on the CPU.

    Raises NotCausalError where a query's keys are not the contiguous range first(q)..q.
    """
    if mask_function is masking_utils.causal_mask_function:
        return KeyRanges.causal(0, length).first_key[0]
    if (window := _own_window(mask_function)) is not None:
        return (torch.arange(length) + 1 - window).clamp_(min=0)
    rows = max(1, _PAIRS_AT_ONCE // length)
    begins = range(0, length, rows)
    return torch.cat([_first_keys(mask_function, begin, min(begin + rows, length), device) for begin in begins])


def _own_window(mask_function: MaskFunction) -> int | None:
    """Returns the width of a causal sliding window of transformers' own, whose pairs needn't be evaluated; None for any
    other function."""
    like = masking_utils.sliding_window_causal_mask_function(1)
    parts = _enclosed(mask_function, like)
    if parts is None or len(parts) != 2 or parts[1] is not masking_utils.causal_mask_function:
        return None
    width = _enclosed(parts[0], _enclosed(like, like)[0])
    return width if isinstance(width, int) and width > 0 else None


def _enclosed(function: Any, like: Any) -> Any:
    """Returns the one value that a function encloses, if its code is that of another; else None."""
    cells = getattr(function, "__closure__", None)
    if getattr(function, "__code__", None) is not like.__code__ or cells is None or len(cells) != 1:
        return None
    return cells[0].cell_contents


def _first_keys(mask_function: MaskFunction, begin: int, end: int, device: torch.device) -> Tensor:
    query = torch.arange(begin, end, device=device)[:, None]
    key = torch.arange(end, device=device)[None, :]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    seen = torch.as_tensor(mask_function(zero, zero, query, key)).expand(end - begin, end)
    first = seen.int().argmax(dim=1)
    if not torch.equal(seen, (key >= first[:, None]) & (key <= query)):
        raise NotCausalError("a mask that is not causal over a contiguous range of keys")
    return first.cpu()


class NotCausalError(Exception):
    """A mask under which a query doesn't see exactly the keys first(q)..q.

    Models may build masks that no layer uses, so this travels in the mask's place and is raised by attention.
    """


class SliceMask(KeyRanges):
    """The mask that a model's layers are given. Some models' code takes parts of theirs: its last queries, which here
    are all, or an indexer's candidates.
    """

    def __init__(self, first_key: Tensor, start: int, length: int, device: torch.device) -> None:
        super().__init__(first_key, start)
        self._length = length
        self._device = device

    def __getitem__(self, index: Any) -> SliceMask | Tensor:
        """Returns itself for all queries, and for [:, 0] whether a query sees a key of the sequence.

        This has shape (rows, T, length), rows being 1 where all are alike. Raises SlipstreamError for anything else.
        """
        if index == (_ALL, _ALL, slice(0, None), _ALL):
            return self
        if index not in ((_ALL, 0), (_ALL, 0, _ALL, _ALL)):
            raise SlipstreamError(f"its own code reads the attention mask, {index} of it, which slices don't have")
        key = torch.arange(self._length, device=self._device)
        query = torch.arange(self.start, self.end, device=self._device)[:, None]
        return (key <= query) & (key >= self.first_key.to(self._device)[..., None])


class MaskTables:
    """The masks of one stage's model, their `functions` in the order in which its forward builds them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.functions: list[MaskFunction] = []
        self._tables: dict[int, Tensor | NotCausalError] = {}
        self._ranges: dict[tuple[int, int, int, int], SliceMask] = {}

    def ranges(
        self, mask: int, start: int, end: int, length: int, document_start: Tensor | None
    ) -> SliceMask | NotCausalError:
        """Returns the mask of queries [start, end) of a sequence; document_start is (b, end - start) or None."""
        table = self._table(mask, length)
        if isinstance(table, NotCausalError):
            return table
        if document_start is not None:
            begins = document_start.cpu()
            query = torch.arange(start, end)
            within = begins + table[query - begins] if _COUNTS_WITHIN_DOCUMENTS else begins.maximum(table[query])
            return SliceMask(within, start, length, self._device)
        place = mask, start, end, length
        if place not in self._ranges:
            self._ranges[place] = SliceMask(table[None, start:end], start, length, self._device)
        return self._ranges[place]

    def _table(self, mask: int, length: int) -> Tensor | NotCausalError:
        """Returns the first keys for at least `length` queries: a longer sequence's begin with a shorter one's."""
        known = self._tables.get(mask)
        if known is None or (isinstance(known, Tensor) and len(known) < length):
            try:
                known = first_keys(self.functions[mask], length, self._device)
            except NotCausalError as refused:
                known = refused
            self._tables[mask] = known
        return known


_BUILDER = "blockwise_overlay"


@contextmanager
def masks_of_text() -> Iterator[None]:
    """Lets no two tokens be of one image, for one forward; raises RuntimeError in it where a token is of one."""
    # An older transformers has no such function.
    if not hasattr(masking_utils, _BUILDER):
        yield
        return
    original = getattr(masking_utils, _BUILDER)
    # unittest.mock.patch takes ten times as long, and this runs for every slice.
    setattr(masking_utils, _BUILDER, _of_text)
    try:
        yield
    finally:
        setattr(masking_utils, _BUILDER, original)


def _of_text(block_sequence_ids: Tensor) -> Callable[..., Tensor]:
    """Returns the stand-in for transformers' function, given the number of each token's image, -1 for text."""
    # on a GPU this doesn't wait
    torch._assert_async((block_sequence_ids < 0).all(), "a token of an image is in a batch of text")

    def is_in_one_image(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.bool, device=query.device)

    return is_in_one_image
