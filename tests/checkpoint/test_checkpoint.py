"""A checkpoint is whole or absent whatever breaks, and the newest good one is found; on one process."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from slipstream.checkpoint import CheckpointFolder, CheckpointReader, Checkpoints, TensorShard
from slipstream.checkpoint.background_save import Snapshot
from slipstream.checkpoint.files import _head, read_record, write_file, write_record
from slipstream.checkpoint.saved_checkpoint import ignore_lone_process_warning
from slipstream.errors import NonFiniteError, SlipstreamError
from slipstream.parallel import ParameterShare, RankGroup

FILE = "rank-00000.safetensors"


def pieces(value: float, size: int = 300) -> list[TensorShard]:
    """Two tensors that say when they were saved."""
    tensors = {"weight": torch.full((size, 10), value), "step": torch.tensor(value)}
    return [TensorShard(key, ParameterShare.whole(tuple(tensor.shape)), tensor) for key, tensor in tensors.items()]


def loaded(checkpoints: Checkpoints, wanted: int | str = "latest") -> float:
    """The value in the checkpoint, the same in all of it."""
    found = checkpoints.find(wanted)  # type: ignore[arg-type]
    assert found is not None
    targets = pieces(-1.0)
    checkpoints.load(found, targets)
    value = float(targets[1].tensor)
    assert (targets[0].tensor == value).all()
    assert found.facts == {"samples": value}
    assert found.step == value
    return value


class Run:
    """A folder, its checkpoints, and what was said."""

    def __init__(self, folder: Path, keep: int = 2, keep_every: int = 0) -> None:
        self.folder, self.said = folder / "checkpoints", list[str]()
        self.checkpoints = Checkpoints(self.folder, RankGroup(), keep, keep_every, self.said.append)
        self.checkpoints.prepare()

    def save(self, *steps: int) -> None:
        for step in steps:
            self.checkpoints.save(step, pieces(float(step)), {"samples": step})
        self.checkpoints.wait()

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_there_and_back(run: Run) -> None:
    assert run.checkpoints.find() is None
    assert run.checkpoints.find("last-good") is None
    run.save(1, 2)
    assert loaded(run.checkpoints) == loaded(run.checkpoints, 2) == loaded(run.checkpoints, "last-good") == 2
    assert loaded(run.checkpoints, 1) == 1
    assert run.said == []
    assert sorted(path.name for path in (run.folder / "step-00000002").iterdir()) == ["manifest.json", FILE]
    json.loads((run.folder / "step-00000002" / "manifest.json").read_text())


def test_saves_the_values_of_the_call_while_training_goes_on(run: Run) -> None:
    """100 MB, checked and synced, aren't on the disk when `save` returns."""
    large = pieces(1.0, size=2_500_000)
    facts = {"samples": 1}
    run.checkpoints.save(1, large, facts)
    run.checkpoints.keep()
    assert run.names() == ["step-00000001.part"]
    for piece in large:
        piece.tensor.fill_(5.0)
    facts["samples"] = 5
    run.checkpoints.wait()
    found = run.checkpoints.find()
    assert found is not None
    assert found.facts == {"samples": 1}
    run.checkpoints.load(found, large)
    assert all((piece.tensor == 1.0).all() for piece in large)


def test_a_save_waits_for_the_one_before(run: Run) -> None:
    run.checkpoints.save(1, pieces(1.0, size=1_000_000), {})
    run.checkpoints.save(2, pieces(2.0), {})
    assert "step-00000001" in run.names()
    run.checkpoints.close()
    assert run.names() == ["step-00000001", "step-00000002"]


def test_the_last_few_and_every_so_many_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2, keep_every=4)
    run.save(*range(1, 11))
    assert run.names() == [f"step-{step:08d}" for step in (4, 8, 9, 10)]
    with pytest.raises(SlipstreamError, match="keep=0, keep_every=0: give keep from 1"):
        Checkpoints(tmp_path, RankGroup(), keep=0)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def flip(bit: int) -> Callable[[Path], None]:
    """Of the file's bits, counted round and round."""

    def act(path: Path) -> None:
        data = bytearray(path.read_bytes())
        place = bit % (8 * len(data))
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)

    act.__name__ = f"flip bit {bit}"
    return act


FLIPS = [flip(bit) for bit in (0, 7, 61, 64, 77, 300, 1_000_003, 2_000_029, -1, -1001)]


