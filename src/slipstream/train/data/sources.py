"""Reads the documents and rows of a source: files, folders, `datasets`, or Python's standard library."""

from __future__ import annotations

import csv
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, check_not_misspelt, path_hint
from slipstream.foreign_text import parse_json
from slipstream.train.config import SourceSection

_READ_FOR_TEXT = 65536  # bytes; after as many blank ones, the whole file is read
_DIGESTED = 2**20  # bytes digested at the beginning of a file, and at its end
_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks
_SHOWN = 80  # bytes shown of an unreadable line
_BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def find_files(sources: Iterable[Path], suffixes: Sequence[str]) -> list[Path]:
    """Returns the files among `sources`, and those in its folders whose suffix is one of `suffixes`.

    Raises SlipstreamError where there is no such file or folder, or a folder has none with such a suffix.
    """
    files: list[Path] = []
    for source in sources:
        if source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.suffix in suffixes and path.is_file())
            if not inside:
                raise SlipstreamError(
                    f"the folder {source} holds no file ending in {', '.join(suffixes)}; "
                    f"name other endings with --data.suffixes=[.txt,.rst]"
                )
            files += inside
        elif source.is_file():
            files.append(source)
        else:
            raise SlipstreamError(f"data.files: there is no file or folder {source}{path_hint(source)}")
    return files


def with_given_keys(rows: Iterable[dict[str, Any]], features: Any) -> Iterator[dict[str, Any]]:
    """Yields rows without the null keys inside of them that a column's type adds where other rows have a value: each
    tool's arguments would be all tools'. `features` are those of the columns in `datasets`."""
    for row in rows:
        yield {name: _given(value, (features or {}).get(name)) for name, value in row.items()}


