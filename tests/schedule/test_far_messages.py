"""Messages past neighbours, of skips and of a spread vocabulary, are actions that end in any order of the ranks."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.schedule import (
    RECEIVES,
    SCHEDULES,
    SENDS,
    Action,
    Channel,
    Op,
    Schedule,
    ScheduleError,
    StageSkip,
    add_communication,
    channel,
    check_communication,
    forward_only,
    freeze_stages,
    make_schedule,
    one_f_one_b,
    predecessors,
    split_backwards,
    spread_vocabulary,
    validate,
    with_far_messages,
)
from slipstream.simulator import UnitCost, simulate
from slipstream.timeline import draw_timelines, load_trace, save_trace
from support.examples import examples


def random_schedule(pick: random.Random, spreads: bool) -> tuple[Schedule, list[StageSkip]]:
    """Any kind, with one to three stages a rank; a spread head, or skips past one stage and more."""
    name = pick.choice([*SCHEDULES])
    stages_per_rank = pick.choice([v for v in (1, 2, 3) if v in SCHEDULES[name].stages_per_rank])
    schedule = make_schedule(name, pick.randint(2, 4), pick.randint(1, 4), pick.randint(1, 4), stages_per_rank)
    if Op.W not in schedule.ops and pick.random() < 0.3:
        schedule = split_backwards(schedule)
    if spreads:
        return spread_vocabulary(schedule, embedding=pick.random() < 0.5), []
    stages = range(schedule.num_stages)
    pairs = [(stash, pop) for stash in stages for pop in stages if pop > stash + 1 and pick.random() < 0.4]
    return schedule, [StageSkip(*pair, pick.random() < 0.3) for pair in pairs]


def runs(schedule: Schedule, rendezvous: bool, pick: random.Random) -> bool:
    """Whether the ranks come to their ends, each channel first in, first out, whichever rank goes on first."""
    rows = [deque(row) for row in schedule.actions]
    sent, posted = defaultdict[Channel, list[Action]](list), defaultdict[Channel, list[Action]](list)
    done: set[Action] = set()

    def arrived(receive: Action) -> bool:
        line = channel(receive, schedule)
        place = posted[line].index(receive) if receive in posted[line] else len(sent[line])
        assert place >= len(sent[line]) or sent[line][place].other_end == receive
        return place < len(sent[line])

    def ready(action: Action) -> bool:
        if action.op in RECEIVES:
            return True
        line = channel(action, schedule) if action.op in SENDS else None
        if line is not None and rendezvous and len(posted[line]) <= len(sent[line]):
            return False
        return all(arrived(b) if b.op in RECEIVES else b in done for b in predecessors(action, schedule))

    while able := [rank for rank, row in enumerate(rows) if row and ready(row[0])]:
        action = rows[pick.choice(able)].popleft()
        done.add(action)
        if action.op in SENDS | RECEIVES:
            (sent if action.op in SENDS else posted)[channel(action, schedule)].append(action)
    return not any(rows)


@examples(80)
@given(st.integers(0, 2**32), st.booleans())
def test_ranks_come_to_their_ends_under_both_models(seed: int, spreads: bool) -> None:
    """Where every send waits for its receive, and with one stream for each communicator."""
    pick = random.Random(seed)
    order, skips = random_schedule(pick, spreads)
    for schedule in (order, forward_only(order)):
        lowered = with_far_messages(add_communication(schedule, pick.randint(0, 2)), skips)
        check_communication(lowered)
        for rendezvous in (True, False):
            assert runs(lowered, rendezvous, pick)
        assert Schedule.parse(str(lowered)) == lowered
        computed = [tuple(action for action in row if action in schedule.positions) for row in lowered.actions]
        assert computed == [*schedule.actions]
        assert with_far_messages(lowered, skips) == lowered
    assert simulate(lowered, UnitCost()).makespan > 0


def test_every_slice_of_a_skip_goes_and_comes_back_or_the_first_alone() -> None:
    schedule = with_far_messages(add_communication(one_f_one_b(4, 1, 3)), [StageSkip(0, 2, True), StageSkip(1, 3)])
    far = sorted(str(action) for action in schedule.positions if action.peer >= 0 and action.op in SENDS)
    assert far == [
        *("0SEND_F0.0>2", "1SEND_F0.0>3", "1SEND_F0.1>3", "1SEND_F0.2>3"),
        *("2SEND_B0.0>0", "3SEND_B0.0>1", "3SEND_B0.1>1", "3SEND_B0.2>1"),
    ]
    before = predecessors(Action(Op.F, 3, 0, 1), schedule)
    assert {str(action) for action in before} == {"3F0.0", "3RECV_F0.1", "3RECV_F0.1>1"}
    assert predecessors(Action(Op.B, 1, 0, 2), schedule)[-1] == Action(Op.RECV_B, 1, 0, 2, 3)


def test_a_saved_trace_and_a_picture_have_messages_past_neighbours(tmp_path: Path) -> None:
    schedule = with_far_messages(add_communication(one_f_one_b(3, 1, 2)), [StageSkip(0, 2)])
    timeline = simulate(schedule, UnitCost(link=0.25))
    save_trace(tmp_path / "trace.json", timeline)
    (loaded,) = load_trace(tmp_path / "trace.json")
    assert {(span.action, span.start, span.end) for span in loaded.spans} == {
        (span.action, float(span.start), float(span.end)) for span in timeline.spans
    }
    assert Action(Op.RECV_F, 2, 0, 1, 0) in {message.receive.action for message in loaded.messages}
    draw_timelines(tmp_path / "picture.svg", timeline)


def test_stages_of_one_rank_exchange_no_messages() -> None:
    """Of stages 0 to 3 on two ranks, 0 and 2 are on one."""
    schedule = add_communication(make_schedule("interleaved-1f1b", 2, 2, 2, 2))
    assert with_far_messages(schedule, [StageSkip(0, 2)]).actions == schedule.actions
    assert with_far_messages(schedule, [StageSkip(0, 3)]).actions != schedule.actions


def test_a_message_past_neighbours_that_cannot_come_is_refused() -> None:
    lowered = with_far_messages(add_communication(one_f_one_b(3, 1, 2)), [StageSkip(0, 2)])
    receive, send = Action(Op.RECV_F, 2, 0, 1, 0), Action(Op.SEND_F, 0, 0, 1, 2)
    without_send = replace(lowered, actions=(tuple(a for a in lowered.actions[0] if a != send), *lowered.actions[1:]))
    with pytest.raises(ScheduleError, match=r"2RECV_F0\.1>0 has no other end: the schedule lacks 0SEND_F0\.1>2"):
        validate(without_send)
    row = [action for action in lowered.actions[2] if action != receive]
    late = (*row[: row.index(Action(Op.F, 2, 0, 1)) + 1], receive, *row[row.index(Action(Op.F, 2, 0, 1)) + 1 :])
    with pytest.raises(ScheduleError, match=r"2F0\.1 \(rank 2\) waits for 2RECV_F0\.1>0, which comes after it"):
        validate(replace(lowered, actions=(*lowered.actions[:2], late)))


@pytest.mark.parametrize("text", ["0SEND_E0", "0F0.0>2", "2RECV_E0.1", "0REDUCE_GRAD>1"])
def test_only_messages_name_another_stage(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


def test_frozen_stages_get_no_gradients_of_skips() -> None:
    frozen = freeze_stages(one_f_one_b(3, 1, 2), 1)
    lowered = with_far_messages(add_communication(frozen), [StageSkip(0, 2)])
    check_communication(lowered)
    assert not any(action.op is Op.SEND_B and action.peer == 0 for action in lowered.positions)
