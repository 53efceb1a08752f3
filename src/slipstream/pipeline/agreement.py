"""Finds out where ranks call different methods of a Pipeline, or give its pipelines different batches."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.comm import TransportError
from slipstream.errors import SlipstreamError
from slipstream.parallel import PendingWork, Ranks, ranks_text
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.watchdog import waiting

_CALLS = (
    "step",
    "evaluate",
    "logits",
    "log_probabilities",
    "clip_grad_norm_",
    "state_dict",
    "save_pretrained",
    "save",
    "load",
    "sequence_log_probabilities",
    "timeline",
    "memory_table",
)
_NUM_VALUES = 5
_made: Counter[tuple[int, ...]] = Counter()  # the number of Pipelines in this process, per group of global ranks


class RankValues(NamedTuple):
    """The values that a rank sends at the beginning of a call."""

    rank: int
    replica: int
    values: list[int]


class CallAgreement:
    """Lets all ranks of a mesh find out together whether they are in one call, and exchange a few numbers.

    Every collective method of a Pipeline begins with this all-gather of seven numbers for each rank. It has one shape,
    so that calls that differ meet in it: a gather of weights that met a sum of losses would end the processes, or wait.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        together = tuple(ranks.world.global_ranks)
        _made[together] += 1
        # Numbers the Pipeline: its ranks make their common Pipelines in the same order, so they agree on the number.
        self._number = _made[together]
        self.name = _CALLS[0]
        """The method that a message belongs to. A method whose message has numbers of a batch sets it beforehand."""
        self._asked: tuple[str, Tensor, PendingWork | None] | None = None  # the values being gathered

    def begin(self, name: str, values: Sequence[int] | Tensor = ()) -> list[RankValues]:
        """Returns the values that every rank sends at the beginning of the method of this name. Collective.

        Raises SlipstreamError on every rank where others call other methods, and TransportError where a rank has ended.
        """
        self.name = name
        self.start(values)
        return self.finish()

    def start(self, values: Sequence[int] | Tensor, of_list: bool = False) -> None:
        """Starts to exchange some numbers, up to five int64, in the method that runs; `of_list` where they are those of
        its plan for a list of sequences, which comes before those of the batch. Collective."""
        self.finish()
        if self._ranks.world.size == 1:
            return
        device = self._ranks.device
        numbers = values.to(device) if isinstance(values, Tensor) else torch.tensor(values, device=device).long()
        call = 2 * (self._number * len(_CALLS) + _CALLS.index(self.name)) + of_list
        head = torch.tensor([call, self._ranks.data.rank, *[0] * (_NUM_VALUES - len(numbers))], device=device)
        self._asked = self.name, *self._ranks.world.start_all_gather(torch.cat([head[:2], numbers, head[2:]]))

    def finish(self) -> list[RankValues]:
        """Waits for the gathering that has begun; returns every rank's values, none where there is none to wait for."""
        if self._asked is None:
            return []
        (name, gathered, work), self._asked = self._asked, None
        world = self._ranks.world
        try:
            if work is not None:
                of_which = f" of Pipeline {self._number}" if self._number > 1 else ""
                with waiting(f"{name}{of_which}, until every rank calls it".encode()):
                    work.wait()
        except RuntimeError as error:
            raise TransportError(world.explained(f"{name}, which every rank must call,", error)) from error
        calls = list(zip(world.global_ranks, gathered.tolist(), strict=True))
        ranks_of: defaultdict[int, list[int]] = defaultdict(list)
        for rank, (call, *_) in calls:
            ranks_of[call].append(rank)
        if len(ranks_of) > 1:
            raise _difference(ranks_of)
        return [RankValues(rank, replica, values) for rank, (_, replica, *values) in calls]


