"""The batch of a step: rows of one length, sequences of different ones, or a mapping that is one or the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED, Tensors
from slipstream.parallel import Ranks

# Fewer labels than these may follow the tokens by chance.
_FEWEST_SHIFTED = 8
Lengths = Sequence[int] | None  # the tokens of each row of padded tensors
Rows = Tensor | list[Tensor]  # one length for all sequences, or each its own
Inputs = Tensors | Rows | list[Tensors] | Mapping[str, Any]


@dataclass(frozen=True)
class Batch:
    """The sequences of a step, on this rank's device: dim 0 of tensors where they have one length, else a list of
    tensors, of which each has its own number of tokens (T, ...).

    Inputs are token ids, or the inputs of an nn.Sequential's first layer.
    """

    inputs: tuple[Rows, ...]
    is_tuple: bool  # whether the first layer takes the inputs as a tuple
    targets: Rows
    position_ids: Rows | None = None
    document_ids: Rows | None = None
    sequence_values: Tensor | None = None  # (B, ...), for a loss of whole sequences
    max_position: int | None = None  # that the unsplit model would see, where padding that was left out had more
    lone_lengths: Sequence[int] = ()  # of sequences that follow each other in one row, and are as if each were alone
    are_rows: bool = False  # of one batch, which the unsplit model runs together, where lengths differ

    @classmethod
    def of(
        cls,
        device: torch.device,
        inputs: Tensor | Tensors,
        targets: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        sequence_values: Tensor | None = None,
    ) -> Batch:
        """Moves the tensors of sequences of one length to the device."""
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        moved: list[Tensor | None] = []
        for place, tensor in enumerate((*tensors, targets, position_ids, document_ids, sequence_values)):
            if place <= len(tensors) and not isinstance(tensor, Tensor):
                name = "labels" if place == len(tensors) else "inputs"
                kind = type(tensor).__name__
                raise SlipstreamError(f"{name} are of type {kind}: give a tensor, or a list of tensors.")
            if tensor is not None and tensor.is_inference():
                tensor = _moved(tensor, device)
            moved.append(None if tensor is None else tensor.to(device))
        *here, labels, positions, documents, values = moved
        is_tuple = isinstance(inputs, tuple)
        return cls(tuple(here), is_tuple, labels, positions, documents, values)  # type: ignore[arg-type]

    @classmethod
    def of_lengths(
        cls,
        device: torch.device,
        inputs: Tensor | Sequence[Tensor] | Sequence[Tensors],
        targets: Tensor | Sequence[Tensor],
        document_ids: Tensor | Sequence[Tensor] | None = None,
        lengths: Lengths = None,
        sequence_values: Tensor | None = None,
    ) -> Batch:
        """Moves lists of (T,) tensors, or with `lengths` padded ones (batch, longest), whose padding is left out.

        Raises SlipstreamError where they aren't as many.
        """
        columns = {"inputs": inputs, "labels": targets, "document_ids": document_ids}
        lists = {name: _listed(name, rows, lengths) for name, rows in columns.items() if rows is not None}
        if not lists["inputs"]:
            raise SlipstreamError("inputs are a list without a sequence: give at least one, or leave the step out.")
        for name, rows in lists.items():
            if len(rows) != len(lists["inputs"]):
                raise SlipstreamError(f"{name} are {len(rows)} sequences, inputs {len(lists['inputs'])}: give as many.")
        tensors = [row_inputs if isinstance(row_inputs, tuple) else (row_inputs,) for row_inputs in lists["inputs"]]
        for row, count in enumerate(map(len, tensors)):
            if count != len(tensors[0]):
                raise SlipstreamError(
                    f"inputs[{row}] are {count} tensors, inputs[0] {len(tensors[0])}: give as many of each sequence."
                )

        def moved(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [_moved(tensor, device) for tensor in tensors]

        return cls(
            tuple(moved(rows) for rows in zip(*tensors, strict=True)),
            isinstance(lists["inputs"][0], tuple),
            moved(lists["labels"]),
            document_ids=moved(lists["document_ids"]) if "document_ids" in lists else None,
            sequence_values=None if sequence_values is None else _moved(sequence_values, device),
        )

    @property
    def is_ragged(self) -> bool:
        """Whether each sequence is a tensor of its own, of any length."""
        return isinstance(self.targets, list)

    @property
    def tensors(self) -> Tensors:
        """The inputs of sequences of one length."""
        return tuple(rows for rows in self.inputs if isinstance(rows, Tensor))

    @property
    def num_sequences(self) -> int:
        rows = self.inputs[0]
        return len(rows) if isinstance(rows, list) or rows.dim() else 0

    @property
    def token_counts(self) -> list[int]:
        """The tokens of each sequence of token ids."""
        rows = self.inputs[0]
        return [rows.shape[1]] * rows.shape[0] if isinstance(rows, Tensor) else [len(row) for row in rows]

    def as_rows(self, width: int, lengths: Sequence[int], position_ids: Tensor | None) -> Batch:
        """Returns these rows of a batch that was `width` tokens wide: each token keeps its position, and the unsplit
        model, which is given the padding, finds the largest in it."""
        if position_ids is None:  # they restart in documents, which padding has none of
            return replace(self, are_rows=True, max_position=width - 1 if self.document_ids is None else None)
        device = self.targets[0].device
        rows = [_moved(row[:length], device) for row, length in zip(position_ids, lengths, strict=True)]
        counts = all(torch.equal(row, torch.arange(len(row), device=device)) for row in rows)
        largest = int(position_ids.max())
        return replace(self, are_rows=True, position_ids=None if counts else rows, max_position=largest)

    def padded(self, num_tokens: Sequence[int]) -> Batch:
        """Returns token ids with further sequences, of so many tokens each, in which nothing counts."""
        ids = [self.targets[0].new_zeros(count) for count in num_tokens]
        positions = [torch.arange(count, device=ids[0].device) for count in num_tokens]
        return replace(
            self,
            inputs=([*self.inputs[0], *ids],),
            targets=[*self.targets, *(torch.full_like(row, IGNORED) for row in ids)],
            position_ids=None if self.position_ids is None else [*self.position_ids, *positions],
            document_ids=None if self.document_ids is None else [*self.document_ids, *ids],
        )

    def packed(self, groups: Sequence[Sequence[int]]) -> list[Batch]:
        """Returns the batch of each microbatch: a row of these sequences, each of them its own documents."""
        return [self._row(group) for group in groups]

    def _row(self, group: Sequence[int]) -> Batch:
        def joined(rows: Sequence[Tensor] | Tensor) -> Tensor:
            first, *others = [rows[index] for index in group]
            return (torch.cat([first, *others]) if others else first)[None]

        row = Batch(
            tuple(map(joined, self.inputs)),
            self.is_tuple,
            joined(self.targets),
            position_ids=None if self.position_ids is None else joined(self.position_ids),
            max_position=self.max_position,
            lone_lengths=() if self.are_rows else [len(self.targets[index]) for index in group],
        )
        ids = self.document_ids
        if ids is None and self.position_ids is not None:
            ids = [document_numbers(positions) for positions in self.position_ids]
        if len(group) == 1 and ids is None:
            return row
        ids = ids or [torch.zeros_like(targets) for targets in self.targets]
        documents = [2 * ids[index] + place % 2 for place, index in enumerate(group)]  # differ where a sequence ends
        return replace(row, document_ids=torch.cat(documents)[None])

    def check_form(self) -> None:
        """Raises SlipstreamError where these aren't token ids, (batch, sequence) or each (tokens,), and their
        companions of one shape."""
        if self.is_tuple:
            raise SlipstreamError(
                f"inputs are a tuple of {len(self.inputs)}; a causal LM takes token ids, (batch, sequence) int64."
            )
        form, dims = ("(tokens,)", 1) if self.is_ragged else ("(batch, sequence)", 2)
        for place, ids in self.places(self.inputs[0]):
            if ids.dim() != dims or ids.dtype != torch.int64:
                raise SlipstreamError(f"inputs{place} are {_describe(ids)}; expected token ids, {form} int64.")
            if self.is_ragged and len(ids) == 0:
                raise SlipstreamError(f"inputs{place} is an empty sequence. Leave it out.")
        for place, targets in self.places(self.targets):
            if targets.dtype != torch.int64:
                raise SlipstreamError(f"labels{place} are {_describe(targets)}; expected token ids or -100, int64.")
        columns = {"labels": self.targets, "position_ids": self.position_ids, "document_ids": self.document_ids}
        for name, rows in columns.items():
            pairs = zip(self.places(self.inputs[0]), self.places(rows), strict=rows is not None)
            for (place, ids), (_, other) in pairs:
                if other.shape != ids.shape:
                    raise SlipstreamError(
                        f"{name}{place} are {_describe(other)}, inputs{place} {_describe(ids)}: they must have one "
                        "shape."
                    )

    def check_labels_are_unshifted(self) -> None:
        """Raises SlipstreamError where the labels are the tokens shifted by one, as loops have them whose model doesn't
        shift: trained on them, a model would learn the token after the next.

        Labels are taken for shifted where every one that counts is the next token of its row, at least eight of them
        are, and some differ from the token at their own place.
        """
        pairs = list(zip(self.places(self.inputs[0]), self.places(self.targets), strict=True))
        own = torch.cat([inputs[..., :-1].flatten() for (_, inputs), _ in pairs])
        following = torch.cat([inputs[..., 1:].flatten() for (_, inputs), _ in pairs])
        labels = torch.cat([labels[..., :-1].flatten() for _, (_, labels) in pairs])
        counts = labels != IGNORED
        are_shifted = ((labels == following) | ~counts).all() & (counts & (labels != own)).any()
        if bool(are_shifted & (counts.sum() >= _FEWEST_SHIFTED)):
            raise SlipstreamError(
                "the labels are shifted already: each that counts is the next token, labels[:, t] == inputs[:, t + 1]. "
                "A Pipeline shifts labels itself, as transformers does, so the model would learn the token after the "
                "next. Give both unshifted: for step(tokens[:, :-1], tokens[:, 1:]) type step(tokens, tokens)."
            )

    def places(self, rows: Rows | None) -> list[tuple[str, Tensor]]:
        """Returns some of its tensors: the one of all sequences, or each sequence's with its place, such as [3]."""
        if rows is None:
            return []
        return [("", rows)] if isinstance(rows, Tensor) else [(f"[{row}]", tensor) for row, tensor in enumerate(rows)]


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _listed(name: str, given: Any, lengths: Lengths) -> list[Any]:
    """Returns the sequences of a list, or of a padded tensor."""
    if lengths is None:
        each_is = (Tensor, tuple) if name == "inputs" else Tensor
        if isinstance(given, Tensor) or not all(isinstance(item, each_is) for item in given):
            raise SlipstreamError(f"{name} must be a list of tensors, one for each sequence, as inputs are.")
        return [*given]
    if not isinstance(given, Tensor) or given.dim() != 2 or len(given) != len(lengths):
        shape = tuple(given.shape) if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise SlipstreamError(
            f"{name} are {shape} for {len(lengths)} lengths: with lengths=..., give tensors (batch, longest), padded."
        )
    lengths = [int(length) for length in lengths]
    for row, length in enumerate(lengths):
        if not 0 <= length <= given.shape[1]:
            raise SlipstreamError(f"lengths[{row}]={length}, but {name} have room for {given.shape[1]} tokens.")
    return [row[:length] for row, length in zip(given, lengths, strict=True)]


