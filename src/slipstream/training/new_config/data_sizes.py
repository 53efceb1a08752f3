"""How many tokens the data has, and its documents have: counted, or of large data estimated from a part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from slipstream.launch import Progress
from slipstream.training.data.corpus import Documents
from slipstream.training.data.samples import ChatTemplate
from slipstream.training.data.tokenised_text import Array
from slipstream.training.new_config.data_choice import DataChoice, Opened

_MOST_CHARACTERS = 500_000  # of text that are tokenised
_MOST_ROWS = 1000  # of samples, the first ones, so that an error names a row's own number
_FEW_DOCUMENTS = 100


@dataclass(frozen=True)
class DataSizes:
    """The tokens of documents, conversations, or the longer answers of pairs; of some where there are many."""

    lengths: Array
    number: int  # of all documents, conversations or pairs
    is_text: bool
    largest: int  # the largest token id that was seen

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


def some_of(opened: Opened) -> Opened:
    """Returns as much of the data as is tokenised here."""
    rows = opened.rows
    if isinstance(rows, Documents):
        some = _some_text(rows)
        return replace(opened, rows=Documents(opened.source, lambda: iter(some), lambda line: None))
    return replace(opened, rows=rows.select(range(min(len(rows), _MOST_ROWS))))


def _some_text(documents: Documents) -> list[str]:
    """Returns documents from all over the data, of which the last may be cut."""
    found: list[str] = []
    room = _MOST_CHARACTERS
    stride = max(1, documents.num_characters // _MOST_CHARACTERS)
    for document in islice(documents, 0, None, stride):
        found.append(document[:room])
        room -= len(found[-1])
        if room <= 0:
            break
    return found


def count_tokens(data: DataChoice, some: Opened, tokenizer: Any, template: ChatTemplate | None, most: int) -> DataSizes:
    """Returns the sizes of the data, of which `some` are tokenised. A sample isn't read beyond `most` tokens.

    Raises:
        SlipstreamError: with the number of a row that hasn't the form of the others.
    """
    text = some.tokenise(tokenizer, template, most, Progress(None))
    if data.is_text:
        rate = len(text.tokens) / some.rows.num_characters
        lengths = np.ceil(np.array([len(each) for each in data.opened.rows]) * rate).astype(np.int64)
        return DataSizes(lengths, len(lengths), True, text.largest())
    lengths = text.lengths.reshape(-1, text.group_size).max(axis=1)
    number = round(len(data.opened.rows) * len(lengths) / len(some.rows))
    return DataSizes(lengths, number, False, text.largest())
