"""What any mesh saved is read into any other mesh to the bit, on one process and on several."""

from __future__ import annotations

import re
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from slipstream.checkpoint import Checkpoints, SavedCheckpoint, TensorShard
from slipstream.checkpoint.background_save import Snapshot
from slipstream.checkpoint.folder import CheckpointFolder
from slipstream.checkpoint.manifest import Manifest, WrittenFile
from slipstream.errors import SlipstreamError
from slipstream.parallel import ParameterShare, RankGroup
from support.checkpoints.layouts import bits, emptied, layout, same_bits, tensors
from support.checkpoints.run import pieces_of, start, train
from support.examples import examples
from support.forked import launch
from support.parameters import first_of
from support.paths import WORKERS
from workers.checkpoint.checkpoint_processes import MESHES, SEEDS

seeds = st.integers(0, 2**32)
sizes = st.integers(1, 4)


def save(folder: Path, ranks: list[list[TensorShard]], snapshot: Snapshot | None = None) -> SavedCheckpoint:
    """What every rank writes, and rank 0 commits, one after the other."""
    checkpoints, written = CheckpointFolder(folder), list[WrittenFile]()
    checkpoints.begin(3)
    for rank, pieces in enumerate(ranks):
        snapshot = snapshot if snapshot and len(ranks) == 1 else Snapshot()
        snapshot.take(pieces, f"{rank}.safetensors")
        if file := snapshot.write(checkpoints.part(3)):
            written.append(file)
    Manifest.of(3, {"lr": 0.1}, written).write(checkpoints.part(3))
    checkpoints.commit(3)
    return SavedCheckpoint(checkpoints.complete(3), Manifest.read(checkpoints.complete(3)))


def load(found: SavedCheckpoint, *pieces: TensorShard) -> None:
    assert found.describe_misfits(pieces) == ""
    found.load(pieces, RankGroup())


@given(seeds, sizes, sizes, sizes, sizes)
@examples(150)
def test_any_mesh_loads_what_any_other_saved(seed: int, tp: int, dp: int, later_tp: int, later_dp: int) -> None:
    whole = tensors(seed)
    with tempfile.TemporaryDirectory() as folder:
        found = save(Path(folder), layout(seed, whole, tp, dp))
        for pieces in layout(seed + 1, whole, later_tp, later_dp):
            targets = emptied(pieces)
            load(found, *targets)
            for piece, target in zip(pieces, targets, strict=True):
                assert same_bits(piece.tensor, target.tensor), piece


def test_a_file_is_safetensors_of_boxes(tmp_path: Path) -> None:
    whole = tensors(0)
    share = ParameterShare((24, 8), 1, ((0, 2), (5, 8)))
    found = save(tmp_path, [[TensorShard("packed", share, share.take(whole["packed"]))], [rest(whole, share)]])
    stored = load_file(found.folder / "0.safetensors")
    assert set(stored) == {"packed@0,0", "packed@0,5"}
    assert same_bits(stored["packed@0,5"], whole["packed"][:, 5:])


def rest(whole: dict[str, torch.Tensor], share: ParameterShare) -> TensorShard:
    """What lies between the share's two ranges."""
    ((_, start), (stop, _)) = share.ranges
    between = ParameterShare(share.shape, share.dim, ((start, stop),))
    return TensorShard("packed", between, between.take(whole["packed"]))


def test_memory_is_used_again_by_smaller_and_larger_saves(tmp_path: Path) -> None:
    snapshot = Snapshot()
    for size in (100, 30, 200, 199):
        value = torch.arange(size) * size
        found = save(tmp_path, [[TensorShard("a", ParameterShare.whole((size,)), value)]], snapshot)
        target = torch.zeros_like(value)
        load(found, TensorShard("a", ParameterShare.whole((size,)), target))
        assert bits(target).equal(bits(value))


def test_strided_tensors_and_parameters(tmp_path: Path) -> None:
    value = torch.nn.Parameter(torch.randn(6, 4))
    found = save(tmp_path, [[TensorShard("a", ParameterShare.whole((4, 6)), value.t())]])
    target = torch.nn.Parameter(torch.zeros(4, 12))
    load(found, TensorShard("a", ParameterShare.whole((4, 6)), target[:, ::2]))
    assert target[:, ::2].equal(value.t())
    assert not target[:, 1::2].any()


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([TensorShard("c", ParameterShare.whole((4,)), torch.zeros(4))], "c isn't in it"),
        ([TensorShard("a", ParameterShare.whole((5,)), torch.zeros(5))], r"a has shape \(4,\) in it and \(5,\) here"),
        (
            [TensorShard("a", ParameterShare.whole((4,)), torch.zeros(4).double())],
            "a is float32 in it and float64 here",
        ),
        ([TensorShard("a", ParameterShare.whole((4,)), torch.zeros(4), first_row=1)], "a isn't all in it"),
        ([TensorShard("b", ParameterShare((4, 2), 1, ((0, 1),)), torch.zeros(4, 1), first_row=1)], "b isn't all in it"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, pieces: list[TensorShard], reason: str) -> None:
    saved = [
        TensorShard("a", ParameterShare.whole((4,)), torch.ones(4)),
        TensorShard("b", ParameterShare.whole((4, 2)), torch.ones(4, 2)),
    ]
    found = save(tmp_path, [saved])
    assert re.fullmatch(reason, found.describe_misfits(pieces))


def test_other_models_differ_by_field(tmp_path: Path) -> None:
    model = {"model_type": "llama", "hidden_size": 32, "rope": {"theta": 1e4, "kind": None}, "eos": (1, 2)}
    Manifest.of(1, {"model": model}, []).write(tmp_path)
    found = SavedCheckpoint(tmp_path, Manifest.read(tmp_path))
    found.check_model(model)
    with pytest.raises(
        SlipstreamError, match=r"hidden_size is 32 in it and 64 here; rope.theta is 10000.0 in it and 5"
    ):
        found.check_model(model | {"hidden_size": 64, "rope": {"theta": 5}})


def test_every_element_is_written_once(tmp_path: Path) -> None:
    ones = torch.ones(4)
    whole = TensorShard("a", ParameterShare.whole((4,)), ones)
    with pytest.raises(ValueError, match="two shards of this rank have the same elements a@0"):
        save(tmp_path, [[whole, whole]])
    with pytest.raises(ValueError, match="several ranks write the same elements of a"):
        save(tmp_path, [[whole], [whole]])
    with pytest.raises(ValueError, match="the ranks write 3 elements of a, which has 4"):
        save(
            tmp_path,
            [
                [TensorShard("a", ParameterShare.whole((4,)), ones[:2])],
                [TensorShard("a", ParameterShare.whole((4,)), ones[:1], 2)],
            ],
        )
    with pytest.raises(ValueError, match=r"a is \('float32', \(4,\)\) on one rank and \('float64', \(4,\)\)"):
        save(
            tmp_path,
            [
                [TensorShard("a", ParameterShare.whole((4,)), ones[:2])],
                [TensorShard("a", ParameterShare.whole((4,)), ones[:2].double(), 2)],
            ],
        )


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"a is of torch.complex64, which checkpoints can't hold"):
        save(tmp_path, [[TensorShard("a", ParameterShare.whole((4,)), torch.ones(4, dtype=torch.complex64))]])


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