def document_numbers(position_ids: Tensor) -> Tensor:
    """Returns the number of each token's document, (..., T): a new one begins where positions don't count on."""
    numbers = torch.zeros_like(position_ids)
    numbers[..., 1:] = (position_ids[..., 1:] != position_ids[..., :-1] + 1).cumsum(-1)
    return numbers


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on the device, one that a backward may keep: not as made within torch.inference_mode()."""
    moved = tensor.to(device)
    return moved.clone() if moved.is_inference() and not torch.is_inference_mode_enabled() else moved


def given_batch(
    ranks: Ranks,
    device: torch.device,
    inputs: Inputs,
    labels: Rows | None,
    position_ids: Tensor | None = None,
    document_ids: Rows | None = None,
    lengths: Lengths = None,
    sequence_values: Tensor | None = None,
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
    if isinstance(inputs, Mapping):
        _refuse_twice(labels=labels, position_ids=position_ids)
        inputs, labels, position_ids, row_lengths = _agreed(ranks, inputs, lengths, needs_labels)
        if row_lengths is not None:
            rows = Batch.of_lengths(device, inputs, labels, document_ids, row_lengths.tolist(), sequence_values)
            return rows.as_rows(inputs.shape[1], row_lengths.tolist(), position_ids)
    elif labels is None:
        if needs_labels:
            raise SlipstreamError("labels are missing: give step(inputs, labels), or a mapping that has 'labels'.")
        labels = inputs[0] if isinstance(inputs, tuple) else inputs  # type: ignore[assignment]
    assert labels is not None
    is_list = isinstance(inputs, list) or isinstance(labels, list) or isinstance(document_ids, list)
    if not is_list and lengths is None:
        if is_planned:
            raise SlipstreamError(
                "plan=... is for sequences of different lengths: give lists, or padded with lengths=..."
            )
        of_rows = position_ids, document_ids, sequence_values
        return Batch.of(device, inputs, labels, *of_rows)  # type: ignore[arg-type]
    if position_ids is not None or isinstance(inputs, tuple):
        name = "a tuple of inputs" if isinstance(inputs, tuple) else "position_ids"
        raise SlipstreamError(
            f"{name} with sequences of different lengths: each is token ids, whose positions begin at 0. Leave it out."
        )
    return Batch.of_lengths(device, inputs, labels, document_ids, lengths, sequence_values)


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


def _agreed(ranks: Ranks, batch: Mapping[str, Any], lengths: Lengths, needs_labels: bool) -> CollatedBatch:
    """Returns the batch, with lengths where some rank's has padding: all ranks then plan a step of sequences.

    Raises SlipstreamError on every rank where one can't take its batch.
    """
    collated = problem = None
    try:
        collated = CollatedBatch.of(batch, needs_labels)
        if lengths is not None and collated.lengths is not None:
            raise SlipstreamError(
                "lengths=... given together with an attention_mask, which says the same. Give one of the two."
            )
    except SlipstreamError as error:
        problem = error
    state = torch.tensor([collated is not None and collated.has_padding, problem is not None], device=ranks.device)
    pads, is_refused = ranks.world.max(state.int()).tolist()
    if problem is not None:
        raise problem
    assert collated is not None
    if is_refused:
        raise SlipstreamError("the step can't run on this rank, as another rank refused its batch: see its message.")
    if not pads:
        return collated._replace(lengths=None)
    rows, longest = collated.input_ids.shape
    return collated._replace(lengths=torch.full((rows,), longest) if collated.lengths is None else collated.lengths)


KEYS = ("input_ids", "labels", "attention_mask", "position_ids")
# Keys that collators without padding add for attention kernels: where documents begin, as in position_ids.
_OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_LABELS = (
    "For a causal LM give transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False), or type "
    "batch['labels'] = batch['input_ids'].masked_fill(batch['attention_mask'] == 0, -100)."
)


class CollatedBatch(NamedTuple):
    """The tensors of a mapping, (batch, sequence) each, and how many tokens of each row aren't padding."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None
    lengths: Tensor | None  # (batch,); None without a mask

    @classmethod
    def of(cls, batch: Mapping[str, Any], needs_labels: bool) -> Self:
        """Reads a mapping; without labels, those that aren't needed are the tokens.

        Raises SlipstreamError, naming the key, for entries that a Pipeline doesn't take, or takes otherwise than the
        unsplit model would.
        """
        _check_keys(batch, needs_labels)
        for key in KEYS:
            _check_tensor(key, batch.get(key), batch["input_ids"])
        _check_documents(batch)
        ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
        labels = batch["labels"] if needs_labels else ids
        if mask is None:
            return cls(ids, labels, positions, None)
        lengths = _lengths(mask)
        if positions is not None:
            _check_positions(positions, mask)
        if needs_labels:
            _check_padding(labels, mask)
        return cls(ids, labels, positions, lengths)

    @property
    def has_padding(self) -> bool:
        """Whether some row is shorter than the tensors."""
        return self.lengths is not None and bool((self.lengths < self.input_ids.shape[1]).any())


