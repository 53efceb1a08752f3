"""Chat templates, by which conversations become tokens: which of these are the assistant's, and whether it ends."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slipstream.errors import SlipstreamError, did_you_mean, path_hint
from slipstream.model import IGNORED
from slipstream.train.config import DataSection
from slipstream.train.data.tokenised_text import TokenisedText

Messages = Sequence[Mapping[str, Any]]
LOOKED_AT = 100  # conversations


class NamedTemplate(NamedTuple):
    """A chat template that goes by a name."""

    text: str
    tokens: tuple[str, ...] = ()  # special tokens of the template
    end: str | None = None  # end of a turn; None: the tokenizer's end of text


_NO_TOOLS = (
    "{% if tools %}{{ raise_exception('this template has no tools') }}{% endif %}{% for message in messages %}"
    "{% if message.tool_calls is defined %}{{ raise_exception('this template has no tool calls') }}{% endif %}"
)
_BEGIN = "{% if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}"
_SPOKEN = "{{ message.content | trim }}"
_ASKED = "{% endfor %}{% if add_generation_prompt %}"

NAMED_TEMPLATES: Mapping[str, NamedTemplate] = {
    "chatml": NamedTemplate(
        f"{_NO_TOOLS}<|im_start|>{{{{ message.role }}}}\n{{{{ message.content }}}}<|im_end|>\n"
        f"{_ASKED}<|im_start|>assistant\n{{% endif %}}",
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "gemma": NamedTemplate(
        f"{_BEGIN}{_NO_TOOLS}"
        "{% if message.role == 'system' %}{{ raise_exception('this template has no system messages') }}{% endif %}"
        "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
        f"{_SPOKEN}<end_of_turn>\n{_ASKED}<start_of_turn>model\n{{% endif %}}",
        ("<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "llama3": NamedTemplate(
        f"{_BEGIN}{_NO_TOOLS}<|start_header_id|>{{{{ message.role }}}}<|end_header_id|>\n\n{_SPOKEN}<|eot_id|>"
        f"{_ASKED}<|start_header_id|>assistant<|end_header_id|>\n\n{{% endif %}}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
    ),
    "zephyr": NamedTemplate(
        f"{_NO_TOOLS}<|{{{{ message.role }}}}|>\n{{{{ message.content }}}}{{{{ eos_token }}}}\n"
        f"{_ASKED}<|assistant|>\n{{% endif %}}"
    ),
}
"""The templates that `data.chat_template` takes by name."""


def special_tokens(section: DataSection) -> list[str]:
    """Returns the tokens that a tokenizer must have: those of the settings, and of a template that goes by a name."""
    named = NAMED_TEMPLATES.get(str(section.chat_template))
    return [*dict.fromkeys([*section.special_tokens, *(named.tokens if named else ())])]


def with_special_tokens(tokenizer: Any, section: DataSection) -> Any:
    """Returns a tokenizer, which it changes, with the special tokens of the settings and their end of text.

    Raises SlipstreamError where that isn't one of its tokens.
    """
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in special_tokens(section) if token not in known], special_tokens=True)
    named = NAMED_TEMPLATES.get(str(section.chat_template))
    end = section.end_of_text or (named.end if named else None)
    if end is not None:
        if end not in tokenizer.get_vocab():
            raise SlipstreamError(
                f"data.end_of_text={end} isn't a token of the tokenizer, so a model couldn't write it as one; give "
                f"one that is, or add it with --data.special_tokens=['{end}']"
            )
        tokenizer.eos_token = end
    return tokenizer


# Or the rest of one whose beginning is in the header.
_NO_THOUGHTS = re.compile(r"(^|<think>)\s*</think>")
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")


_OPTION = "--data.chat_template"


def check_template(given: Path | str | None, option: str = _OPTION) -> None:
    """Raises SlipstreamError where a template, given by an option, is neither a name nor a file."""
    if given is None or str(given) in NAMED_TEMPLATES or Path(given).is_file():
        return
    named = did_you_mean(str(given), NAMED_TEMPLATES).removeprefix("; ")
    near = path_hint(given) if named == "." else f" ({named})"
    raise SlipstreamError(
        f"{option.removeprefix('--')}={given} is neither a file here nor one of {', '.join(NAMED_TEMPLATES)}{near}; "
        f"leave it out for the tokenizer's own, or give the file of a template, such as {option}=chat.jinja"
    )


class ChatTemplate:
    """The chat template of a tokenizer, or one of a file or a name, which becomes the tokenizer's."""

    def __init__(self, tokenizer: Any, given: Path | str | None = None, option: str = _OPTION) -> None:
        """`given`, as the value of `option`, is a file or a name. Raises SlipstreamError where there is none, or the
        file can't be read."""
        check_template(given, option)
        self._tokenizer = tokenizer
        if (named := NAMED_TEMPLATES.get(str(given))) is not None:
            tokenizer.chat_template = named.text
        elif given is not None:
            try:
                tokenizer.chat_template = Path(given).read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                names = ", ".join(NAMED_TEMPLATES)
                raise SlipstreamError(
                    f"can't read {option}={given}: {error}; give a file, or one of {names}"
                ) from error
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if template is None:
            others = ", ".join(name for name in NAMED_TEMPLATES if name != "chatml")
            raise SlipstreamError(
                "the tokenizer has no chat template, which turns messages into text; name one with "
                f"{option}=chatml (or {others}), or give the file of one with {option}=chat.jinja"
                + (", or name an instruct model's with --data.tokenizer=..." if option.startswith("--data.") else "")
            )
        self._marks_turns = _MARKS_TURNS.search(template) is not None

    def tokens(self, messages: Messages, tools: Any = None, prompt: bool = False) -> list[int]:
        """Returns the tokens of a conversation; of a `prompt`, with those that begin the assistant's next turn.

        Raises:
            SlipstreamError: with the template's message, where it refuses the conversation.
        """
        return [*self._apply(messages, tools, add_generation_prompt=prompt)["input_ids"]]

    def assistant_turns(self, messages: Messages, tools: Any = None) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a conversation, and of each whether it is in an assistant's turn.

        The template says which are where it has `{% generation %}`. Else a turn begins where the conversation before it
        ends, with the prompt for the assistant, and ends where the conversation with it ends.

        Raises:
            SlipstreamError: where a conversation doesn't begin with the tokens of its first turns.
        """
        if self._marks_turns:
            encoded = self._apply(messages, tools, return_assistant_tokens_mask=True)
            return encoded["input_ids"], [bool(is_counted) for is_counted in encoded["assistant_masks"]]
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
        if not messages:
            raise SlipstreamError(
                "the conversation begins with the turn that counts, and a template writes no header of a turn that "
                "answers nothing; begin with a turn of the user or a system message, leave such rows out, or let every "
                "token count with --data.loss=all"
            )
        beginning = self.tokens(messages, tools, prompt)
        if list(tokens[: len(beginning)]) != beginning:
            written = [self._tokenizer.decode(part) for part in (tokens, beginning)]
            raise SlipstreamError(
                f"in the whole conversation, its first {len(messages)} messages{' and a header' if prompt else ''} "
                + ("have other tokens" if written[0].startswith(written[1]) else "are written differently")
                + " than by themselves, so that the assistant's turns can't be found. Give a template that marks them "
                "by {% generation %} and {% endgeneration %}, or whose headers end with a line break or a special "
                "token, with --data.chat_template=chat.jinja; or let every token count with --data.loss=all"
            )
        return beginning

    def _apply(self, messages: Messages, tools: Any, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template([*messages], tools=tools or None, return_dict=True, **options)
        except (TemplateError, TypeError, ValueError) as error:
            raise SlipstreamError(f"the chat template can't write this conversation: {error}") from error


def find_turn_problems(
    texts: Sequence[TokenisedText], tokenizer: Any, seq_len: int, stops: Collection[int]
) -> list[str]:
    """Returns the probable problems of the counted turns in the first conversations of texts, which were cut after
    `seq_len` tokens: turns without an end, or with one that isn't among the tokens at which the model `stops`, and
    empty thoughts. Each is said of the first text that has it."""
    problems = [_problems(text, tokenizer, seq_len, stops) for text in texts]
    kinds = ("end", "stop", "thoughts")
    return [said for kind in kinds if (said := next((of_text[kind] for of_text in problems if kind in of_text), ""))]


def _problems(text: TokenisedText, tokenizer: Any, seq_len: int, stops: Collection[int]) -> dict[str, str]:
    marks = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    count = min(LOOKED_AT, text.num_documents)
    ends = list[int | None]()
    num_thoughtless = 0
    last = ""
    for document in range(count):
        turns = [*_counted_turns(text, document)]
        ends += [_end_of(tokens, tokenizer, marks) for tokens, end in turns if end < seq_len]
        written = [str(tokenizer.decode(tokens)) for tokens, _ in turns]
        num_thoughtless += any(_NO_THOUGHTS.search(document_text) for document_text in written)
        last = written[-1] if written else last
    problems = {}
    end_tokens = [end for end in ends if end is not None]
    if end_tokens and not {*end_tokens} & {*stops}:
        end = tokenizer.decode(end_tokens[-1:])
        problems["stop"] = (
            f"the turns that count end with {end}, but the tokenizer's end of text is {tokenizer.eos_token}, so the "
            f"exported model writes {end} and goes on. Give --data.end_of_text='{end}'; or let the chat template close "
            "the assistant's turns with {{ eos_token }}"
        )
    if ends and not end_tokens:
        end = tokenizer.eos_token
        problems["end"] = (
            f"no turn that counts ends with a special or added token in the first {count:,} conversations (the last "
            f"ends with {last[-20:]!r}), so the model doesn't learn to stop. Let the chat template close the "
            "assistant's turns with {{ eos_token }}"
            + (f" ({end})" if end else ", of a tokenizer that has one (data.tokenizer)")
            + ", before {% endgeneration %} where it has that, and give its file with --data.chat_template=chat.jinja"
        )
    if num_thoughtless:
        problems["thoughts"] = (
            f"an empty <think> block counts in {num_thoughtless:,} of the first {count:,} conversations, so the model "
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


def _end_of(tokens: Sequence[int], tokenizer: Any, marks: set[int]) -> int | None:
    """Returns the token of `marks` with which a turn ends, if it does; white space may follow, as a line break."""
    for token in reversed(tokens):
        if str(tokenizer.decode([token])).strip():
            return token if token in marks else None
    return None
