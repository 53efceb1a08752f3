"""On random schedules, the rules of order agree with a second, slower statement that shares no code."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slipstream.schedule import (
    RECEIVES,
    SENDS,
    Action,
    Channel,
    Op,
    Schedule,
    ScheduleError,
    add_communication,
    channel,
    check_communication,
    forward_only,
    receives_in_flight,
    running_order,
    validate,
)
from slipstream.simulator import simulate
from slipstream.simulator.costs import TableCost
from support.examples import examples


@dataclass(frozen=True)
class Problem:
    """What must run; `split[unit]` tells whether the unit's backward is I and W."""

    placement: tuple[int, ...]
    num_ranks: int
    num_microbatches: int
    slice_counts: tuple[int, ...]
    reach: tuple[tuple[int, ...], ...] | None
    split: frozenset[tuple[int, int, int]]

    def attends(self, m: int, later: int, earlier: int) -> bool:
        return earlier <= later and (self.reach is None or self.reach[m][later] <= earlier)

    def edges(self) -> dict[Action, set[Action]]:
        """All actions and everything each must follow: the rules of order, spelt out pair by pair."""
        units = [
            (g, m, i)
            for g in range(len(self.placement))
            for m in range(self.num_microbatches)
            for i in range(self.slice_counts[m])
        ]
        down = {unit: Action(Op.I if unit in self.split else Op.B, *unit) for unit in units}
        edges: dict[Action, set[Action]] = {}
        for g, m, i in units:
            later = [j for j in range(i + 1, self.slice_counts[m]) if self.attends(m, j, i)]
            earlier = [j for j in range(i) if self.attends(m, i, j)]
            edges[Action(Op.F, g, m, i)] = {Action(Op.F, g, m, j) for j in earlier}
            edges[down[g, m, i]] = {Action(Op.F, g, m, i), *(down[g, m, j] for j in later)}
            if g > 0:
                edges[Action(Op.F, g, m, i)].add(Action(Op.F, g - 1, m, i))
            if g + 1 < len(self.placement):
                edges[down[g, m, i]].add(down[g + 1, m, i])
            if (g, m, i) in self.split:
                edges[Action(Op.W, g, m, i)] = {down[g, m, i]}
        return edges

    def schedule(self, order: list[Action]) -> Schedule:
        rows: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        for action in order:
            rows[self.placement[action.stage]].append(action)
        actions = tuple(map(tuple, rows))
        counts = self.slice_counts
        return Schedule("random", actions, self.placement, self.num_microbatches, max(counts), self.reach, counts)


def reaches(slice_counts: tuple[int, ...]) -> st.SearchStrategy:
    rows = (st.tuples(*(st.integers(0, i) for i in range(count))) for count in slice_counts)
    return st.none() | st.tuples(*rows)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_stages, num_ranks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    loop = tuple(g % num_ranks for g in range(num_stages))
    v = tuple(min(g % (2 * num_ranks), 2 * num_ranks - 1 - g % (2 * num_ranks)) for g in range(num_stages))
    anywhere = st.tuples(*[st.integers(0, num_ranks - 1)] * num_stages)
    placement = draw(st.sampled_from([loop, v]) | anywhere)
    m, s = draw(st.integers(1, 3)), st.integers(1, 4)
    counts = (draw(s),) * m if draw(st.booleans()) else draw(st.tuples(*[s] * m))
    unit = st.tuples(st.integers(0, num_stages - 1), st.integers(0, m - 1), st.integers(0, max(counts) - 1))
    return Problem(placement, num_ranks, m, counts, draw(reaches(counts)), draw(st.frozensets(unit)))


@st.composite
def random_schedules(draw: st.DrawFn) -> tuple[Problem, Schedule]:
    """A random topological order of everything, cut into ranks: it can run by construction."""
    problem = draw(problems())
    edges, shuffle = problem.edges(), random.Random(draw(st.integers(0, 2**32)))
    order: list[Action] = []
    done: set[Action] = set()
    while len(order) < len(edges):
        action = shuffle.choice([a for a, before in edges.items() if a not in done and before <= done])
        order.append(action)
        done.add(action)
    return problem, problem.schedule(order)