@pytest.mark.parametrize("name", [FILE, "manifest.json"])
@pytest.mark.parametrize("damage", [Path.unlink, truncate, empty, extend, *FLIPS], ids=lambda act: act.__name__)
def test_damage_is_named_and_the_one_before_taken(run: Run, name: str, damage: Callable[[Path], None]) -> None:
    run.save(1, 2)
    damage(run.folder / "step-00000002" / name)
    reason = {Path.unlink: "is missing", truncate: "is truncated", extend: "has grown|altered", empty: "is truncated"}
    words = rf"step 2 in .* is damaged: {name} .*({reason.get(damage, 'altered')})"
    with pytest.raises(SlipstreamError, match=rf"{words}.*last good one before it is of step 1: give 1, or last-good"):
        run.checkpoints.find()
    with pytest.raises(SlipstreamError, match=words):
        run.checkpoints.find(2)
    assert loaded(run.checkpoints, 1) == 1
    assert run.said == []
    assert loaded(run.checkpoints, "last-good") == 1
    assert len(run.said) == 1
    assert name in run.said[0]
    assert run.said[0].endswith("taking that of step 1")


def test_nothing_good_is_left(run: Run) -> None:
    run.save(1)
    (run.folder / "step-00000001" / FILE).unlink()
    for wanted in ("latest", "last-good"):
        with pytest.raises(SlipstreamError, match=r"step 1 .* is damaged: .* is missing\. No good"):
            run.checkpoints.find(wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", [3, "last_good", "1"])
def test_what_is_not_there(run: Run, wanted: int | str) -> None:
    run.save(1, 2)
    with pytest.raises(SlipstreamError, match=r"no checkpoint .* give one of its steps \(2, 1\), latest or last-good"):
        run.checkpoints.find(wanted)  # type: ignore[arg-type]


def test_going_on_from_an_earlier_one_sets_the_later_aside(run: Run) -> None:
    run.save(1, 2)
    run.checkpoints.find(1)
    run.save(2)
    assert run.names() == ["step-00000001", "step-00000002", "step-00000002.aside"]
    run.save(1)
    aside = ["step-00000001.aside", "step-00000002.aside", "step-00000002.aside-2"]
    assert run.names() == ["step-00000001", *aside]
    assert loaded(run.checkpoints) == 1


def test_a_part_is_no_checkpoint_and_goes_with_the_next_start(run: Run) -> None:
    run.save(1)
    shutil.copytree(run.folder / "step-00000001", run.folder / "step-00000002.part")
    assert loaded(run.checkpoints) == 1
    run.checkpoints.prepare()
    assert run.names() == ["step-00000001"]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to write more, as it does when a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_and_training_goes_on(run: Run) -> None:
    run.save(1)
    with largest_file(4096):
        run.checkpoints.save(2, pieces(2.0), {"samples": 2})
        run.checkpoints.wait()
    assert len(run.said) == 1
    assert "step 2 was not saved: rank 0: [Errno 27] File too large" in run.said[0]
    assert run.said[0].endswith("The last checkpoint is that of step 1.")
    assert run.names() == ["step-00000001"]
    run.save(3)
    assert loaded(run.checkpoints) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_saved(run: Run, value: float) -> None:
    """A sum of finite elements that overflows is no reason."""
    run.save(1)
    large = torch.full((300, 10), 3e38)
    shards = [TensorShard("large", ParameterShare.whole((300, 10)), large), *pieces(2.0)]
    run.checkpoints.save(2, shards, {})
    run.checkpoints.wait()
    shards[1].tensor[299, 9] = value
    run.checkpoints.save(3, shards, {})
    with pytest.raises(NonFiniteError, match=r"step 3 was not saved: rank 0: weight has elements that are infinite or"):
        run.checkpoints.wait()
    assert run.names() == ["step-00000001", "step-00000002"]


def test_a_checkpoint_that_is_not_finite_is_damaged(run: Run) -> None:
    """As an earlier version saved it."""
    run.save(1, 2)
    folder = run.folder / "step-00000002"
    data = bytearray((folder / FILE).read_bytes())
    data[-4:] = struct.pack("<f", float("nan"))
    (folder / FILE).write_bytes(data)
    record = read_record(folder / "manifest.json")
    record["files"][FILE] = [len(data), f"{zlib.crc32(data):08x}"]
    write_record(folder / "manifest.json", record)
    with pytest.raises(SlipstreamError, match=rf"step 2 .* is damaged: in {FILE}, .* infinite or not numbers"):
        run.checkpoints.find()
    assert loaded(run.checkpoints, "last-good") == 1


def test_earlier_ones_are_taken_where_that_is_wanted(run: Run) -> None:
    run.save(1, 2)
    found = run.checkpoints.find("last-good", before=2)
    assert found is not None
    assert found.step == 1
    assert run.checkpoints.find("last-good", before=1) is None


def test_a_folder_that_is_gone_is_told_and_training_goes_on(run: Run, tmp_path: Path) -> None:
    run.save(1)
    run.folder.rename(tmp_path / "away")
    run.folder.touch()
    run.save(2)
    assert "step 2 was not saved: [Errno 20] Not a directory" in run.said[0]
    assert run.said[0].endswith("There is none yet.")
    run.folder.unlink()
    (tmp_path / "away").rename(run.folder)
    assert loaded(run.checkpoints) == 1


def call_before_block(monkeypatch: pytest.MonkeyPatch, number: int, call: Callable[[], None]) -> None:
    """Calls a function while a file is being written: before one of its blocks, of which 0 is the header."""
    own = Snapshot._blocks

    def blocks(snapshot: Snapshot) -> Iterator[bytes | memoryview]:
        written = own(snapshot)
        yield from islice(written, number)
        call()
        yield from written

    monkeypatch.setattr(Snapshot, "_blocks", blocks)


def test_what_is_kept_may_change_before_it_is_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = pieces(2.0)

    def keep_and_change() -> None:
        run.checkpoints.keep()
        for piece in saved:
            piece.tensor.fill_(3.0)

    call_before_block(monkeypatch, 1, keep_and_change)
    run.checkpoints.save(2, saved, {})
    run.checkpoints.wait()
    found = run.checkpoints.find()
    assert found is not None
    run.checkpoints.load(found, saved)
    assert all((piece.tensor == 2.0).all() for piece in saved)


@pytest.mark.parametrize("number", [1, 2])
def test_what_changes_before_it_is_kept_is_not_saved(run: Run, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Rather than half of each."""
    run.save(2)
    saved = pieces(4.0)
    call_before_block(monkeypatch, number, lambda: torch._foreach_zero_([piece.tensor for piece in saved]))
    run.checkpoints.save(4, saved, {})
    run.checkpoints.wait()
    assert "step 4 was not saved: " in run.said[0]
    assert "was changed before it was kept" in run.said[0]
    assert run.names() == ["step-00000002"]


def test_a_folder_that_goes_while_it_is_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(1)
    call_before_block(monkeypatch, 1, lambda: shutil.rmtree(run.folder / "step-00000002.part"))
    run.checkpoints.save(2, pieces(2.0), {})
    run.checkpoints.wait()
    assert "step 2 was not saved: rank 0: [Errno 2] No such file" in run.said[0]
    assert run.names() == ["step-00000001"]


def test_an_older_one_that_stays_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=1)
    run.save(1)
    (run.folder / "step-00000001.part").mkdir()
    (run.folder / "step-00000001.part" / "in the way").touch()
    run.save(2)
    assert "step 2 is saved, but no older one was removed: [Errno 39] Directory not empty" in run.said[0]
    assert loaded(run.checkpoints) == 2


def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(SlipstreamError, match=r"no checkpoints can be written to .*/checkpoints: .* Choose another"):
        Run(tmp_path)


def test_another_model_is_refused_and_nothing_filled(run: Run) -> None:
    run.save(1)
    found = run.checkpoints.find()
    assert found is not None
    targets = [*pieces(-1.0), TensorShard("more", ParameterShare.whole((2,)), torch.zeros(2))]
    with pytest.raises(SlipstreamError, match=r"can't be loaded: more isn't in it\. Start with"):
        run.checkpoints.load(found, targets)
    assert (targets[0].tensor == -1.0).all()


def test_many_differences_are_not_all_told(run: Run) -> None:
    run.save(1)
    found = run.checkpoints.find()
    assert found is not None
    targets = [TensorShard(f"layer {index}", ParameterShare.whole((2,)), torch.zeros(2)) for index in range(40)]
    with pytest.raises(SlipstreamError, match="layer 4 isn't in it; and 35 more"):
        run.checkpoints.load(found, targets)


def test_manifests_of_other_versions_and_of_other_programs(run: Run) -> None:
    run.save(1)
    path = run.folder / "step-00000001" / "manifest.json"
    record = read_record(path)
    write_record(path, record | {"format": 2})
    with pytest.raises(SlipstreamError, match=r"can't be read: .* format 2; this version of slipstream reads format 1"):
        run.checkpoints.find()
    write_record(path, record | {"files": {"../../elsewhere": [1, "00000000"]}})
    with pytest.raises(SlipstreamError, match="names files outside the checkpoint"):
        run.checkpoints.find()
    write_record(path, record | {"tensors": {"a": 3}})
    with pytest.raises(SlipstreamError, match=r"manifest.json isn't a manifest: "):
        run.checkpoints.find()


def test_last_good_passes_over_the_checkpoint_of_a_newer_version(run: Run) -> None:
    for step in (1, 2):
        run.save(step)
    path = run.folder / "step-00000002" / "manifest.json"
    write_record(path, read_record(path) | {"format": 2})
    found = run.checkpoints.find("last-good")
    assert found is not None
    assert found.step == 1
    assert run.said[-1].startswith(f"the checkpoint of step 2 in {run.folder} can't be read: manifest.json is of")
    assert run.said[-1].endswith("reads format 1: install the version that wrote it; taking that of step 1")
    with pytest.raises(SlipstreamError, match=r"install the version that wrote it\. The last good one .* give 1, or"):
        run.checkpoints.find("latest")
    with pytest.raises(SlipstreamError, match=r"step-00000002 can't be read: .* Take another one"):
        CheckpointReader(path.parent)


@pytest.mark.parametrize("boxes", ["none", "half", "outside"])
def test_a_manifest_without_all_elements_is_damaged(run: Run, boxes: str) -> None:
    """Nothing, or half, would be loaded silently; also by PyTorch's own reader."""
    run.save(1)
    path = run.folder / "step-00000001" / "manifest.json"
    record = read_record(path)
    ((file, (offsets, (rows, columns))),) = record["tensors"]["weight"]["boxes"]
    less = {
        "none": [],
        "half": [[file, [offsets, [rows // 2, columns]]]],
        "outside": [[file, [[5, 0], [rows, columns]]]],
    }[boxes]
    record["tensors"]["weight"]["boxes"] = less
    write_record(path, record)
    with pytest.raises(SlipstreamError, match=r"step 1 .* is damaged: manifest.json isn't of a whole checkpoint: "):
        run.checkpoints.find()
    with pytest.raises(SlipstreamError, match="isn't of a whole checkpoint"):
        CheckpointReader(run.folder / "step-00000001")


def rewrite_manifest(run: Run, text: str) -> None:
    """Replaces the newest manifest by a text, with the checksum that it ought to have."""
    (run.folder / "step-00000002" / "manifest.json").write_bytes(_head(text.encode()) + text.encode())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("}", "isn't a JSON object, though its checksum is right"),
        ('"format": }', "isn't a JSON object, though its checksum is right"),
        ("[" * 100_000, "isn't a JSON object, though its checksum is right"),
        ('"format": "1"}', "doesn't say its format"),
        ('"format": 1, "step": []}', "isn't a manifest"),
    ],
)
def test_a_manifest_that_is_broken_under_a_right_checksum_is_damaged(run: Run, text: str, what: str) -> None:
    run.save(1, 2)
    rewrite_manifest(run, text)
    with pytest.raises(SlipstreamError, match=f"step 2 in .* is damaged: manifest.json {what}"):
        run.checkpoints.find("latest")
    assert loaded(run.checkpoints, "last-good") == 1


def test_any_change_of_a_manifest_under_a_right_checksum_is_damage_or_read(run: Run) -> None:
    """Each value is replaced by one of another kind: no error but of damage."""
    run.save(1, 2)
    record = read_record(run.folder / "step-00000002" / "manifest.json")

    def places(value: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in entries:
            yield (*path, key)
            yield from places(inner, (*path, key))

    for path in places({key: value for key, value in record.items() if key != "facts"}):
        for other in (None, -1, "x", [], {}, 1.5, "__doc__", 2**70):
            changed = json.loads(json.dumps(record))
            *parents, last = path
            holder = changed
            for key in parents:
                holder = holder[key]
            holder[last] = other
            rewrite_manifest(run, json.dumps(changed)[1:])
            if path == ("format",) and isinstance(other, int):
                continue
            found = run.checkpoints.find("last-good")
            assert found is not None
            assert found.step in (1, 2)


def test_a_file_that_is_none_of_tensors_under_a_right_checksum_is_damaged(run: Run) -> None:
    run.save(1, 2)
    folder = run.folder / "step-00000002"
    record = read_record(folder / "manifest.json")
    record["files"][FILE] = write_file(folder / FILE, [b"not tensors" * 2000])
    write_record(folder / "manifest.json", record)
    assert loaded(run.checkpoints, "last-good") == 1
    assert f"{FILE} isn't a safetensors file" in run.said[-1]


def test_a_folder_that_was_renamed_is_not_the_step_it_says(run: Run) -> None:
    run.save(1, 2)
    shutil.copytree(run.folder / "step-00000001", run.folder / "step-00000009")
    words = (
        r"step 9 .* is damaged: manifest.json is of step 1: the folder was renamed or copied; rename it to step-0{7}1"
    )
    with pytest.raises(SlipstreamError, match=words):
        run.checkpoints.find()
    assert loaded(run.checkpoints, "last-good") == 2


def test_pytorch_reads_it_into_tensors_of_any_program(run: Run) -> None:
    run.save(1)
    state = {"weight": torch.zeros(300, 10), "step": torch.tensor(0.0)}
    ignore_lone_process_warning()
    dcp.load(state, storage_reader=CheckpointReader(run.folder / "step-00000001"))
    assert (state["weight"] == 1.0).all()
    assert state["step"] == 1.0


@pytest.mark.parametrize("name", [FILE, "manifest.json"])
def test_pytorch_reads_nothing_that_is_damaged(run: Run, name: str) -> None:
    run.save(1)
    flip(-9)(run.folder / "step-00000001" / name)
    state = {"weight": torch.zeros(300, 10)}
    ignore_lone_process_warning()
    refusals = (CheckpointException, SlipstreamError)  # of a file when it is read, of the manifest at once
    with pytest.raises(refusals, match=f"step-00000001 is damaged: {name} .*altered.* Take another one"):
        dcp.load(state, storage_reader=CheckpointReader(run.folder / "step-00000001"))
    assert not state["weight"].any()


def test_a_folder_of_checkpoints_is_none(run: Run, tmp_path: Path) -> None:
    run.save(1, 2)
    with pytest.raises(SlipstreamError, match=r"isn't a checkpoint, .* there are: step-00000001, step-00000002\."):
        CheckpointReader(run.folder)
    with pytest.raises(SlipstreamError, match=r"isn't a checkpoint, .* no checkpoints either"):
        CheckpointReader(tmp_path / "nowhere")


def test_a_reader_has_one_folder(run: Run) -> None:
    run.save(1)
    folder = run.folder / "step-00000001"
    ignore_lone_process_warning()
    with pytest.raises(
        SlipstreamError, match=r"checkpoint_id='other' .* which has its folder already: .*step-00000001\. Leave"
    ):
        dcp.load({"weight": torch.zeros(300, 10)}, storage_reader=CheckpointReader(folder), checkpoint_id="other")


def test_facts_are_json(run: Run) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        run.checkpoints.save(1, pieces(1.0), {"lr": torch.ones(1)})
    assert run.names() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu(run: Run) -> None:
    """They are copied before `save` returns, while kernels are still queued before and after it."""
    value = torch.randn(4096, 4096, device="cuda")
    there = TensorShard("a", ParameterShare.whole((4096, 4096)), torch.zeros_like(value))
    for _ in range(3):
        torch.matmul(value, value, out=there.tensor)
    wanted = value @ value
    run.checkpoints.save(1, [there], {})
    assert run.checkpoints._snapshot._memory.is_pinned()
    there.tensor.fill_(5.0)
    run.checkpoints.close()
    found = run.checkpoints.find()
    assert found is not None
    run.checkpoints.load(found, [there])
    assert there.tensor.equal(wanted)


def test_of_those_set_aside_only_the_last_four_stay(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for number in range(12):
        folder.begin(3)
        os.utime(folder.part(3), (number, number))
        folder.commit(3)
        folder.retire()
    names = {path.name for path in tmp_path.glob("*.aside*")}
    assert names == {f"step-00000003.aside-{number}" for number in (8, 9, 10, 11)}
    assert folder.steps() == [3]
