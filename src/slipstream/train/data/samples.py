"""Turns rows of a data set into samples: their tokens, and labels that say which of them count."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby, takewhile
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.foreign_text import parse_json
from slipstream.launch import Progress
from slipstream.model import IGNORED
from slipstream.train.config import SourceSection
from slipstream.train.data.chat_templates import ChatTemplate
from slipstream.train.data.tokenised_text import Array, DocumentWriter, TokenisedText
from slipstream.units import plural

Sample = tuple[list[int], list[int]]  # tokens and labels
_NULL = "without content (null)"
_EMPTY = "empty"
_EQUAL = "with equal answers"
_NOTHING, _FULL = "in which no token counts", "with no room for an answer after the prompt"


_OF_SEAM = 12  # characters shown of a prompt's end, and of its completion's beginning


class UnusableRowError(Exception):
    """A row that can't be trained on, and why."""


class SampleReader:
    """Reads the rows of one source, of one form: a sample each, or in the form `pairs` two answers to one prompt."""

    def __init__(
        self,
        source: SourceSection,
        form: str,
        loss: str,
        tokenizer: Any,
        template: ChatTemplate | None,
        vocab_size: int | None = None,
    ):
        """`vocab_size` limits the ids of given tokens and labels, where the model is known."""
        self._source = source
        self._form = form
        self._loss = loss
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._template = template
        start = tokenizer("")["input_ids"]
        self._adds_end = bool(start) and start[-1] == tokenizer.eos_token_id and len(start) > 1
        self.are_pairs = form == "pairs"
        self.are_rated = form == "rated"
        self.seam: str | None = None
        """Where in the rows so far the texts of a prompt and a completion would share a token, and are tokenised apart:
        the end of the first such prompt, and the beginning of its completion."""

    def read(self, row: Mapping[str, Any], seq_len: int) -> tuple[list[Sample], bool]:
        """Returns the tokens and labels of a row's documents up to `seq_len` tokens, and whether one was cut there.

        Raises:
            UnusableRowError: where nothing can be trained on.
            SlipstreamError: where it hasn't the form of the source.
        """
        answers = _answers(row) if self.are_pairs or (self.are_rated and "chosen" in row) else [row]
        whole = [self._read_document(answer) for answer in answers]
        documents = [(tokens[:seq_len], labels[:seq_len]) for tokens, labels in whole]
        if any(all(label == IGNORED for label in labels[1:]) for _, labels in documents):
            raise UnusableRowError(_FULL if self.are_pairs or self.are_rated else _NOTHING)
        if self.are_pairs and documents[0] == documents[1]:
            raise UnusableRowError(_EQUAL)
        return documents, any(len(tokens) > seq_len for tokens, _ in whole)

    def _read_document(self, row: Mapping[str, Any]) -> Sample:
        if self._form == "tokens":
            tokens, labels = _given_tokens(row)
            if self._vocab_size is not None:
                _check_ids(tokens, labels, self._vocab_size)
            return tokens, labels
        is_answer = self._form in ("prompt-completion", "pairs", "rated")
        tokens, counts = self._completion(row) if is_answer else self._turns(row)
        return tokens, [token if count else IGNORED for token, count in zip(tokens, counts, strict=True)]

    def _turns(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        if self._form == "question-answer":
            messages = _question_and_answer(row)
        else:
            column = conversation_column(self._source, row)
            messages = _checked_messages(row[column], column, row.get("system"))
        return self._counted(messages, len(messages) - 1, _tools(row.get("tools")))

    def _completion(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        prompt = row["prompt"]
        completion = row["completion"]
        if prompt is None or completion is None:
            raise UnusableRowError(_NULL)
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise UnusableRowError(_EMPTY)
            return self._text_completion(prompt, completion)
        if isinstance(prompt, str) or isinstance(completion, str):
            raise SlipstreamError("prompt and completion must both be texts or both lists of messages")
        first = _checked_messages(prompt, "prompt")
        last = _checked_messages(completion, "completion")
        return self._counted([*first, *last], len(first), _tools(row.get("tools")))

    def _counted(self, messages: list[dict[str, Any]], num_prompt: int, tools: Any) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a conversation, and which count; a completion comes after `num_prompt` messages."""
        template = self._template = self._template or ChatTemplate(self._tokenizer)
        roles = dict.fromkeys(str(message.get("role")) for message in messages)
        if self._loss != "all" and (renamed := _roles_to_rename(roles)):
            raise SlipstreamError(
                f"the roles are {', '.join(roles)}, and the turns that count are those of the role assistant; rename "
                + ", ".join(f"{role} to {meant}" for role, meant in renamed.items())
            )
        if self._loss == "assistant" and "assistant" not in roles:
            raise UnusableRowError(f"in which no turn is the assistant's (the roles are {', '.join(roles)})")
        if self._loss == "assistant":
            return template.assistant_turns(messages, tools)
        tokens = template.tokens(messages, tools)
        if self._loss == "all":
            return tokens, [True] * len(tokens)
        speaks = messages[num_prompt].get("role") == "assistant"
        begin = len(template.prefix(tokens, messages[:num_prompt], tools, prompt=speaks))
        return tokens, [False] * begin + [True] * (len(tokens) - begin)

    def _text_completion(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        """Returns the prompt's tokens, as a generation would begin with them, and those of the completion. Where all
        count, which are learnt as one text, they are tokenised as one."""
        if self._loss == "assistant":
            raise SlipstreamError("data.loss=assistant needs messages, but prompt and completion are texts")
        begin = self._ids(prompt)
        whole = self._ids(prompt + completion)
        if whole[: len(begin)] != begin and self._loss != "all":
            # A token would be half of the prompt and half of the completion, which a generation never begins with.
            whole = begin + self._tokenizer(completion, add_special_tokens=False)["input_ids"]
            self.seam = self.seam or f"{prompt[-_OF_SEAM:]!r} and {completion[:_OF_SEAM]!r}"
        end = self._tokenizer.eos_token_id
        tokens = whole if end is None or whole[-1] == end else [*whole, end]
        num_prompt = 0 if self._loss == "all" else len(begin)
        return tokens, [place >= num_prompt for place in range(len(tokens))]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, verbose=False)["input_ids"]
        return ids[:-1] if self._adds_end else ids


def _answers(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the chosen and the rejected answer as completions of the prompt; without a prompt, the first messages
    that both have are it. Raises UnusableRowError and SlipstreamError as `read` does."""
    prompt = row.get("prompt")
    chosen = row["chosen"]
    rejected = row["rejected"]
    if chosen is None or rejected is None:
        raise UnusableRowError(_NULL)
    columns = [column for column in (prompt, chosen, rejected) if column is not None]
    if not any(all(isinstance(column, kind) for column in columns) for kind in (str, list)):
        hint = "; where chosen and rejected begin with the prompt, leave that column out" if prompt is not None else ""
        raise SlipstreamError(f"prompt, chosen and rejected must all be texts, or all be lists of messages{hint}")
    if "prompt" not in row:
        if isinstance(chosen, str):
            raise SlipstreamError("chosen and rejected are texts, which need the column prompt: what both answer")
        shared = len([*takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))])
        prompt = chosen[:shared]
        chosen = chosen[shared:]
        rejected = rejected[shared:]
    if chosen == rejected:
        raise UnusableRowError(_EQUAL)
    return [{"prompt": prompt, "completion": answer, "tools": row.get("tools")} for answer in (chosen, rejected)]


