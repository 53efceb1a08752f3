"""The actions of a schedule as arrays: the predecessors, rank and kind of each, and passes that add actions.

The rules of order are asked for the actions of one slice (`slipstream.schedule.predecessors`), and hold for all slices
that have the same actions, as their neighbours do: none but REDUCE_GRAD, which follows its rank's order, needs one of
another microbatch, or without documents of a slice farther away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.schedule.action import COMMUNICATION, NUMBERS, OPS, Action, Op
from slipstream.schedule.rules import predecessors
from slipstream.schedule.schedule import ActionRows, Schedule


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
            shape: a schedule with the placement, reach, slice counts and frozen stages; its order doesn't count.
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
            before_slice, before, after = _before_slice(shape.placement, shape.num_frozen_stages, *key)
            rows = np.array(members)[:, None]
            pairs.append((order[firsts[rows + before_slice] + before].ravel(), order[firsts[rows] + after].ravel()))
        before, after = (np.concatenate(side) for side in zip(*pairs, strict=True))
        sizes = (np.bincount(side, minlength=len(op)) for side in (after, before))
        first_before, first_after = (np.concatenate([[0], np.cumsum(size)]) for size in sizes)
        in_order = np.argsort(after, kind="stable")
        before, after = before[in_order], after[in_order]
        return cls(first_before, before, first_after, after[np.argsort(before, kind="stable")])


@lru_cache(maxsize=4096)
def _before_slice(
    placement: tuple[int, ...], num_frozen: int, places: tuple[bytes, ...], index: int, reach: tuple[int, ...] | None
) -> tuple[Ints, Ints, Ints]:
    """Returns the pairs of actions of which the one comes before the other, which is of slice `index`: how many slices
    later the first one's is, and the two by their places in their slices."""
    schedule, numbers = _of_slices(placement, num_frozen, places, reach)
    pairs = [
        (before.slice - index, numbers[before], number)
        for action, number in numbers.items()
        if action.slice == index
        for before in predecessors(action, schedule)
    ]
    slices, before, after = np.array(pairs, np.int64).reshape(-1, 3).T
    return slices, before, after


