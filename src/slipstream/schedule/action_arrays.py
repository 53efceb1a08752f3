"""The actions of a schedule as arrays: the predecessors, rank and kind of each, and passes that add actions.

The rules of order are asked for the actions of one slice (`slipstream.schedule.predecessors`), and hold for all slices
that have the same actions, as their neighbours do: none but REDUCE_GRAD, which follows its rank's order, needs one of
another microbatch, or without documents of a slice farther away.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.schedule.action import COMMUNICATION, NUMBERS, OPS, Action, Op, ScheduleError
from slipstream.schedule.rules import predecessors, reason
from slipstream.schedule.schedule import ActionRows, Schedule
from slipstream.schedule.sweep import ActionGraph, ActionOrder, HeadGaps, Replays, StageSlots


class Sweeps(Protocol):
    """The functions that sweep over actions, compiled or not."""

    def start_times(self, graph: ActionGraph, order: ActionOrder) -> Floats: ...

    def place_replays(self, graph: ActionGraph, order: ActionOrder, replays: Replays) -> None: ...

    def place_due(self, graph: ActionGraph, priority: Floats, slots: StageSlots) -> ActionOrder: ...

    def fill_gaps(self, graph: ActionGraph, priority: Floats, gaps: HeadGaps) -> tuple[ActionOrder, Floats]: ...


def sweeps(compiled: bool) -> Sweeps:
    """Returns the functions that sweep over actions: compiled ones where they are loaded already, or where it pays to
    load numba for them, which takes a while."""
    if compiled or "slipstream.schedule.compiled_sweep" in sys.modules:
        from slipstream.schedule import compiled_sweep

        return compiled_sweep
    from slipstream.schedule import sweep

    return sweep


class Precedence(NamedTuple):
    """Which actions come before and after each, as an ActionGraph has them."""

    first_before: Ints
    before: Ints
    first_after: Ints
    after: Ints

    @classmethod
    def of(cls, op: Ints, stage: Ints, microbatch: Ints, index: Ints, shape: Schedule) -> Precedence:
        """Returns the precedence of numbered actions by the rules.

        Args:
            op: of each action, its place in OPS.
            stage: of each.
            microbatch: of each.
            index: the slice of each.
            shape: a schedule with the placement, reach and slice counts; its order doesn't count.
        """
        begins = [*accumulate(shape.slice_counts, initial=0)]
        slices, place = np.array(begins)[microbatch] + index, op * shape.num_stages + stage
        order = np.lexsort((place, slices))
        firsts, places = np.searchsorted(slices[order], np.arange(begins[-1] + 1)), place[order]
        actions = [places[first:end].tobytes() for first, end in pairwise(firsts.tolist())]
        alike: dict[tuple[tuple[bytes, ...], int, tuple[int, ...] | None], list[int]] = {}
        for m, (begin, end) in enumerate(pairwise(begins)):
            reach = None if shape.reach is None else shape.reach[m]
            for i in range(begin, end):
                low, high = (max(i - 1, begin), min(i + 2, end)) if reach is None else (begin, end)
                alike.setdefault((tuple(actions[low:high]), i - low, reach), []).append(i)
        pairs = []
        for key, members in alike.items():
            before_slice, before, after = _before_slice(shape.placement, *key)
            rows = np.array(members)[:, None]
            pairs.append((order[firsts[rows + before_slice] + before].ravel(), order[firsts[rows] + after].ravel()))
        before, after = (np.concatenate(side) for side in zip(*pairs, strict=True))
        return cls.of_pairs(before, after, len(op))

    @classmethod
    def of_pairs(cls, before: Ints, after: Ints, size: int) -> Precedence:
        """Returns the precedence of `size` actions, given pairs of which the one comes before the other."""
        sizes = (np.bincount(side, minlength=size) for side in (after, before))
        first_before, first_after = (np.concatenate([[0], np.cumsum(size)]) for size in sizes)
        in_order = np.argsort(after, kind="stable")
        before, after = before[in_order], after[in_order]
        return cls(first_before, before, first_after, after[np.argsort(before, kind="stable")])

    def with_pairs(self, before: Ints, after: Ints) -> Precedence:
        """Returns the precedence with further pairs."""
        size = len(self.first_before) - 1
        users = np.repeat(np.arange(size), np.diff(self.first_before))
        return Precedence.of_pairs(np.concatenate([self.before, before]), np.concatenate([users, after]), size)


@lru_cache(maxsize=4096)
def _before_slice(
    placement: tuple[int, ...], places: tuple[bytes, ...], index: int, reach: tuple[int, ...] | None
) -> tuple[Ints, Ints, Ints]:
    """Returns the pairs of actions of which the one comes before the other, which is of slice `index`: how many slices
    later the first one's is, and the two by their places in their slices."""
    schedule, numbers = _of_slices(placement, places, reach)
    pairs = [
        (before, action) for action in numbers if action.slice == index for before in predecessors(action, schedule)
    ]
    if missing := next((pair for pair in pairs if pair[0] not in numbers), None):
        raise ScheduleError(f"{missing[1]} waits for {missing[0]}, which the schedule lacks: {reason(*missing[::-1])}.")
    numbered = [(before.slice - index, numbers[before], numbers[action]) for before, action in pairs]
    slices, before, after = np.array(numbered, np.int64).reshape(-1, 3).T
    return slices, before, after


