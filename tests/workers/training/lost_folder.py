"""An owner that is stopped before any of the changes that it makes to its folder, loses the folder, and goes on.

python lost_folder.py FOLDER    prints how many changes there were, and what became of the new owner's files
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from slipstream.checkpoint import CheckpointFolder
from slipstream.train import run_results
from slipstream.train.folder_lock import FolderLock
from slipstream.train.metrics.records import MetricsFile, SaveRecord
from slipstream.train.run_folder import RunFolder

CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.symlink", "os.truncate"}
FILES = ("manifest.json", "rank-00000.safetensors")


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def checkpoints_of(run: RunFolder) -> CheckpointFolder:
    return CheckpointFolder(run.checkpoints, keep=2, work=run.work)


def save(run: RunFolder, step: int, text: str) -> None:
    folder = checkpoints_of(run)
    folder.begin(step)
    for name in FILES:
        (folder.part(step) / name).write_text(text)
    folder.commit(step)
    folder.retire()


def export(run: RunFolder, text: str) -> None:
    """Writes an export as the leader does, where the pipeline writes one file."""
    part, before = run.work / "model.part", run.work / "model.before.part"
    run_results._clear(run, part, before)
    part.mkdir()
    (part / "config.json").write_text(text)
    run_results._complete(run, part, before, run.model, trusts_code=False)


def write_all(run: RunFolder, text: str, steps: tuple[int, ...]) -> None:
    """Everything that a run does in its folder but at its start."""
    for step in steps:
        save(run, step, text)
    file = MetricsFile(run.metrics, resumed_after=3)
    file.write(SaveRecord(4, 1.0, len(text)))
    file.close()
    with run.replaced(run.plan) as part:
        part.write_text(text)
    export(run, text)


def begin_again(run: RunFolder) -> None:
    """What a run does that replaces another one."""
    checkpoints_of(run).prepare()
    run.listed.remove()


def prepare(output: Path) -> None:
    """The folder as a run has left it that another one resumes from step 3."""
    with FolderLock(output, print):
        run = RunFolder(output)
        run.listed.add_folder(run.checkpoints)
        run.listed.add(run.metrics, run.plan)
        run.checkpoints.mkdir()
        write_all(run, "first", (3, 4, 5))
        assert checkpoints_of(run).steps() == [5, 4]


def contents(output: Path) -> dict[str, str]:
    """Every file, but those in which a former owner may still write, and the owner's own."""
    files = [file for file in output.rglob("*") if file.is_file()]
    kept = [file for file in files if not file.relative_to(output).as_posix().startswith("slipstream-run/owner-")]
    return {file.relative_to(output).as_posix(): file.read_text() for file in kept}


def late_owner(output: Path, change: int, how: str) -> None:
    """Stops before a change, and goes on when it is continued. Never returns: the exit code says whether it stopped."""
    count, stopped = 0, False

    def stop(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, stopped
        writes = event == "open" and bool(int(arguments[2]) & (os.O_WRONLY | os.O_RDWR))
        if active and (event in CHANGES or writes):
            count += 1
            if count == change:
                stopped = True
                os.kill(os.getpid(), signal.SIGSTOP)

    active = False
    sys.addaudithook(stop)
    FolderLock(output, print, end=lambda _: None, beat_seconds=1000).take()
    active = True
    try:
        run = RunFolder(output)
        if how == "goes on":
            write_all(run, "late", (4, 5, 6, 7))
        else:
            begin_again(run)
    except BaseException as error:
        if not stopped or not isinstance(error, OSError):
            print(f"change {change}: {error!r}", file=sys.stderr, flush=True)
            os._exit(2)
    os._exit(0 if stopped else 1)


def try_change(output: Path, change: int, how: str) -> list[str] | None:
    """Returns what is wrong after a takeover before this change; None where there are fewer changes."""
    prepare(output)
    if (late := os.fork()) == 0:
        late_owner(output, change, how)
    _, status = os.waitpid(late, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        assert os.waitstatus_to_exitcode(status) == 1, status
        return None
    with FolderLock(output, lambda _: None, beat_seconds=1000, stale_seconds=0.0):
        run, problems = RunFolder(output), []
        run.listed.add_folder(run.checkpoints)
        run.listed.add(run.metrics, run.plan)
        checkpoints_of(run).prepare()
        for step in checkpoints_of(run).steps():
            there = sorted(file.name for file in checkpoints_of(run).complete(step).iterdir())
            if there != sorted(FILES):
                problems.append(f"step {step} has {there}")
        newest = max(checkpoints_of(run).steps(), default=0)
        write_all(run, "new", (newest + 1, newest + 2, newest + 3))
        before = contents(output)
        os.kill(late, signal.SIGCONT)
        _, status = os.waitpid(late, 0)
        if os.waitstatus_to_exitcode(status) != 0:
            problems.append(f"the late owner ended with {os.waitstatus_to_exitcode(status)}")
        after = contents(output)
        problems += [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    left = [each.name for each in (output / "slipstream-run").iterdir() if each.name.endswith(".part")]
    return problems + left


def main() -> None:
    run_results.load_tokenizer = lambda *_: Tokenizer()  # type: ignore[assignment]
    found: dict[str, list[list[str]]] = {}
    for how in ("goes on", "begins again"):
        problems = found[how] = []
        while (result := try_change(Path(sys.argv[1], f"{how}-{len(problems)}"), len(problems) + 1, how)) is not None:
            problems.append(result)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
