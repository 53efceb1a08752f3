"""The batch of a step: rows of one length, or sequences of different ones, as the arguments of a Pipeline's methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED, Tensors
from slipstream.parallel import Ranks
from slipstream.pipeline.collated_batch import agreed_batch
from slipstream.pipeline.token_values import (
    DOCUMENTS,
    INPUTS,
    LABELS,
    POSITIONS,
    Rows,
    TokenRule,
    TokenValues,
    document_numbers,
)

# Fewer labels than these may follow the tokens by chance.
_FEWEST_SHIFTED = 8
Lengths = Sequence[int] | None  # the tokens of each row of padded tensors
Inputs = Tensors | Rows | list[Tensors] | Mapping[str, Any]


@dataclass(frozen=True)
class Batch:
    """The sequences of a step, on this rank's device, with what travels with their tokens.

    Inputs are token ids, or the inputs of an nn.Sequential's first layer.
    """

    inputs: tuple[TokenValues, ...]
    is_tuple: bool  # a tuple of inputs for the first layer, even of length 1
    companions: Mapping[str, TokenValues]
    """What travels with the inputs' tokens: the labels, and whatever else was given. Keys are names of rules."""
    sequence_values: Tensor | None = None  # (B, ...), for a loss of whole sequences
    max_position: int | None = None  # the unsplit model's largest position; None: the largest of `inputs`
    lone_lengths: Sequence[int] = ()  # tokens of each lone sequence in the packed row
    are_rows: bool = False  # rows of one batch for the unsplit model, possibly unequal in length

    @classmethod
    def of(
        cls,
        device: torch.device,
        inputs: Tensor | Tensors,
        labels: Tensor,
        others: Sequence[TokenValues] = (),
        sequence_values: Tensor | None = None,
    ) -> Batch:
        """Moves the tensors of sequences of one length to the device."""
        is_tuple = isinstance(inputs, tuple)
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        given = (*map(TokenValues, [INPUTS] * len(tensors), tensors), TokenValues(LABELS, labels), *others)
        moved: list[TokenValues] = []
        companions: dict[str, TokenValues] = {}
        for values in given:
            rows = values.rows
            name = values.rule.name
            if not isinstance(rows, Tensor):
                or_list = "" if values.rule == POSITIONS else ", or a list of tensors"
                raise SlipstreamError(f"{name} are of type {type(rows).__name__}: give a tensor{or_list}.")
            rows = _moved(rows, device) if rows.is_inference() else rows.to(device)
            values = replace(values, rows=rows)
            if values.rule == INPUTS:
                moved.append(values)
            else:
                companions[name] = values
        if sequence_values is not None:
            sequence_values = _moved(sequence_values, device)
        return cls(tuple(moved), is_tuple, companions, sequence_values)

    @classmethod
    def of_lengths(
        cls,
        device: torch.device,
        inputs: Tensor | Sequence[Tensor] | Sequence[Tensors],
        labels: Tensor | Sequence[Tensor],
        others: Sequence[TokenValues] = (),
        lengths: Lengths = None,
        sequence_values: Tensor | None = None,
    ) -> Batch:
        """Moves lists of (T, ...) tensors, or with `lengths` padded ones (batch, longest, ...), whose padding is left
        out.

        Raises SlipstreamError where they aren't as many.
        """
        given: list[tuple[TokenRule, Any]] = [(INPUTS, inputs), (LABELS, labels)]
        given += [(values.rule, values.rows) for values in others]
        lists = [(rule, _listed(rule, rows, lengths)) for rule, rows in given]
        (_, sequences), *companions = lists
        if not sequences:
            raise SlipstreamError("inputs are a list without a sequence: give at least one, or leave the step out.")
        for rule, rows in companions:
            if len(rows) != len(sequences):
                raise SlipstreamError(f"{rule.name} are {len(rows)} sequences, inputs {len(sequences)}: give as many.")
        tensors = [row_inputs if isinstance(row_inputs, tuple) else (row_inputs,) for row_inputs in sequences]
        for row, count in enumerate(map(len, tensors)):
            if count != len(tensors[0]):
                raise SlipstreamError(
                    f"inputs[{row}] are {count} tensors, inputs[0] {len(tensors[0])}: give as many of each sequence."
                )

        def moved(rule: TokenRule, tensors: Sequence[Tensor]) -> TokenValues:
            return TokenValues(rule, [_moved(tensor, device) for tensor in tensors])

        return cls(
            tuple(moved(INPUTS, rows) for rows in zip(*tensors, strict=True)),
            isinstance(sequences[0], tuple),
            {rule.name: moved(rule, rows) for rule, rows in companions},
            sequence_values=None if sequence_values is None else _moved(sequence_values, device),
        )

    @property
    def is_ragged(self) -> bool:
        """Whether each sequence is a tensor of its own, of any length."""
        return isinstance(self.inputs[0].rows, list)

    @property
    def labels(self) -> Rows:
        """The labels, or a loss function's targets, unshifted."""
        return self.companions[LABELS.name].rows

    @property
    def every(self) -> tuple[TokenValues, ...]:
        """The inputs, then their companions."""
        return *self.inputs, *self.companions.values()

    @property
    def tensors(self) -> Tensors:
        """The inputs of sequences of one length."""
        return tuple(values.rows for values in self.inputs if isinstance(values.rows, Tensor))

    @property
    def num_sequences(self) -> int:
        rows = self.inputs[0].rows
        return len(rows) if isinstance(rows, list) or rows.dim() else 0

    @property
    def token_counts(self) -> list[int]:
        """The tokens of each sequence of token ids."""
        rows = self.inputs[0].rows
        return [rows.shape[1]] * rows.shape[0] if isinstance(rows, Tensor) else [len(row) for row in rows]

    def given(self, rule: TokenRule) -> Rows | None:
        """Returns the companions of this rule, None where the batch has none."""
        values = self.companions.get(rule.name)
        return None if values is None else values.rows

    def as_rows(self, width: int, lengths: Sequence[int], position_ids: Tensor | None) -> Batch:
        """Returns these rows of a batch that was `width` tokens wide: each token keeps its position, and the unsplit
        model, which is given the padding, finds the largest in it."""
        # Without given positions they restart in each document, and padding belongs to none.
        if position_ids is None:
            max_position = width - 1 if DOCUMENTS.name not in self.companions else None
            return replace(self, are_rows=True, max_position=max_position)
        device = self.labels[0].device
        rows = [_moved(row[:length], device) for row, length in zip(position_ids, lengths, strict=True)]
        counts = all(torch.equal(row, torch.arange(len(row), device=device)) for row in rows)
        kept = self if counts else self._with(TokenValues(POSITIONS, rows))
        return replace(kept, are_rows=True, max_position=int(position_ids.max()))

    def padded(self, num_tokens: Sequence[int]) -> Batch:
        """Returns the batch with further sequences, as long as `num_tokens` says, in which nothing counts."""
        return self._changed(lambda values: values.padded(num_tokens))

    def packed(self, groups: Sequence[Sequence[int]]) -> list[Batch]:
        """Returns the batch of each microbatch: a row of these sequences, each of them its own documents."""
        whole = self
        positions = self.given(POSITIONS)
        if DOCUMENTS.name not in self.companions and (positions is not None or any(len(group) > 1 for group in groups)):
            if positions is None:
                numbers = [torch.zeros_like(labels) for labels in self.labels]
            else:
                numbers = [document_numbers(each) for each in positions]
            whole = self._with(TokenValues(DOCUMENTS, numbers))
        return [whole._row(group) for group in groups]

    def _row(self, group: Sequence[int]) -> Batch:
        row = self._changed(lambda values: values.packed(group))
        lone_lengths = () if self.are_rows else [len(self.labels[index]) for index in group]
        return replace(row, sequence_values=None, lone_lengths=lone_lengths)

    def _changed(self, change: Callable[[TokenValues], TokenValues]) -> Batch:
        companions = {name: change(values) for name, values in self.companions.items()}
        return replace(self, inputs=tuple(map(change, self.inputs)), companions=companions)

    def _with(self, values: TokenValues) -> Batch:
        return replace(self, companions={**self.companions, values.rule.name: values})

    def check_form(self) -> None:
        """Raises SlipstreamError where these aren't token ids, (batch, sequence) or each (tokens,), and companions with
        a value for each."""
        if self.is_tuple:
            raise SlipstreamError(
                f"inputs are a tuple of {len(self.inputs)}; a causal LM takes token ids, (batch, sequence) int64."
            )
        form, dims = ("(tokens,)", 1) if self.is_ragged else ("(batch, sequence)", 2)
        tokens = places(self.inputs[0])
        for place, ids in tokens:
            if ids.dim() != dims or ids.dtype != torch.int64:
                raise SlipstreamError(f"inputs{place} are {_describe(ids)}; expected token ids, {form} int64.")
            if self.is_ragged and len(ids) == 0:
                raise SlipstreamError(f"inputs{place} is an empty sequence. Leave it out.")
        for place, labels in places(self.companions[LABELS.name]):
            if labels.dtype != torch.int64:
                raise SlipstreamError(f"labels{place} are {_describe(labels)}; expected token ids or -100, int64.")
        for name, values in self.companions.items():
            for (place, ids), (_, other) in zip(tokens, places(values), strict=True):
                if other.shape[:dims] != ids.shape or other.dim() != dims + values.rule.num_dims:
                    raise SlipstreamError(
                        f"{name}{place} are {_describe(other)}, inputs{place} {_describe(ids)}: they must have one "
                        f"shape{', apart from the dims of a token' if values.rule.num_dims else ''}."
                    )

    def check_labels_are_unshifted(self) -> None:
        """Raises SlipstreamError where the labels are the tokens shifted by one, as loops have them whose model doesn't
        shift: trained on them, a model would learn the token after the next.

        Labels are taken for shifted where every one that counts is the next token of its row, at least eight of them
        are, and some differ from the token at their own place.
        """
        inputs = [ids for _, ids in places(self.inputs[0])]
        own = torch.cat([ids[..., :-1].flatten() for ids in inputs])
        following = torch.cat([ids[..., 1:].flatten() for ids in inputs])
        labels = torch.cat([each[..., :-1].flatten() for _, each in places(self.companions[LABELS.name])])
        counts = labels != IGNORED
        are_shifted = ((labels == following) | ~counts).all() & (counts & (labels != own)).any()
        if bool(are_shifted & (counts.sum() >= _FEWEST_SHIFTED)):
            raise SlipstreamError(
                "the labels are shifted already: each that counts is the next token, labels[:, t] == inputs[:, t + 1]. "
                "A Pipeline shifts labels itself, as transformers does, so the model would learn the token after the "
                "next. Give both unshifted: for step(tokens[:, :-1], tokens[:, 1:]) type step(tokens, tokens)."
            )


