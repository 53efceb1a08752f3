"""No division of batch and tokens is faster than the one chosen, by trying all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, pairwise, product
from math import inf
from typing import Any

import numpy as np
import pytest

from slipstream import SlipstreamError
from slipstream.planner.slicing.equal_stage_slicing import (
    slice_batch,
    slice_batch_with_flushes,
    slice_tokens,
    split_batch,
)


def every_slicing(length: int) -> Iterator[tuple[int, ...]]:
    for count in range(length):
        for cuts in combinations(range(1, length), count):
            yield tuple(b - a for a, b in pairwise((0, *cuts, length)))


def every_division(batch: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, batch + 1):
        yield from (sizes for sizes in combinations_with_replacement(range(1, batch + 1), count) if sum(sizes) == batch)


@pytest.mark.parametrize("seed", range(3))
def test_no_division_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        batch, length, num_stages = draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 6)
        table = {key: draw.randint(0, 20) for key in product(range(1, batch + 1), range(1, length + 1), range(length))}

        def times(b: int, slices: tuple[int, ...]) -> list[int]:
            return [table[b, tokens, sum(slices[:i])] for i, tokens in enumerate(slices)]  # noqa: B023

        pipelined = flushed = inf
        for sizes in every_division(batch):
            for chosen in product(every_slicing(length), repeat=len(sizes)):
                each = [times(b, slices) for b, slices in zip(sizes, chosen, strict=True)]
                total = sum(map(sum, each))
                pipelined = min(pipelined, total + (num_stages - 1) * max(map(max, each)))
                flushed = min(flushed, total + (num_stages - 1) * sum(map(max, each)))

        def t(b: int, i: int, j: int) -> float:
            return table[int(b), int(i), int(j)]  # noqa: B023

        found = slice_batch(t, batch, length, num_stages)
        assert found.latency == pipelined
        each = [times(group.num_sequences, group.slices) for group in found.microbatches]
        assert sum(map(sum, each)) + (num_stages - 1) * max(map(max, each)) == pipelined
        assert slice_batch_with_flushes(t, batch, length, num_stages).latency == flushed


def t(b: int, i: Any, j: Any) -> Any:
    return np.maximum(300, b * i) + 1e-3 * b * i * j


def test_one_sequence_is_slicing() -> None:
    found = slice_batch(t, 1, 2048, 8, granularity=64)
    alone = slice_tokens(lambda i, j: t(1, i, j), 2048, 8, granularity=64)
    assert (found.latency, found.microbatches[0].slices) == (alone.latency, alone.slices)
    assert slice_batch_with_flushes(t, 1, 2048, 8, granularity=64) == found


def test_a_limit_on_sequences_and_on_memory() -> None:
    found = slice_batch(t, 8, 1024, 4, granularity=64, max_sequences=3)
    assert max(group.num_sequences for group in found.microbatches) <= 3
    by_memory = slice_batch(lambda b, i, j: t(b, i, j) + (inf if b > 3 else 0), 8, 1024, 4, granularity=64)
    assert by_memory == found


def test_bad_input_is_explained() -> None:
    with pytest.raises(SlipstreamError, match="batch=0"):
        slice_batch(t, 0, 64, 2, 64)
    with pytest.raises(SlipstreamError, match="max_sequences=0"):
        slice_batch(t, 4, 64, 2, 64, max_sequences=0)
    with pytest.raises(SlipstreamError, match="No way to cut a batch of 3"):
        slice_batch(lambda b, i, j: i * (1.0 if b == 2 else inf), 3, 8, 2)
    with pytest.raises(SlipstreamError, match="A batch of 3 has no division"):
        split_batch([inf, 1.0], 3)
