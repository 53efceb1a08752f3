"""Compares what the ranks of each pipeline were given as a step's batch, by one small message."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.parallel import Ranks
from slipstream.pipeline.batch import SplitBatch, WholeBatch
from slipstream.pipeline.call_agreement import CallAgreement, named
from slipstream.pipeline.sequences import Sequences

_MOST_BYTES = 2**20  # of a tensor that are read; of a larger one, elements at equal distances
_REFUSED = -1


class _Totals(NamedTuple):
    """What the batches of all replicas have together, and whether any rank trains something."""

    num_valid: int
    max_position: int
    trains: bool


_NOTHING = _Totals(num_valid=0, max_position=-1, trains=True)


class BatchAgreement:
    """Lets all ranks of a mesh find out together whether each pipeline's ranks have one batch, how many targets count
    in all, which position is the largest, and whether anything is trained.

    The numbers travel in the message with which the call begins. On CPUs, where there are no replicas, no ranks that
    share layers and no memory limit, it travels while the first stage computes its first slice: call `finish` before
    anything else is sent. Every method is collective, and called in the same order.
    """

    def __init__(self, ranks: Ranks, calls: CallAgreement, has_limit: bool) -> None:
        """`has_limit` where ranks exchange what a step would hold before it sends anything."""
        self._ranks, self._calls = ranks, calls
        # Without it a GPU would have to be waited for later, when it has work.
        self._waits = has_limit or ranks.world.size > ranks.pipeline.size or ranks.device.type != "cpu"
        self._whole: WholeBatch | Sequences | None = None

    def on(
        self,
        whole: WholeBatch | Sequences,
        split: Callable[[], SplitBatch],
        needs_targets: bool = True,
        trains: bool = True,
    ) -> SplitBatch:
        """Returns what `split` makes of the batch, with the valid targets of all replicas, and begins to compare the
        batch with those of the other ranks.

        Raises SlipstreamError on every rank where it can't be split on one, or no target counts that is needed; where a
        pipeline's ranks differ, or no rank `trains`, this does or `finish`.
        """
        try:
            batch = split()
        except SlipstreamError:
            self._refuse()
            raise
        totals = self._start(whole, _Totals(batch.num_valid, batch.max_position, trains))
        if totals.num_valid == 0 and needs_targets:
            self.finish()  # other ranks may have other batches
            raise SlipstreamError(
                "no label of this batch counts: all are -100, a causal LM's after shifting. Leave such batches out."
            )
        if totals.max_position > batch.max_position:
            batch = batch.with_max_position(totals.max_position)
        return replace(batch, num_valid=totals.num_valid)

    def compare(self, whole: WholeBatch | Sequences) -> None:
        """Raises SlipstreamError on every rank where a pipeline's ranks have different batches."""
        self._start(whole, _NOTHING)
        self.finish()

    def finish(self) -> _Totals:
        """Waits for the comparison, where that hasn't been done; returns what all replicas have, 0 targets where there
        was nothing to wait for. Raises SlipstreamError on every rank where a pipeline's ranks differ, ranks call
        different methods or nothing is trained, and TransportError where a rank has ended."""
        replicas: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        totals: dict[int, _Totals] = {}
        for rank, replica, (checksum, num_valid, largest, trains) in self._calls.finish():
            replicas[replica].append((checksum, rank))
            others = totals.get(replica)
            totals[replica] = _Totals(num_valid, largest, bool(trains) or (others is not None and others.trains))
        refused = [rank for found in replicas.values() for checksum, rank in found if checksum == _REFUSED]
        if refused:
            raise SlipstreamError(f"the step can't run, as {named(refused)} refused its batch: see the message there.")
        if any(len(dict(found)) > 1 for found in replicas.values()):
            self._raise_difference(replicas)
        found = [*totals.values()] or [_NOTHING]
        _check_trained(any(each.trains for each in found))
        largest = max(each.max_position for each in found)
        return _Totals(sum(each.num_valid for each in found), largest, trains=True)

    def _start(self, whole: WholeBatch | Sequences, own: _Totals) -> _Totals:
        """Begins to compare a batch with those of the other ranks; returns what all replicas have."""
        if self._ranks.world.size == 1:
            _check_trained(own.trains)
            return own
        self._whole = whole
        self._ask(_checksum(whole), own)
        return self.finish() if self._waits else own

    def _refuse(self) -> None:
        """Takes part for a rank that can't take its batch and raises an error of its own: the others then know it."""
        if self._ranks.world.size > 1:
            self._ask(_REFUSED, _NOTHING)
            self._calls.finish()

    def _ask(self, checksum: int, own: _Totals) -> None:
        self.finish()
        self._calls.start([checksum, *own])

    def _raise_difference(self, replicas: dict[int, list[tuple[int, int]]]) -> None:
        """Raises the error that names the ranks that differ, and what each was given."""
        assert self._whole is not None
        texts = dict(zip(self._ranks.world.global_ranks, self._ranks.world.gather(_describe(self._whole)), strict=True))
        lines = []
        for found in replicas.values():
            by_checksum: defaultdict[int, list[int]] = defaultdict(list)
            for checksum, rank in found:
                by_checksum[checksum].append(rank)
            if len(by_checksum) > 1:
                lines += [f"{named(ranks)}: {texts[ranks[0]]}" for ranks in by_checksum.values()]
        raise SlipstreamError(
            "the ranks of one pipeline were given different batches:\n  "
            + "\n  ".join(lines)
            + "\nGive them one batch: a sampler takes num_replicas=pipe.num_replicas and rank=pipe.replica, and the "
            "same seed on every rank."
        )


def _check_trained(is_trained: bool) -> None:
    if not is_trained:
        raise SlipstreamError(
            "nothing would be trained: requires_grad is False of every parameter. Of an adapter that PEFT has loaded "
            "type peft.PeftModel.from_pretrained(model, folder, is_trainable=True); of any other model call "
            "requires_grad_() of what is to be trained before the Pipeline is made. pipe.evaluate(...) takes batches "
            "as step does, and gives the loss alone."
        )


def _tensors(whole: WholeBatch | Sequences) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that a step was given, with what each is."""
    for name in ("inputs", "targets", "position_ids", "document_ids", "sequence_values"):
        for tensor in _flat(getattr(whole, name, None)):
            yield name, tensor


def _flat(given: Any) -> Iterable[Tensor]:
    if given is None:
        return []
    return [given] if isinstance(given, Tensor) else [tensor for each in given for tensor in _flat(each)]


def _checksum(whole: WholeBatch | Sequences) -> int:
    """Returns a number of the shapes, dtypes and contents of a batch."""
    value = 0
    for name, tensor in _tensors(whole):
        value = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), value)
        flat = tensor.detach().reshape(-1)
        flat = flat[:: max(1, -(-flat.nbytes // _MOST_BYTES))].contiguous().cpu()
        value = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), value)
    return value


def _describe(whole: WholeBatch | Sequences) -> str:
    """Returns what a batch looks like: shapes, dtypes, and the sum of the elements, in which contents mostly differ."""
    if isinstance(whole, Sequences):
        lengths = [len(targets) for targets in whole.targets]
        return f"sequences of {lengths} tokens, checksum {_checksum(whole):08x}"
    tensors = (f"{name} {tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for name, each in _tensors(whole))
    return f"{', '.join(tensors)}, checksum {_checksum(whole):08x}"
