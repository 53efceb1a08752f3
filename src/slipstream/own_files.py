"""Moves, removes and opens what is inside of a folder, and never anything behind a link there.

A folder that came as an archive or a copy may have a link at any name, with files of others behind it. So every folder
on the way to a file is opened from the one before, without following links, and the file is reached from the last one:
nobody can put a link in the way between a look and the change.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_A_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class OwnFolder:
    """The folder at `path`, which may be a link itself: who names it means what is there.

    Every path that is given lies inside of it. The last name of one may be a link, which is then moved or removed
    itself; a link before it raises OSError, which names it and says what to do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def move(self, source: Path, target: Path) -> Path:
        """Gives a file or a folder another place, as `os.rename`, and returns that."""
        with self._parent(source) as (here, name), self._parent(target) as (there, new_name):
            os.rename(name, new_name, src_dir_fd=here, dst_dir_fd=there)
        return target

    def remove(self, path: Path, ignore_errors: bool = False) -> None:
        """Removes a file, a link, or a folder with everything inside, if it is there.

        `ignore_errors`: leaves what can't be removed.
        """
        with suppress(OSError if ignore_errors else FileNotFoundError), self._parent(path) as (folder, name):
            if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                shutil.rmtree(name, ignore_errors, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)

    def remove_empty(self, path: Path) -> None:
        """Removes a folder. Raises OSError where it isn't there, isn't empty or is no folder."""
        with self._parent(path) as (folder, name):
            os.rmdir(name, dir_fd=folder)

    def names(self, path: Path) -> list[str]:
        """Returns the names in a folder, none where it isn't there. Raises OSError where it is a link or no folder."""
        with suppress(FileNotFoundError), self._parent(path / "*") as (folder, _):
            return sorted(os.listdir(folder))
        return []

    def open(self, path: Path, mode: str) -> IO[Any]:
        """Opens a file as the builtin does, text in UTF-8. Raises OSError where the file is a link."""

        def opener(_: str, flags: int) -> int:
            with self._parent(path) as (folder, name), _link_named(path, folder, name):
                return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)

        return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)

    def find_link(self, *paths: Path) -> Path | None:
        """Returns the first link among these paths and the folders on the way to them; None where there is none."""
        for path in paths:
            inside = [*path.relative_to(self.path).parents][-2::-1]
            for each in (*(self.path / parent for parent in inside), path):
                if each.is_symlink():
                    return each
        return None

    @contextmanager
    def _parent(self, path: Path) -> Iterator[tuple[int, str]]:
        """Yields a descriptor of the folder that a path is in, and the path's last name."""
        *parents, name = path.relative_to(self.path).parts
        if ".." in (*parents, name):
            raise OSError(errno.EINVAL, f"{path} may lead out of {self.path}")
        reached, folder = self.path, os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for parent in parents:
                reached /= parent
                outer = folder
                with _link_named(reached, outer, parent):
                    folder = os.open(parent, _A_FOLDER, dir_fd=outer)
                os.close(outer)
            yield folder, name
        finally:
            os.close(folder)


def link_advice(link: Path) -> str:
    """Returns the part of a sentence that says why a link is in the way, and what to do."""
    return (
        f"{link} is a link, and nothing is moved, removed or written behind one: remove the link, or put what it leads "
        "to in its place"
    )


@contextmanager
def _link_named(path: Path, folder: int, name: str) -> Iterator[None]:
    """Says in an OSError of the body that the file of this name in a folder is a link, where it is one."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
            raise OSError(errno.ELOOP, link_advice(path)) from error
        raise
