"""A source of pairs of answers that has been opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.training.config import SourceSection
from slipstream.training.data import TokenisedText, read_rows
from slipstream.training.data.rows import with_given_keys
from slipstream.training.data.samples import ChatTemplate, SampleReader
from slipstream.training.data.samples.open_source import is_list, texts_in
from slipstream.training.preferences.pair_reader import PairReader, read_pairs


@dataclass(frozen=True)
class PairSource:
    """The rows of a data set with the columns `chosen` and `rejected`."""

    source: SourceSection
    rows: Any  # a datasets.Dataset

    @classmethod
    def of(cls, source: SourceSection, _say: Callable[[str], None]) -> PairSource:
        """Opens a source. Raises SlipstreamError where it can't be read, or has no such columns."""
        rows = read_rows(source)
        if missing := [name for name in ("chosen", "rejected") if name not in rows.column_names]:
            raise SlipstreamError(
                f"{source.name} has no column {missing[0]!r}, but {', '.join(rows.column_names)}; preference needs "
                "pairs of answers: rename columns to prompt, chosen and rejected, or leave the section preference out"
            )
        return cls(source, rows)

    def describe(self) -> str:
        """Returns how many pairs there are, and where their prompts come from."""
        whose = "a prompt of its own" if "prompt" in self.rows.column_names else "the first messages that both have"
        return f"preferences: {len(self.rows):,} pairs of answers to {whose}, of which the answers count"

    @property
    def has_messages(self) -> bool:
        """Whether rows need a chat template."""
        return is_list(self.rows.features["chosen"])

    @property
    def num_closed(self) -> int:
        """The documents that should be closed by an end-of-text token; a chat template closes turns by itself."""
        return 0 if self.has_messages else 2 * len(self.rows)

    def texts(self) -> Iterator[str]:
        """Yields the texts in all rows, for a tokenizer to be trained on."""
        for row in self.rows:
            for column in ("prompt", "chosen", "rejected"):
                yield from texts_in(row.get(column))

    def tokenise(
        self, tokenizer: Any, template: ChatTemplate | None, seq_len: int, progress: Progress
    ) -> TokenisedText:
        """Returns the documents of all pairs, chosen and rejected in turn.

        Raises:
            SlipstreamError: with the number of a row that hasn't the form of the others; where no pair is left.
        """
        reader = PairReader(SampleReader(self.source, "prompt-completion", "completion", tokenizer, template), seq_len)
        with progress.counting("tokenising", total=len(self.rows)) as show:
            rows = with_given_keys(self.rows, self.rows.features)
            return read_pairs(rows, reader, self.source.name, progress.warn, show)