@lru_cache(maxsize=8)
def _of_slices(
    placement: tuple[int, ...], num_frozen: int, places: tuple[bytes, ...], reach: tuple[int, ...] | None
) -> tuple[Schedule, dict[Action, int]]:
    """Returns a schedule of a microbatch with these actions in its slices, and the place of each in its slice."""
    numbers = {
        Action(OPS[place // len(placement)], place % len(placement), 0, index): number
        for index, of_slice in enumerate(places)
        for number, place in enumerate(np.frombuffer(of_slice, np.int64).tolist())
    }
    # The rules ask which actions there are, not in whose row.
    rows, reaches = (tuple(numbers), *[()] * max(placement)), None if reach is None else (reach,)
    return Schedule("rules", rows, placement, 1, len(places), reaches, (), num_frozen), numbers


class ContextMarks(NamedTuple):
    """The actions at which a microbatch's keys, values and their gradients on a stage come and go."""

    opens: Flags  # its first forward
    begins: Flags  # its first B or I
    closes: Flags  # its last B or I, or the last F of a stage without backwards


def first_of(key: Ints, among: Flags) -> Flags:
    """Marks the first entry of every key, of the entries in `among`."""
    places = np.flatnonzero(among)[::-1]
    firsts = np.full(key.max(initial=0) + 1, -1)
    firsts[key[places]] = places  # of several with one key the last one stays
    return np.asarray(among & (firsts[key] == np.arange(len(key))))


@dataclass(frozen=True, eq=False)
class ActionArrays(ActionRows):
    """The rows of a valid schedule, and what its rules of order and its counts say of them."""

    schedule: Schedule
    alike: bool  # whether all microbatches take the same times

    @classmethod
    def of(cls, schedule: Schedule, alike: bool = True) -> ActionArrays:
        """Returns the arrays of a schedule; microbatches with different numbers of slices aren't alike."""
        of_all = schedule, alike and not schedule.is_ragged
        if isinstance(rows := schedule.actions, ActionRows):
            return cls(rows.firsts, *rows.columns, *of_all)
        actions = np.array([(NUMBERS[op], *place) for row in rows for op, *place in row], np.int64).reshape(-1, 4)
        op, stage, microbatch, index = np.ascontiguousarray(actions.T)
        return cls(np.cumsum([0, *map(len, rows)]), op, stage, microbatch, index, *of_all)

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
    def context_marks(self) -> ContextMarks:
        """When the context of each microbatch comes and goes."""
        chain = self.stage * self.schedule.num_microbatches + self.microbatch
        forward, backward = self.is_one_of(Op.F), self.is_one_of(Op.B, Op.I)
        last = np.where(self.stage < self.schedule.num_frozen_stages, forward, backward)
        closes = first_of(chain[::-1], last[::-1])[::-1]
        return ContextMarks(first_of(chain, forward), first_of(chain, backward), closes)

    def ends(self, seconds: Floats, run: RowsRun) -> Floats:
        """Returns when each action ends, if messages take no time."""
        nothing, none = np.zeros(len(self.op)), np.zeros(len(self.op), np.bool_)
        return run(self.firsts, *self.precedence[:2], seconds, nothing, none, none, none, self.op, 1)[0]

    def with_recompute(
        self, stages: Collection[int], alive: int, seconds: Callable[[Action], float], run: RowsRun
    ) -> Schedule:
        """Returns the schedule with an R for the backwards of `stages`; see `slipstream.schedule.add_recompute`."""
        number, forward, reload = np.arange(len(self.op)), self.of_slice(Op.F), self.of_slice(Op.RELOAD)
        chosen = self.is_one_of(Op.B, Op.I) & np.isin(self.stage, [*stages])
        # Right after its forward, on the same rank, a backward needs no R.
        waits = chosen & (forward != number - 1)
        whole = np.isin(number, forward[chosen & ~waits])
        replay = self.each(lambda action: seconds(action.with_op(Op.R)), among=waits)
        order = self.firsts, self.precedence.first_before, self.precedence.before, self.each(seconds)
        _, places = run(*order, replay, waits, whole, chosen, np.maximum(forward, reload), alive)
        return self.with_more(places[waits], np.full(int(waits.sum()), NUMBERS[Op.R]), number[waits])

    def with_offload(self, share: float, ahead: int, seconds: Callable[[Action], float], run: RowsRun) -> Schedule:
        """Returns the schedule with OFFLOADs and RELOADs; see `slipstream.schedule.add_offload`."""
        used = np.full((self.schedule.num_stages, sum(self.schedule.slice_counts)), len(self.op))
        users = np.flatnonzero(self.is_one_of(Op.R, Op.B, Op.I))
        np.minimum.at(used, (self.stage[users], self.slices[users]), users)
        forward = np.flatnonzero(self.is_one_of(Op.F) & (self.stage >= self.schedule.num_frozen_stages))
        needed = used[self.stage[forward], self.slices[forward]]
        # Only where anything runs while the activations are away.
        possible = needed - ahead > forward + 1
        most = np.rint(share * np.bincount(self.rank[forward], minlength=len(self.firsts) - 1))
        forward, needed = forward[possible], needed[possible]
        if share < 1:
            durations = self.each(seconds)
            ends = self.ends(durations, run)
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
    def placed(cls, arrays: ActionArrays, seconds: Floats, run: RowsRun, ahead: int = 1) -> MessageArrays:
        """Returns those of an order without any, as `slipstream.schedule.add_communication` places them.

        A receive is posted before the action number `posted // 3`, where its rank stands when the message is sent, or
        `ahead` actions before it is needed, and not after that of a later message.
        """
        (sender, user), ends = _ends_of_messages(arrays), arrays.ends(seconds, run)
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


def run_rows(
    firsts: Ints,
    first_before: Ints,
    before: Ints,
    seconds: Floats,
    replay: Floats,
    waits: Flags,
    whole: Flags,
    chosen: Flags,
    inputs: Ints,
    most_alive: int,
) -> tuple[Floats, Ints]:
    """Runs each rank's actions in order, as early as it can with messages that take no time, and places the R's.

    Where a rank would wait for as long as an R takes, that stands before the wait; else right before its backward.

    Args:
        firsts: rank r's actions are `firsts[r]` up to `firsts[r + 1]`.
        first_before: the actions before number n are before[first_before[n] : first_before[n + 1]].
        before: see there.
        seconds: of each action.
        replay: of each backward's R.
        waits: marks the backwards that have one.
        whole: marks the forwards that keep all their activations until their backward, which follows at once.
        chosen: marks the backwards of both kinds.
        inputs: the last action of its rank that an R needs.
        most_alive: how many slices of a rank have all their activations at the same time, at most.

    Returns:
        The end of each action, and the action before which each backward's R stands, -1 without one.
    """
    num_ranks = len(firsts) - 1
    ends, places = np.full(len(seconds), -1.0), np.full(len(seconds), -1)
    free, alive = np.zeros(num_ranks), np.zeros(num_ranks, np.int64)
    # Of each rank the next action, the next backward whose R has not run, and the next forward that stays whole.
    reached, waiting, kept_whole = firsts[:-1].copy(), firsts[:-1].copy(), firsts[:-1].copy()
    has_moved = True
    while has_moved:
        has_moved = False
        for rank in range(num_ranks):
            end = firsts[rank + 1]
            while reached[rank] < end:
                action, ready, can_run = reached[rank], 0.0, True
                for earlier in before[first_before[action] : first_before[action + 1]]:
                    ready = max(ready, ends[earlier])
                    can_run = can_run and ends[earlier] >= 0
                if not can_run:
                    break
                while kept_whole[rank] < end and (kept_whole[rank] < action or not whole[kept_whole[rank]]):
                    kept_whole[rank] += 1
                while waiting[rank] < end:
                    backward = waiting[rank]
                    if waits[backward]:
                        has_time = free[rank] + replay[backward] <= ready and inputs[backward] < action
                        has_room = alive[rank] + (kept_whole[rank] < backward) < most_alive
                        if backward != action and not (has_time and has_room):
                            break
                        places[backward] = action
                        free[rank] += replay[backward]
                        alive[rank] += 1
                    waiting[rank] += 1
                alive[rank] += int(whole[action]) - int(chosen[action])
                free[rank] = ends[action] = max(free[rank], ready) + seconds[action]
                reached[rank] += 1
                has_moved = True
    return ends, places


def due_first(due: Floats, free: Ints, room: Ints, missing: Ints, first_after: Ints, after: Ints) -> Ints:
    """Returns the order in which ranks run F, I and W of their two stages: in every unit of time each runs, of the next
    ones of these that can run, the one that is due first. An F can run where its stage isn't full, and its rank has
    room for it and for the F's of its other stage that are due before it; a W makes room.

    Args:
        due: when each action is due. They are numbered by rank, by its stages and by F, I and W.
        free: how many slices each stage may take, one rank's two stages after the other's; used up.
        room: how many each rank may take, its two stages together; used up.
        missing: how many actions each still waits for; used up.
        first_after: the actions after number n are after[first_after[n] : first_after[n + 1]].
        after: see there.
    """
    size, order, done = len(due) // (6 * len(room)), np.zeros(len(due), np.int64), 0
    following, chosen = np.arange(6 * len(room)) * size, np.zeros(len(room), np.int64)
    while done < len(due):
        for rank in range(len(room)):
            chosen[rank] = -1
            for queue in range(6 * rank, 6 * rank + 6):
                action, best = following[queue], chosen[rank]
                can_run = action < (queue + 1) * size and missing[action] == 0
                can_run = can_run and (queue % 3 > 0 or free[queue // 3] > 0)
                if can_run and queue % 3 == 0:
                    other = queue + 3 if queue == 6 * rank else queue - 3
                    left, earlier = room[rank], following[other]
                    while left > 0 and earlier < (other + 1) * size and due[earlier] < due[action]:
                        left -= 1
                        earlier += 1
                    can_run = left > 0
                if can_run and (best < 0 or due[action] < due[best]):
                    chosen[rank] = action
        for rank in range(len(room)):
            action = chosen[rank]
            if action >= 0:
                taken = action // size
                following[taken] += 1
                free[taken // 3] += taken % 3 - 1
                room[rank] += taken % 3 - 1
                order[done] = action
                done += 1
                for later in after[first_after[action] : first_after[action + 1]]:
                    missing[later] -= 1
    return order


@cache
def compiled_due_first() -> Callable[..., Ints]:
    """Returns `due_first` compiled by Numba, whose import takes a while: loaded only where it pays."""
    from slipstream.numba_jit import compiled

    return compiled(due_first)


RowsRun = Callable[..., tuple[Floats, Ints]]
"""`run_rows`, or the same compiled (`slipstream.simulator.time_kernel`)."""
