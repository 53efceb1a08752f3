"""The rows of a batch that a microbatch has, and the lengths of its token slices."""

from __future__ import annotations

from typing import NamedTuple


class SlicedMicrobatch(NamedTuple):
    """Sequences that go through the pipeline together, in slices of these lengths."""

    num_sequences: int
    slices: tuple[int, ...]
