"""Boxes of any mesh are read into those of any other, to the bit; on one process, with hypothesis."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from slipstream.errors import SlipstreamError
from slipstream.parallel.shares import Share
from slipstream.training.checkpoint import Found, Piece
from slipstream.training.checkpoint.box import Box
from slipstream.training.checkpoint.manifest import Manifest, Part
from slipstream.training.checkpoint.snapshot import Snapshot
from training.checkpoint_layouts import bits, emptied, layout, same_bits, tensors

seeds = st.integers(0, 2**32)
sizes = st.integers(1, 4)
intervals = st.tuples(st.integers(0, 8), st.integers(1, 5))


def save(folder: Path, ranks: list[list[Piece]]) -> Found:
    """Every rank's file, by the one snapshot."""
    snapshot, parts = Snapshot(), list[Part]()
    for rank, pieces in enumerate(ranks):
        snapshot.take(pieces, f"{rank}.safetensors")
        parts.append(snapshot.write(folder))
    Manifest.of(3, {"lr": 0.1}, parts).write(folder)
    return Found(folder, Manifest.read(folder))


@given(seeds, sizes, sizes, sizes, sizes)
@settings(deadline=None, max_examples=150)
def test_any_mesh_loads_what_any_other_saved(seed: int, tp: int, dp: int, later_tp: int, later_dp: int) -> None:
    whole = tensors(seed)
    with tempfile.TemporaryDirectory() as folder:
        found = save(Path(folder), layout(seed, whole, tp, dp))
        for pieces in layout(seed + 1, whole, later_tp, later_dp):
            targets = emptied(pieces)
            assert found.misfits(targets) == ""
            found.fill(targets)
            for piece, target in zip(pieces, targets, strict=True):
                assert same_bits(piece.tensor, target.tensor), piece


@given(st.lists(st.tuples(intervals, intervals), max_size=3))
def test_the_overlap_is_what_both_hold(dims: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    whole = torch.zeros([16] * len(dims))
    one = Box(tuple(a for (a, _), _ in dims), tuple(n for (_, n), _ in dims))
    other = Box(tuple(a for _, (a, _) in dims), tuple(n for _, (_, n) in dims))
    everything = Box((0,) * len(dims), (16,) * len(dims))
    for box in (one, other):
        whole[box.inside(everything)] += 1
    common = one.overlap(other)
    assert (whole == 2).sum() == (0 if common is None else common.num_elements)
    if common is not None:
        assert (whole[one.inside(everything)][common.inside(one)] == 2).all()
        assert (whole[other.inside(everything)][common.inside(other)] == 2).all()


def test_a_file_is_safetensors_of_boxes(tmp_path: Path) -> None:
    whole = tensors(0)
    share = Share((24, 8), 1, ((0, 2), (5, 8)))
    save(tmp_path, [[Piece("packed", share, share.take(whole["packed"]))], [rest(whole, share)]])
    stored = load_file(tmp_path / "0.safetensors")
    assert set(stored) == {"packed@0,0", "packed@0,5"}
    assert same_bits(stored["packed@0,5"], whole["packed"][:, 5:])


def rest(whole: dict[str, torch.Tensor], share: Share) -> Piece:
    """What lies between the share's two ranges."""
    ((_, start), (stop, _)) = share.ranges
    between = Share(share.shape, share.dim, ((start, stop),))
    return Piece("packed", between, between.take(whole["packed"]))


def test_memory_is_used_again_by_smaller_and_larger_saves(tmp_path: Path) -> None:
    for size in (100, 30, 200, 199):
        value = torch.arange(size) * size
        found = save(tmp_path, [[Piece("a", Share.whole((size,)), value)]])
        target = torch.zeros_like(value)
        found.fill([Piece("a", Share.whole((size,)), target)])
        assert bits(target).equal(bits(value))


def test_strided_tensors_and_parameters(tmp_path: Path) -> None:
    value = torch.nn.Parameter(torch.randn(6, 4))
    found = save(tmp_path, [[Piece("a", Share.whole((4, 6)), value.t())]])
    target = torch.nn.Parameter(torch.zeros(4, 12))
    found.fill([Piece("a", Share.whole((4, 6)), target[:, ::2])])
    assert target[:, ::2].equal(value.t())
    assert not target[:, 1::2].any()


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([Piece("b", Share.whole((4,)), torch.zeros(4))], "b isn't in it"),
        ([Piece("a", Share.whole((5,)), torch.zeros(5))], r"a has shape \(4,\) in it and \(5,\) here"),
        ([Piece("a", Share.whole((4,)), torch.zeros(4).double())], "a is float32 in it and float64 here"),
        ([Piece("a", Share.whole((4,)), torch.zeros(4), first_row=1)], "a isn't all in it"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, pieces: list[Piece], reason: str) -> None:
    found = save(tmp_path, [[Piece("a", Share.whole((4,)), torch.ones(4))]])
    assert re.fullmatch(reason, found.misfits(pieces))


def test_other_models_differ_by_field(tmp_path: Path) -> None:
    model = {"model_type": "llama", "hidden_size": 32, "rope": {"theta": 1e4, "kind": None}, "eos": (1, 2)}
    Manifest.of(1, {"model": model}, []).write(tmp_path)
    found = Found(tmp_path, Manifest.read(tmp_path))
    found.check_model(model)
    with pytest.raises(
        SlipstreamError, match=r"hidden_size is 32 in it and 64 here; rope.theta is 10000.0 in it and 5"
    ):
        found.check_model(model | {"hidden_size": 64, "rope": {"theta": 5}})


def test_every_element_is_written_once(tmp_path: Path) -> None:
    ones = torch.ones(4)
    whole = Piece("a", Share.whole((4,)), ones)
    with pytest.raises(ValueError, match="two pieces of this rank are the elements a@0"):
        save(tmp_path, [[whole, whole]])
    with pytest.raises(ValueError, match="several ranks write the same elements of a"):
        save(tmp_path, [[whole], [whole]])
    with pytest.raises(ValueError, match="the ranks write 3 elements of a, which has 4"):
        save(tmp_path, [[Piece("a", Share.whole((4,)), ones[:2])], [Piece("a", Share.whole((4,)), ones[:1], 2)]])
    with pytest.raises(ValueError, match=r"a is \('float32', \(4,\)\) on one rank and \('float64', \(4,\)\)"):
        save(
            tmp_path, [[Piece("a", Share.whole((4,)), ones[:2])], [Piece("a", Share.whole((4,)), ones[:2].double(), 2)]]
        )


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"a is of torch.complex64, which checkpoints don't hold"):
        save(tmp_path, [[Piece("a", Share.whole((4,)), torch.ones(4, dtype=torch.complex64))]])
