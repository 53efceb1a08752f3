"""The kind of a new configuration's data, and its number of tokens: counted, or estimated from a part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.train.config import SourceSection
from slipstream.train.data import read_rows
from slipstream.train.data.chat_templates import ChatTemplate
from slipstream.train.data.open_source import PAIR_COLUMNS, OpenSource, columns_of
from slipstream.train.data.sources import Documents
from slipstream.train.data.tokenised_text import Array

_CORPUS = "python-stdlib"
_TYPED = (".jsonl", ".json", ".parquet")  # tables with types; a .csv has texts only


@dataclass(frozen=True)
class DataChoice:
    """The data, opened, and the settings that describe it."""

    settings: dict[str, Any]
    opened: OpenSource

    @property
    def are_pairs(self) -> bool:
        """Whether rows are pairs of answers, of which one is preferred."""
        return self.opened.form == "pairs"

    @property
    def is_text(self) -> bool:
        """Whether rows are documents, all of whose tokens count."""
        return self.opened.form == "text"


def choose_data(name: str, given: Mapping[str, Any], say: Callable[[str], None]) -> DataChoice:
    """Opens data by a typed name: a file, a folder, a data set's hub name, or python-stdlib.

    `given` are settings that are already chosen; `say` gets a line about documents without text.

    Raises:
        SlipstreamError: where it can't be read, or its columns fit no form.
    """
    settings = place_of(name) | dict(given)
    if not _source(settings).has_rows:
        return DataChoice(settings, OpenSource.of(_source(settings), say))
    rows = read_rows(_source(settings))
    if {*rows.column_names} >= {*PAIR_COLUMNS}:
        return DataChoice(settings, OpenSource.of(_source(settings), say, "pairs"))
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
    """Returns the place of a folder's most frequent files: texts of the usual endings, tables, or other texts."""
    seen = ((path, path.relative_to(folder).parts) for path in folder.rglob("*") if path.is_file())
    files = [path for path, parts in seen if not any(part.startswith(".") for part in parts)]
    if not files:
        raise SlipstreamError(f"the folder {folder} holds no file; give one with texts or tables, or a file")
    ending, _ = Counter(path.suffix for path in files).most_common(1)[0]
    if ending in _TYPED:
        return {"dataset": str(folder)}
    usual = SourceSection.model_fields["suffixes"].default
    return {"files": [str(folder)]} | ({} if ending in usual or not ending else {"suffixes": [ending]})


def _source(settings: Mapping[str, Any]) -> SourceSection:
    return SourceSection(**{name: value for name, value in settings.items() if name in SourceSection.model_fields})


def _names_of_columns(source: SourceSection, rows: Any) -> dict[str, Any]:
    """Returns the setting that tells the form of rows where their columns alone don't, or have other names."""
    columns = rows.column_names
    fitting = [form for form, needed in columns_of(source, columns).items() if {*needed} <= {*columns}]
    if source.form is not None or len(fitting) == 1:
        return {}
    # The richest form comes first.
    if fitting:
        return {"form": fitting[0]}
    conversations = [name for name in columns if _are_messages(rows[:1][name])]
    if len(conversations) == 1:
        return {"messages_column": conversations[0]}
    kinds = {name: getattr(rows.features[name], "dtype", "") for name in columns}  # dtype of each column; "" for lists
    texts = [name for name, kind in kinds.items() if kind in ("string", "large_string")]
    return {"text_column": texts[0]} if len(texts) == 1 else {}


def _are_messages(values: Any) -> bool:
    first = values[0] if values else None
    if not isinstance(first, list) or not first or not isinstance(first[0], dict):
        return False
    return {"role", "content"} <= {*first[0]} or {"from", "value"} <= {*first[0]}


_MOST_CHARACTERS = 500_000  # characters of text to tokenise
_MOST_ROWS = 1000  # first rows of samples to read; the first ones, so that errors give a row's own number
_FEW_DOCUMENTS = 100


@dataclass(frozen=True)
class DataSizes:
    """The tokens of documents, conversations, or the longer answers of pairs; of some where there are many."""

    lengths: Array
    number: int  # number of all documents, conversations or pairs
    is_text: bool
    largest: int  # largest token id seen

    @property
    def num_tokens(self) -> int:
        """The tokens of all, about."""
        return round(float(self.lengths.sum()) * self.number / max(1, len(self.lengths)))

    @property
    def longest(self) -> int:
        """The tokens of the longest."""
        return int(self.lengths.max(initial=0))

    def held_out(self, fraction: float) -> int:
        """Returns the least number of tokens that are in a `fraction` of the documents, about."""
        if not self.is_text or self.number == 1 or self.number >= _FEW_DOCUMENTS:
            return round(self.num_tokens * fraction)
        number = min(max(1, round(self.number * fraction)), self.number - 1)
        return int(np.sort(self.lengths)[:number].sum())


def some_of(opened: OpenSource) -> OpenSource:
    """Returns as much of the data as is tokenised here."""
    rows = opened.rows
    if isinstance(rows, Documents):
        some = _some_text(rows)
        return replace(opened, rows=Documents(opened.source, lambda: iter(some), lambda line: None))
    return replace(opened, rows=rows.select(range(min(len(rows), _MOST_ROWS))))


def _some_text(documents: Documents) -> list[str]:
    """Returns documents from all over the data, of which the last may be cut."""
    texts: list[str] = []
    room = _MOST_CHARACTERS
    stride = max(1, documents.num_characters // _MOST_CHARACTERS)
    for document in islice(documents, 0, None, stride):
        texts.append(document[:room])
        room -= len(texts[-1])
        if room <= 0:
            break
    return texts


def count_tokens(
    data: DataChoice, some: OpenSource, tokenizer: Any, template: ChatTemplate | None, most: int, vocab_size: int
) -> DataSizes:
    """Returns the sizes of the data, of which `some` are tokenised. A sample isn't read beyond `most` tokens, and given
    tokens are below `vocab_size`.

    Raises:
        SlipstreamError: with the number of a row that hasn't the form of the others.
    """
    text = some.tokenise(tokenizer, template, most, Progress(None), vocab_size)
    if data.is_text:
        rate = len(text.tokens) / some.rows.num_characters
        lengths = np.ceil(np.array([len(row) for row in data.opened.rows]) * rate).astype(np.int64)
        return DataSizes(lengths, len(lengths), True, text.largest())
    lengths = text.lengths.reshape(-1, text.group_size).max(axis=1)
    num_rows = round(len(data.opened.rows) * len(lengths) / len(some.rows))
    return DataSizes(lengths, num_rows, False, text.largest())
