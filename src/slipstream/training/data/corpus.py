"""Reads the documents of a training text from files, folders, `datasets`, or Python's standard library."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.training.config import SourceSection

# Folders in that of the standard library that aren't its source: installed packages, oddly encoded tests.
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_READ_FOR_TEXT = 65536  # bytes; a file that begins with so many blank ones is read whole
_SHOWN = 80  # bytes of a line that can't be read
_BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def read_documents(config: SourceSection, say: Callable[[str], None], rows: Any = None) -> list[str]:
    """Returns all documents that hold any text, in an order that is the same on every machine with the same files.

    `say` gets a line about those that hold none, where there are any. `rows` are those of the data set, where they were
    read already.

    Raises:
        SlipstreamError: if a source can't be read or holds no text.
    """
    source = config.name
    if config.corpus is not None:
        documents: list[Any] = [_read_file(path) for path in _standard_library()]
    elif config.files is not None:
        documents = [_read_file(path) for path in _find_files(config.files, config.suffixes)]
    else:
        rows = read_rows(config) if rows is None else rows
        if config.text_column not in rows.column_names:
            raise SlipstreamError(
                f"{source} has no column {config.text_column!r}; "
                f"choose data.text_column, or --column of `slipstream eval`, from: {', '.join(rows.column_names)}"
            )
        documents = [*rows[config.text_column]]
    texts = [document for document in documents if isinstance(document, str) and document.strip()]
    if not texts:
        raise SlipstreamError(f"{source} holds no text; give a source with at least one document")
    if len(texts) < len(documents):
        missing = sum(not isinstance(document, str) for document in documents)
        say(
            f"{source}: left out {len(documents) - len(texts):,} of {len(documents):,} documents: {missing:,} without "
            f"text (null), {len(documents) - len(texts) - missing:,} empty or of white space"
        )
    return texts


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(root.rglob("*.py")) if not _NOT_THE_LIBRARY & set(path.relative_to(root).parts)]


def _find_files(sources: Iterable[Path], suffixes: Sequence[str]) -> list[Path]:
    """Returns the files among `sources`, and those in its folders whose suffix is one of `suffixes`."""
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.suffix in suffixes and path.is_file())
            if not inside:
                raise SlipstreamError(
                    f"the folder {source} holds no file ending in {', '.join(suffixes)}; "
                    f"name other endings with --data.suffixes=[.txt,.rst]"
                )
            found += inside
        elif source.is_file():
            found.append(source)
        else:
            raise SlipstreamError(f"data.files: there is no file or folder {source}")
    return found


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SlipstreamError(
            f"{path} isn't UTF-8 text (byte {error.start}); convert it, or leave it out of data.files"
        ) from error
    except OSError as error:
        raise SlipstreamError(f"can't read {path}: {error.strerror}") from error


def read_rows(config: SourceSection) -> Any:
    """Returns the rows of `config.dataset`, a `datasets.Dataset`: dictionaries that are read from the disk when used.

    Raises:
        SlipstreamError: if it can't be read.
    """
    return _load(config)


def open_rows(config: SourceSection) -> Any:
    """Returns the rows of `config.dataset`, a `datasets.IterableDataset`: read from the file or the hub when used.

    Raises:
        SlipstreamError: if it can't be read.
    """
    return _load(config, streaming=True)


def _load(config: SourceSection, **options: bool) -> Any:
    from datasets import load_dataset
    from datasets.utils.logging import CRITICAL, disable_progress_bar, set_verbosity

    disable_progress_bar()  # its bars and ours would overwrite each other
    set_verbosity(CRITICAL)  # what it logs, an error of ours says better
    name = str(config.dataset)
    builder = _BUILDERS.get(Path(name).suffix)
    _check_file(Path(name), builder)
    try:
        if builder is not None:
            return load_dataset(builder, data_files=name, split="train", **options)
        return load_dataset(name, config.dataset_config, split=config.split, **options)
    except Exception as error:  # `datasets` raises many types; all mean that it can't be read
        if builder == "json" and (where := find_bad_line(Path(name))):
            raise SlipstreamError(f"data.dataset={name}, {where}") from error
        if builder is None and not Path(name).exists():
            raise SlipstreamError(
                f"data.dataset={name}: there is no such file or folder here, and it can't be read as a data set of the "
                f"hub (split {config.split}): {error}. Give a {', '.join(_BUILDERS)} file, or its name on the hub"
            ) from error
        raise SlipstreamError(f"can't read data.dataset={name} (split {config.split}): {error}") from error


def _check_file(path: Path, builder: str | None) -> None:
    """Raises SlipstreamError where a data set's file isn't there, is empty, or is of a kind that isn't read."""
    if builder is None and path.is_file():
        raise SlipstreamError(
            f"data.dataset={path} ends in {path.suffix or 'nothing'}, which isn't read; give a file that ends in "
            f"{', '.join(_BUILDERS)}, or a text with --data.files=[{path}]"
        )
    if builder is not None and not path.is_file():
        raise SlipstreamError(f"data.dataset: there is no file {path}")
    if builder is not None and not path.read_bytes()[:_READ_FOR_TEXT].strip():
        raise SlipstreamError(f"data.dataset={path} is empty; give a file with at least one row")


def find_bad_line(path: Path) -> str:
    """Returns the first line of a .jsonl file that isn't a row, and why; "" where all are."""
    if path.suffix != ".jsonl":
        return ""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            shown = line[:_SHOWN].decode(errors="replace").strip()
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError as error:
                return f"line {number} isn't JSON ({error}): {shown}. Mend it, or leave it out"
            if not isinstance(row, dict):
                return f'line {number} is no row: {shown}. Write each line as {{"text": ...}}'
    return ""
