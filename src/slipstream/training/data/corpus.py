"""Reads the documents of a training text from files, folders, `datasets`, or Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.training.config import SourceSection
from slipstream.training.data.rows import find_files, read_rows

# Folders in that of the standard library that aren't its source: installed packages, oddly encoded tests.
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_ROWS_AT_ONCE = 64


class Documents:
    """The documents of a source that hold any text, read from the disk whenever they are gone through.

    Attributes:
        num_characters: of all documents together.
    """

    def __init__(self, source: SourceSection, read: Callable[[], Iterator[Any]], say: Callable[[str], None]) -> None:
        """Goes through all of them once. `say` gets a line about those without text, where there are any.

        Raises SlipstreamError where one can't be read, or none holds text.
        """
        self._read = read
        self._number = self.num_characters = num_null = num_blank = 0
        for document in read():
            if not isinstance(document, str):
                num_null += 1
            elif not document.strip():
                num_blank += 1
            else:
                self._number, self.num_characters = self._number + 1, self.num_characters + len(document)
        if not self._number:
            raise SlipstreamError(f"{source.name} holds no text; give a source with at least one document")
        if left_out := num_null + num_blank:
            say(
                f"{source.name}: left out {left_out:,} of {self._number + left_out:,} documents: {num_null:,} without "
                f"text (null), {num_blank:,} empty or of white space"
            )

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[str]:
        return (document for document in self._read() if isinstance(document, str) and document.strip())


def read_documents(config: SourceSection, say: Callable[[str], None], rows: Any = None) -> Documents:
    """Returns all documents that hold any text, in an order that is the same on every machine with the same files.

    `say` gets a line about those that hold none, where there are any. `rows` are those of the data set, where they were
    read already.

    Raises:
        SlipstreamError: if a source can't be read or holds no text.
    """
    if config.corpus is not None:
        library = _standard_library()
        return Documents(config, lambda: map(_read_file, library), say)
    if not config.has_rows:
        files = find_files(config.files or (), config.suffixes)
        return Documents(config, lambda: map(_read_file, files), say)
    rows = read_rows(config) if rows is None else rows
    if config.text_column not in rows.column_names:
        raise SlipstreamError(
            f"{config.name} has no column {config.text_column!r}; "
            f"choose data.text_column, or --column of `slipstream eval`, from: {', '.join(rows.column_names)}"
        )
    return Documents(config, lambda: _column(rows, config.text_column), say)


def _column(rows: Any, name: str) -> Iterator[Any]:
    for some in rows.select_columns([name]).iter(batch_size=_ROWS_AT_ONCE):
        yield from some[name]


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(root.rglob("*.py")) if not _NOT_THE_LIBRARY & set(path.relative_to(root).parts)]


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SlipstreamError(
            f"{path} isn't UTF-8 text (byte {error.start}); convert it, or leave it out of data.files"
        ) from error
    except OSError as error:
        raise SlipstreamError(f"can't read {path}: {error.strerror}") from error
