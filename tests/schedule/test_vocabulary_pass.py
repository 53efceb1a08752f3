"""The pass that spreads the vocabulary keeps few of its parts waiting, and leaves the order of the rest alone, or lets
every rank run a microbatch ahead in it."""

from __future__ import annotations

import pytest

from slipstream.schedule import (
    BACKWARDS,
    SCHEDULES,
    VOCABULARY,
    Action,
    Op,
    ScheduleError,
    make_schedule,
    spread_vocabulary,
    validate,
)
from slipstream.simulator import TableCost, simulate


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches", "num_slices"), [(2, 12, 2), (3, 6, 3)])
def test_few_lookups_wait_for_the_first_stage_and_few_gradients_behind_it(
    name: str, num_ranks: int, num_microbatches: int, num_slices: int
) -> None:
    """At most two slices a rank, and the one at hand."""
    schedule = make_schedule(
        name, num_ranks, num_microbatches, num_slices, stages_per_rank=SCHEDULES[name].stages_per_rank.start
    )
    spread = spread_vocabulary(schedule, embedding=True)
    validate(spread)
    for before, after in zip(schedule.actions, spread.actions, strict=True):
        assert tuple(action for action in after if action.op not in VOCABULARY) == before
    looked_up = gradients = 0
    for action in spread.actions[schedule.placement[0]]:
        looked_up += (action.op is Op.E) - (action.op is Op.F and action.stage == 0)
        gradients += (action.op in BACKWARDS - {Op.W} and action.stage == 0) - (action.op is Op.EW)
        assert 0 <= looked_up <= 2 * num_ranks + 1
        assert 0 <= gradients <= 2 * num_ranks + 1
    assert looked_up == gradients == 0


def test_lookups_are_made_in_the_order_of_the_first_stage() -> None:
    schedule = make_schedule("1f1b", 2, 6, 2)
    for row in spread_vocabulary(schedule, embedding=True).actions:
        lookups = [action[2:] for action in row if action.op is Op.E]
        assert lookups == [action[2:] for action in schedule.actions[0] if action.op is Op.F]


# Seconds of each action of a model of which a rank's rows of the head are a quarter of the work of its layers.
SHARED_HEAD = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0, Op.V: 0.5, Op.L: 0.0, Op.VW: 0.25}


def shared_head_cost(num_stages: int) -> TableCost:
    times = {(g, 0, op): seconds for g in range(num_stages) for op, seconds in SHARED_HEAD.items()}
    return TableCost(times=times, message_bytes=[0.0], latency=0.0, bandwidth=None)


def in_flight(row: tuple[Action, ...]) -> int:
    """The most microbatches of which a rank holds activations."""
    alive = most = 0
    for action in row:
        alive += (action.op is Op.F) - (action.op in (Op.B, Op.I))
        most = max(most, alive)
    return most


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 16), (8, 128)])
def test_one_more_microbatch_in_flight_hides_the_exchange(num_ranks: int, num_microbatches: int) -> None:
    """As in the published algorithm: at most p + 1. In 1F1B's own order each rank waits for V and L of each microbatch.
    The second case has more waiting parts than a search through all of them at every action would end on."""
    schedule, cost = make_schedule("1f1b", num_ranks, num_microbatches), shared_head_cost(num_ranks)
    seconds = []
    for ahead in (0, 1):
        spread = spread_vocabulary(schedule, cost.seconds, ahead=ahead)
        validate(spread)
        seconds.append(simulate(spread, cost).makespan)
        assert [in_flight(row) for row in spread.actions] == [num_ranks - rank + ahead for rank in range(num_ranks)]
        for stage, (before, after) in enumerate(zip(schedule.actions, spread.actions, strict=True)):
            for ops in ((Op.F,), (Op.B, Op.I)):
                order = [[each for each in row if each.op in ops and each.stage == stage] for row in (before, after)]
                assert order[0] == order[1]
    busy = num_microbatches * sum(SHARED_HEAD[op] for op in (Op.F, Op.B, Op.V, Op.VW))
    assert seconds[1] < busy + 6 * num_ranks
    assert seconds[0] > 1.1 * seconds[1]


def test_an_order_that_cannot_run_ahead_is_refused() -> None:
    with pytest.raises(ScheduleError, match="wait for each other"):
        spread_vocabulary(make_schedule("v-half", 4, 8, 2, stages_per_rank=2), ahead=1)
