"""Locks an output folder for one run at a time, over all machines that share its disk.

output/slipstream-run/owner-0003.json    the third owner; its heartbeat is the time at which the file was last touched

The owner is the file with the highest number. Each file is made by one process (O_EXCL) and touched by that one alone,
so that of two that take the folder over from a dead owner only one can succeed. Whether an owner lives is seen by
whether its file's time changes, never by what the time is: the clocks of two machines may differ.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from slipstream.errors import SlipstreamError
from slipstream.training.ownership.folder_owner import FolderOwner
from slipstream.training.ownership.listed_files import FOLDER

BEAT_SECONDS = 2.0
STALE_SECONDS = 30.0  # without a heartbeat; far above what a full disk or a busy interpreter delays one
_NAME = re.compile(r"owner-(\d{4,})\.json")
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
    run holds it.

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
        self._output, self._folder, self._say, self._end = folder, folder / FOLDER, say, end
        self._beat_seconds, self._stale_seconds = beat_seconds, stale_seconds
        self._owner = FolderOwner.here()
        self._number = 0  # of this owner; 0 while the lock isn't held
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def check_free(self) -> None:
        """Raises SlipstreamError where another run shows within a few heartbeats that it is at work. Writes nothing."""
        number, owner = self._newest()
        if owner is not None and self._lives(number, owner, 3 * self._beat_seconds):
            raise self._busy(owner)

    def seems_held(self) -> bool:
        """Returns whether a run seems to be at work, at once: its process is there, or was seen within `stale_seconds`.

        For people who look on; the clocks of two machines may differ, so `take` and `check_free` wait for a heartbeat.
        """
        number, owner = self._newest()
        if owner is None or owner.has_ended():
            return False
        touched = self._touched(number)
        return touched is not None and time.time() - touched / 1e9 < self._stale_seconds

    def take(self) -> None:
        """Takes the folder; waits for `stale_seconds` where its owner may have died on another machine.

        Raises:
            SlipstreamError: if another run is at work in it, or it can't be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while not self._number:
                self._try_to_take()
        except OSError as error:
            raise SlipstreamError(f"can't write to training.output={self._output}: {error}") from error
        self._released.clear()
        self._thread = threading.Thread(target=self._beat, name="folder-heartbeat", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Lets other runs take the folder; nothing where it isn't held."""
        if not self._number:
            return
        self._released.set()
        if self._thread is not None:
            self._thread.join()
        if self._newest() == (self._number, self._owner):
            with suppress(OSError):  # in one step, as others read it at any time
                part = self._file(self._number).with_suffix(".part")
                part.write_text("null", encoding="utf-8")
                part.replace(self._file(self._number))
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
        number, owner = self._newest()
        if owner is not None:
            if not owner.has_ended():
                self._say_that_it_waits(owner)
            if self._lives(number, owner, self._stale_seconds):
                raise self._busy(owner)
        try:
            self._write(number + 1)
        except FileExistsError:
            return
        self._number = number + 1
        for earlier in self._numbers():
            if earlier < self._number:
                self._file(earlier).unlink(missing_ok=True)
        if owner is not None:
            self._say(f"took over {self._output} from {owner}, which has ended without releasing it")

    def _say_that_it_waits(self, owner: FolderOwner) -> None:
        self._say(
            f"{self._output} belongs to {owner}; waiting {self._stale_seconds:g} seconds at most for a sign of life"
        )

    def _lives(self, number: int, owner: FolderOwner, seconds: float) -> bool:
        """Returns whether an owner's heartbeat is seen within some seconds."""
        if owner.has_ended():
            return False
        first, deadline = self._touched(number), time.monotonic() + seconds
        while time.monotonic() < deadline and not owner.has_ended():
            time.sleep(min(0.1, self._beat_seconds))
            if self._touched(number) != first:
                return self._newest()[1] is not None  # it may have been released
        return False

    def _beat(self) -> None:
        """Shows from time to time that this run is at work, until the lock is released or lost."""
        while not self._released.wait(self._beat_seconds):
            with suppress(OSError):  # a disk that fails doesn't end a run
                number, owner = self._newest()
                if owner == self._owner:
                    os.utime(self._file(self._number))
                elif number >= self._number:
                    self._end(
                        f"{owner or 'another run'} has taken over training.output={self._output}, since this run, "
                        f"{self._owner}, showed no sign of life for {self._stale_seconds:g} seconds; this run ends"
                    )
                    return
                else:  # somebody has removed the file
                    self._write(self._number)

    def _busy(self, owner: FolderOwner) -> SlipstreamError:
        owner = self._newest()[1] or owner
        return SlipstreamError(
            f"training.output={self._output} belongs to a run that is at work: {owner}. Choose another folder, or end "
            f"that run first: kill {owner.process} on {owner.host}"
        )

    def _newest(self) -> tuple[int, FolderOwner | None]:
        """Returns the number of the last owner, 0 where there was none, and who it is; None where it has released."""
        number = max(self._numbers(), default=0)
        if not number:
            return 0, None
        try:
            values = json.loads(self._file(number).read_text(encoding="utf-8"))
            return number, None if values is None else FolderOwner(**values)
        except FileNotFoundError:
            return number, None
        except (ValueError, TypeError):  # it is just being written
            return number, _UNKNOWN

    def _numbers(self) -> list[int]:
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]

    def _touched(self, number: int) -> int | None:
        """Returns the file's time. Opening it lets a network's disk ask its server."""
        try:
            with self._file(number).open() as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _write(self, number: int) -> None:
        """Makes the file of an owner. Raises FileExistsError where there is one already."""
        with self._file(number).open("x", encoding="utf-8") as file:
            json.dump(asdict(self._owner), file)

    def _file(self, number: int) -> Path:
        return self._folder / f"owner-{number:04d}.json"
