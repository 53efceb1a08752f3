"""The forms that the rows of a data set may have, and which of their tokens can count."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import SlipstreamError
from slipstream.training.config import SourceSection

# Which tokens of a form can count; the first is the default.
_LOSSES = {
    "text": ("all",),
    "messages": ("assistant", "completion", "all"),
    "prompt-completion": ("completion", "assistant", "all"),
    "tokens": ("all",),
}

# The forms that may be conversations.
WITH_ANSWERS = ("messages", "prompt-completion")

_SHAREGPT = "conversations"


def columns_of(source: SourceSection) -> dict[str, tuple[str, ...]]:
    """Returns the columns that each form needs."""
    return {
        "messages": (source.messages_column,),
        "prompt-completion": ("prompt", "completion"),
        "tokens": ("input_ids",),
        "text": (source.text_column,),
    }


def find_form(source: SourceSection, columns: Sequence[str]) -> str:
    """Returns the form of a data set with these columns, as it is named or as the columns say.

    Raises:
        SlipstreamError: where they fit no form, or several.
    """
    wanted = columns_of(source)
    if source.form is not None:
        missing = [name for name in wanted[source.form] if name not in columns]
        if missing:
            raise SlipstreamError(_without(source, missing[0], columns))
        return source.form
    fitting = [form for form, needed in wanted.items() if set(needed) <= {*columns}]
    if len(fitting) > 1:
        raise SlipstreamError(
            f"{source.name} has the columns of several forms ({', '.join(columns)}); choose one with data.form: "
            + " or ".join(fitting)
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
    if _SHAREGPT in columns:
        lines.append(
            f"The column {_SHAREGPT} may be of ShareGPT's kind, whose turns have from and value: rename these to role "
            f"and content, with the roles system, user and assistant, and give data.messages_column={_SHAREGPT}"
        )
    elif source.form is None:
        lines.append(
            "Rows that aren't text have the columns messages (else: data.messages_column), prompt and completion, or "
            "input_ids"
        )
    return ". ".join(lines)
