"""The batch of a step: rows of one length, sequences of different ones, or a mapping that is one or the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import Tensors
from slipstream.parallel import Ranks
from slipstream.pipeline.arguments.collated_batch import CollatedBatch
from slipstream.pipeline.batch import WholeBatch
from slipstream.pipeline.sequences import Lengths, Rows, Sequences

Inputs = Tensors | Rows | list[Tensors] | Mapping[str, Any]


def given_batch(
    ranks: Ranks,
    device: torch.device,
    inputs: Inputs,
    targets: Rows | None,
    position_ids: Tensor | None = None,
    document_ids: Rows | None = None,
    lengths: Lengths = None,
    sequence_values: Tensor | None = None,
    is_planned: bool = False,
    needs_labels: bool = True,
) -> WholeBatch | Sequences:
    """Returns the batch: rows of one length, or, of lists and with `lengths`, of different ones. Of a mapping it is
    rows of one length where no rank's has padding; with an attention_mask that is found out by one small message.

    Collective. Raises SlipstreamError where the tensors don't say which batch is meant.
    """
    if isinstance(inputs, Mapping):
        _refuse_twice(targets=targets, position_ids=position_ids)
        inputs, targets, position_ids, found = _agreed(ranks, inputs, lengths, needs_labels)
        if found is not None:
            without_padding = Sequences.of(device, inputs, targets, document_ids, found.tolist(), sequence_values)
            return without_padding.as_rows(inputs.shape[1], found.tolist(), position_ids)
    elif targets is None:
        if needs_labels:
            raise SlipstreamError("targets are missing: give step(inputs, targets), or a mapping that has 'labels'.")
        targets = inputs[0] if isinstance(inputs, tuple) else inputs  # type: ignore[assignment]
    assert targets is not None
    is_list = isinstance(inputs, list) or isinstance(targets, list) or isinstance(document_ids, list)
    if not is_list and lengths is None:
        if is_planned:
            raise SlipstreamError(
                "plan=... is for sequences of different lengths: give lists, or padded with lengths=..."
            )
        of_rows = position_ids, document_ids, sequence_values
        return WholeBatch.of(device, inputs, targets, *of_rows)  # type: ignore[arg-type]
    if position_ids is not None or isinstance(inputs, tuple):
        name = "a tuple of inputs" if isinstance(inputs, tuple) else "position_ids"
        raise SlipstreamError(
            f"{name} with sequences of different lengths: each is token ids, whose positions begin at 0. Leave it out."
        )
    return Sequences.of(device, inputs, targets, document_ids, lengths, sequence_values)


def padded_as(outputs: Tensor | list[Tensor], inputs: Inputs) -> Tensor | list[Tensor]:
    """Returns what was found of tokens in the form of the inputs: of padded ones (batch, sequence, ...), zeros at
    padding."""
    given = inputs["input_ids"] if isinstance(inputs, Mapping) else inputs
    if isinstance(outputs, Tensor) or not isinstance(given, Tensor):
        return outputs
    rows = outputs[0].new_zeros(*given.shape, *outputs[0].shape[1:])
    for row, found in zip(rows, outputs, strict=True):
        row[: len(found)] = found
    return rows


def _refuse_twice(**others: object) -> None:
    for name, given in others.items():
        if given is not None:
            raise SlipstreamError(f"{name}=... beside a mapping, which has its own. Give one of the two.")


def _agreed(ranks: Ranks, batch: Mapping[str, Any], lengths: Lengths, needs_labels: bool) -> CollatedBatch:
    """Returns the batch, with lengths where some rank's has padding: all ranks then plan a step of sequences.

    Raises SlipstreamError on every rank where one can't take its batch.
    """
    found = problem = None
    try:
        found = CollatedBatch.of(batch, needs_labels)
        if lengths is not None and found.lengths is not None:
            raise SlipstreamError("lengths=... beside an attention_mask, which says them. Give one of the two.")
    except SlipstreamError as error:
        problem = error
    state = torch.tensor([found is not None and found.has_padding, problem is not None], device=ranks.device)
    pads, is_refused = ranks.world.max(state.int()).tolist()
    if problem is not None:
        raise problem
    assert found is not None
    if is_refused:
        raise SlipstreamError("the step can't run on this rank, as another rank refused its batch: see its message.")
    if not pads:
        return found._replace(lengths=None)
    rows, longest = found.input_ids.shape
    return found._replace(lengths=torch.full((rows,), longest) if found.lengths is None else found.lengths)
