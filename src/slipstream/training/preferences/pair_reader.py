"""Turns rows with a chosen and a rejected answer into pairs of documents, in which the answers count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED
from slipstream.training.data import DocumentWriter, TokenisedText
from slipstream.training.data.samples.tokenised_samples import Sample, SampleReader, UnusableRowError

_EQUAL = "with equal answers"
_FULL = "with no room for an answer after the prompt"


class PairReader:
    """Reads rows of `chosen`, `rejected` and `prompt`: texts, or lists of messages, whose prompt may be implicit."""

    def __init__(self, reader: SampleReader, seq_len: int) -> None:
        """Takes the reader of prompts with completions; what is after `seq_len` tokens is cut off."""
        self._reader, self.seq_len = reader, seq_len
        self.num_cut = 0  # pairs of which an answer was cut

    def read(self, row: Mapping[str, Any]) -> tuple[Sample, Sample]:
        """Returns the tokens and labels of the chosen and of the rejected document.

        Raises:
            UnusableRowError: where nothing can be learnt from the pair.
            SlipstreamError: where it hasn't the form of the others.
        """
        prompt, answers = _separated(row)
        if answers[0] == answers[1]:
            raise UnusableRowError(_EQUAL)
        tools = row.get("tools")
        whole = [self._reader.read({"prompt": prompt, "completion": each, "tools": tools}) for each in answers]
        chosen, rejected = ((tokens[: self.seq_len], labels[: self.seq_len]) for tokens, labels in whole)
        if any(all(label == IGNORED for label in labels[1:]) for _, labels in (chosen, rejected)):
            raise UnusableRowError(_FULL)
        if chosen == rejected:
            raise UnusableRowError(_EQUAL)
        self.num_cut += any(len(tokens) > self.seq_len for tokens, _ in whole)
        return chosen, rejected


def _separated(row: Mapping[str, Any]) -> tuple[Any, tuple[Any, Any]]:
    """Returns the prompt and both answers; without a prompt, the first messages that both have are it."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if chosen is None or rejected is None:
        raise UnusableRowError("without content (null)")
    given = [each for each in (prompt, chosen, rejected) if each is not None]
    if not (all(isinstance(each, str) for each in given) or all(isinstance(each, list) for each in given)):
        hint = "; where chosen and rejected begin with the prompt, leave that column out" if prompt is not None else ""
        raise SlipstreamError(f"prompt, chosen and rejected must all be texts, or all be lists of messages{hint}")
    if "prompt" in row:
        return prompt, (chosen, rejected)
    if isinstance(chosen, str):
        raise SlipstreamError("chosen and rejected are texts, which need the column prompt: what both answer")
    both = zip(chosen, rejected, strict=False)
    number = next((place for place, (one, other) in enumerate(both) if one != other), min(len(chosen), len(rejected)))
    return chosen[:number], (chosen[number:], rejected[number:])


def read_pairs(
    rows: Iterable[Mapping[str, Any]],
    reader: PairReader,
    name: str,
    say: Callable[[str], None],
    show: Callable[[float], None] = lambda _done: None,
) -> TokenisedText:
    """Returns the documents of all rows, chosen and rejected in turn. `say` gets a line about pairs that are left out
    or cut; `show` the number of rows that are done.

    Raises:
        SlipstreamError: with the number of the row, where one hasn't the form of the others, or no pair is left.
    """
    writer, left_out = DocumentWriter(), dict[str, list[int]]()
    number = 0
    for number, row in enumerate(rows, start=1):
        try:
            pair = reader.read(row)
        except UnusableRowError as reason:
            left_out.setdefault(str(reason), []).append(number)
        except SlipstreamError as error:
            raise SlipstreamError(f"{name}, row {number}: {error}") from error
        else:
            for document in pair:
                writer.add(*(np.asarray(each, dtype=np.int32) for each in document))
        show(number)
    report = _report(left_out, reader, number)
    if not len(writer):
        raise SlipstreamError(f"{name} holds no pair to train on{': ' + report if report else ''}")
    if report:
        say(f"{name}: {report}")
    return writer.finish(has_labels=True, group_size=2)


def _report(left_out: Mapping[str, list[int]], reader: PairReader, total: int) -> str:
    """Returns how many pairs were left out, why, and which was the first of each kind; and how many were cut."""
    parts, num_left_out = [], sum(map(len, left_out.values()))
    if left_out:
        reasons = (f"{len(rows):,} {reason} (first: row {rows[0]})" for reason, rows in left_out.items())
        parts.append(f"left out {num_left_out:,} of {total:,} pairs: {', '.join(reasons)}")
    if reader.num_cut:
        parts.append(
            f"{reader.num_cut:,} of {total:,} pairs have an answer that ends after training.seq_len="
            f"{reader.seq_len} tokens: what comes after them is left out"
        )
    return "; ".join(parts)
