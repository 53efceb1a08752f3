"""The pass that spreads the vocabulary over all ranks: where V, L and VW, E and EW stand among the other actions.

Vocabulary parallelism for pipelines, with one exchange before the backward (Yeung et al. 2024, "Balancing Pipeline
Parallelism with Vocabulary Parallelism", algorithm 2, whose passes S and T are V and VW here, and its section on the
input layer, whose passes are E and EW).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from slipstream.schedule.action import COMMUNICATION, VOCABULARY, Action, Op, ScheduleError
from slipstream.schedule.dependencies import predecessors
from slipstream.schedule.lowering import Seconds, unit_seconds
from slipstream.schedule.schedule import Schedule
from slipstream.schedule.validation import validate

_Rank = Callable[[Action, bool], int]  # the smaller, the earlier: of an action, given whether its microbatch is through


def spread_vocabulary(
    schedule: Schedule,
    seconds: Seconds = unit_seconds,
    link: Seconds = lambda _: 0,
    embedding: bool = False,
) -> Schedule:
    """Adds V, L and VW to a schedule with compute actions only, so that every rank has its rows of the head.

    The other actions keep their order. In a run with times `seconds`, and messages that travel `link` seconds after
    the action that sends them, V and VW fill the time in which their rank waits. V's are also tried before other
    actions, always or from when their microbatch has gone through all stages; the shortest of the three runs counts.
    One microbatch of three slices on two ranks:

        rank 0  F0.0 F0.1 F0.2 V0.0 V0.1 V0.2           VW0.2 B0.2----- ...
        rank 1       F0.0 F0.1 F0.2 V0.2 V0.1 L0.2 B0.2-----  ...

    With `embedding`, for a head whose weight embeds too, E and EW are added: an E runs as soon as the first stage is
    within two slices a rank of its own, and an EW where its rank waits, or when more than two a rank are left over.

    A schedule of forwards alone gets V and L, and E.

    Raises:
        ScheduleError: the schedule is not valid, or has communication or a spread vocabulary already.
    """
    validate(schedule)
    if empty := set(range(schedule.num_ranks)) - set(schedule.placement):
        raise ScheduleError(f"{schedule.name} has no stage on rank {min(empty)}, next to which it could have its rows.")
    if not schedule.ops.isdisjoint(COMMUNICATION | VOCABULARY):
        raise ScheduleError(f"{schedule.name} has sends and receives, or V's, already: spread the vocabulary before.")
    wider = _with_vocabulary_last(schedule, embedding)
    runs = [_Run(wider, schedule, seconds, link, rank) for rank in (_in_waits, _once_through, _at_once)]
    rows = min((run.finished() for run in runs), key=lambda run: run.makespan).rows
    return replace(schedule, actions=tuple(map(tuple, rows)))


def _in_waits(action: Action, is_through: bool) -> int:
    return _ORDER.get(action.op, 1)


def _once_through(action: Action, is_through: bool) -> int:
    return 0 if action.op is Op.V and is_through else _ORDER.get(action.op, 1)


def _at_once(action: Action, is_through: bool) -> int:
    return 0 if action.op is Op.V else _ORDER.get(action.op, 1)


_ORDER = {Op.E: -1, Op.L: 0, Op.V: 2, Op.VW: 3, Op.EW: 4}
_AHEAD = 2  # slices for each rank by which an E may be ahead of its F, and an EW behind its backward


def _with_vocabulary_last(schedule: Schedule, embedding: bool) -> Schedule:
    """Returns the schedule with the new actions at the ends of rows: the rules of order need to know of them."""
    ops = [Op.V, *([Op.E] if embedding else [])]
    if schedule.has_backward:
        ops += [Op.VW, *([Op.EW] if embedding else [])]
    last = schedule.num_stages - 1
    rows = [
        (*row, *(Action(op, stage, *each) for op in ops for each in schedule.microbatch_slices))
        for row, stage in zip(schedule.actions, schedule.vocabulary_stages, strict=True)
    ]
    rows[schedule.placement[last]] += tuple(Action(Op.L, last, *each) for each in schedule.microbatch_slices)
    return replace(schedule, actions=tuple(rows))


@dataclass
class _Run:
    """Runs all ranks at the same time, each as soon as it can, and notes what each runs."""

    wider: Schedule  # with the new actions somewhere
    schedule: Schedule
    seconds: Seconds
    link: Seconds
    priority: _Rank
    makespan: float = 0
    rows: list[list[Action]] = field(default_factory=list)

    def finished(self) -> _Run:
        """Runs to the end: always what starts first, and of that what comes first by priority."""
        num_ranks = self.schedule.num_ranks
        self.rows = [[] for _ in range(num_ranks)]
        self._ends: dict[Action, float] = {}
        self._free: list[float] = [0] * num_ranks
        self._before = {action: predecessors(action, self.wider) for action in self.wider.positions}
        self._before |= self._not_too_early()
        self._after = defaultdict(list)
        for action, before in self._before.items():
            for each in before:
                self._after[each].append(action)
        self._ready: list[dict[Action, float]] = [{} for _ in range(num_ranks)]  # the new ones: when they may start
        self._note(action for action, before in self._before.items() if not before)
        while (chosen := min(self._choices(), default=None)) is not None:
            start, _, rank, _, action = chosen
            self._run(action, rank, start)
        self.makespan = max(self._free)
        return self

    def _not_too_early(self) -> dict[Action, tuple[Action, ...]]:
        """Returns for each E the forward of the first stage after which it may run, so that few results wait there."""
        ahead = _AHEAD * self.schedule.num_ranks
        row = self.schedule.actions[self.schedule.placement[0]]
        forwards = [action for action in row if action.op is Op.F and action.stage == 0]
        pairs = zip(forwards, forwards[ahead:], strict=False)
        stages = self.schedule.vocabulary_stages if self.wider.spreads_embedding else ()
        return {later.with_op(Op.E)._replace(stage=g): (earlier,) for earlier, later in pairs for g in stages}

    def _choices(self) -> Iterator[tuple[float, int, int, int, Action]]:
        """Yields for every rank what it could run next: start, priority, rank, order of slices, action."""
        for rank, ready in enumerate(self._ready):
            has_many = sum(action.op is Op.EW for action in ready) > _AHEAD * self.schedule.num_ranks
            for action, since in ready.items():
                through = (
                    Action(Op.F, self.schedule.num_stages - 1, action.microbatch, self._last(action)) in self._ends
                )
                order = -action.slice if through else action.slice
                if action.op is Op.E:
                    _, order = self.schedule.positions[Action(Op.F, 0, action.microbatch, action.slice)]
                priority = 0 if has_many and action.op is Op.EW else self.priority(action, through)
                yield max(since, self._free[rank]), priority, rank, order, action

    def _last(self, action: Action) -> int:
        return self.schedule.slice_counts[action.microbatch] - 1

    def _run(self, action: Action, rank: int, start: float) -> None:
        self._free[rank] = self._ends[action] = start + self.seconds(action)
        del self._ready[rank][action]
        self.rows[rank].append(action)
        following = self._following(action)
        self._note([*self._after[action], *([] if following is None else [following])])

    def _following(self, action: Action) -> Action | None:
        """Returns the next action of the rank's own order."""
        if action.op in VOCABULARY:
            return None
        rank, index = self.schedule.positions[action]
        row = self.schedule.actions[rank]
        return row[index + 1] if index + 1 < len(row) else None

    def _note(self, actions: Iterable[Action]) -> None:
        """Makes those of the actions ready for which all that must come before has run."""
        for action in actions:
            rank = self.schedule.placement[action.stage]
            if action in self._ends or not self._is_next(action, rank):
                continue
            if all(before in self._ends for before in self._before[action]):
                self._ready[rank][action] = max((self._arrival(b, rank) for b in self._before[action]), default=0)

    def _is_next(self, action: Action, rank: int) -> bool:
        if action.op in VOCABULARY:
            return True
        _, index = self.schedule.positions[action]
        return index == 0 or self.schedule.actions[rank][index - 1] in self._ends

    def _arrival(self, before: Action, rank: int) -> float:
        here = self.schedule.placement[before.stage] == rank
        return self._ends[before] + (0 if here else self.link(before))
