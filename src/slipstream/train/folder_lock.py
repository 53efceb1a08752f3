"""Locks an output folder for one run at a time, over all machines that share its disk.

output/slipstream-run/owner-0003.json    the third owner; its heartbeat is the time at which the file was last touched
output/slipstream-run/owner-5d41.part/   where its processes write files that a rename then puts in the output

The owner is the file with the highest number. Each file is made by one process (O_EXCL) and touched by its run alone,
so that of two that take the folder over from a dead owner only one can succeed. Whether an owner lives is seen by
whether its file's time changes, never by what the time is: the clocks of two machines may differ.

An owner that was only stopped may go on at any moment. So whoever takes the folder over first moves the owner's own
folder away: every rename from or to it then fails, and with it all that the former run was about to publish, set aside
or remove. All that it published before that moment, the new one sees.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from slipstream.errors import SlipstreamError, printable
from slipstream.foreign_text import parse_json, read_text
from slipstream.own_files import OwnFolder, link_advice

FOLDER = "slipstream-run"  # a visible name, so that it is copied with the rest
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")

_held: dict[str, str] = {}  # output folder -> key of the owner as which this process writes


def write_as(key: str | None, output: Path) -> None:
    """Notes as which owner this process writes into an output folder; None: as nobody's."""
    if key is None:
        _held.pop(os.path.abspath(output), None)
    else:
        _held[os.path.abspath(output)] = key


def work_folder(output: Path) -> Path:
    """Returns where this process writes files that a rename then puts in the output folder, which fails once another
    run has the folder: the owner's own folder, or the output itself where this process has no owner."""
    key = _held.get(os.path.abspath(output))
    return output if key is None else output / FOLDER / f"owner-{key}.part"


@dataclass(frozen=True)
class FolderOwner:
    """A process, where and since when it runs."""

    key: str  # a random text, unique to this owner
    host: str
    process: int
    machine: str  # the boot and the namespace of the process's number; "" where unknown
    # Start of the process in ticks since its machine's boot, as a clock may be set.
    started: int
    since: str  # time at which it took the folder, for people

    @classmethod
    def here(cls) -> FolderOwner:
        """Returns this process."""
        machine = _machine()
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        started = _state_and_start(os.getpid())[1] if machine else 0
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), machine, started, now)

    def __str__(self) -> str:
        return printable(f"process {self.process} on host {self.host}, since {self.since}")

    def has_ended(self) -> bool:
        """Returns whether the process is known to have ended; never of one in another machine or container."""
        if not self.machine or self.machine != _machine():
            return False
        try:
            state, started = _state_and_start(self.process)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "XZ" or started != self.started  # a zombie, or another process with its number


def _state_and_start(process: int) -> tuple[str, int]:
    """Returns the third and the 22nd field of /proc/PID/stat; the second, in parentheses, may have spaces."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _machine() -> str:
    """Returns the boot and the namespace in which processes have their numbers; "" where Linux doesn't say."""
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink(_NAMESPACE)}"
    except OSError:
        return ""


BEAT_SECONDS = 2.0
# Seconds without a heartbeat, far above the delay by a full disk or a busy interpreter.
STALE_SECONDS = 30.0
_NAME = re.compile(r"owner-(\d{4,})\.json")
_WORK = re.compile(r"\.?owner-[0-9a-f]{32}\.part")
_TRIES_TO_EMPTY = 100
_UNKNOWN = FolderOwner("", "unknown", 0, "", 0, "unknown")


def _end_this_process(message: str) -> None:
    """Ends this run at once: its launcher ends with it, and all ranks with that.

    SIGTERM would ask it to save a checkpoint first, in a folder that is another run's by now.
    """
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    os._exit(1)


