"""Turns rows of a data set into samples: their tokens, and labels that say which of them count."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED
from slipstream.training.config import SourceSection
from slipstream.training.data.samples.chat_template import ChatTemplate
from slipstream.training.data.tokenised_text import DocumentWriter, TokenisedText

Sample = tuple[list[int], list[int]]  # tokens and labels
_NULL, _EMPTY, _NOTHING, _CUT = "without content (null)", "empty", "in which no token counts", "cut"


class UnusableRowError(Exception):
    """A row that can't be trained on, and why."""


class SampleReader:
    """Reads the rows of one source, of one form."""

    def __init__(self, source: SourceSection, form: str, loss: str, tokenizer: Any, template: ChatTemplate | None):
        self._source, self._form, self._loss = source, form, loss
        self._tokenizer, self._template = tokenizer, template
        start = tokenizer("")["input_ids"]
        self._adds_end = bool(start) and start[-1] == tokenizer.eos_token_id and len(start) > 1

    def read(self, row: Mapping[str, Any]) -> Sample:
        """Returns the tokens and the labels of a row.

        Raises:
            UnusableRowError: where nothing can be trained on.
            SlipstreamError: where it hasn't the form of the source.
        """
        if self._form == "messages":
            tokens, counts = self._conversation(row)
        elif self._form == "prompt-completion":
            tokens, counts = self._completion(row)
        else:
            return _given_tokens(row)
        return tokens, [token if count else IGNORED for token, count in zip(tokens, counts, strict=True)]

    def _conversation(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        messages = _checked_messages(row[self._source.messages_column], self._source.messages_column)
        return self._counted(messages, len(messages) - 1, _tools(row.get("tools")))

    def _completion(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        prompt, completion = row["prompt"], row["completion"]
        if prompt is None or completion is None:
            raise UnusableRowError(_NULL)
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise UnusableRowError(_EMPTY)
            return self._text_completion(prompt, completion)
        if isinstance(prompt, str) or isinstance(completion, str):
            raise SlipstreamError("prompt and completion must both be texts or both lists of messages")
        first, last = _checked_messages(prompt, "prompt"), _checked_messages(completion, "completion")
        return self._counted([*first, *last], len(first), _tools(row.get("tools")))

    def _counted(self, messages: list[dict[str, Any]], num_prompt: int, tools: Any) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a conversation, and which count; a completion comes after `num_prompt` messages."""
        template = self._template = self._template or ChatTemplate(self._tokenizer)
        if self._loss == "assistant":
            return template.assistant_turns(messages, tools)
        tokens = template.tokens(messages, tools)
        if self._loss == "all":
            return tokens, [True] * len(tokens)
        speaks = messages[num_prompt].get("role") == "assistant"
        begin = len(template.prefix(tokens, messages[:num_prompt], tools, prompt=speaks))
        return tokens, [False] * begin + [True] * (len(tokens) - begin)

    def _text_completion(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        """Returns the prompt's tokens, as a generation would begin with them, and those of the completion."""
        if self._loss == "assistant":
            raise SlipstreamError("data.loss=assistant needs messages, but prompt and completion are texts")
        begin, whole = self._ids(prompt), self._ids(prompt + completion)
        if whole[: len(begin)] != begin:  # a token would be half of the prompt and half of the completion
            whole = begin + self._tokenizer(completion, add_special_tokens=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        tokens = whole if end is None or whole[-1] == end else [*whole, end]
        num_prompt = 0 if self._loss == "all" else len(begin)
        return tokens, [place >= num_prompt for place in range(len(tokens))]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, verbose=False)["input_ids"]
        return ids[:-1] if self._adds_end else ids


def _tools(given: Any) -> Any:
    """Returns the tools of a row, also where they are JSON text. Raises SlipstreamError for other text."""
    if not isinstance(given, str) or not given:
        return given or None
    try:
        return json.loads(given)
    except ValueError as error:
        raise SlipstreamError(f"tools must be a list of tools, or JSON text of one, and this isn't: {error}") from error


def _checked_messages(messages: Any, column: str) -> list[dict[str, Any]]:
    """Returns messages without their empty fields. Raises UnusableRowError and SlipstreamError as `read` does."""
    if messages is None:
        raise UnusableRowError(_NULL)
    if len(messages) == 0:
        raise UnusableRowError(_EMPTY)
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise SlipstreamError(f"{column} must be a list of messages like {{role: user, content: ...}}")
    given = [{name: value for name, value in each.items() if value is not None} for each in messages]
    for each in given:
        if "role" not in each:
            hint = "; rename from and value" if "from" in each else ""
            raise SlipstreamError(
                f"each message in {column} needs a role and a content, but one has {', '.join(each) or 'nothing'}{hint}"
            )
        if len(each) == 1:
            raise UnusableRowError(_NULL)
    return given


def _given_tokens(row: Mapping[str, Any]) -> Sample:
    tokens = row["input_ids"]
    labels = row.get("labels", tokens)
    if tokens is None or labels is None:
        raise UnusableRowError(_NULL)
    if len(tokens) == 0:
        raise UnusableRowError(_EMPTY)
    if len(labels) != len(tokens):
        raise SlipstreamError(f"labels has {len(labels)} tokens, but input_ids {len(tokens)}; give as many")
    if any(not isinstance(each, int) or each < 0 for each in tokens):
        raise SlipstreamError("input_ids must be lists of token ids, whole numbers from 0")
    if any(not isinstance(each, int) or (each < 0 and each != IGNORED) for each in labels):
        raise SlipstreamError(f"labels must be lists of token ids, or {IGNORED} where a token doesn't count")
    return tokens, labels


def tokenise_samples(
    rows: Iterable[Mapping[str, Any]],
    reader: SampleReader,
    name: str,
    seq_len: int,
    say: Callable[[str], None],
    show: Callable[[float], None] = lambda _done: None,
) -> TokenisedText:
    """Returns the samples of all rows, as `read_samples` does. `say` gets a line about those left out or cut.

    Raises:
        SlipstreamError: with the number of the row, where one hasn't the form of the others, or none is left.
    """
    text, report = read_samples(rows, reader, name, seq_len, show)
    if not text.num_documents:
        raise SlipstreamError(f"{name} holds no sample to train on{': ' + report if report else ''}")
    if report:
        say(f"{name}: {report}")
    return text


def read_samples(
    rows: Iterable[Mapping[str, Any]],
    reader: SampleReader,
    name: str,
    seq_len: int,
    show: Callable[[float], None] = lambda _done: None,
) -> tuple[TokenisedText, str]:
    """Returns the samples of rows, cut after `seq_len` tokens, and what was left out or cut, if anything. `show` gets
    the number of rows that are done.

    Raises:
        SlipstreamError: with the number of the row, where one hasn't the form of the others.
    """
    writer, found = DocumentWriter(), Counter[str]()
    for number, row in enumerate(rows, start=1):
        try:
            ids, counted = reader.read(row)
            if all(label == IGNORED for label in counted[1:seq_len]):
                raise UnusableRowError(_NOTHING)
        except UnusableRowError as reason:
            found[str(reason)] += 1
        except SlipstreamError as error:
            raise SlipstreamError(f"{name}, row {number}: {error}") from error
        else:
            found[_CUT] += len(ids) > seq_len
            both = (np.asarray(each[:seq_len], dtype=np.int32) for each in (ids, counted))
            writer.add(*both)
        show(number)
    report = _report(found, sum(found.values()) - found[_CUT] + len(writer), seq_len)
    return writer.finish(has_labels=True), report


def _report(found: Counter[str], total: int, seq_len: int) -> str:
    """Returns what was left out and what was cut, with counts; nothing where neither was."""
    parts = []
    if left_out := {reason: found[reason] for reason in (_NULL, _EMPTY, _NOTHING) if found[reason]}:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
        if _NOTHING in left_out:
            reasons += f" (of the first {seq_len:,})"
        parts.append(f"left out {sum(left_out.values()):,} of {total:,} samples: {reasons}")
    if found[_CUT]:
        parts.append(
            f"{found[_CUT]:,} of {total:,} samples have more than training.seq_len={seq_len} tokens: what comes after "
            "them is left out"
        )
    return "; ".join(parts)
