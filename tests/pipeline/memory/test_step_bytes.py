"""What rows of any length hold, by a few that were rehearsed, is what their own tables say, lowered or not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.pipeline.memory.linear_memory import LinearMemoryModel, Slices, rows_to_rehearse
from slipstream.planner.order.ordering_problem import OrderingProblem, StepActions
from slipstream.schedule import Op, Schedule, add_communication, add_recompute, add_reductions
from slipstream.simulator import Footprint, MemoryTable, StageSlice, UnitCost, memory_of
from support.examples import examples
from support.random_orders import partly_split
from support.step_problems import PLACEMENTS

OPS = (Op.F, Op.B, Op.I, Op.W)


@pytest.mark.more
@examples(60)
@given(st.data())
def test_an_order_holds_what_it_holds_lowered(data: st.DataObject) -> None:
    random = Random(data.draw(st.integers(0, 10**6)))
    placement = data.draw(st.sampled_from(PLACEMENTS))
    row = st.lists(st.sampled_from([1, 2, 64, 100]) | st.integers(1, 700), min_size=1, max_size=6).map(tuple)
    slices = data.draw(st.lists(row, min_size=1, max_size=6))
    rows, table = random_rows(random, len(placement))
    step = StepActions(placement, [*map(len, slices)])
    schedule = partly_split(step, random, share=random.choice([0.0, 0.5, 1.0]))
    if data.draw(st.booleans()):
        schedule = add_reductions(schedule)
    full = [rank.peak for rank in memory_of(add_communication(schedule), [*map(table, slices)])]
    assert rows.order_bytes(schedule, slices).rank_peaks() == pytest.approx(full, rel=1e-9)


def test_an_action_that_was_never_rehearsed() -> None:
    rows, _ = random_rows(Random(0), 2)
    schedule = add_recompute(OrderingProblem((0, 1), 1, [2], UnitCost()).whole)
    with pytest.raises(SlipstreamError, match=r"of stage 0 holds was never rehearsed: give rows of one length\."):
        rows.order_bytes(schedule, [(3, 4)])


def test_long_waits_fill_the_buffers_of_messages() -> None:
    """All forwards come before all backwards, so more sends are on their way than a channel lets through."""
    slices = [(5,) * 12, (7, 5, 3)]
    (rows, table), placement = random_rows(Random(0), 3), (0, 1, 2)
    flush = OrderingProblem(placement, 2, [12, 3], UnitCost()).whole
    forwards = [[each for each in row if each.op is Op.F] for row in flush.actions]
    backwards = [[each for each in reversed(row) if each.op is Op.B] for row in flush.actions]
    rest = [sorted(row, key=lambda each: (each.microbatch, -each.slice)) for row in backwards]
    actions = tuple((*first, *then) for first, then in zip(forwards, rest, strict=True))
    schedule = Schedule("flush", actions, placement, 2, 12, slice_counts=(12, 3))
    full = [rank.peak for rank in memory_of(add_communication(schedule), [*map(table, slices)])]
    assert rows.order_bytes(schedule, slices).rank_peaks() == pytest.approx(full, rel=1e-9)


def random_rows(random: Random, num_stages: int) -> tuple[LinearMemoryModel, Callable[[Slices], MemoryTable]]:
    """What rows of any length hold, at random: as if a few had been rehearsed, and a row's own table."""
    rates = {(stage, op): [random.uniform(-50, 100) for _ in range(8)] for stage in range(num_stages) for op in OPS}
    state = {stage: random.uniform(1e3, 1e5) for stage in range(num_stages)}
    context, context_gradients = ({g: random.uniform(0, 30) for g in state} for _ in range(2))
    gradients = {(stage, op): random.uniform(0, 1e5) for stage in state for op in OPS[1:]}
    message, header = random.randint(1, 64), random.randint(0, 64)

    def table(slices: Slices) -> MemoryTable:
        tokens = sum(slices)
        footprints, first = {}, {}
        for (stage, op), numbers in rates.items():
            for index, length in enumerate(slices):
                made = context[stage] * tokens if op is Op.F and index == 0 else 0.0
                if op in (Op.B, Op.I) and index == len(slices) - 1:
                    made = context_gradients[stage] * tokens
                peak = numbers[2] + numbers[3] * length + numbers[4] * sum(slices[: index + 1])
                unit = StageSlice(stage, index)
                footprints[unit, op] = Footprint(numbers[0] + numbers[1] * length, peak + made)
                if op is not Op.F and index == len(slices) - 1:
                    first[unit, op] = peak + made + numbers[5] + numbers[6] * length + gradients[stage, op]
        return MemoryTable(
            footprints,
            first,
            context={stage: each * tokens for stage, each in context.items()},
            context_gradients={stage: each * tokens for stage, each in context_gradients.items()},
            message_bytes=[message * length for length in slices],
            header_bytes=header,
            parameters=state,
            gradients=gradients,
            optimizer=state,
        )

    return LinearMemoryModel(tuple((slices, table(slices)) for slices in rows_to_rehearse(None))), table