def _given(value: Any, feature: Any) -> Any:
    if isinstance(value, dict) and isinstance(feature, dict):
        return {name: _given(item, feature.get(name)) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
        return [_given(item, inner) for item in value]
    return value


def row_files(config: SourceSection) -> list[Path]:
    """Returns the files whose rows a source has; none of a data set of the hub."""
    if config.files is not None:
        return find_files(config.files, config.suffixes)
    file = Path(str(config.dataset))
    return [file] if file.suffix in _BUILDERS else []


def digest_of(file: Path) -> str:
    """Returns a digest of a file's size and of its first and last MiB, which tells it from one that has replaced it."""
    size = file.stat().st_size
    digest = blake2b(str(size).encode(), digest_size=16)
    with file.open("rb") as opened:
        digest.update(opened.read(_DIGESTED))
        opened.seek(max(opened.tell(), size - _DIGESTED))
        digest.update(opened.read(_DIGESTED))
    return digest.hexdigest()


def _cache_of(files: Iterable[Path]) -> Path:
    """Returns the folder in the cache of `datasets` for the rows of these very files.

    By itself `datasets` takes a file for the one that it has read by its path and time, which copies such as those of
    `rsync -t` and `cp -p`, or an image with fixed dates, don't change.
    """
    from datasets.config import HF_DATASETS_CACHE

    key = blake2b(digest_size=16)
    for file in files:
        key.update(f"{file.absolute()}\0{file.stat().st_mtime_ns}\0{digest_of(file)}\0".encode())
    return Path(HF_DATASETS_CACHE, "slipstream", key.hexdigest())


def read_rows(config: SourceSection, streaming: bool = False) -> Any:
    """Returns the rows of a source, a `datasets.Dataset`: dictionaries that are read from the disk when used; or a
    `datasets.IterableDataset`, read from the files or the hub when used.

    Raises:
        SlipstreamError: if it can't be read.
    """
    from datasets import load_dataset
    from datasets.utils.logging import CRITICAL, disable_progress_bar, set_verbosity

    # Its bars and ours would overwrite each other.
    disable_progress_bar()
    # Our own errors say it better.
    set_verbosity(CRITICAL)
    files = row_files(config)
    _check_files(config, files)
    options: dict[str, Any] = {"streaming": True} if streaming else {}
    try:
        if files:
            builder = _BUILDERS[files[0].suffix]
            if builder == "csv":
                options |= _as_texts(files)
            elif builder == "text":
                # The other builders leave out a byte order mark by themselves.
                options["encoding"] = "utf-8-sig"
            options |= {} if streaming else {"cache_dir": str(_cache_of(files))}
            rows = load_dataset(builder, data_files=[str(file) for file in files], split="train", **options)
            if streaming and rows.features is None and any(file.suffix == ".json" for file in files):
                # A list in one file is read whole anyhow, but streamed its columns of mixed types come as JSON text.
                return read_rows(config).to_iterable_dataset()
        else:
            inside = sorted(path for path in Path(str(config.dataset)).rglob("*") if path.is_file())
            options |= {"cache_dir": str(_cache_of(inside))} if inside and not streaming else {}
            rows = load_dataset(str(config.dataset), config.dataset_config, split=config.split, **options)
        return rows if config.max_samples is None else rows.take(config.max_samples)
    # `datasets` raises many types, all of which mean that the data can't be read.
    except Exception as error:
        if where := find_bad_line(files):
            raise SlipstreamError(f"{config.option}={where}") from error
        if not files and not Path(str(config.dataset)).exists():
            hint = path_hint(str(config.dataset))
            raise SlipstreamError(
                f"{config.name}: there is no such file or folder here{hint}, and it can't be read as a data set of the "
                f"hub (split {config.split}): {error}. Give a {', '.join(_BUILDERS)} file, or its name on the hub"
            ) from error
        raise SlipstreamError(f"can't read {config.name} (split {config.split}): {error}") from error


def _check_files(config: SourceSection, files: Sequence[Path]) -> None:
    """Raises SlipstreamError where a file of rows isn't there, is empty, or is of a kind that isn't read."""
    path = Path(str(config.dataset))
    if not files:
        check_not_misspelt(config.name, str(path))
    if not files and path.is_file():
        raise SlipstreamError(
            f"data.dataset={path} ends in {path.suffix or 'nothing'}, which isn't read; give a file that ends in "
            f"{', '.join(_BUILDERS)}, or a text with --data.files=[{path}]"
        )
    for file in files:
        if not file.is_file():
            raise SlipstreamError(f"data.dataset: there is no file {file}{path_hint(file)}")
        with file.open("rb") as opened:
            begin = opened.read(_READ_FOR_TEXT)
            if not begin.strip() and not file.read_bytes().strip():
                raise SlipstreamError(f"{config.name}: {file} is empty; give a file with at least one row")
        if file.suffix != ".parquet" and 0 in begin and not begin.startswith(_UTF16):
            raise SlipstreamError(
                f"{config.name}: {file} is a binary file and no text (byte {begin.find(0)} is 0); give a "
                f"{', '.join(_BUILDERS)} file, unpacked where it is compressed"
            )


def _as_texts(files: Sequence[Path]) -> dict[str, Any]:
    """Returns how `datasets` reads .csv files: every column as text, also numbers and the word null."""
    from datasets import Features, Value

    with files[0].open(encoding="utf-8-sig", newline="") as opened:
        columns = [name for name in next(csv.reader(opened)) if name]
    return {"features": Features({name: Value("string") for name in columns}), "keep_default_na": False}


def find_bad_line(files: Sequence[Path]) -> str:
    """Returns the first line of .jsonl files that isn't a row, and why; "" where all are."""
    return next(filter(None, map(_bad_line_of, files)), "")


def _bad_line_of(path: Path) -> str:
    if path.suffix != ".jsonl":
        return ""
    with path.open("rb") as lines:
        for place, line in enumerate(lines, start=1):
            shown = line[:_SHOWN].decode(errors="replace").strip()
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"{path}, line {place} isn't UTF-8 text; convert the file, as iconv -f UTF-16 -t UTF-8 does"
            try:
                row = parse_json(line) if line.strip() else {}
            except ValueError as error:
                return f"{path}, line {place} isn't JSON ({error}): {shown}. Fix the line, or leave it out"
            if not isinstance(row, dict):
                return f'{path}, line {place}: {shown} isn\'t a row. Write each line as {{"text": ...}}'
    return ""


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
        odd = None
        for document in read():
            if not isinstance(document, str):
                odd = document if odd is None else odd
                num_null = num_null + 1
            elif not document.strip():
                num_blank += 1
            else:
                self._number = self._number + 1
                self.num_characters = self.num_characters + len(document)
        if not self._number:
            instead = "" if odd is None else f", but values such as {odd!r} in the column {source.text_column!r}"
            raise SlipstreamError(f"{source.name} holds no text{instead}; give a source with at least one document")
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
        return Documents(config, lambda: map(_read_file, library[: config.max_samples]), say)
    if not config.has_rows:
        files = find_files(config.files or (), config.suffixes)
        return Documents(config, lambda: map(_read_file, files[: config.max_samples]), say)
    rows = read_rows(config) if rows is None else rows
    return Documents(config, lambda: _column(rows, config.text_column), say)


def _column(rows: Any, name: str) -> Iterator[Any]:
    for some in rows.select_columns([name]).iter(batch_size=_ROWS_AT_ONCE):
        yield from some[name]


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(root.rglob("*.py")) if not _NOT_THE_LIBRARY & set(path.relative_to(root).parts)]


def _read_file(path: Path) -> str:
    try:
        data = path.read_bytes()
        if problem := _no_text(data):
            raise SlipstreamError(f"{path} {problem}")
        # A byte order mark is dropped.
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise SlipstreamError(
            f"{path} isn't UTF-8 text (byte {error.start}); convert it, or leave it out of data.files"
        ) from error
    except OSError as error:
        raise SlipstreamError(f"can't read {path}: {error.strerror}") from error


def _no_text(data: bytes) -> str:
    """Returns why bytes with zeros aren't a text in UTF-8, and what to do; "" where there are none."""
    if data.startswith(_UTF16):
        return "is text in UTF-16 and not in UTF-8; convert it, as iconv -f UTF-16 -t UTF-8 does"
    place = data.find(0)
    return "" if place < 0 else f"is a binary file and no text (byte {place} is 0); leave it out of data.files"
