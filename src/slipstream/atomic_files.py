"""Writes files for other processes, there whole or not at all, and keeps measurements in such files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Returns the folder of files that outlast a run, which need not exist."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "slipstream"


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yields where to write a file that then gets its place, so that no other process reads half of it.

    Raises OSError where nothing can be written, or there is no such folder: who waited for the file has removed it.
    """
    part = path.with_suffix(f".{os.getpid()}")
    yield part
    part.replace(path)


def read_kept(file: Path) -> dict[str, Any]:
    """Returns the measurements that `keep_measured` wrote to a file; none where it isn't there, or is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        values = json.loads(file.read_text())
        if isinstance(values, dict):
            return values
    return {}


def keep_measured(file: Path, values: dict[str, Any]) -> None:
    """Writes measurements; where nothing can be written, the next process measures again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(file) as part:
            part.write_text(json.dumps(values, indent=1))
