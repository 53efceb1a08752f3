"""One run at a time in an output folder, whatever dies, and only what a run has listed is ever removed."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.train.folder_lock import FolderLock
from slipstream.train.run_folder import ListedFiles
from support.forked import ForkedProgram, run_alone
from support.paths import TESTS
from support.timeouts import LIMIT, wait_until

HOLDS = """
import sys, time
from pathlib import Path
from slipstream.launch import StopRequest
from slipstream.train.folder_lock import FolderLock
request = StopRequest()
request.listen()
request.begin()  # as the processes of a run do: they save before SIGTERM ends them
FolderLock(Path(sys.argv[1]), print, beat_seconds=0.05).take()
print("taken", flush=True)
time.sleep(1000)
"""


def lock(folder: Path, said: list[str], **options: float) -> FolderLock:
    """Beats often; the owner is this process, but not this object's."""
    return FolderLock(folder, said.append, pytest.fail, **{"beat_seconds": 0.05, "stale_seconds": 0.5} | options)


def patient_lock(folder: Path, said: list[str]) -> FolderLock:
    """Waits for the sign of life of an owner that finds no processor."""
    return lock(folder, said, beat_seconds=LIMIT, stale_seconds=LIMIT)


def owner_file(folder: Path) -> Path:
    (file,) = folder.glob("slipstream-run/owner-*.json")
    return file


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    said: list[str] = []
    with lock(tmp_path, said) as first:
        second = patient_lock(tmp_path, said)
        for attempt in (second.check_free, second.take):
            with pytest.raises(SlipstreamError, match=f"a run that is at work: process {os.getpid()} on host"):
                attempt()
    first.release()  # once more does nothing
    second.check_free()
    second.take()
    second.release()
    assert not [line for line in said if "took over" in line]
    assert len([*tmp_path.glob("slipstream-run/*")]) == 1


def test_who_looks_on_sees_at_once_whether_a_run_is_at_work(tmp_path: Path) -> None:
    looks_on = FolderLock(tmp_path, pytest.fail)
    assert not looks_on.seems_held()
    with FolderLock(tmp_path, pytest.fail, pytest.fail, beat_seconds=LIMIT):
        assert looks_on.seems_held()
        os.utime(owner_file(tmp_path), (0, 0))  # it has been silent for long
        assert not looks_on.seems_held()
    assert not looks_on.seems_held()


def owner(folder: Path) -> ForkedProgram:
    """A process that holds the folder."""
    script = folder.with_suffix(".py")
    script.write_text(HOLDS)
    process = ForkedProgram(folder, script, folder)
    process.wait_for("taken\n")
    return process


def killed_owner(folder: Path) -> ForkedProgram:
    """A process that was killed while it held the folder."""
    process = owner(folder)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process


@pytest.mark.parametrize("where", ["here", "on another machine"])
def test_a_killed_owner_is_taken_over(tmp_path: Path, where: str) -> None:
    """At once where its process can be seen to be gone, else when its heartbeat has stopped."""
    process = killed_owner(tmp_path)
    if where == "on another machine":
        values = json.loads(owner_file(tmp_path).read_text())
        owner_file(tmp_path).write_text(json.dumps(values | {"machine": "another", "host": "node7"}))
    said: list[str] = []
    with lock(tmp_path, said, stale_seconds=0.5 if where == "on another machine" else LIMIT):
        host = "node7" if where == "on another machine" else ""
        assert f"took over {tmp_path} from process {process.pid} on host {host}" in said[-1]
        assert ("waiting 0.5 seconds at most for a sign of life" in said[0]) == bool(host)


def test_an_owner_that_was_silent_for_too_long_ends(tmp_path: Path) -> None:
    """As one does that was stopped and goes on: it beats late, and finds that it has lost the folder."""
    reasons: list[str] = []
    late = FolderLock(tmp_path, pytest.fail, reasons.append, beat_seconds=LIMIT)
    late.take()
    with lock(tmp_path, []):
        late._beat_seconds = 0.0
        late._beat()
    assert f"process {os.getpid()} on host" in reasons[0]
    assert "has taken over" in reasons[0]
    late.release()
    assert json.loads(owner_file(tmp_path).read_text()) is None  # the new owner's, which has released it