class FolderLock:
    """The lock of the folder at `folder`: from `take` to `release`, or as a context. Not collective: one process of a
    run takes it, and the others that write into the folder `join` it.

    Args:
        folder: the output folder; it is made.
        say: gets a line of text where the folder is taken over from a run that has died.
        end: gets the reason where another run has taken the folder over from this one; ends the process by default.
        beat_seconds: between two heartbeats.
        stale_seconds: without a heartbeat, after which an owner counts as dead.
    """

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        end: Callable[[str], None] = _end_this_process,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self._output = folder
        self._folder = folder / FOLDER
        self._say = say
        self._end = end
        self._own = OwnFolder(folder)
        self._beat_seconds = beat_seconds
        self._stale_seconds = stale_seconds
        self._owner = FolderOwner.here()
        self._number = 0  # this owner's number; 0 without the lock
        self._is_joined = False
        self._write_again: Callable[[], None] = lambda: None
        self._remaking = threading.Lock()
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def check_free(self) -> None:
        """Raises SlipstreamError where another run shows within a few heartbeats that it is at work. Writes nothing."""
        owner_number, owner = self._newest()
        if owner is not None and self._lives(owner_number, owner, 3 * self._beat_seconds):
            raise self._busy(owner)

    def seems_held(self) -> bool:
        """Returns whether a run seems to be at work, at once: its process is there, or was seen within `stale_seconds`.

        For people who look on; the clocks of two machines may differ, so `take` and `check_free` wait for a heartbeat.
        """
        owner_number, owner = self._newest()
        if owner is None or owner.has_ended():
            return False
        touched = self._touched(owner_number)
        return touched is not None and time.time() - touched / 1e9 < self._stale_seconds

    @property
    def key(self) -> str:
        """The key by which the other processes of its run know this owner."""
        return self._owner.key

    def take(self) -> None:
        """Takes the folder; waits for `stale_seconds` where its owner may have died on another machine.

        Raises:
            SlipstreamError: if another run is at work in it, or it can't be written.
        """
        try:
            if (link := self._own.find_link(self._folder)) is not None:
                raise OSError(link_advice(link))
            self._folder.mkdir(parents=True, exist_ok=True)
            while not self._number:
                self._try_to_take()
        except OSError as error:
            raise SlipstreamError(f"can't write to training.output={self._output}: {error}") from error
        self._hold(beats=True)
        # What is left of the former owner is removed only now, as that may take longer than a heartbeat.
        for name in self._own.names(self._work):
            self._own.remove(self._work / name, ignore_errors=True)

    def on_removal(self, write: Callable[[], None]) -> None:
        """Calls `write`, which writes what is missing, whenever the folder is made again."""
        self._write_again = write

    def make_again(self) -> None:
        """Makes the folder again where somebody has removed it, or the owner's file; nothing where it is there, or this
        process isn't the run's first. Raises OSError where it can't be made."""
        with self._remaking:
            if not self._number or self._is_joined:
                return
            if not self._newest()[0]:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._claim(1)
            self._write_again()

    def join(self, key: str, beats: bool) -> None:
        """Writes into the folder as another process of the run that has taken it as `key`; ends this process where
        another run has it by now. `beats`: shows from here, too, that the run is at work: its first process may be
        stopped while the others go on."""
        owner_number, owner = self._newest()
        if owner is None or owner.key != key:
            self._end(f"{owner or 'another run'} has taken over training.output={self._output}; this run ends")
            return
        self._number = owner_number
        self._owner = owner
        self._is_joined = True
        self._hold(beats)

    def release(self) -> None:
        """Lets other runs take the folder; nothing where it isn't held, or by another process than the first."""
        if not self._number:
            return
        self._released.set()
        if self._thread is not None:
            self._thread.join()
        write_as(None, self._output)
        if not self._is_joined and self._newest() == (self._number, self._owner):
            # In one step, as others may read it at any time
            with suppress(OSError):
                part = self._file(self._number).with_suffix(".part")
                self._own.remove(part)
                with self._own.open(part, "x") as file:
                    file.write("null")
                self._own.move(part, self._file(self._number))
        if not self._is_joined:
            self._own.remove(self._work, ignore_errors=True)
        self._number = 0

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _try_to_take(self) -> None:
        """Becomes the next owner, unless another one lives or is faster."""
        owner_number, owner = self._newest()
        if owner is not None:
            if not owner.has_ended():
                self._say_that_it_waits(owner)
            if self._lives(owner_number, owner, self._stale_seconds):
                raise self._busy(owner)
        if self._claim(owner_number + 1) and owner is not None:
            self._say(f"took over {self._output} from {owner}, which has ended without releasing it")

    def _claim(self, number: int) -> bool:
        """Becomes the owner of this number, unless another process is faster; then no earlier one can publish anything
        any more."""
        new = self._work.with_name(f".{self._work.name}")  # a folder from which nothing can be published
        new.mkdir(exist_ok=True)
        try:
            self._write(number)
            # Several owners have come and gone meanwhile.
            if max(self._numbers()) > number:
                self._own.remove(self._file(number))
                raise FileExistsError
            for name in self._own.names(self._folder):
                if _WORK.fullmatch(name) and name not in (new.name, self._work.name):
                    self._move_away(self._folder / name, new)
            if not self._work.exists():
                self._own.move(new, self._work)
        # Another process has become the owner, and has moved this folder away.
        except (FileExistsError, FileNotFoundError):
            with suppress(OSError):
                self._own.remove_empty(new)
            return False
        self._number = number
        for earlier in self._numbers():
            if earlier < number:
                self._own.remove(self._file(earlier))
        return True

    def _move_away(self, work: Path, new: Path) -> None:
        """Moves the folder of a former owner into that of the new one. Raises FileNotFoundError where that one has lost
        the folder itself.

        Then it is emptied by renames: a process that has it open, on a network's disk also another machine, could still
        publish its files, of which some would be gone.
        """
        away = new / work.name
        try:
            self._own.move(work, away)
        except FileNotFoundError:
            # Raises if it is this folder that is gone.
            new.stat()
            return
        # A link isn't the folder of a run, which made a folder.
        if away.is_symlink():
            return
        for _ in range(_TRIES_TO_EMPTY):
            for name in self._own.names(away):
                self._own.move(away / name, new / f"{work.name}-{name}")
            # The folder stays if something new is inside.
            with suppress(OSError):
                self._own.remove_empty(away)
                break

    def _hold(self, beats: bool) -> None:
        write_as(self.key, self._output)
        self._released.clear()
        if beats:
            self._thread = threading.Thread(target=self._beat, name="folder-heartbeat", daemon=True)
            self._thread.start()

    def _say_that_it_waits(self, owner: FolderOwner) -> None:
        self._say(
            f"{self._output} belongs to {owner}; waiting {self._stale_seconds:g} seconds at most for a sign of life"
        )

    def _lives(self, number: int, owner: FolderOwner, seconds: float) -> bool:
        """Returns whether an owner's heartbeat is seen within some seconds."""
        if owner.has_ended():
            return False
        first = self._touched(number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not owner.has_ended():
            time.sleep(min(0.1, self._beat_seconds))
            if self._touched(number) != first:
                # The lock may have been released meanwhile.
                return self._newest()[1] is not None
        return False

    def _beat(self) -> None:
        """Shows from time to time that this run is at work, until the lock is released or lost."""
        while not self._released.wait(self._beat_seconds):
            # A failing disk doesn't end a run.
            with suppress(OSError):
                owner_number, owner = self._newest()
                if owner == self._owner:
                    os.utime(self._file(owner_number))
                elif owner_number:
                    self._end(
                        f"{owner or 'another run'} has taken over training.output={self._output}, since this run, "
                        f"{self._owner}, showed no sign of life for {self._stale_seconds:g} seconds; this run ends"
                    )
                    return
                else:
                    self.make_again()

    def _busy(self, owner: FolderOwner) -> SlipstreamError:
        owner = self._newest()[1] or owner
        return SlipstreamError(
            f"training.output={self._output} belongs to a run that is at work: {owner}. Choose another folder, or end "
            f"that run first: kill {owner.process} on {owner.host}"
        )

    def _newest(self) -> tuple[int, FolderOwner | None]:
        """Returns the number of the last owner, 0 where there was none, and who it is; None where it has released."""
        newest = max(self._numbers(), default=0)
        if not newest:
            return 0, None
        try:
            values = parse_json(read_text(self._file(newest)))
            return newest, None if values is None else FolderOwner(**values)
        except FileNotFoundError:
            return newest, None
        # The file is just being written, or no run has written it.
        except (OSError, ValueError, TypeError):
            return newest, _UNKNOWN

    def _numbers(self) -> list[int]:
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]

    def _touched(self, number: int) -> int | None:
        """Returns the file's time. Opening it lets a network's disk ask its server."""
        try:
            descriptor = os.open(self._file(number), os.O_RDONLY | os.O_NONBLOCK)
            try:
                return os.fstat(descriptor).st_mtime_ns
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return None

    def _write(self, number: int) -> None:
        """Makes the file of an owner. Raises FileExistsError where there is one already."""
        with self._own.open(self._file(number), "x") as file:
            json.dump(asdict(self._owner), file)

    def _file(self, number: int) -> Path:
        return self._folder / f"owner-{number:04d}.json"

    @property
    def _work(self) -> Path:
        return self._folder / f"owner-{self.key}.part"
