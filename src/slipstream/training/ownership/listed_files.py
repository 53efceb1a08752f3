"""The list of what runs made in a folder: nothing else in it is ever replaced or removed.

output/slipstream-run/files.json
    {"files": ["config.yaml", "inputs/", "model/config.json", ...]}    a slash: a folder with everything inside
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from slipstream.errors import SlipstreamError
from slipstream.training.ownership.folder_owner import FOLDER, work_folder

_FILE = "files.json"


class ListedFiles:
    """The list in the folder at `folder`. Only the run that holds the folder's lock changes it, one process at a time.

    Its methods raise OSError where the disk fails, and SlipstreamError where the list can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / FOLDER / _FILE

    def add(self, *paths: Path) -> None:
        """Lists files that are about to be written; so a run that is killed in between leaves nothing unlisted."""
        self._write(self._names() | {self._name(path) for path in paths})

    def add_folder(self, path: Path) -> None:
        """Lists a folder with everything that is and will be inside."""
        name = f"{self._name(path)}/"
        self._write({each for each in self._names() if not each.startswith(name)} | {name})

    def itemise(self, path: Path) -> None:
        """Replaces a folder in the list by the files inside, now that it is complete: what comes later is another's."""
        inside = {self._name(file) for file in path.rglob("*") if not file.is_dir()}
        self._write(self._names() - {f"{self._name(path)}/"} | inside)

    def is_itemised(self, path: Path) -> bool:
        """Returns whether the folder at this path was complete when its files were listed, and they are there."""
        name = f"{self._name(path)}/"
        inside = [each for each in self._names() if each.startswith(name)]
        return bool(inside) and name not in inside and all((self._folder / each).exists() for each in inside)

    def has(self, path: Path) -> bool:
        """Returns whether a file or a folder is in the list, by itself or as a part of a folder."""
        name = self._name(path)
        parents = [f"{parent}/" for parent in PurePosixPath(name).parents]
        return not self._names().isdisjoint([name, f"{name}/", *parents])

    def find_unlisted(self, path: Path) -> Path | None:
        """Returns the file at this path, or one in the folder there, that isn't in the list; hidden ones may be."""
        if not os.path.lexists(path) or self.has(path):
            return None
        if path.is_symlink() or not path.is_dir():
            return path
        inside = [each for each in sorted(path.iterdir()) if not each.name.startswith(".")]
        return next((found for each in inside if (found := self.find_unlisted(each))), None)

    def remove(self) -> None:
        """Removes all that is listed, and folders that this leaves empty."""
        names = self._names()
        removed = work_folder(self._folder) / "removed"  # into which no rename leads once another run has the folder
        for name in sorted(names):
            path = self._folder / name
            if path.is_symlink() or (path.is_dir() if name.endswith("/") else path.is_file()):
                removed.mkdir(exist_ok=True)
                path.rename(removed / "it")
                shutil.rmtree(removed)
        for parent in {self._folder / parent for name in names for parent in [*PurePosixPath(name).parents][:-1]}:
            with suppress(OSError):  # it isn't empty, or isn't there
                parent.rmdir()
        self._write(set())

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    def _names(self) -> set[str]:
        if not self._file.exists():
            return set()
        try:
            names = json.loads(self._file.read_text(encoding="utf-8"))["files"]
            return set(_inside(names))
        except (ValueError, TypeError, KeyError) as error:
            raise SlipstreamError(
                f"{self._file} isn't a list of a run's files ({error!r}); choose another folder, or move it away with "
                "the files around it"
            ) from error

    def _write(self, names: set[str]) -> None:
        """Replaces the list in one step, so that it is never half there."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = work_folder(self._folder) / "files.part"
        with part.open("w", encoding="utf-8") as file:
            json.dump({"files": sorted(names)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._file)


def _inside(names: list[str]) -> Iterator[str]:
    """Yields the names; raises ValueError for one that leads out of the folder."""
    for name in names:
        parts = PurePosixPath(name)
        if not parts.parts or parts.is_absolute() or ".." in parts.parts:
            raise ValueError(f"{name!r} isn't a path inside of the folder")
        yield name