def _difference(ranks_of: dict[int, list[int]]) -> SlipstreamError:
    """Returns the error that says which ranks are in which call."""
    texts = {}
    numbers = {call // 2 // len(_CALLS) for call in ranks_of}
    for call in ranks_of:
        pipeline_index, place = divmod(call // 2, len(_CALLS))
        texts[call] = f"{_CALLS[place]}{' of a list of sequences' if call % 2 else ''}"
        if len(numbers) > 1:
            texts[call] += f" of Pipeline {pipeline_index}, in the order in which they were made"
    lines = "\n  ".join(f"{ranks_text(ranks)}: {texts[call]}" for call, ranks in ranks_of.items())
    where = "the Pipeline" if len(numbers) == 1 else "Pipelines"
    calls = " and ".join(text.partition(",")[0] for text in texts.values())
    return SlipstreamError(
        f"the ranks call different methods of {where}, each of which waits for every rank:\n  {lines}\nCall {calls} on "
        "every rank, in the same order. Under `if pipe.leads:` belongs only what is done with a result, such as "
        "printing it; save and save_pretrained write on one rank by themselves."
    )


# A larger tensor is compared by elements at equal distances, so that no more than this is read.
_MOST_BYTES = 2**20
_REFUSED = -1
NOTHING_TRAINED = (
    "nothing would be trained: requires_grad is False of every parameter. For an adapter that PEFT has loaded, "
    "type peft.PeftModel.from_pretrained(model, folder, is_trainable=True); for any other model, call "
    "requires_grad_() on what is to be trained, before the Pipeline is made. pipe.evaluate(...) takes batches "
    "as step does, and gives the loss alone."
)


class _Totals(NamedTuple):
    """The totals over the batches of all replicas, and whether any rank trains something."""

    num_valid: int
    max_position: int
    trains: bool


_NOTHING = _Totals(num_valid=0, max_position=-1, trains=True)


class BatchAgreement:
    """Lets all ranks of a mesh find out together whether each pipeline's ranks have one batch, how many targets count
    in all, which position is the largest, whether anything is trained, and, where layers of replicas exchange tokens,
    whether all run the same actions.

    The numbers travel in the message with which the call begins. On CPUs, where there are no replicas, no ranks that
    share layers and no memory limit, it travels while the first stage computes its first slice: call `finish` before
    anything else is sent. Every method is collective, and called in the same order.
    """

    def __init__(self, ranks: Ranks, calls: CallAgreement, has_limit: bool) -> None:
        """`has_limit` where ranks exchange the memory of a step before it sends anything."""
        self._ranks = ranks
        self._calls = calls
        # Without it a GPU would have to be waited for later, when it has work.
        self._waits = has_limit or ranks.world.size > ranks.pipeline.size or ranks.device.type != "cpu"
        self._whole: Batch | None = None

    @contextmanager
    def telling_refusals(self) -> Iterator[None]:
        """Joins `agree` on a rank that raises SlipstreamError within, so that the others fail too instead of waiting.
        Whatever runs within is not collective."""
        try:
            yield
        except SlipstreamError:
            if self._ranks.world.size > 1:
                self._ask(_REFUSED, _NOTHING)
                self._calls.finish()
            raise

    def agree(
        self, whole: Batch, batch: SplitBatch, order: int, needs_targets: bool = True, trains: bool = True
    ) -> SplitBatch:
        """Returns the batch with the valid targets of all replicas, and begins to compare the whole one with those of
        the other ranks, and `order`, the checksum of the actions that run it.

        Raises SlipstreamError on every rank where one has refused its batch, no target counts that is needed, or
        replicas with different experts would run different actions; where a pipeline's ranks differ, or no rank
        `trains`, this does or `finish`.
        """
        totals = self._start(whole, _Totals(batch.num_valid, batch.max_position, trains), order)
        if totals.num_valid == 0 and needs_targets:
            # The step ends here, so that ranks whose own batch is fine don't wait for this one.
            self.finish()
            raise SlipstreamError(
                "no label of this batch counts: all are -100, a causal LM's after shifting. Leave such batches out."
            )
        if totals.max_position > batch.max_position:
            batch = batch.with_max_position(totals.max_position)
        return replace(batch, num_valid=totals.num_valid)

    def compare(self, whole: Batch) -> None:
        """Raises SlipstreamError on every rank where a pipeline's ranks have different batches."""
        self._start(whole, _NOTHING)
        self.finish()

    def finish(self) -> _Totals:
        """Waits for the comparison, where that hasn't been done; returns the totals of all replicas, 0 targets where
        there was nothing to wait for. Raises SlipstreamError on every rank where a pipeline's ranks differ, ranks call
        different methods or nothing is trained, and TransportError where a rank has ended."""
        answers = self._calls.finish() if self._ranks.world.size > 1 else []
        if not answers:
            return _NOTHING
        replicas: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        totals: dict[int, _Totals] = {}
        for rank, replica, (checksum, num_valid, largest, trains, _) in answers:
            replicas[replica].append((checksum, rank))
            others = totals.get(replica)
            totals[replica] = _Totals(num_valid, largest, bool(trains) or (others is not None and others.trains))
        refused = [rank for entries in replicas.values() for checksum, rank in entries if checksum == _REFUSED]
        if refused:
            raise SlipstreamError(
                f"the step can't run, as {ranks_text(refused)} refused its batch: see the message there."
            )
        if any(len(dict(entries)) > 1 for entries in replicas.values()):
            self._raise_difference(replicas)
        if self._ranks.replicas_act_together and len({values[-1] for *_, values in answers}) > 1:
            raise SlipstreamError(
                "the replicas would run different actions, in each of which their layers exchange tokens. Give all "
                "of them rows of one length, or slices as a count that each row has tokens for."
            )
        every = [*totals.values()]
        if not any(total.trains for total in every):
            raise SlipstreamError(NOTHING_TRAINED)
        largest = max(total.max_position for total in every)
        return _Totals(sum(total.num_valid for total in every), largest, trains=True)

    def _start(self, whole: Batch, own: _Totals, order: int = 0) -> _Totals:
        """Begins to compare a batch with those of the other ranks; returns the totals of all replicas."""
        if self._ranks.world.size == 1:
            if not own.trains:
                raise SlipstreamError(NOTHING_TRAINED)
            return own
        self._whole = whole
        self._ask(_checksum(whole), own, order)
        return self.finish() if self._waits else own

    def _ask(self, checksum: int, own: _Totals, order: int = 0) -> None:
        self.finish()
        self._calls.start([checksum, *own, order])

    def _raise_difference(self, replicas: dict[int, list[tuple[int, int]]]) -> None:
        """Raises the error that names the ranks that differ, and the batch of each."""
        assert self._whole is not None
        texts = dict(zip(self._ranks.world.global_ranks, self._ranks.world.gather(_describe(self._whole)), strict=True))
        lines = []
        for entries in replicas.values():
            by_checksum: defaultdict[int, list[int]] = defaultdict(list)
            for checksum, rank in entries:
                by_checksum[checksum].append(rank)
            if len(by_checksum) > 1:
                lines += [f"{ranks_text(ranks)}: {texts[ranks[0]]}" for ranks in by_checksum.values()]
        raise SlipstreamError(
            "the ranks of one pipeline were given different batches:\n  "
            + "\n  ".join(lines)
            + "\nGive them one batch: a sampler takes num_replicas=pipe.num_replicas and rank=pipe.replica, and the "
            "same seed on every rank. A loader that accelerator.prepare has returned deals out batches by process: use "
            "it as it was before."
        )


def _tensors(whole: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that a step was given, with their names."""
    for values in whole.every:
        for tensor in [values.rows] if isinstance(values.rows, Tensor) else values.rows:
            yield values.rule.name, tensor
    if whole.sequence_values is not None:
        yield "sequence_values", whole.sequence_values


def _checksum(whole: Batch) -> int:
    """Returns a number of the shapes, dtypes and contents of a batch."""
    value = 0
    for name, tensor in _tensors(whole):
        value = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), value)
        flat = tensor.detach().reshape(-1)
        flat = flat[:: max(1, -(-flat.nbytes // _MOST_BYTES))].contiguous().cpu()
        value = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), value)
    return value


def _describe(whole: Batch) -> str:
    """Describes a batch: shapes, dtypes, and the sum of the elements, in which contents mostly differ."""
    if whole.is_ragged:
        return f"sequences of {[*map(len, whole.labels)]} tokens, checksum {_checksum(whole):08x}"
    tensors = (f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in _tensors(whole))
    return f"{', '.join(tensors)}, checksum {_checksum(whole):08x}"
