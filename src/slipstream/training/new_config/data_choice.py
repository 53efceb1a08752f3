"""What the data of a new configuration is: where it is read from, and what its rows are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.errors import SlipstreamError
from slipstream.training.config import SourceSection
from slipstream.training.data import read_rows
from slipstream.training.data.samples import OpenSource
from slipstream.training.data.samples.forms import columns_of
from slipstream.training.preferences import PairSource

Opened: TypeAlias = OpenSource | PairSource
_CORPUS = "python-stdlib"
_TYPED = (".jsonl", ".json", ".parquet")  # tables that tell what their values are; a .csv's are texts, as `files`
_ANSWERS = {"chosen", "rejected"}


@dataclass(frozen=True)
class DataChoice:
    """The data, opened, and the settings that say what it is."""

    settings: dict[str, Any]
    opened: Opened

    @property
    def are_pairs(self) -> bool:
        """Whether rows are pairs of answers, of which one is preferred."""
        return isinstance(self.opened, PairSource)

    @property
    def is_text(self) -> bool:
        """Whether rows are documents, all of whose tokens count."""
        return isinstance(self.opened, OpenSource) and self.opened.form == "text"


def choose_data(name: str, given: Mapping[str, Any], say: Callable[[str], None]) -> DataChoice:
    """Opens data by what was typed for it: a file, a folder, a data set's hub name, or python-stdlib.

    `given` are settings that are already chosen; `say` gets a line about documents without text.

    Raises:
        SlipstreamError: where it can't be read, or its columns fit no form.
    """
    settings = place_of(name) | dict(given)
    if not _source(settings).has_rows:
        return DataChoice(settings, OpenSource.of(_source(settings), say))
    rows = read_rows(_source(settings))
    if {*rows.column_names} >= _ANSWERS:
        return DataChoice(settings, PairSource(_source(settings), rows))
    settings |= _names_of_columns(_source(settings), rows)
    return DataChoice(settings, OpenSource.of(_source(settings), say))


def place_of(name: str) -> dict[str, Any]:
    """Returns the settings that say where data is: `corpus`, `files` or `dataset`."""
    path = Path(name)
    if name == _CORPUS:
        return {"corpus": name}
    if path.is_dir():
        return _place_of_folder(path)
    return {"files": [name]} if path.is_file() and path.suffix not in _TYPED else {"dataset": name}


def _place_of_folder(folder: Path) -> dict[str, Any]:
    """Returns the place of what a folder has most of: texts of the usual endings, tables, or other texts."""
    files = [each for each in folder.rglob("*") if each.is_file() and not _is_hidden(each.relative_to(folder))]
    if not files:
        raise SlipstreamError(f"the folder {folder} holds no file; give one with texts or tables, or a file")
    ending, _ = Counter(each.suffix for each in files).most_common(1)[0]
    if ending in _TYPED:
        return {"dataset": str(folder)}
    usual = SourceSection.model_fields["suffixes"].default
    return {"files": [str(folder)]} | ({} if ending in usual or not ending else {"suffixes": [ending]})


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _source(settings: Mapping[str, Any]) -> SourceSection:
    return SourceSection(**{name: value for name, value in settings.items() if name in SourceSection.model_fields})


def _names_of_columns(source: SourceSection, rows: Any) -> dict[str, Any]:
    """Returns the setting that tells the form of rows where their columns alone don't, or have other names."""
    columns = rows.column_names
    fitting = [form for form, needed in columns_of(source).items() if {*needed} <= {*columns}]
    if source.form is not None or len(fitting) == 1:
        return {}
    if fitting:  # the richest comes first
        return {"form": fitting[0]}
    conversations = [name for name in columns if _are_messages(rows[:1][name])]
    if len(conversations) == 1:
        return {"messages_column": conversations[0]}
    texts = [name for name in columns if rows.features[name].dtype in ("string", "large_string")]
    return {"text_column": texts[0]} if len(texts) == 1 else {}


def _are_messages(values: Any) -> bool:
    first = values[0] if values else None
    return isinstance(first, list) and bool(first) and isinstance(first[0], dict) and {"role", "content"} <= {*first[0]}
