"""Any number of real processes loads what any other number saved, and one may be killed meanwhile."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from slipstream.checkpoint import Checkpoints
from slipstream.parallel import RankGroup
from support.checkpoints.layouts import emptied, layout, same_bits, tensors
from support.checkpoints.run import pieces_of, start, train
from support.forked import launch
from support.parameters import first_of
from support.paths import WORKERS
from workers.checkpoint.checkpoint_processes import MESHES, SEEDS

WORKER = WORKERS / "checkpoint/checkpoint_processes.py"


def succeed(num_processes: int, *arguments: str) -> None:
    ended = launch(num_processes, WORKER, *arguments)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize(("saved_by", "loaded_by"), first_of([(2, 4), (4, 2)]))
def test_another_number_of_ranks_loads_to_the_bit(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    succeed(saved_by, "save", str(tmp_path))
    succeed(loaded_by, "load", str(tmp_path))
    alone = Checkpoints(tmp_path, RankGroup())
    for seed in SEEDS:
        (pieces,) = layout(seed, tensors(seed), 1, 1)
        targets = emptied(pieces)
        found = alone.find(seed)
        assert found is not None
        assert {path.name for path in found.folder.glob("*.safetensors")} == set(found.manifest.files)
        meshes = MESHES[saved_by]
        saved = layout(seed, tensors(seed), *meshes[seed % len(meshes)])
        assert len(found.manifest.files) == sum(any(p.writes and p.tensor.numel() for p in rank) for rank in saved)
        alone.load(found, targets)
        assert all(same_bits(piece.tensor, target.tensor) for piece, target in zip(pieces, targets, strict=True))


@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_rank_killed_while_it_saves_leaves_the_one_before(tmp_path: Path, victim: str) -> None:
    ended = launch(2, WORKER, "kill", str(tmp_path), victim)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002.part"]
    checkpoints = Checkpoints(tmp_path, RankGroup())
    found = checkpoints.find()
    assert found is not None
    assert found.step == 1
    checkpoints.prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_all_ranks_are_told_alike_what_went_wrong(tmp_path: Path) -> None:
    succeed(2, "trouble", str(tmp_path / "checkpoints"))


def test_one_process_goes_on_to_the_bit_where_two_were(tmp_path: Path) -> None:
    """Parameters, moments and the steps taken, of a real model, from two ranks' rows."""
    succeed(2, "train", str(tmp_path))
    checkpoints, again = Checkpoints(tmp_path, RankGroup()), start(seed=5)
    early, late = checkpoints.find(1), checkpoints.find(3)
    assert early is not None
    assert late is not None
    checkpoints.load(early, pieces_of(again, 0, 1))
    for step in range(early.facts["next"], late.facts["next"]):
        train(again, step)
    found = pieces_of(again, 0, 1)
    wanted = emptied(found)
    checkpoints.load(late, wanted)
    assert len(found) == 4 * len(list(again.model.parameters()))
    for one, other in zip(found, wanted, strict=True):
        assert same_bits(one.tensor, other.tensor), one.key