def _check_keys(batch: Mapping[str, Any], needs_labels: bool) -> None:
    of_documents = _OF_DOCUMENTS if batch.get("position_ids") is not None else ()
    unknown = [key for key in batch if key not in (*KEYS, *of_documents)]
    if unknown:
        allowed = ", ".join(KEYS)
        raise SlipstreamError(
            f"the batch has {', '.join(map(repr, unknown))}; a Pipeline takes {allowed}. Leave "
            f"{'it' if len(unknown) == 1 else 'them'} out: {{key: batch[key] for key in batch if key in {KEYS}}}."
        )
    if batch.get("input_ids") is None:
        raise SlipstreamError("the batch has no 'input_ids': token ids, (batch, sequence) int64.")
    if needs_labels and batch.get("labels") is None:
        raise SlipstreamError(f"the batch has no 'labels': unshifted, -100 where none counts. {_LABELS}")


def _check_tensor(key: str, given: object, ids: Any) -> None:
    if given is None:
        return
    if not isinstance(given, Tensor):
        raise SlipstreamError(
            f"batch[{key!r}] is a {type(given).__name__}; expected a tensor (batch, sequence): give the tokenizer or "
            "the collator return_tensors='pt', or step(...) lists of tensors instead of a mapping."
        )
    if given.dim() != 2 or given.shape != ids.shape:
        raise SlipstreamError(
            f"batch[{key!r}] is {tuple(given.shape)}, batch['input_ids'] {tuple(ids.shape)}; expected one shape, "
            "(batch, sequence)."
        )