def places(values: TokenValues) -> list[tuple[str, Tensor]]:
    """Returns the tensors: the one of all sequences, or each sequence's with its place, such as [3]."""
    rows = values.rows
    return [("", rows)] if isinstance(rows, Tensor) else [(f"[{row}]", tensor) for row, tensor in enumerate(rows)]


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _listed(rule: TokenRule, given: Any, lengths: Lengths) -> list[Any]:
    """Returns the sequences of a list, or of a padded tensor."""
    name = rule.name
    if lengths is None:
        each_is = (Tensor, tuple) if rule is INPUTS else Tensor
        if isinstance(given, Tensor) or not all(isinstance(item, each_is) for item in given):
            raise SlipstreamError(f"{name} must be a list of tensors, one for each sequence, as inputs are.")
        return [*given]
    if not isinstance(given, Tensor) or given.dim() != 2 + rule.num_dims or len(given) != len(lengths):
        shape = tuple(given.shape) if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise SlipstreamError(
            f"{name} are {shape} for {len(lengths)} lengths: with lengths=..., give tensors (batch, longest), padded."
        )
    lengths = [int(length) for length in lengths]
    for row, length in enumerate(lengths):
        if not 0 <= length <= given.shape[1]:
            raise SlipstreamError(f"lengths[{row}]={length}, but {name} have room for {given.shape[1]} tokens.")
    return [row[:length] for row, length in zip(given, lengths, strict=True)]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on the device, one that a backward may keep: not as made within torch.inference_mode()."""
    moved = tensor.to(device)
    return moved.clone() if moved.is_inference() and not torch.is_inference_mode_enabled() else moved


def given_batch(
    ranks: Ranks,
    device: torch.device,
    inputs: Inputs,
    labels: Rows | None,
    *,
    position_ids: Tensor | None = None,
    document_ids: Rows | None = None,
    lengths: Lengths = None,
    sequence_values: Any = None,
    is_planned: bool = False,
    needs_labels: bool = True,
    targets: Rows | None = None,
) -> Batch:
    """Returns the batch: rows of one length, or, of lists and with `lengths`, of different ones. Of a mapping it is
    rows of one length where no rank's has padding; with an attention_mask that is found out by one small message.

    `targets` is another name of the labels. Collective. Raises SlipstreamError where the tensors don't say which batch
    is meant.
    """
    if targets is not None:
        if labels is not None:
            raise SlipstreamError("labels=... and targets=..., two names of one argument: give labels=... alone.")
        labels = targets
    if not isinstance(sequence_values, Tensor | None):
        kind = type(sequence_values).__name__
        raise SlipstreamError(f"sequence_values are of type {kind}: give a tensor, (sequences, ...).")
    others = [] if document_ids is None else [TokenValues(DOCUMENTS, document_ids)]
    if isinstance(inputs, Mapping):
        _refuse_twice(labels=labels, position_ids=position_ids)
        inputs, labels, position_ids, row_lengths = agreed_batch(ranks, inputs, lengths, needs_labels)
        if row_lengths is not None:
            rows = Batch.of_lengths(device, inputs, labels, others, row_lengths.tolist(), sequence_values)
            return rows.as_rows(inputs.shape[1], row_lengths.tolist(), position_ids)
    elif labels is None:
        if needs_labels:
            raise SlipstreamError("labels are missing: give step(inputs, labels), or a mapping that has 'labels'.")
        labels = inputs[0] if isinstance(inputs, tuple) else inputs  # type: ignore[assignment]
    assert labels is not None
    is_list = isinstance(inputs, list) or isinstance(labels, list)
    for values in others:
        is_list = is_list or isinstance(values.rows, list)
    if not is_list and lengths is None:
        if is_planned:
            raise SlipstreamError(
                "plan=... is for sequences of different lengths: give lists, or padded with lengths=..."
            )
        if position_ids is not None:
            others = [TokenValues(POSITIONS, position_ids), *others]
        return Batch.of(device, inputs, labels, others, sequence_values)  # type: ignore[arg-type]
    if position_ids is not None or isinstance(inputs, tuple):
        name = "a tuple of inputs" if isinstance(inputs, tuple) else "position_ids"
        raise SlipstreamError(
            f"{name} with sequences of different lengths: each is token ids, whose positions begin at 0. Leave it out."
        )
    return Batch.of_lengths(device, inputs, labels, others, lengths, sequence_values)


def padded_as(outputs: Tensor | list[Tensor], inputs: Inputs) -> Tensor | list[Tensor]:
    """Returns the tokens' outputs in the form of the inputs: of padded ones (batch, sequence, ...), zeros at
    padding."""
    ids = inputs["input_ids"] if isinstance(inputs, Mapping) else inputs
    if isinstance(outputs, Tensor) or not isinstance(ids, Tensor):
        return outputs
    rows = outputs[0].new_zeros(*ids.shape, *outputs[0].shape[1:])
    for row, output in zip(rows, outputs, strict=True):
        row[: len(output)] = output
    return rows


def _refuse_twice(**others: object) -> None:
    for name, argument in others.items():
        if argument is not None:
            raise SlipstreamError(f"{name}=... given together with a mapping, which has its own. Give one of the two.")