def _ratings(row: Mapping[str, Any]) -> list[bool]:
    """Returns whether each answer of a row is wanted: of a pair the chosen one. Raises UnusableRowError and
    SlipstreamError as `read` does."""
    if "chosen" in row:
        return [True, False]
    label = row["label"]
    if label is None:
        raise UnusableRowError(_NULL)
    if label not in (True, False, "true", "false", "True", "False"):
        raise SlipstreamError(f"label must say whether the completion is wanted, true or false, and is {label!r}")
    return [label in (True, "true", "True")]


class _RatedWriter:
    """Writes rated answers, each followed by its prompt with the answer to another prompt."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len
        self._answers = DocumentWriter()
        self._numbers = dict[bytes, int]()  # the numbers of prompts, by the digest of their tokens
        self._prompts = array("q")  # the number of each answer's prompt
        self._ratings: list[bool] = []

    def add(self, sample: Sample, is_wanted: bool) -> None:
        """Adds an answer with its prompt."""
        tokens, labels = (np.asarray(column, dtype=np.int32) for column in sample)
        self._answers.add(tokens, labels)
        prompt = blake2b(tokens[: _first_counted(labels)].tobytes(), digest_size=16).digest()
        self._prompts.append(self._numbers.setdefault(prompt, len(self._numbers)))
        self._ratings.append(is_wanted)

    def finish(self) -> TokenisedText:
        """Returns the text, to which no more can be added. Raises SlipstreamError where all answer one prompt."""
        answers = self._answers.finish(has_labels=True)
        writer = DocumentWriter()
        others: list[int] = _other_prompts(np.array(self._prompts)).tolist() if self._ratings else []
        for number, other in enumerate(others):
            labels = answers.labels_of(number)
            others_labels = answers.labels_of(other)
            begin = _first_counted(labels)
            others_begin = _first_counted(others_labels)
            tokens = answers.document(number)
            others_tokens = answers.document(other)
            writer.add(tokens, labels)
            mismatched = [
                np.concatenate([tokens[:begin], others_tokens[others_begin:]]),
                np.concatenate([labels[:begin], others_labels[others_begin:]]),
            ]
            writer.add(*(column[: self._seq_len] for column in mismatched))
        text = writer.finish(has_labels=True, group_size=2)
        return replace(text, ratings=np.array(self._ratings, dtype=bool))


def _other_prompts(prompts: Array) -> Array:
    """Returns for each answer the number of an answer to another prompt, by the `prompts` of all, numbers from 0.

    Where no prompt has more than half of the answers, each answer is taken once, so that what is estimated from them is
    of the same answers. Where every prompt has one answer, it is the one before. Raises SlipstreamError where there is
    but one prompt.

        prompts       0 0 0 1 1 2      in the order of prompts, that with the most answers first
        those taken   1 1 2 0 0 0      the same, turned by the number of its answers
    """
    sizes = np.bincount(prompts)
    if len(sizes) == 1:
        raise SlipstreamError(
            f"all of its {plural(len(prompts), 'answer')} are to one prompt, and preference.loss=kto compares with "
            "answers to other prompts; add rows with other prompts, or give pairs of answers with "
            "--preference.loss=dpo"
        )
    most = int(sizes.argmax())
    order = np.argsort((prompts - most) % len(sizes), kind="stable")
    count = sizes[most]
    rest = len(prompts) - count
    taken = np.concatenate([order[count + np.arange(-count, 0) % rest], order[:rest]])
    others: Array = np.empty_like(taken)
    others[order] = taken
    return others


def _first_counted(labels: Array) -> int:
    return int(np.argmax(labels != IGNORED))


def _tools(given: Any) -> Any:
    """Returns the tools of a row, also where they are JSON text. Raises SlipstreamError for other text."""
    if not isinstance(given, str) or not given:
        return given or None
    try:
        return parse_json(given)
    except ValueError as error:
        raise SlipstreamError(f"tools must be a list of tools, or JSON text of one, and this isn't: {error}") from error


def conversation_column(source: SourceSection, columns: Container[str]) -> str:
    """Returns the column with the conversations: where the usual one isn't there, the one that ShareGPT has."""
    usual = type(source).model_fields["messages_column"].default
    is_sharegpt = source.messages_column == usual and usual not in columns and _SHAREGPT in columns
    return _SHAREGPT if is_sharegpt else source.messages_column


