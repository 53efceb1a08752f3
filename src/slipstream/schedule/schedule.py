"""Every rank's ordered actions as data, and the text form of that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from slipstream.errors import SlipstreamError
from slipstream.schedule.action import BACKWARDS, COMMUNICATION, NUMBER, OPS, Action, Op, ScheduleError

if TYPE_CHECKING:
    from slipstream.array_types import Ints

SliceCounts = int | Sequence[int]  # one number for all microbatches, or one for each


@dataclass(frozen=True, eq=False, repr=False)
class ActionRows(Sequence[tuple[Action, ...]]):
    """Every rank's actions as numbers, which are made into actions when they are first asked for.

    Args:
        firsts: rank r's actions, in order, are `firsts[r]` up to `firsts[r + 1]`.
        op: of each action, its place in OPS.
        stage: of each.
        microbatch: of each.
        slice: of each.
    """

    firsts: Ints
    op: Ints
    stage: Ints
    microbatch: Ints
    slice: Ints

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The op, stage, microbatch and slice of every action."""
        return self.op, self.stage, self.microbatch, self.slice

    @property
    def occurring(self) -> frozenset[tuple[Op, int]]:
        """The (op, stage) of all actions."""
        num_stages = int(self.stage.max(initial=0)) + 1
        numbers = {*(self.op * num_stages + self.stage).tolist()}
        return frozenset((OPS[number // num_stages], number % num_stages) for number in numbers)

    @cached_property
    def _rows(self) -> tuple[tuple[Action, ...], ...]:
        ops, *places = (column.tolist() for column in self.columns)
        actions = tuple(map(Action, map(OPS.__getitem__, ops), *places))
        return tuple(actions[first:end] for first, end in pairwise(self.firsts.tolist()))

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def __getitem__(self, rank: Any) -> Any:
        return self._rows[rank]

    def __eq__(self, other: object) -> bool:
        return self._rows == (other._rows if isinstance(other, ActionRows) else other)

    def __hash__(self) -> int:
        return hash(self._rows)

    def __repr__(self) -> str:
        return repr(self._rows)


@dataclass(frozen=True)
class Schedule:
    """Every rank's actions, in order. The order itself is checked by `validate`.

    Args:
        name: one line of text.
        actions: of every pipeline rank, in its order.
        placement: the rank that holds each stage.
        num_microbatches: microbatches of a step.
        num_slices: token slices of each microbatch, or the most that one has.
        slice_counts: where microbatches differ, the token slices of each; not given: all have `num_slices`.
        reach: `reach[microbatch][i]` is the first slice that slice i attends to (documents and sliding windows
            shorten it); None means that every slice attends to all earlier ones.

    Raises:
        ScheduleError: the counts, the placement and the reach do not fit together.
    """

    name: str
    actions: Sequence[tuple[Action, ...]]
    placement: tuple[int, ...]
    num_microbatches: int
    num_slices: int
    reach: tuple[tuple[int, ...], ...] | None = None
    slice_counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or len(self.name.splitlines()) != 1 or self.name.strip() != self.name:
            raise ScheduleError(f"A schedule's name is one line of text, not {self.name!r}.")
        counts = self.num_stages, self.num_ranks, self.num_microbatches, self.num_slices
        if min(counts) < 1:
            rule = "A schedule needs at least one stage, rank, microbatch and slice"
            raise ScheduleError(f"{rule}, but {self.name} has {', '.join(map(str, counts))}.")
        self._check_slice_counts()
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < self.num_ranks:
                raise ScheduleError(f"Stage {stage} is placed on rank {rank}; the ranks are 0 to {self.num_ranks - 1}.")
        if self.reach is not None:
            self._check_reach(self.reach)

    def _check_slice_counts(self) -> None:
        counts = self.slice_counts or (self.num_slices,) * self.num_microbatches
        if len(counts) != self.num_microbatches or min(counts) < 1 or max(counts) != self.num_slices:
            raise ScheduleError(
                f"{self.name} has slices {' '.join(map(str, counts))}; give {self.num_microbatches} microbatches 1 to "
                f"{self.num_slices} slices each, and at least one of them {self.num_slices}."
            )
        object.__setattr__(self, "slice_counts", counts)

    def _check_reach(self, reach: tuple[tuple[int, ...], ...]) -> None:
        if tuple(map(len, reach)) != self.slice_counts:
            wanted = f"{list(self.slice_counts)}" if self.is_ragged else f"{self.num_slices}"
            raise ScheduleError(
                f"reach has rows of {[len(row) for row in reach]} slices; it needs one row of "
                f"{wanted} for each of {self.num_microbatches} microbatches."
            )
        for microbatch, row in enumerate(reach):
            for i, first in enumerate(row):
                if not 0 <= first <= i:
                    rule = f"slice {i} attends to itself and earlier slices, so it must be 0 to {i}"
                    raise ScheduleError(f"reach[{microbatch}][{i}] is {first}; {rule}.")

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def is_ragged(self) -> bool:
        """Whether microbatches differ in their number of slices."""
        return min(self.slice_counts) < self.num_slices

    @property
    def microbatch_slices(self) -> list[tuple[int, int]]:
        """The (microbatch, slice) of every slice, in order."""
        return [(m, i) for m, count in enumerate(self.slice_counts) for i in range(count)]

    @cached_property
    def positions(self) -> dict[Action, tuple[int, int]]:
        """The place of each action: (rank, index in that rank's order)."""
        return {action: (rank, i) for rank, row in enumerate(self.actions) for i, action in enumerate(row)}

    @cached_property
    def checksum(self) -> int:
        """A number by which processes compare the orders of all ranks."""
        return crc32(repr((self.placement, self.actions)).encode())

    @cached_property
    def kinds(self) -> frozenset[tuple[Op, int]]:
        """The (op, stage) that occur."""
        if isinstance(rows := self.actions, ActionRows):
            return rows.occurring
        return frozenset(action[:2] for row in rows for action in row)

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The ops that occur."""
        return frozenset(op for op, _ in self.kinds)

    @cached_property
    def is_lowered(self) -> bool:
        """Whether sends and receives are written out."""
        return not self.ops.isdisjoint(COMMUNICATION)

    @cached_property
    def peers(self) -> dict[tuple[Op, int], tuple[int, ...]]:
        """By op and stage, the stages at the other ends of messages past neighbours."""
        if isinstance(self.actions, ActionRows) or not self.is_lowered:
            return {}
        ends = {(op, stage, peer) for row in self.actions for op, stage, _, _, peer in row if peer >= 0}
        found: dict[tuple[Op, int], tuple[int, ...]] = {}
        for op, stage, peer in sorted(ends):
            found[op, stage] = (*found.get((op, stage), ()), peer)
        return found

    @property
    def vocabulary_stages(self) -> tuple[int, ...]:
        """The stage next to which each rank has its rows of the vocabulary, if these are spread: the rank's last."""
        return tuple(max(g for g, there in enumerate(self.placement) if there == r) for r in range(self.num_ranks))

    @cached_property
    def spreads_vocabulary(self) -> bool:
        """Whether every rank computes the logits of its rows of the head, rather than the last stage all of them."""
        return Op.V in self.ops

    @cached_property
    def spreads_embedding(self) -> bool:
        """Whether these rows embed tokens too, rather than the first stage all of them."""
        return Op.E in self.ops

    @cached_property
    def has_backward(self) -> bool:
        """Whether there is any backward; evaluation runs forwards only."""
        return not self.ops.isdisjoint(BACKWARDS)

    @cached_property
    def num_frozen_stages(self) -> int:
        """The first stages, which have forwards alone, as their weights are frozen: no gradient is sent to them."""
        return min((stage for op, stage in self.kinds if op in BACKWARDS), default=0)

    def trains(self, stage: int) -> bool:
        """Returns whether a stage has backwards."""
        return self.has_backward and stage >= self.num_frozen_stages

    def text(self, action: Action) -> str:
        """Returns the action's text as this schedule writes it."""
        return action.text(self.num_slices)

    def __str__(self) -> str:
        """Returns the text form that `Schedule.parse` reads: a header, then one line per rank."""
        fields: dict[str, Iterable[object]] = {"schedule": [self.name], "placement": self.placement}
        slices = self.slice_counts if self.is_ragged else [self.num_slices]
        fields |= {"microbatches": [self.num_microbatches], "slices": slices}
        fields |= {f"reach {m}": row for m, row in enumerate(self.reach or ())}
        fields |= {f"rank {rank}": map(self.text, row) for rank, row in enumerate(self.actions)}
        return "\n".join(f"{key}: {' '.join(map(str, words))}".rstrip() for key, words in fields.items())

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Reads the text form back. Unknown, missing and repeated lines raise ScheduleError.

        Older texts have a line `frozen stages: 1`, which now follows from the actions.
        """
        fields = _fields(text)
        reach = [key for key in fields if key.startswith("reach ")]
        ranks = [key for key in fields if key.startswith("rank ")]
        frozen = [key for key in fields if key == "frozen stages"]
        wanted = ["schedule", "placement", "microbatches", "slices", *frozen]
        wanted += [f"reach {m}" for m in range(len(reach))] + [f"rank {rank}" for rank in range(len(ranks))]
        if list(fields) != wanted:
            raise ScheduleError(
                f"The schedule's lines are {', '.join(fields)}; they must be, in this order: schedule, "
                "placement, microbatches, slices, reach 0, reach 1, ... (or no reach), rank 0, rank 1, ..."
            )
        slices = _numbers("slices", fields)
        schedule = cls(
            name=fields["schedule"],
            actions=tuple(_actions(key, fields) for key in ranks),
            placement=_numbers("placement", fields),
            num_microbatches=_numbers("microbatches", fields, single=True)[0],
            num_slices=max(slices),
            reach=tuple(_numbers(key, fields) for key in reach) or None,
            slice_counts=slices if len(slices) > 1 else (),
        )
        said = _numbers("frozen stages", fields, single=True)[0] if frozen else schedule.num_frozen_stages
        if schedule.has_backward and said != schedule.num_frozen_stages:
            raise ScheduleError(
                f"'frozen stages: {said}' doesn't fit the actions: the first stage with a backward is "
                f"{schedule.num_frozen_stages}. Leave the line out."
            )
        return schedule


_EXAMPLES = {"slices": "4' for all microbatches, or 'slices: 3 1 2"}


def _fields(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in filter(str.strip, text.splitlines()):
        key, colon, value = line.partition(":")
        if not colon or key in fields:
            problem = "comes twice" if colon else "has no colon"
            raise ScheduleError(f"The line {line!r} {problem}. Lines look like 'rank 0: 0F0.0 0B0.0'.")
        fields[key] = value.strip()
    return fields


def _numbers(key: str, fields: dict[str, str], single: bool = False) -> tuple[int, ...]:
    words = fields[key].split()
    if not words or not all(re.fullmatch(NUMBER, word) for word in words) or (single and len(words) > 1):
        several = f"whole numbers, as in '{key}: {_EXAMPLES.get(key, '0 1')}'"
        example = f"one whole number, as in '{key}: 4'" if single else several
        raise ScheduleError(f"'{key}: {fields[key]}' needs {example}.")
    return tuple(map(int, words))


def _actions(key: str, fields: dict[str, str]) -> tuple[Action, ...]:
    try:
        return tuple(map(Action.parse, fields[key].split()))
    except ScheduleError as error:
        raise ScheduleError(f"{key}: {error}") from None


class SlicedMicrobatch(NamedTuple):
    """Sequences that go through the pipeline together, in slices of these lengths."""

    num_sequences: int
    slices: tuple[int, ...]


_EXAMPLE = "[[2, [704, 688, 656]], [1, [2048]]] for 3 rows of 2048 tokens"


def given_microbatches(given: Any) -> tuple[SlicedMicrobatch, ...]:
    """Returns the microbatches of a setting: as from `slice_batch`, or pairs of rows and slice lengths.

    Raises SlipstreamError where it is neither, or rows differ in their tokens.
    """
    listed = getattr(given, "microbatches", given)
    try:
        microbatches = tuple(SlicedMicrobatch(index(rows), tuple(map(index, slices))) for rows, slices in listed)
    except (TypeError, ValueError):
        microbatches = ()
    if not microbatches or any(min(m.num_sequences, *m.slices, len(m.slices)) < 1 for m in microbatches):
        raise SlipstreamError(
            f"microbatches={given!r}: give each one's rows and the tokens of its slices, such as {_EXAMPLE}."
        )
    for place, microbatch in enumerate(microbatches):
        if sum(microbatch.slices) != sum(microbatches[0].slices):
            raise SlipstreamError(
                f"microbatches[{place}] has slices of {sum(microbatch.slices)} tokens in all, microbatches[0] of "
                f"{sum(microbatches[0].slices)}: the rows of a batch have one length. Make them equal."
            )
    return microbatches


def check_microbatches(
    given: Sequence[SlicedMicrobatch], num_rows: int, length: int, rows_of: str = "the batch", tokens_of: str = "it"
) -> None:
    """Raises SlipstreamError where microbatches don't add up to a batch of `num_rows` sequences of `length` tokens."""
    rows, tokens = sum(microbatch.num_sequences for microbatch in given), sum(given[0].slices)
    shown = [[microbatch.num_sequences, [*microbatch.slices]] for microbatch in given]
    if rows != num_rows:
        raise SlipstreamError(f"microbatches={shown} have {rows} rows, but {rows_of} has {num_rows}. Make them equal.")
    if tokens != length:
        raise SlipstreamError(
            f"microbatches={shown} have slices of {tokens} tokens in all, but {tokens_of} has rows of {length}. Make "
            "them equal."
        )


def slice_lengths(
    slices: int | Sequence[int], length: int, tokens_of: str = "the sequence has ", setting: str = "slices"
) -> list[int]:
    """Returns the tokens of every slice: a count cuts evenly, with the first slices one token longer if need be.

    Raises SlipstreamError where they don't add up to the sequence length.
    """
    if isinstance(slices, int):
        if not 1 <= slices <= length:
            raise SlipstreamError(f"{setting}={slices}: a sequence of {length} tokens takes 1 to {length} slices.")
        return [length // slices + (i < length % slices) for i in range(slices)]
    if sum(slices) != length or min(slices) < 1:
        difference = length - sum(slices)
        raise SlipstreamError(
            f"{setting}={list(slices)} add up to {sum(slices)} tokens, but {tokens_of}{length}: all must be positive "
            f"and sum to it. {'Add' if difference > 0 else 'Take away'} {abs(difference)}, or give a count, such as "
            f"{setting}={len(slices)}."
        )
    return list(slices)