def _check_documents(batch: Mapping[str, Any]) -> None:
    """Raises SlipstreamError where other keys say otherwise of documents than position_ids."""
    keys = [key for key in _OF_DOCUMENTS if batch.get(key) is not None]
    if not keys:
        return
    positions = batch["position_ids"].flatten()
    starts = torch.nn.functional.pad((positions == 0).nonzero()[:, 0], (0, 1), value=len(positions))
    lengths = starts.diff()
    expected: dict[str, Tensor] = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts)
    expected |= dict.fromkeys(("max_length_q", "max_length_k"), lengths.max())
    expected["seq_idx"] = torch.repeat_interleave(torch.arange(len(lengths), device=positions.device), lengths)
    for key in keys:
        actual = torch.as_tensor(batch[key], device=positions.device).flatten()
        if not torch.equal(actual.to(torch.int64), expected[key].flatten()):
            raise SlipstreamError(
                f"batch[{key!r}] and batch['position_ids'] disagree on where documents start; position_ids are 0 "
                f"there. Make them agree, or leave {key!r} out."
            )


def _lengths(mask: Tensor) -> Tensor:
    """Returns the tokens of each row, (batch,). Raises SlipstreamError unless its padding is all at the right."""
    lengths = (mask != 0).sum(1)
    places = torch.arange(mask.shape[1], device=mask.device)
    wrong = ((places < lengths[:, None]) != (mask == 1)).any(1).nonzero()[:, 0].tolist()
    if not wrong:
        return lengths
    row = wrong[0]
    if mask[row, -1] == 1 and (mask[row, -int(lengths[row]) :] == 1).all():
        raise SlipstreamError(
            f"attention_mask pads row {row} at the left, where the unsplit model counts positions from the padding. "
            "Give tokenizer.padding_side = 'right'."
        )
    raise SlipstreamError(
        f"attention_mask of row {row} isn't ones followed by zeros: a Pipeline leaves out padding at the right, and "
        "masks nothing else. Give documents by document_ids=..., and without attention_mask."
    )


def _check_positions(positions: Tensor, mask: Tensor) -> None:
    """Raises SlipstreamError where positions aren't those that a step gives the rows."""
    follows = (positions[:, 1:] == positions[:, :-1] + 1) | (mask[:, 1:] == 0)
    rows = (~follows.all(1)).nonzero()[:, 0].tolist()
    if rows:
        raise SlipstreamError(
            f"position_ids of row {rows[0]} don't count up in a batch with an attention_mask. For documents, at which "
            "positions restart, leave attention_mask out: with it the unsplit model attends across them."
        )
    if (mask == 0).any() and (positions[:, 0] != 0).any():
        raise SlipstreamError(
            "position_ids that don't begin at 0 in a batch with padding: those of a shorter row do. Leave position_ids "
            "out."
        )


def _check_padding(labels: Tensor, mask: Tensor) -> None:
    """Raises SlipstreamError where padding has labels that count."""
    rows = ((mask == 0) & (labels != IGNORED)).any(1).nonzero()[:, 0].tolist()
    if rows:
        raise SlipstreamError(
            f"labels of row {rows[0]} count where attention_mask is 0, at its padding. Type batch['labels'] = "
            "batch['labels'].masked_fill(batch['attention_mask'] == 0, -100)."
        )
