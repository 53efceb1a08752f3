"""Puts arrays after each other: in memory while they are few, then in a file."""

from __future__ import annotations

import tempfile
from typing import IO, Any

import numpy as np

from slipstream.errors import SlipstreamError

Array = np.ndarray[Any, Any]
_KEPT = 2**25  # bytes in memory, before they are written


class ArrayWriter:
    """An int32 array that grows at its end, of which at most 32 MiB are in memory.

    The file is in the folder for temporary files (TMPDIR), has no name, and is gone with the array or the process.
    """

    def __init__(self) -> None:
        self._parts, self._num_kept = list[Array](), 0  # what isn't written yet, and its bytes
        self._file: IO[bytes] | None = None

    def add(self, array: Array) -> None:
        """Puts an array at the end. Raises SlipstreamError where the disk has no room."""
        self._parts.append(array.astype(np.int32, copy=False))
        self._num_kept += self._parts[-1].nbytes
        if self._num_kept >= _KEPT:
            self._write()

    def finish(self) -> Array:
        """Returns the whole array, to which no more can be added; one in a file is read from there when it is used."""
        if self._file is None:
            return np.concatenate(self._parts) if self._parts else np.zeros(0, dtype=np.int32)
        self._write()
        with self._file as file:
            return np.memmap(file, dtype=np.int32, mode="r")

    def _write(self) -> None:
        try:
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - the array outlives this
            for part in self._parts:
                self._file.write(np.ascontiguousarray(part).data)
            self._file.flush()
        except OSError as error:
            raise SlipstreamError(
                f"the tokens can't be written to {tempfile.gettempdir()}: {error.strerror}; make room there, or name a "
                "folder on another disk in the environment variable TMPDIR"
            ) from error
        self._parts, self._num_kept = [], 0
