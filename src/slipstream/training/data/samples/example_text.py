"""Shows a sample as the model sees it, with the tokens that count in colour."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from slipstream.launch import Progress
from slipstream.model import IGNORED
from slipstream.training.data.tokenised_text import TokenisedText

_MOST = 240  # tokens in a row that count, or don't, of which all are shown


def show_example(text: TokenisedText, tokenizer: Any, progress: Progress) -> None:
    """Prints the first sample of a text with labels; without colours, what counts stands between two brackets."""
    from rich.text import Text

    console = progress.console
    if console is None:
        return
    has_colours = console.color_system is not None and not console.no_color
    tokens, labels = text.document(0).tolist(), text.labels_of(0).tolist()
    # A label is predicted from the tokens before it, so the first one never is.
    counts = [place > 0 and label != IGNORED for place, label in enumerate(labels)]
    shown = Text()
    for is_counted, run in groupby(zip(counts, tokens, strict=True), key=lambda each: each[0]):
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
