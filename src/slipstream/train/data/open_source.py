"""A source that has been opened: the form of its rows, and how they become tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.train.config import SourceSection
from slipstream.train.data.chat_templates import ChatTemplate
from slipstream.train.data.samples import (
    COUNTING_MASKS,
    QUESTION_CONTEXTS,
    SampleReader,
    conversation_column,
    question_columns,
    tokenise_samples,
)
from slipstream.train.data.sources import Documents, read_documents, read_rows, with_given_keys
from slipstream.train.data.tokenised_text import TokenisedText, check_known, find_double_begin, tokenise
from slipstream.units import plural


@dataclass(frozen=True)
class OpenSource:
    """The rows of a source, of one form; of texts the documents that hold any."""

    source: SourceSection
    form: str
    loss: str
    rows: Any  # Documents, or a datasets.Dataset

    @classmethod
    def of(cls, source: SourceSection, say: Callable[[str], None], answers: str | None = None) -> OpenSource:
        """Opens a source. `answers` says that its rows are "pairs" of them, or "rated", each wanted or not; None finds
        the form by itself. `say` gets a line about documents without text.

        Raises:
            SlipstreamError: where it can't be read, holds nothing, or its columns fit no form.
        """
        rows = read_rows(source) if source.has_rows else None
        form = "text" if rows is None else find_form(source, rows.column_names, answers)
        loss = find_loss(source, form)
        return cls(source, form, loss, read_documents(source, say, rows) if form == "text" else rows)

    def describe(self) -> str:
        """Returns the number of rows, their form, and the tokens that count."""
        if self.form == "rated":
            num_rows = len(self.rows) * (2 if self._answers_column == "chosen" else 1)
            return f"preferences: {num_rows:,} answers, each wanted or not; only answers count"
        if self.form == "pairs":
            has_prompts = "prompt" in self.rows.column_names
            whose = "a prompt of its own" if has_prompts else "the first messages that both have"
            return f"preferences: {plural(len(self.rows), 'pair')} of answers to {whose}; only answers count"
        if isinstance(self.rows, Documents):
            return f"text: {plural(len(self.rows), 'document')}, {self.rows.num_characters:,} characters"
        counted = {"all": "every token counts", "assistant": "the assistant's turns count"}
        last = "the completion counts" if self.form not in CONVERSATIONS else "the last turn counts"
        counted |= {"completion": last}
        saying = [name for name in ("labels", *COUNTING_MASKS) if name in self.rows.column_names]
        what = counted[self.loss]
        if saying and self.form == "tokens":
            what = f"what {' and '.join(saying)} {'says' if len(saying) == 1 else 'say'} counts"
        return f"{self.form}: {plural(len(self.rows), 'sample')}, of which {what}"

    @property
    def has_messages(self) -> bool:
        """Whether rows need a chat template."""
        return self.form in CONVERSATIONS or (self._answers_column is not None and not self._is_plain)

    @property
    def num_closed(self) -> int:
        """The documents that should be closed by an end-of-text token; a chat template closes the turns by itself."""
        if self.form != "text" and not self._is_plain:
            return 0
        return len(self.rows) * (2 if self._answers_column == "chosen" else 1)

    @property
    def _answers_column(self) -> str | None:
        """The column that shows whether answers are texts or messages."""
        if self.form == "rated":
            return "completion" if "completion" in self.rows.column_names else "chosen"
        return {"prompt-completion": "completion", "pairs": "chosen"}.get(self.form)

    @property
    def _is_plain(self) -> bool:
        column = self._answers_column
        return column is not None and not is_list(self.rows.features[column])

    def texts(self) -> Iterator[str]:
        """Yields the texts in all rows, for a tokenizer to be trained on."""
        if self.form == "text":
            yield from self.rows
        elif self.form != "tokens":
            columns = columns_of(self.source, self.rows.column_names) | {"pairs": ("prompt", *PAIR_COLUMNS)}
            columns["rated"] = ("prompt", "completion", *PAIR_COLUMNS)
            more = ("system", *QUESTION_CONTEXTS) if self.form in CONVERSATIONS else ()
            for row in self.rows:
                for column in (*columns[self.form], *more):
                    yield from texts_in(row.get(column))

    def tokenise(
        self,
        tokenizer: Any,
        template: ChatTemplate | None,
        seq_len: int,
        progress: Progress,
        vocab_size: int | None = None,
    ) -> TokenisedText:
        """Returns the tokens of all rows; given ones are below `vocab_size`.

        Raises:
            SlipstreamError: with the number of a row that hasn't the form of the others, and where the tokenizer
                doesn't know the text.
        """
        if isinstance(self.rows, Documents):
            text = tokenise(tokenizer, self.rows, progress, self.rows.num_characters)
        else:
            reader = SampleReader(self.source, self.form, self.loss, tokenizer, template, vocab_size)
            with progress.counting("tokenising", total=len(self.rows)) as show:
                rows = with_given_keys(self.rows, self.rows.features)
                text = tokenise_samples(rows, reader, self.source.name, seq_len, progress.warn, show)
        if self.form != "tokens":
            check_tokenised(text, tokenizer, self.source.name, progress)
        return text


def check_tokenised(text: TokenisedText, tokenizer: Any, name: str, progress: Progress) -> None:
    """Raises SlipstreamError where the tokenizer doesn't know the text of a source. Warns of two begin tokens."""
    check_known(text, tokenizer, name)
    if doubled := find_double_begin(text, tokenizer):
        progress.warn(f"{name}: {doubled}")