def can_run(schedule: Schedule, edges: dict[Action, set[Action]]) -> bool:
    """Let every rank go as far as it gets, again and again."""
    rows = [deque(row) for row in schedule.actions]
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row and edges[row[0]] <= done:
                done.add(row.popleft())
                moved = True
    return not any(rows)


def made_by(send: Action) -> list[Action]:
    ops = [Op.F] if send.op is Op.SEND_F else [Op.B, Op.I]
    return [Action(op, send.stage, send.microbatch, send.slice) for op in ops]


def exchange(schedule: Schedule, edges: dict[Action, set[Action]], rendezvous: bool, pick: random.Random) -> bool:
    """Run a lowered schedule on real queues, one step of a random rank at a time; False if it gets stuck.

    A channel hands over what was sent, whatever the receive hoped for; a consumer refuses a wrong message.
    """
    rows = [deque(row) for row in schedule.actions]
    sent: defaultdict[Channel, list[Action]] = defaultdict(list)
    posted: defaultdict[Channel, list[Action]] = defaultdict(list)
    done: set[Action] = set()

    def arrived(receive: Action) -> bool:
        line = channel(receive, schedule)
        if receive not in posted[line] or len(sent[line]) <= posted[line].index(receive):
            return False
        message = sent[line][posted[line].index(receive)]
        step = 1 if receive.op is Op.RECV_F else -1
        taken = (message.stage + step, message.microbatch, message.slice)
        return taken == (receive.stage, receive.microbatch, receive.slice)

    def ready(action: Action, rank: int) -> bool:
        if action.op in RECEIVES:
            return True
        if action.op in SENDS:
            line = channel(action, schedule)
            made = any(producer in done for producer in made_by(action))
            return made and (not rendezvous or len(posted[line]) > len(sent[line]))
        here = {before for before in edges[action] if schedule.placement[before.stage] == rank}
        op = Op.RECV_F if action.op is Op.F else Op.RECV_B
        receive = Action(op, action.stage, action.microbatch, action.slice)
        return here <= done and (here == edges[action] or arrived(receive))

    while True:
        able = [rank for rank, row in enumerate(rows) if row and ready(row[0], rank)]
        if not able:
            return not any(rows)
        action = rows[pick.choice(able)].popleft()
        done.add(action)
        if action.op in SENDS:
            sent[channel(action, schedule)].append(action)
        elif action.op in RECEIVES:
            posted[channel(action, schedule)].append(action)


@examples(150)
@given(random_schedules())
def test_what_can_run_is_valid_and_runs_in_the_order_of_the_rules(made: tuple[Problem, Schedule]) -> None:
    problem, schedule = made
    validate(schedule)
    done: set[Action] = set()
    for action in running_order(schedule):
        assert problem.edges()[action] <= done
        done.add(action)
    validate(forward_only(schedule))
    assert Schedule.parse(str(schedule)) == schedule


@examples(300)
@given(random_schedules(), st.data())
def test_two_swapped_actions_are_valid_just_if_they_can_run(
    made: tuple[Problem, Schedule], data: st.DataObject
) -> None:
    problem, schedule = made
    rank = data.draw(st.sampled_from([r for r, row in enumerate(schedule.actions) if row]))
    row = list(schedule.actions[rank])
    first, second = data.draw(st.tuples(*[st.integers(0, len(row) - 1)] * 2))
    assume(first != second)
    row[first], row[second] = row[second], row[first]
    mutated = replace(schedule, actions=(*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]))
    if can_run(mutated, problem.edges()):
        validate(mutated)
    else:
        with pytest.raises(ScheduleError, match=r"(?s) waits for .*\n.* >"):
            validate(mutated)


@examples(200)
@given(random_schedules(), st.integers(0, 4), st.integers(0, 2**32))
def test_lowered_schedules_run_with_and_without_buffers(made: tuple[Problem, Schedule], ahead: int, seed: int) -> None:
    problem, schedule = made
    lowered = add_communication(schedule, ahead)
    check_communication(lowered)
    for rendezvous in (True, False):
        assert exchange(lowered, problem.edges(), rendezvous, random.Random(seed))
    assert Schedule.parse(str(lowered)) == lowered