def question_columns(columns: Container[str]) -> tuple[str, str]:
    """Returns the columns with the question and the answer; Alpaca's, where there are none."""
    return next((both for both in _QUESTIONS if both[0] in columns and both[1] in columns), _QUESTIONS[0])


_SHAREGPT = "conversations"
# Who speaks, as ShareGPT and its kin say it.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"}
_ROLES |= {"observation": "tool", "function_response": "tool"}
_ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}


def _roles_to_rename(roles: Iterable[str]) -> dict[str, str]:
    """Returns the roles that are an assistant's or a user's by other names, as they should be called, where one of them
    is the assistant's, whose turns wouldn't count."""
    meant = {role: _ROLES[role.lower()] for role in roles if role not in _ROLES.values() and role.lower() in _ROLES}
    return meant if "assistant" in meant.values() else {}


_QUESTIONS = (
    ("instruction", "output"),  # Alpaca
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("prompt", "response"),
)
# The text that a question is about, where a row has it.
QUESTION_CONTEXTS = ("input", "context")


def _question_and_answer(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the turns of a row with a question and an answer, after those of its `system` and `history`, if any.

    Raises UnusableRowError and SlipstreamError as `read` does.
    """
    columns = question_columns(row)
    question, answer = (row[name] for name in columns)
    if question is None or answer is None:
        raise UnusableRowError(_NULL)
    contexts = [row[name] for name in QUESTION_CONTEXTS if row.get(name) is not None]
    if not all(isinstance(value, str) for value in (question, answer, *contexts)):
        raise SlipstreamError(f"{' and '.join(columns)} must be texts, and so must {' and '.join(QUESTION_CONTEXTS)}")
    if not answer.strip():
        raise UnusableRowError(_EMPTY)
    asked = "\n\n".join(value for value in (question, *contexts) if value.strip())
    before = row.get("history") or []
    if not isinstance(before, list) or any(not isinstance(turn, list) or len(turn) != 2 for turn in before):
        raise SlipstreamError("history must be a list of pairs: a question and its answer")
    if not all(isinstance(text, str) for turn in before for text in turn):
        raise SlipstreamError("history must be pairs of texts: a question and its answer")
    turns = [text for both in (*before, (asked, answer)) for text in both]
    speakers = ("user", "assistant") * (len(before) + 1)
    messages = [{"role": who, "content": text} for who, text in zip(speakers, turns, strict=True)]
    return _after_system(messages, row.get("system"))


def _after_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Returns messages after the text of a row's column `system`, unless they begin with such a message."""
    if not isinstance(system, str) or not system.strip() or messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _checked_messages(messages: Any, column: str, system: Any = None) -> list[dict[str, Any]]:
    """Returns messages without their empty fields, and ShareGPT's as any other, after the text of its column `system`.

    Raises UnusableRowError and SlipstreamError as `read` does.
    """
    if messages is None:
        raise UnusableRowError(_NULL)
    if len(messages) == 0:
        raise UnusableRowError(_EMPTY)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise SlipstreamError(f"{column} must be a list of messages like {{role: user, content: ...}}")
    kept_messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
    is_sharegpt = "from" in kept_messages[0] and "role" not in kept_messages[0]
    if is_sharegpt:
        kept_messages = [_with_role(message, column) for message in kept_messages]
    for message in kept_messages:
        if "role" not in message:
            raise SlipstreamError(
                f"each message in {column} needs a role and a content, or from and value, but one has "
                f"{', '.join(message) or 'nothing'}"
            )
        if len(message) == 1:
            raise UnusableRowError(_NULL)
    for turn, message in enumerate(kept_messages, start=1):
        if "content" in message:
            message["content"] = _text_of(message["content"], f"turn {turn} of {column}")
    return _after_system(kept_messages, system) if is_sharegpt else kept_messages


def _text_of(content: Any, where: str) -> str:
    """Returns the content of a message as a text, also one in parts: [{type: text, text: ...}, ...].

    Raises SlipstreamError for other contents, as a template would write them as Python does.
    """
    if isinstance(content, str):
        return content
    what = f"a content of type {type(content).__name__}"
    if isinstance(content, list):
        others = [part for part in content if not (_kind_of(part) == "text" and isinstance(part["text"], str))]
        if not others:
            return "".join(part["text"] for part in content)
        what = f"a part that isn't text: {_kind_of(others[0])}"
    raise SlipstreamError(
        f"{where} has {what}; give a text, or parts of it as [{{type: text, text: ...}}], and leave out rows with "
        "anything else"
    )


def _kind_of(part: Any) -> str:
    """Returns the type that a part of a content names, or else that of Python."""
    named = part.get("type") if isinstance(part, dict) else None
    if named == "text" and "text" not in part:
        return "text without a text"
    return type(part).__name__ if named is None else str(named)


def _with_role(message: dict[str, Any], column: str) -> dict[str, Any]:
    """Returns a message of ShareGPT with a role and a content. Raises SlipstreamError where nobody knows who speaks."""
    names = {"from": "role", "value": "content"}
    renamed = {names.get(name, name): value for name, value in message.items()}
    if "role" not in renamed:
        return renamed
    if renamed["role"] not in _ROLES:
        raise SlipstreamError(
            f"a message in {column} is from {renamed['role']!r}, which is none of {', '.join(_ROLES)}; rename it, and "
            "give calls of tools as messages with role and tool_calls"
        )
    return renamed | {"role": _ROLES[renamed["role"]]}


def _given_tokens(row: Mapping[str, Any]) -> Sample:
    for column in _OF_PACKED_ROWS:
        if row.get(column) is not None:
            raise SlipstreamError(
                f"the rows have the column {column}, which isn't read: a row is one document, whose positions count "
                "from 0. Give each document as a row, without that column; with data.packing=fixed they are packed"
            )
    tokens = row["input_ids"]
    labels = row.get("labels", tokens)
    if tokens is None or labels is None:
        raise UnusableRowError(_NULL)
    if len(tokens) == 0:
        raise UnusableRowError(_EMPTY)
    if len(labels) != len(tokens):
        raise SlipstreamError(f"labels has {len(labels)} tokens, but input_ids {len(tokens)}; give the same number")
    if any(not isinstance(token, int) or token < 0 for token in tokens):
        raise SlipstreamError("input_ids must be lists of token ids, whole numbers from 0")
    if any(not isinstance(label, int) or (label < 0 and label != IGNORED) for label in labels):
        raise SlipstreamError(f"labels must be lists of token ids, or {IGNORED} where a token doesn't count")
    for column in COUNTING_MASKS:
        if (mask := _mask_of(row, column)) is not None:
            labels = [label if counts else IGNORED for label, counts in zip(labels, mask, strict=True)]
    attended = _mask_of(row, "attention_mask")
    if attended is None:
        return tokens, labels
    if not any(attended):
        raise UnusableRowError(_EMPTY)
    begin = attended.index(1)
    end = len(attended) - attended[::-1].index(1)
    if not all(attended[begin:end]):
        raise SlipstreamError(
            f"attention_mask is 0 at token {attended.index(0, begin) + 1}, between tokens where it is 1; it may only "
            "say where padding is, before or after a row's tokens. For tokens that don't count give labels or "
            "loss_mask"
        )
    return tokens[begin:end], labels[begin:end]


def _check_ids(tokens: list[int], labels: list[int], vocab_size: int) -> None:
    """Raises SlipstreamError for the first token or label that the model's vocabulary doesn't have."""
    for column, ids in (("input_ids", tokens), ("labels", labels)):
        for place, token in enumerate(ids, start=1):
            if token >= vocab_size:
                raise SlipstreamError(
                    f"number {place} of {column} is the token {token}, and the model's vocabulary has {vocab_size} (0 "
                    f"to {vocab_size - 1}); give tokens of the model's own tokenizer"
                )


COUNTING_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""The columns beside `input_ids` that are 0 where a token doesn't count."""
_OF_PACKED_ROWS = ("position_ids", "seq_lengths")


def _mask_of(row: Mapping[str, Any], column: str) -> list[Any] | None:
    """Returns a mask of the tokens of a row; None where it has none. Raises SlipstreamError where it isn't one."""
    mask = row.get(column)
    tokens = row["input_ids"]
    if mask is None:
        return None
    if len(mask) != len(tokens):
        raise SlipstreamError(f"{column} has {len(mask)} values, but input_ids {len(tokens)}; give the same number")
    if others := [value for value in mask if value not in (0, 1)]:
        raise SlipstreamError(f"{column} must be lists of 0 and 1, and has {others[0]!r}")
    return [*mask]


def tokenise_samples(
    rows: Iterable[Mapping[str, Any]],
    reader: SampleReader,
    name: str,
    seq_len: int,
    say: Callable[[str], None],
    show: Callable[[float], None] = lambda _done: None,
) -> TokenisedText:
    """Returns the documents of all rows, as `read_samples` does. `say` gets a line about rows left out or cut.

    Raises:
        SlipstreamError: with the number of the row, where one hasn't the form of the others, or none is left.
    """
    text, report = read_samples(rows, reader, name, seq_len, show)
    if not text.num_documents:
        what = "pair" if reader.are_pairs else "sample"
        raise SlipstreamError(f"{name} holds no {what} to train on{': ' + report if report else ''}")
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
    """Returns the documents of rows, cut after `seq_len` tokens, and a report on rows left out or cut, if any. `show`
    gets the number of rows that are done.

    Raises:
        SlipstreamError: with the number of the row, where one hasn't the form of the others.
    """
    writer = DocumentWriter()
    left_out = dict[str, list[int]]()
    num_cut = 0
    seam = reader.seam
    rated = _RatedWriter(seq_len)
    row_number = 0
    for row_number, row in enumerate(rows, start=1):
        try:
            documents, is_cut = reader.read(row, seq_len)
            ratings = _ratings(row) if reader.are_rated else []
        except UnusableRowError as reason:
            left_out.setdefault(str(reason), []).append(row_number)
        except SlipstreamError as error:
            raise SlipstreamError(f"{name}, row {row_number}: {error}") from error
        else:
            num_cut += is_cut
            for document, is_wanted in zip(documents, ratings, strict=True) if ratings else ():
                rated.add(document, is_wanted)
            for document in documents if not ratings else ():
                writer.add(*(np.asarray(column, dtype=np.int32) for column in document))
        show(row_number)
    reports = [*_report(left_out, num_cut, row_number, reader.are_pairs, seq_len)]
    # A stream's reader says it of its first block that has one.
    if seam is None and reader.seam is not None:
        reports.append(
            f"the end of a prompt and the beginning of its completion, such as {reader.seam}, would share a token: "
            "they are tokenised apart, as a generation begins after the prompt's own tokens. Let prompts end where a "
            "token does, as before a blank, so that both are written as in other texts"
        )
    report = "; ".join(reports)
    if reader.are_rated:
        try:
            return rated.finish(), report
        except SlipstreamError as error:
            raise SlipstreamError(f"{name}: {error}") from error
    return writer.finish(has_labels=True, group_size=2 if reader.are_pairs else 1), report


def _report(
    left_out: Mapping[str, list[int]], num_cut: int, total: int, are_pairs: bool, seq_len: int
) -> Iterator[str]:
    """Yields how many rows were left out and why, and how many were cut."""
    noun = "pairs" if are_pairs else "samples"
    if left_out:
        reasons = (f"{len(rows):,} {why}{f' (first: row {rows[0]})' * are_pairs}" for why, rows in left_out.items())
        seen = f" (of the first {seq_len:,})" if _NOTHING in left_out else ""
        yield f"left out {sum(map(len, left_out.values())):,} of {total:,} {noun}: {', '.join(reasons)}{seen}"
    if num_cut:
        what = "an answer that ends after" if are_pairs else "more than"
        yield (
            f"{num_cut:,} of {total:,} {noun} have {what} training.seq_len={seq_len} tokens: what comes after them is "
            "left out"
        )


_MOST = 240  # tokens shown of a run that counts, or doesn't


def show_example(text: TokenisedText, tokenizer: Any, progress: Progress) -> None:
    """Prints the first sample of a text with labels; without colours, counted tokens stand between two brackets."""
    from rich.text import Text

    console = progress.console
    if console is None:
        return
    has_colours = console.color_system is not None and not console.no_color
    tokens = text.document(0).tolist()
    labels = text.labels_of(0).tolist()
    # A label is predicted from the tokens before it, so the first one never is.
    counts = [place > 0 and label != IGNORED for place, label in enumerate(labels)]
    shown = Text()
    for is_counted, run in groupby(zip(counts, tokens, strict=True), key=lambda pair: pair[0]):
        words = _decoded([token for _, token in run], tokenizer)
        if is_counted and not has_colours:
            words = f"[[{words}]]"
        shown.append(words, style="bold green" if is_counted and has_colours else "")
    how = "in green" if has_colours else "between [[ and ]]"
    progress.say(f"the first sample, as the model sees it; {sum(counts)} of its {len(tokens)} tokens count, {how}:")
    progress.say(shown)


def _decoded(tokens: list[int], tokenizer: Any) -> str:
    if len(tokens) <= _MOST:
        return str(tokenizer.decode(tokens))
    half = _MOST // 2
    left_out = f" [{len(tokens) - _MOST} tokens more] "
    return str(tokenizer.decode(tokens[:half])) + left_out + str(tokenizer.decode(tokens[-half:]))