def is_list(feature: Any) -> bool:
    """Returns whether a column, by its feature in `datasets`, holds lists, such as of messages."""
    from datasets import LargeList, List

    return isinstance(feature, (list, List, LargeList))


def texts_in(value: Any) -> Iterator[str]:
    """Yields a text, or the contents of messages, also those in parts."""
    if isinstance(value, str):
        yield value
    for message in value if isinstance(value, list) else ():
        if isinstance(message, dict):
            for name in ("content", "value", "text"):
                yield from texts_in(message.get(name))


# Which tokens of a form can count; the first is the default.
_LOSSES = {
    "text": ("all",),
    "messages": ("assistant", "completion", "all"),
    "question-answer": ("assistant", "completion", "all"),
    "prompt-completion": ("completion", "assistant", "all"),
    "tokens": ("all",),
    "pairs": ("completion",),
    "rated": ("completion",),
}

# The forms that are conversations, and those that may be.
CONVERSATIONS = ("messages", "question-answer")
WITH_ANSWERS = (*CONVERSATIONS, "prompt-completion", "pairs", "rated")

# The columns of pairs of answers, which may have a prompt besides.
PAIR_COLUMNS = ("chosen", "rejected")

# Those of answers that are wanted or not.
RATED_COLUMNS = ("prompt", "completion", "label")


def columns_of(source: SourceSection, columns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the columns that each form needs: those that are there of those that would do."""
    return {
        "messages": (conversation_column(source, columns),),
        "prompt-completion": ("prompt", "completion"),
        "question-answer": question_columns(columns),
        "tokens": ("input_ids",),
        "text": (source.text_column,),
    }


def find_form(source: SourceSection, columns: Sequence[str], answers: str | None = None) -> str:
    """Returns the form of a data set with these columns: that of its answers, as it is named, or as the columns say.

    Raises:
        SlipstreamError: where they fit no form, or several.
    """
    missing = [name for name in PAIR_COLUMNS if name not in columns]
    if answers == "pairs" and missing:
        raise SlipstreamError(
            f"{source.name} has no column {missing[0]!r}, but {', '.join(columns)}; preference needs pairs of answers: "
            "rename columns to prompt, chosen and rejected, or leave the section preference out"
        )
    if answers == "rated" and missing and not {*RATED_COLUMNS} <= {*columns}:
        raise SlipstreamError(
            f"{source.name} has the columns {', '.join(columns)}; preference.loss=kto needs prompt, completion and "
            "label, which is true where the completion is wanted, or pairs: chosen and rejected"
        )
    if answers is not None:
        return answers
    wanted = columns_of(source, columns)
    if source.form is not None:
        if without := [name for name in wanted[source.form] if name not in columns]:
            raise SlipstreamError(_without(source, without[0], columns))
        return source.form
    fitting = [form for form, needed in wanted.items() if set(needed) <= {*columns}]
    if len(fitting) > 1:
        raise SlipstreamError(
            f"{source.name} has the columns of several forms ({', '.join(columns)}); choose one with data.form: "
            + " or ".join(fitting)
        )
    if not fitting and not missing:
        raise SlipstreamError(
            f"{source.name} has the columns {' and '.join(PAIR_COLUMNS)}, pairs of answers, which need the section "
            "preference: give --preference.loss=dpo, or choose the column of a text with data.text_column"
        )
    if not fitting:
        raise SlipstreamError(_without(source, source.text_column, columns))
    return fitting[0]


def find_loss(source: SourceSection, form: str) -> str:
    """Returns which tokens count. Raises SlipstreamError where rows of that form have no such tokens."""
    allowed = _LOSSES[form]
    if source.loss is not None and source.loss not in allowed:
        why = "the column labels says which tokens count" if form == "tokens" else f"it is of the form {form}"
        raise SlipstreamError(f"data.loss={source.loss} for {source.name}: {why}; choose {' or '.join(allowed)}")
    return source.loss or allowed[0]


def _without(source: SourceSection, missing: str, columns: Sequence[str]) -> str:
    lines = [
        f"{source.name} has no column {missing!r}; choose data.text_column, or --column of `slipstream eval`, from: "
        + ", ".join(columns)
    ]
    if source.form is None:
        lines.append(
            "Rows that aren't text have the columns messages or conversations (else: data.messages_column), prompt and "
            "completion, question and answer, instruction and output, or input_ids"
        )
    return ". ".join(lines)
