"""On random schedules, the rules of order agree with a second, slower statement that shares no code."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import replace

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
    add_reductions,
    channel,
    check_communication,
    forward_only,
    join_backwards,
    receives_in_flight,
    running_order,
    split_backwards,
    validate,
)
from slipstream.simulator import simulate
from slipstream.simulator.costs import TableCost
from support.examples import examples
from support.schedules import Problem, named_schedules, random_schedules


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


def received(lowered: Schedule) -> dict[Channel, int]:
    """Most messages of each channel that are posted and not yet consumed when a rank comes by."""
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
    assert not any(held.values())
    return most


@examples(200)
@given(random_schedules(), st.integers(0, 4), st.integers(0, 2**32))
def test_what_can_run_is_valid_and_runs_lowered_too(made: tuple[Problem, Schedule], ahead: int, seed: int) -> None:
    """In the order of the rules; with buffers for messages and without, and with as many as are counted."""
    problem, schedule = made
    edges = problem.edges()
    validate(schedule)
    done: set[Action] = set()
    for action in running_order(schedule):
        assert edges[action] <= done
        done.add(action)
    validate(forward_only(schedule))
    lowered = add_communication(schedule, ahead)
    check_communication(lowered)
    computed = [[action for action in row if action in schedule.positions] for row in lowered.actions]
    assert computed == [list(row) for row in schedule.actions]
    for rendezvous in (True, False):
        assert exchange(lowered, edges, rendezvous, random.Random(seed))
    assert receives_in_flight(lowered) == received(lowered)
    for each in (schedule, lowered):
        assert Schedule.parse(str(each)) == each
        order = running_order(each)
        rows = [tuple(a for a in order if each.placement[a.stage] == rank) for rank in range(each.num_ranks)]
        assert tuple(rows) == each.actions


@examples(100)
@given(named_schedules(most_ranks=6, most=7, ragged=True))
def test_every_generator_makes_schedules_that_run_lowered_and_are_read_back(schedule: Schedule) -> None:
    """Also of microbatches that differ in their number of slices."""
    validate(schedule)
    changed = split_backwards(schedule), join_backwards(schedule), forward_only(schedule), add_reductions(schedule)
    for variant in (schedule, *changed):
        lowered = add_communication(variant)
        check_communication(lowered)
        assert Schedule.parse(str(lowered)) == lowered


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
    """With receives posted at the start, lowered and compute-only times are equal."""
    problem, schedule = made
    dice, edges = random.Random(seed), problem.edges()
    times = {(a.stage, a.slice, a.op): dice.randint(1, 20) for a in edges}
    nothing = TableCost(times)
    timeline = simulate(schedule, nothing)
    work = [timeline.busy(rank) for rank in range(schedule.num_ranks)]
    assert sum(work) == sum(map(nothing.seconds, edges))
    assert max(max(work), longest_path(edges, nothing)) <= timeline.makespan <= sum(work)
    ends = {span.action: span.end for span in timeline.spans}
    for span in timeline.spans:
        assert all(ends[before] <= span.start for before in edges[span.action])
    links = TableCost(times, message_bytes=[dice.randint(1, 5) for _ in range(4)], latency=2, bandwidth=1)
    plain, early, late = (
        simulate(each, links)
        for each in (schedule, *(add_communication(schedule, ahead=ahead) for ahead in (10**6, 0)))
    )
    assert timeline.makespan <= plain.makespan <= late.makespan
    assert set(early.compute_spans) == set(plain.spans)
    assert early.memory == plain.memory