def test_of_many_that_take_over_one_succeeds(tmp_path: Path) -> None:
    killed_owner(tmp_path)
    locks, refused = [lock(tmp_path, [], stale_seconds=LIMIT) for _ in range(6)], []

    def take(each: FolderLock) -> None:
        try:
            each.take()
        except SlipstreamError as error:
            refused.append(error)

    threads = [threading.Thread(target=take, args=[each]) for each in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == len(locks) - 1
    for each in locks:
        each.release()


def test_an_owner_that_died_before_it_wrote_who_it_is(tmp_path: Path) -> None:
    (tmp_path / "slipstream-run").mkdir()
    (tmp_path / "slipstream-run" / "owner-0001.json").write_text("")
    said: list[str] = []
    with lock(tmp_path, said):
        assert f"took over {tmp_path} from process 0 on host unknown" in said[-1]


def test_a_lock_that_was_removed_is_made_again(tmp_path: Path) -> None:
    with lock(tmp_path, []):
        before = owner_file(tmp_path).read_text()
        owner_file(tmp_path).unlink()
        wait_until(lambda: [*tmp_path.glob("slipstream-run/owner-*.json")], "no lock was made again")
        with pytest.raises(SlipstreamError, match="belongs to a run"):
            patient_lock(tmp_path, []).check_free()
        assert owner_file(tmp_path).read_text() == before


@pytest.mark.more
def test_a_run_that_has_lost_its_folder_ends_without_saving_anything(tmp_path: Path) -> None:
    process = owner(tmp_path)
    other = tmp_path / "slipstream-run" / "owner-0002.json"
    part = other.with_suffix(".part")  # the run reads it at any time
    part.write_text((tmp_path / "slipstream-run" / "owner-0001.json").read_text().replace('"key": "', '"key": "x'))
    part.replace(other)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.startswith("error: process ")
    assert errors.rstrip().endswith("this run ends")


@pytest.mark.more
def test_whoever_lost_its_folder_changes_nothing_of_the_next_run(tmp_path: Path) -> None:
    """It is stopped before every single change that it makes there, and goes on once another run has written."""
    ended = run_alone(TESTS / "workers" / "training" / "lost_folder.py", tmp_path)
    assert ended.returncode == 0, ended.stderr
    for how, problems in json.loads(ended.stdout).items():
        assert len(problems) > (20 if how == "begins again" else 40)
        assert [(number, each) for number, each in enumerate(problems, 1) if each] == []


def test_what_is_listed_is_removed_and_nothing_else(tmp_path: Path) -> None:
    listed = ListedFiles(tmp_path)
    for name in ("config.yaml", "inputs/deep/tokens", "model/config.json", "model/.hidden", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    listed.add(tmp_path / "config.yaml")
    listed.add_folder(tmp_path / "inputs")
    listed.add_folder(tmp_path / "model")
    assert listed.find_unlisted(tmp_path / "model") is None
    listed.itemise(tmp_path / "model")
    (tmp_path / "model" / "own.gguf").touch()  # somebody puts it there
    assert listed.find_unlisted(tmp_path / "model") == tmp_path / "model" / "own.gguf"
    assert listed.find_unlisted(tmp_path / "notes.txt") == tmp_path / "notes.txt"
    assert listed.find_unlisted(tmp_path / "inputs") is None
    assert listed.find_unlisted(tmp_path / "nowhere") is None
    listed.remove()
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"notes.txt", "model/own.gguf", "slipstream-run/files.json"}
    assert not (tmp_path / "inputs").exists()
    assert not listed.has(tmp_path / "config.yaml")


@pytest.mark.parametrize("text", ['{"files": ["../mine"]}', '{"files": ["/mine"]}', "{}", "", '{"files": [1]}'])
def test_a_list_that_leads_elsewhere_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "slipstream-run").mkdir()
    (tmp_path / "slipstream-run" / "files.json").write_text(text)
    with pytest.raises(SlipstreamError, match=r"files\.json isn't a list of a run's files"):
        ListedFiles(tmp_path).remove()


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "far" / "kept").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "inputs").symlink_to(tmp_path / "far")
    listed = ListedFiles(tmp_path / "run")
    listed.add_folder(tmp_path / "run" / "inputs")
    listed.remove()
    assert (tmp_path / "far" / "kept").exists()
    assert not (tmp_path / "run" / "inputs").is_symlink()
    assert json.loads((tmp_path / "run" / "slipstream-run" / "files.json").read_text()) == {"files": []}
