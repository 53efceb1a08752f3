"""Rows that are read while they are trained on come once an epoch, and after a resume from where the run was."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from slipstream.errors import SlipstreamError
from slipstream.train.config import SourceSection
from slipstream.train.data import TokenisedText
from slipstream.train.data.streams import MixedStreams, RowStream, StreamedSequences
from support.parameters import each_once

NUM_ROWS, BLOCK = 50, 16


@pytest.fixture(scope="module", params=[".jsonl", ".parquet"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row n has 2 + n % 5 tokens 10 n + 0, 1, ...; every tenth has none."""
    rows = [{"input_ids": [10 * n + i for i in range(2 + n % 5)] if n % 10 else None} for n in range(NUM_ROWS)]
    path = tmp_path_factory.mktemp("stream") / f"rows{request.param}"
    if request.param == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(
            pyarrow.table({"input_ids": [row["input_ids"] for row in rows]}), path, row_group_size=7
        )
    return path


def tokenise(name: str, rows: list[dict[str, Any]]) -> TokenisedText:
    kept = [np.array(row["input_ids"], dtype=np.int32) for row in rows if row["input_ids"]]
    return TokenisedText.join(kept, kept)


def tokenise_text(name: str, rows: list[dict[str, Any]]) -> TokenisedText:
    return TokenisedText.join([np.array(row["input_ids"], dtype=np.int32) for row in rows if row["input_ids"]])


def stream(file: Path, packing: str, make: Any = tokenise) -> StreamedSequences:
    return StreamedSequences(RowStream(SourceSection(dataset=str(file)), BLOCK), make, {}, packing, 8, seed=5)


def counted(batch: Any) -> list[int]:
    return [int(token) for row in batch.labels for token in row if token != -100]


@pytest.mark.parametrize(
    ("make", "packing"),
    each_once([tokenise, tokenise_text], ["fixed", "none"]),
    ids=["samples-fixed", "samples-none", "text-fixed", "text-none"],
)
def test_each_row_comes_once_an_epoch_also_after_a_resume(file: Path, packing: str, make: Any) -> None:
    """Resumed after each step on another number of replicas."""
    whole, size = stream(file, packing, make), 4
    wanted, states = [], []
    per_epoch = {10 * n + i for n in range(NUM_ROWS) if n % 10 for i in range(2 + n % 5)}
    seen: Counter[int] = Counter()
    while not wanted or min(seen[token] for token in per_epoch) < 2:
        wanted.append(counted(whole.batch(size * len(wanted), size)))
        seen.update(wanted[-1])
        states.append(json.loads(json.dumps(whole.state(size * len(wanted)))))
    assert {*seen} == per_epoch
    assert max(seen.values()) <= 3  # the last batch may be of the third epoch
    assert sum(count == 2 for count in seen.values()) > 0.8 * len(per_epoch)
    for step, state in enumerate(states[:-1], start=1):
        again = stream(file, packing, make)
        again.go_to(state)
        shares = [again.batch(size * step, size, replica, 2) for replica in range(2)]
        assert sorted(token for share in shares for token in counted(share)) == sorted(wanted[step])


def test_blocks_are_shuffled_otherwise(file: Path) -> None:
    sequences = stream(file, "none")
    firsts = [int(sequences.batch(index, 1).input_ids[0][0]) // 10 for index in range(90)]
    assert firsts[:14] != sorted(firsts[:14])
    assert sorted(firsts[:14]) == [n for n in range(16) if n % 10]
    assert firsts[45:59] != firsts[:14]  # in the second epoch
    assert sorted(firsts[45:59]) == sorted(firsts[:14])


@pytest.mark.parametrize("packing", ["fixed", "none"])
def test_several_streams_come_by_weight_also_after_a_resume(tmp_path: Path, packing: str) -> None:
    """Each row of each stream once in an epoch of its own; resumed on another number of replicas."""
    sizes, weights, size = (70, 30, 50), (3.0, 1.0, 0.5), 6
    for number, rows in enumerate(sizes):
        lines = ({"input_ids": [1000 * number + 10 * row + i for i in range(4 + row % 5)]} for row in range(rows))
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def opened() -> MixedStreams:
        return MixedStreams([stream(tmp_path / f"{number}.jsonl", packing) for number in range(3)], weights, 5)

    whole, wanted, states = opened(), [], []
    for step in range(100):
        wanted.append(counted(whole.batch(size * step, size)))
        states.append(json.loads(json.dumps(whole.state(size * (step + 1)))))
    assert np.bincount([whole._parts.index(whole._find(index)[0]) for index in range(512)]).tolist() == [341, 114, 57]
    seen = Counter(token for step in wanted for token in step)
    for number, rows in enumerate(sizes):
        times = [seen[1000 * number + 10 * row] for row in range(rows)]
        assert max(times) - min(times) <= 1
        assert max(times) >= 1
    for step in (1, 7, 42, 43, 85, 98):
        again = opened()
        again.go_to(states[step - 1])
        shares = [again.batch(size * step, size, replica, 2) for replica in range(2)]
        assert sorted(token for share in shares for token in counted(share)) == sorted(wanted[step])


def test_what_has_passed_cannot_be_asked_for(file: Path) -> None:
    sequences = stream(file, "none")
    sequences.batch(40, 2)
    with pytest.raises(IndexError, match="has passed"):
        sequences.row(0)


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n' * 3 + "{broken\n")
    with pytest.raises(SlipstreamError, match=r"data.dataset=.*rows.jsonl, line 4 isn't JSON"):
        stream(path, "none")
    path.write_text("")
    with pytest.raises(SlipstreamError, match=r"rows.jsonl"):
        stream(path, "none")
