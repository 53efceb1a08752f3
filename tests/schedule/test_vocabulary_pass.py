"""The pass that spreads a tied embedding keeps few of its parts waiting, and leaves the order of the rest alone."""

from __future__ import annotations

import pytest

from slipstream.schedule import (
    BACKWARDS,
    GENERATORS,
    STAGES_PER_RANK,
    VOCABULARY,
    Op,
    make_schedule,
    spread_vocabulary,
    validate,
)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("num_ranks", "num_microbatches", "num_slices"), [(2, 12, 2), (3, 6, 3)])
def test_few_lookups_wait_for_the_first_stage_and_few_gradients_behind_it(
    name: str, num_ranks: int, num_microbatches: int, num_slices: int
) -> None:
    """At most two slices a rank, and the one at hand."""
    schedule = make_schedule(name, num_ranks, num_microbatches, num_slices, stages_per_rank=STAGES_PER_RANK[name].start)
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