@examples(300)
@given(random_schedules(), st.integers(0, 2), st.data())
def test_the_proof_refuses_just_what_gets_stuck(
    made: tuple[Problem, Schedule], ahead: int, data: st.DataObject
) -> None:
    """One end of one message stands somewhere else on its rank."""
    problem, schedule = made
    lowered = add_communication(schedule, ahead)
    ends = [action for action in lowered.positions if action.op in SENDS | RECEIVES]
    assume(ends)
    moved = data.draw(st.sampled_from(ends))
    rank, _ = lowered.positions[moved]
    row = [action for action in lowered.actions[rank] if action != moved]
    row.insert(data.draw(st.integers(0, len(row))), moved)
    mutated = replace(lowered, actions=(*lowered.actions[:rank], tuple(row), *lowered.actions[rank + 1 :]))
    if exchange(mutated, problem.edges(), True, random.Random(0)):
        check_communication(mutated)
        assert exchange(mutated, problem.edges(), False, random.Random(0))
    else:
        with pytest.raises(ScheduleError):
            check_communication(mutated)


def longest_path(edges: dict[Action, set[Action]], cost: TableCost) -> float:
    lengths: dict[Action, float] = {}

    def length(action: Action) -> float:
        if action not in lengths:
            lengths[action] = cost.seconds(action) + max(map(length, edges[action]), default=0)
        return lengths[action]

    return max(map(length, edges))


@examples(100)
@given(random_schedules(), st.integers(0, 2**32))
def test_simulated_times_obey_their_bounds(made: tuple[Problem, Schedule], seed: int) -> None:
    problem, schedule = made
    dice = random.Random(seed)
    times = {(a.stage, a.slice, a.op): dice.randint(1, 20) for a in problem.edges()}
    nothing = TableCost(times)
    timeline = simulate(schedule, nothing)
    work = [timeline.busy(rank) for rank in range(schedule.num_ranks)]
    assert sum(work) == sum(map(nothing.seconds, problem.edges()))
    assert max(max(work), longest_path(problem.edges(), nothing)) <= timeline.makespan <= sum(work)
    links = TableCost(times, message_bytes=[3] * 4, latency=2, bandwidth=1)
    assert timeline.makespan <= simulate(schedule, links).makespan
    ends = {span.action: span.end for span in timeline.spans}
    for span in timeline.spans:
        assert all(ends[before] <= span.start for before in problem.edges()[span.action])


@examples(100)
@given(random_schedules(), st.integers(0, 2**32))
def test_receives_posted_at_the_start_make_lowered_and_compute_only_times_equal(
    made: tuple[Problem, Schedule], seed: int
) -> None:
    problem, schedule = made
    dice = random.Random(seed)
    times = {(a.stage, a.slice, a.op): dice.randint(1, 9) for a in problem.edges()}
    cost = TableCost(times, message_bytes=[dice.randint(1, 5) for _ in range(4)], latency=2, bandwidth=1)
    lowered = simulate(add_communication(schedule, ahead=10**6), cost)
    plain = simulate(schedule, cost)
    assert set(lowered.compute_spans) == set(plain.spans)
    assert lowered.memory == plain.memory
    late = simulate(add_communication(schedule, ahead=0), cost)
    assert late.makespan >= plain.makespan


@examples(100)
@given(random_schedules(), st.integers(0, 3))
def test_receives_in_flight_are_those_a_run_has(made: tuple[Problem, Schedule], ahead: int) -> None:
    """Counted from the run instead: posted and not yet consumed when a rank comes by."""
    _, schedule = made
    lowered = add_communication(schedule, ahead)
    most: dict[Channel, int] = {}
    held: defaultdict[Channel, int] = defaultdict(int)
    for row in lowered.actions:
        for action in row:
            if action.op in RECEIVES:
                line = channel(action, lowered)
                held[line] += 1
                most[line] = max(most.get(line, 0), held[line])
            for op in (Op.RECV_F, Op.RECV_B):
                receive = Action(op, action.stage, action.microbatch, action.slice)
                takes = action.op is Op.F if op is Op.RECV_F else action.op in (Op.B, Op.I)
                if takes and receive in lowered.positions:
                    held[channel(receive, lowered)] -= 1
    assert receives_in_flight(lowered) == most
    assert not any(held.values())
