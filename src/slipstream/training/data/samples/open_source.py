"""A source that has been opened: the form of its rows, and how they become tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.launch import Progress
from slipstream.training.config import SourceSection
from slipstream.training.data.corpus import Documents, read_documents
from slipstream.training.data.rows import read_rows, with_given_keys
from slipstream.training.data.samples.chat_template import ChatTemplate
from slipstream.training.data.samples.forms import find_form, find_loss
from slipstream.training.data.samples.tokenised_samples import SampleReader, tokenise_samples
from slipstream.training.data.tokenised_text import TokenisedText
from slipstream.training.data.tokenizer import tokenise


@dataclass(frozen=True)
class OpenSource:
    """The rows of a source, of one form; of texts the documents that hold any."""

    source: SourceSection
    form: str
    loss: str
    rows: Any  # Documents, or a datasets.Dataset

    @classmethod
    def of(cls, source: SourceSection, say: Callable[[str], None]) -> OpenSource:
        """Opens a source. `say` gets a line about documents without text.

        Raises:
            SlipstreamError: where it can't be read, holds nothing, or its columns fit no form.
        """
        rows = read_rows(source) if source.has_rows else None
        form = "text" if rows is None else find_form(source, rows.column_names)
        loss = find_loss(source, form)
        return cls(source, form, loss, read_documents(source, say, rows) if form == "text" else rows)

    def describe(self) -> str:
        """Returns how many rows there are, of what form, and which tokens count."""
        if isinstance(self.rows, Documents):
            noun = "document" if len(self.rows) == 1 else "documents"
            return f"text: {len(self.rows):,} {noun}, {self.rows.num_characters:,} characters"
        counted = {"all": "every token counts", "assistant": "the assistant's turns count"}
        counted |= {"completion": "the completion counts" if self.form != "messages" else "the last turn counts"}
        what = "what the labels say counts" if "labels" in self.rows.column_names else counted[self.loss]
        return f"{self.form}: {len(self.rows):,} samples, of which {what}"

    @property
    def has_messages(self) -> bool:
        """Whether rows need a chat template."""
        return self.form == "messages" or (self.form == "prompt-completion" and not self._is_plain)

    @property
    def num_closed(self) -> int:
        """The rows that should be closed by an end-of-text token; a chat template closes the turns by itself."""
        return len(self.rows) if self.form == "text" or self._is_plain else 0

    @property
    def _is_plain(self) -> bool:
        return self.form == "prompt-completion" and not is_list(self.rows.features["completion"])

    def texts(self) -> Iterator[str]:
        """Yields the texts in all rows, for a tokenizer to be trained on."""
        columns = {"messages": [self.source.messages_column], "prompt-completion": ["prompt", "completion"]}
        for row in self.rows:
            if self.form == "text":
                yield row
            for column in columns.get(self.form, ()):
                yield from texts_in(row[column])

    def tokenise(
        self, tokenizer: Any, template: ChatTemplate | None, seq_len: int, progress: Progress
    ) -> TokenisedText:
        """Returns the tokens of all rows.

        Raises:
            SlipstreamError: with the number of a row that hasn't the form of the others.
        """
        if isinstance(self.rows, Documents):
            return tokenise(tokenizer, self.rows, progress, self.rows.num_characters)
        reader = SampleReader(self.source, self.form, self.loss, tokenizer, template)
        with progress.counting("tokenising", total=len(self.rows)) as show:
            rows = with_given_keys(self.rows, self.rows.features)
            return tokenise_samples(rows, reader, self.source.name, seq_len, progress.warn, show)


def is_list(feature: Any) -> bool:
    """Returns whether a column, by what `datasets` says of it, holds lists, such as of messages."""
    from datasets import LargeList, List

    return isinstance(feature, (list, List, LargeList))


def texts_in(value: Any) -> Iterator[str]:
    """Yields a text, or the contents of messages."""
    if isinstance(value, str):
        yield value
    for message in value if isinstance(value, list) else ():
        if isinstance(message, dict) and isinstance(message.get("content"), str):
            yield message["content"]
