"""The tiles of key ranges cover every visible score once and no other, with work in proportion to the window."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.attention import KeyRanges, masks
from slipstream.attention.masks import ScoreRectangle, ScoreTile
from slipstream.errors import SlipstreamError
from support.examples import examples


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Tiles small enough that short random slices have every kind of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "SHORTEST_RUN", 3)
        patch.setattr(masks, "MASKED_ROWS", 5)
        patch.setattr(masks, "SQUARE", 4)
        yield


def dense(first_key: torch.Tensor, start: int) -> torch.Tensor:
    """(rows, T), start -> which of the keys [0, start + T) each query sees, (rows, T, start + T)."""
    end = start + first_key.shape[1]
    key = torch.arange(end)
    return (key >= first_key[..., None]) & (key <= torch.arange(start, end)[:, None])


def seen(tile: ScoreTile, part: ScoreRectangle) -> torch.Tensor:
    if part.masked:
        return tile.mask(part, torch.device("cpu"))
    square = torch.ones(part.queries.stop - part.queries.start, part.keys.stop - part.keys.start).bool()
    return square.tril() if part.causal else square


@st.composite
def first_keys(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    start, length, rows = draw(st.integers(0, 20)), draw(st.integers(1, 25)), draw(st.integers(1, 3))
    window = draw(st.integers(1, 50))
    table = []
    for _ in range(rows):
        cuts = sorted(draw(st.sets(st.integers(1, 44), max_size=6)))
        document = [max([0, *(c for c in cuts if c <= q)]) for q in range(start, start + length)]
        table.append([max(d, start + t - window + 1) for t, d in enumerate(document)])
    return torch.tensor(table), start


@examples(200)
@given(first_keys())
def test_tiles_cover_every_visible_score_once(case: tuple[torch.Tensor, int]) -> None:
    first_key, start = case
    key_ranges = KeyRanges(first_key, start)
    counts = torch.zeros(first_key.shape[0], key_ranges.end - start, key_ranges.end, dtype=torch.int64)
    covered = torch.zeros(first_key.shape[0], key_ranges.end - start, dtype=torch.int64)
    for tile in key_ranges.tiles:
        for part in tile.parts:
            queries = slice(tile.start - start + part.queries.start, tile.start - start + part.queries.stop)
            keys = slice(tile.first + part.keys.start, tile.first + part.keys.stop)
            visible = seen(tile, part)
            assert visible.any(dim=1).all(), "a kernel given a row without keys returns NaN"
            counts[tile.rows, queries, keys] += visible
            covered[tile.rows, queries] += part.diagonal
    assert torch.equal(counts, dense(first_key, start).long())
    assert (covered == 1).all()
    assert key_ranges.first == int(first_key.min())


def test_tiles_of_the_usual_masks() -> None:
    assert [t.first_keys for t in KeyRanges.causal(8, 16).tiles] == [None]
    document = KeyRanges(torch.tensor([[0] * 4 + [12] * 4]), 8)
    assert [(t.start, t.end, t.first, t.first_keys) for t in document.tiles] == [(8, 12, 0, None), (12, 16, 12, None)]
    window = KeyRanges((torch.arange(0, 30) - 5).clamp(min=0)[None], 0)
    assert [t.window for t in window.tiles] == [None] + [6] * 5  # fills up first, then slides
    assert all(t.end - t.first <= 5 + 6 for t in window.tiles[1:])
    assert KeyRanges(torch.zeros(3, 4, dtype=torch.int64), 2).num_rows == 1


@pytest.mark.parametrize(
    ("first_key", "start", "message"),
    [
        (torch.tensor([[0, 2]]), 0, "position 1 of batch row 0 has the first key 2"),
        (torch.tensor([[0, 1], [0, -1]]), 0, "position 1 of batch row 1 has the first key -1"),
        (torch.tensor([0, 0]), 0, "shape"),
        (torch.tensor([[0, 0]], dtype=torch.int32), 0, "int64"),
        (torch.tensor([[0, 0]]), -1, "starts at -1"),
    ],
)
def test_wrong_first_keys_are_refused(first_key: torch.Tensor, start: int, message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        KeyRanges(first_key, start)