@lru_cache(maxsize=8)
def _of_slices(
    placement: tuple[int, ...], places: tuple[bytes, ...], reach: tuple[int, ...] | None
) -> tuple[Schedule, dict[Action, int]]:
    """Returns a schedule of a microbatch with these actions in its slices, and the place of each in its slice."""
    numbers = {
        Action(OPS[place // len(placement)], place % len(placement), 0, index): number
        for index, of_slice in enumerate(places)
        for number, place in enumerate(np.frombuffer(of_slice, np.int64).tolist())
    }
    # The rules ask which actions there are, not in whose row.
    rows, reaches = (tuple(numbers), *[()] * max(placement)), None if reach is None else (reach,)
    return Schedule("rules", rows, placement, 1, len(places), reaches), numbers


class ContextMarks(NamedTuple):
    """The actions at which a microbatch's keys, values and their gradients on a stage come and go."""

    opens: Flags  # the microbatch's first forward
    begins: Flags  # the first B or I
    closes: Flags  # the last B or I, or the last F of a stage without backwards


def first_of(key: Ints, among: Flags) -> Flags:
    """Marks the first entry of every key, of the entries in `among`."""
    places = np.flatnonzero(among)[::-1]
    firsts = np.full(key.max(initial=0) + 1, -1)
    # The last one of several with one key stays.
    firsts[key[places]] = places
    return np.asarray(among & (firsts[key] == np.arange(len(key))))


@dataclass(frozen=True, eq=False)
class ActionArrays(ActionRows):
    """The rows of a valid schedule, and what its rules of order and its counts say of them."""

    schedule: Schedule
    alike: bool  # whether all microbatches take the same times

    @classmethod
    def of(cls, schedule: Schedule, alike: bool = True) -> ActionArrays:
        """Returns the arrays of a schedule, without messages past neighbours; microbatches with different numbers of
        slices aren't alike."""
        of_all = schedule, alike and not schedule.is_ragged
        if isinstance(rows := schedule.actions, ActionRows):
            return cls(rows.firsts, *rows.columns, *of_all)
        kept = [[action for action in row if action.peer < 0] for row in rows] if schedule.peers else rows
        actions = np.array([(NUMBERS[op], *place) for row in kept for op, *place, _ in row], np.int64).reshape(-1, 4)
        op, stage, microbatch, index = np.ascontiguousarray(actions.T)
        return cls(np.cumsum([0, *map(len, kept)]), op, stage, microbatch, index, *of_all)

    def only(self, chosen: Flags | Ints) -> Schedule:
        """Returns the schedule with these actions alone: in their order, or of each rank in the order given."""
        ranks = self.rank[chosen]
        numbers = np.arange(len(self.op))[chosen][np.argsort(ranks, kind="stable")]
        firsts = np.searchsorted(np.sort(ranks), np.arange(len(self.firsts)))
        return replace(self.schedule, actions=ActionRows(firsts, *(column[numbers] for column in self.columns)))

    def with_halves(self, stages: Collection[int]) -> Schedule:
        """Returns the schedule with I and W in the place of each B of these stages."""
        split = np.flatnonzero(self.is_one_of(Op.B) & np.isin(self.stage, [*stages]))
        op = self.op.copy()
        op[split] = NUMBERS[Op.I]
        return replace(self, op=op).with_more(split + 1, np.full(len(split), NUMBERS[Op.W]), split)

    def with_whole_backwards(self) -> Schedule:
        """Returns the schedule with B in the place of each I, and without W's."""
        op = np.where(self.is_one_of(Op.I), NUMBERS[Op.B], self.op)
        return replace(self, op=op).only(~self.is_one_of(Op.W))

    def with_more(self, before: Ints, op: Ints, like: Ints) -> Schedule:
        """Returns the schedule with more actions in its rows.

        Args:
            before: the action before which each stands; several before the same one stand in this order.
            op: of each, its place in OPS.
            like: the action on whose slice and stage each is.
        """
        added = np.cumsum([0, *np.bincount(self.rank[like], minlength=len(self))])
        others = (np.insert(column, before, column[like]) for column in self.columns[1:])
        rows = ActionRows(self.firsts + added, np.insert(self.op, before, op), *others)
        return replace(self.schedule, actions=rows)

    @cached_property
    def kinds(self) -> tuple[list[Action], Ints]:
        """The actions that take different times, and the index of the one that each action is like.

        Where microbatches are alike, their actions are like those of the first.
        """
        schedule = self.schedule
        microbatch = np.zeros_like(self.microbatch) if self.alike else self.microbatch
        shape = len(OPS), schedule.num_stages, schedule.num_microbatches, schedule.num_slices
        numbers = np.ravel_multi_index((self.op, self.stage, microbatch, self.slice), shape)
        different, like = np.unique(numbers, return_inverse=True)
        places = np.transpose(np.unravel_index(different, shape)).tolist()
        return [Action(OPS[op], *place) for op, *place in places], like

    def each(self, value: Callable[[Action], float], among: Flags | Ints | slice | None = None) -> Floats:
        """Returns the value of every action, or of those in `among`, computed once for those that only differ in a
        microbatch like others."""
        different, like = self.kinds
        asked = np.arange(len(different)) if among is None else np.unique(like[among])
        values = np.zeros(len(different))
        values[asked] = [value(different[kind]) for kind in asked.tolist()]
        return values[like]

    @cached_property
    def rank(self) -> Ints:
        """The rank of every action."""
        return np.repeat(np.arange(len(self.firsts) - 1), np.diff(self.firsts))

    @cached_property
    def precedence(self) -> Precedence:
        """The predecessors and successors of every action."""
        return Precedence.of(self.op, self.stage, self.microbatch, self.slice, self.schedule)

    @cached_property
    def slices(self) -> Ints:
        """The number of each action's slice among those of all microbatches."""
        counts = np.array(self.schedule.slice_counts)
        numbers: Ints = (np.cumsum(counts) - counts)[self.microbatch] + self.slice
        return numbers

    def is_one_of(self, *ops: Op) -> Flags:
        """Marks the actions that have one of these ops."""
        return np.isin(np.arange(len(OPS)), [NUMBERS[op] for op in ops])[self.op]

    def places(self, *ops: Op) -> Ints:
        """Returns which action has one of these ops, (stages, slices of all microbatches); -1 for none."""
        table = np.full((self.schedule.num_stages, sum(self.schedule.slice_counts)), -1)
        mine = np.flatnonzero(self.is_one_of(*ops))
        table[self.stage[mine], self.slices[mine]] = mine
        return table

    def of_slice(self, *ops: Op) -> Ints:
        """Returns for every action the one of its slice on its stage that has one of these ops; -1 for none."""
        numbers: Ints = self.places(*ops)[self.stage, self.slices]
        return numbers

    def has(self, op: Op) -> Flags:
        """Marks the actions whose slice has such an op on their stage."""
        return self.of_slice(op) >= 0

    @cached_property
    def producer(self) -> Ints:
        """The action of the stage before or after, on another rank, whose result each action needs, or -1."""
        first_before, before, *_ = self.precedence
        after = np.repeat(np.arange(len(self.op)), np.diff(first_before))
        sent = self.is_one_of(Op.F, Op.B, Op.I)
        crosses = (self.rank[before] != self.rank[after]) & sent[before] & sent[after]
        producer = np.full(len(self.op), -1)
        producer[after[crosses]] = before[crosses]
        return producer

    @cached_property
    def trains(self) -> Flags:
        """Whether the stage of every action has backwards."""
        flags: Flags = np.array([*map(self.schedule.trains, range(self.schedule.num_stages))])[self.stage]
        return flags

    @cached_property
    def context_marks(self) -> ContextMarks:
        """When the context of each microbatch comes and goes."""
        chain = self.stage * self.schedule.num_microbatches + self.microbatch
        forward, backward = self.is_one_of(Op.F), self.is_one_of(Op.B, Op.I)
        last = np.where(self.trains, backward, forward)
        closes = first_of(chain[::-1], last[::-1])[::-1]
        return ContextMarks(first_of(chain, forward), first_of(chain, backward), closes)

    def graph(self, seconds: Floats, chain: Ints | None = None, precedence: Precedence | None = None) -> ActionGraph:
        """Returns the actions for a sweep, with messages that take no time, and without bytes.

        Args:
            seconds: of each action.
            chain: of each. None: its microbatch.
            precedence: what comes before what. None: the rules alone.
        """
        size, nothing = len(self.op), np.zeros(len(self.op))
        chain = self.microbatch if chain is None else chain
        num_ranks, num_chains = len(self), int(chain.max(initial=0)) + 1
        return ActionGraph(
            seconds=seconds,
            exists=np.ones(size, np.bool_),
            rank=self.rank,
            chain=chain,
            channel=np.full(size, -1),
            link_seconds=nothing,
            link_occupied=nothing,
            acquired=nothing,
            released=nothing,
            **(precedence or self.precedence)._asdict(),
            limits=np.full(num_ranks, np.inf),
            counts=np.array([num_ranks, 0, num_chains, self.longest_row]),
        )

    @property
    def longest_row(self) -> int:
        """The number of actions of the busiest rank."""
        return int(np.diff(self.firsts).max())

    @cached_property
    def order(self) -> ActionOrder:
        """The rows, as a sweep has them."""
        return ActionOrder.of([range(*pair) for pair in pairwise(self.firsts.tolist())], self.longest_row)

    def ends(self, seconds: Floats, compiled: bool = False) -> Floats:
        """Returns when each action ends, if messages take no time."""
        ends: Floats = sweeps(compiled).start_times(self.graph(seconds), self.order) + seconds
        return ends

    def with_recompute(
        self, stages: Collection[int], alive: int, seconds: Callable[[Action], float], compiled: bool
    ) -> Schedule:
        """Returns the schedule with an R for the backwards of `stages`; see `slipstream.schedule.add_recompute`."""
        number, forward, reload = np.arange(len(self.op)), self.of_slice(Op.F), self.of_slice(Op.RELOAD)
        chosen = self.is_one_of(Op.B, Op.I) & np.isin(self.stage, [*stages])
        # Right after its forward, on the same rank, a backward needs no R.
        waits = chosen & (forward != number - 1)
        replays = Replays(
            firsts=self.firsts,
            seconds=self.each(lambda action: seconds(action.with_op(Op.R)), among=waits),
            waits=waits,
            whole=np.isin(number, forward[chosen & ~waits]),
            chosen=chosen,
            inputs=np.maximum(forward, reload),
            most_alive=alive,
            places=np.full(len(number), -1),
            alive=np.zeros(len(self), np.int64),
            following=self.firsts[:-1].copy(),
            kept_whole=self.firsts[:-1].copy(),
        )
        sweeps(compiled).place_replays(self.graph(self.each(seconds)), self.order, replays)
        return self.with_more(replays.places[waits], np.full(int(waits.sum()), NUMBERS[Op.R]), number[waits])

    def with_offload(self, share: float, ahead: int, seconds: Callable[[Action], float], compiled: bool) -> Schedule:
        """Returns the schedule with OFFLOADs and RELOADs; see `slipstream.schedule.add_offload`."""
        used = np.full((self.schedule.num_stages, sum(self.schedule.slice_counts)), len(self.op))
        users = np.flatnonzero(self.is_one_of(Op.R, Op.B, Op.I))
        np.minimum.at(used, (self.stage[users], self.slices[users]), users)
        forward = np.flatnonzero(self.is_one_of(Op.F) & self.trains)
        needed = used[self.stage[forward], self.slices[forward]]
        # Only where anything runs while the activations are away.
        possible = needed - ahead > forward + 1
        most = np.rint(share * np.bincount(self.rank[forward], minlength=len(self.firsts) - 1))
        forward, needed = forward[possible], needed[possible]
        if share < 1:
            durations = self.each(seconds)
            ends = self.ends(durations, compiled)
            longest_first = np.lexsort((ends[forward] - (ends - durations)[needed], self.rank[forward]))
            forward, needed = forward[longest_first], needed[longest_first]
            rank = self.rank[forward]
            chosen = np.arange(len(rank)) - np.searchsorted(rank, rank) < most[rank]
            forward, needed = forward[chosen], needed[chosen]
        by_use = np.argsort(needed, kind="stable")
        places = np.concatenate([forward + 1, needed[by_use] - ahead])
        op = np.repeat([NUMBERS[Op.OFFLOAD], NUMBERS[Op.RELOAD]], len(forward))
        return self.with_more(places, op, np.concatenate([forward, forward[by_use]]))


class MessageArrays(NamedTuple):
    """Messages between stages, in the order of their sends. A moment is a number that grows along a rank's row."""

    sender: Ints  # the action whose result is sent
    user: Ints  # the action that needs it
    sent: Ints  # the moment of the SEND
    posted: Ints  # the moment of the RECV
    done: Ints  # the moment at which each action of the order runs
    lines: list[Ints]  # the messages of each channel

    @classmethod
    def of(cls, arrays: ActionArrays, lowered: Schedule) -> MessageArrays:
        """Returns those of an order, of which `lowered` has the sends and receives."""
        whole, sender, user = ActionArrays.of(lowered), *_ends_of_messages(arrays)
        kinds = ((Op.SEND_F, Op.SEND_B), sender), ((Op.RECV_F, Op.RECV_B), user)
        places = ([whole.places(op)[arrays.stage[who], arrays.slices[who]] for op in ops] for ops, who in kinds)
        sent, posted = (np.where(arrays.op[sender] == NUMBERS[Op.F], *of_kind) for of_kind in places)
        order, done = np.argsort(sent), np.flatnonzero(~whole.is_one_of(*COMMUNICATION))
        sender, user = sender[order], user[order]
        return cls(sender, user, sent[order], posted[order], done, _lines(arrays, sender, user))

    @classmethod
    def placed(cls, arrays: ActionArrays, seconds: Floats, compiled: bool = False, ahead: int = 1) -> MessageArrays:
        """Returns those of an order without any, as `slipstream.schedule.add_communication` places them.

        A receive is posted before the action number `posted // 3`, where its rank stands when the message is sent, or
        `ahead` actions before it is needed, and not after that of a later message.
        """
        (sender, user), ends = _ends_of_messages(arrays), arrays.ends(seconds, compiled)
        starts, before, lines = ends - seconds, np.zeros_like(user), _lines(arrays, sender, user)
        for mine in lines:
            begin, end = arrays.firsts[(rank := arrays.rank[user[mine[0]]])], arrays.firsts[rank + 1]
            witnessed = begin + np.searchsorted(starts[begin:end], ends[sender[mine]])
            latest = np.minimum(witnessed, np.maximum(user[mine] - ahead, begin))
            before[mine] = np.minimum.accumulate(latest[::-1])[::-1]
        return cls(sender, user, 3 * sender + 4, 3 * before, 3 * np.arange(len(ends)) + 2, lines)

    def most_posted(self, line: Ints) -> int:
        """Returns the most receives of a channel that are posted at the same time and whose users haven't run."""
        posted, done = self.posted[line], np.sort(self.done[self.user[line]])
        return int((np.searchsorted(np.sort(posted), posted, "right") - np.searchsorted(done, posted, "right")).max())


def _ends_of_messages(arrays: ActionArrays) -> tuple[Ints, Ints]:
    user = np.flatnonzero(arrays.producer >= 0)
    user = user[np.argsort(arrays.producer[user], kind="stable")]
    return arrays.producer[user], user


def _lines(arrays: ActionArrays, sender: Ints, user: Ints) -> list[Ints]:
    size = arrays.schedule.num_ranks
    lines = ((arrays.op[sender] == NUMBERS[Op.F]) * size + arrays.rank[sender]) * size + arrays.rank[user]
    order = np.argsort(lines, kind="stable")
    ends = np.flatnonzero(np.diff(lines[order], append=-1)) + 1
    return np.split(order, ends[:-1]) if len(order) else []
