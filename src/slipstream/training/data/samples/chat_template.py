"""Turns conversations into tokens with the tokenizer's chat template, and finds the assistant's turns in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED
from slipstream.training.data.tokenised_text import TokenisedText

Messages = Sequence[Mapping[str, Any]]
LOOKED_AT = 100  # conversations
# Or what is left of one whose beginning is in the header.
_NO_THOUGHTS = re.compile(r"(^|<think>)\s*</think>")
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The chat template of a tokenizer, or the one of a file, which becomes the tokenizer's."""

    def __init__(self, tokenizer: Any, file: Path | None = None) -> None:
        """Raises SlipstreamError where there is none, or the file can't be read."""
        self._tokenizer = tokenizer
        if file is not None:
            try:
                tokenizer.chat_template = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise SlipstreamError(f"can't read data.chat_template={file}: {error}") from error
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if template is None:
            raise SlipstreamError(
                "the tokenizer has no chat template, by which messages become text; give the file of one with "
                "--data.chat_template=chat.jinja, or name an instruct model's with --data.tokenizer=..."
            )
        self._marks_turns = _MARKS_TURNS.search(template) is not None

    def tokens(self, messages: Messages, tools: Any = None, prompt: bool = False) -> list[int]:
        """Returns the tokens of a conversation; of a `prompt`, with those that begin the assistant's next turn.

        Raises:
            SlipstreamError: with what the template says, where it refuses the conversation.
        """
        return [*self._apply(messages, tools, add_generation_prompt=prompt)["input_ids"]]

    def assistant_turns(self, messages: Messages, tools: Any = None) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a conversation, and of each whether it is in an assistant's turn.

        The template says which are where it has `{% generation %}`. Else a turn begins where the conversation before
        it ends, with what asks the assistant to speak, and ends where the conversation with it ends.

        Raises:
            SlipstreamError: where a conversation doesn't begin with the tokens of its first turns.
        """
        if self._marks_turns:
            found = self._apply(messages, tools, return_assistant_tokens_mask=True)
            return found["input_ids"], [bool(each) for each in found["assistant_masks"]]
        tokens = self.tokens(messages, tools)
        counts = [False] * len(tokens)
        for place, message in enumerate(messages):
            if message.get("role") == "assistant":
                begin = len(self.prefix(tokens, messages[:place], tools, prompt=True))
                end = len(self.prefix(tokens, messages[: place + 1], tools))
                counts[begin:end] = [True] * (end - begin)
        return tokens, counts

    def prefix(self, tokens: Sequence[int], messages: Messages, tools: Any = None, prompt: bool = False) -> list[int]:
        """Returns the tokens of the first messages. Raises SlipstreamError where `tokens`, of all, don't begin so."""
        if not messages and not prompt:
            return []
        found = self.tokens(messages, tools, prompt)
        if list(tokens[: len(found)]) != found:
            written = [self._tokenizer.decode(each) for each in (tokens, found)]
            raise SlipstreamError(
                f"in the whole conversation, its first {len(messages)} messages{' and a header' if prompt else ''} "
                + ("have other tokens" if written[0].startswith(written[1]) else "are written differently")
                + " than by themselves, so that the assistant's turns can't be found. Give a template that marks them "
                "by {% generation %} and {% endgeneration %}, or whose headers end with a line break or a special "
                "token, with --data.chat_template=chat.jinja; or let every token count with --data.loss=all"
            )
        return found

    def _apply(self, messages: Messages, tools: Any, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template([*messages], tools=tools or None, return_dict=True, **options)
        except (TemplateError, TypeError, ValueError) as error:
            raise SlipstreamError(f"the chat template can't write this conversation: {error}") from error


def find_turn_problems(texts: Sequence[TokenisedText], tokenizer: Any, seq_len: int) -> list[str]:
    """Returns what is probably wrong with what counts in the first conversations of texts, which were cut after
    `seq_len` tokens: turns without an end, and empty thoughts. Each is said of the first text that has it."""
    found = [_problems(text, tokenizer, seq_len) for text in texts]
    return [said for kind in ("end", "thoughts") if (said := next((each[kind] for each in found if kind in each), ""))]


def _problems(text: TokenisedText, tokenizer: Any, seq_len: int) -> dict[str, str]:
    marks = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    number = min(LOOKED_AT, text.num_documents)
    ends, num_thoughtless, last = [], 0, ""
    for document in range(number):
        turns = [*_counted_turns(text, document)]
        ends += [_is_ended(tokens, tokenizer, marks) for tokens, end in turns if end < seq_len]
        written = [str(tokenizer.decode(tokens)) for tokens, _ in turns]
        num_thoughtless += any(_NO_THOUGHTS.search(each) for each in written)
        last = written[-1] if written else last
    problems = {}
    if ends and not any(ends):
        end = tokenizer.eos_token
        problems["end"] = (
            f"no turn that counts ends with a special or added token in the first {number:,} conversations (the last "
            f"ends with {last[-20:]!r}), so the model doesn't learn to stop. Let the chat template close the "
            "assistant's turns with {{ eos_token }}"
            + (f" ({end})" if end else ", of a tokenizer that has one (data.tokenizer)")
            + ", before {% endgeneration %} where it has that, and give its file with --data.chat_template=chat.jinja"
        )
    if num_thoughtless:
        problems["thoughts"] = (
            f"an empty <think> block counts in {num_thoughtless:,} of the first {number:,} conversations, so the model "
            "learns to answer without thinking. If it shouldn't, leave the block out of the chat template, or let "
            "{% generation %} begin after it, and give its file with --data.chat_template=chat.jinja"
        )
    return problems


def _counted_turns(text: TokenisedText, document: int) -> Iterator[tuple[list[int], int]]:
    """Yields the tokens of each turn that counts, and where it ends in the document."""
    tokens = text.document(document).tolist()
    counts = np.concatenate([[False], text.labels_of(document) != IGNORED, [False]])
    places = np.flatnonzero(np.diff(counts)).tolist()
    for begin, end in zip(places[::2], places[1::2], strict=True):
        yield tokens[begin:end], end


def _is_ended(tokens: Sequence[int], tokenizer: Any, marks: set[int]) -> bool:
    """Returns whether a turn ends with one of the tokens `marks`; white space, such as a line break, may follow."""
    for token in reversed(tokens):
        if str(tokenizer.decode([token])).strip():
            return token in marks
    return False
