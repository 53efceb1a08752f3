"""Steps of sequences of different lengths to plan, drawn at random, and what their stages cost."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from slipstream.planner.cuts import Cuts
from slipstream.planner.plan import OPEN, Plan
from slipstream.planner.ragged import StageRates, StepPlan, StepProblem
from slipstream.planner.ragged.sliced_step import SlicedStep
from slipstream.schedule import SCHEDULES, Op, make_schedule

SHARES = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.2, Op.W: 0.9}
PLACEMENTS = [(0,), (0, 1), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 0, 1, 0)]


def rates(num_stages: int, fixed: float = 40.0, bandwidth: float | None = None) -> StageRates:
    """Returns rates of stages of which the last has a head."""
    each = np.tile([fixed, 1.0, 0.002], (num_stages, 1))
    each[-1] += [fixed / 2, 0.7, 0.0]
    held = np.tile([8.0, 100.0], (num_stages, 1))
    return StageRates({op: share * each for op, share in SHARES.items()}, held, 4.0, 5.0, bandwidth)


@st.composite
def problems(draw: st.DrawFn, limited: bool = False) -> StepProblem:
    lengths = draw(st.lists(st.integers(1, 1500), min_size=1, max_size=8))
    placement = draw(st.sampled_from(PLACEMENTS))
    costs = rates(len(placement), draw(st.sampled_from([0.0, 40.0])), draw(st.sampled_from([None, 100.0])))
    num_ranks = max(placement) + 1
    per_rank, more = divmod(len(placement), num_ranks)
    fitting = [name for name in SCHEDULES if per_rank in SCHEDULES[name].stages_per_rank and not more]
    names = [name for name in fitting if make_schedule(name, num_ranks, 1, 1, per_rank).placement == placement]
    room = None
    if limited:
        busiest = int(np.bincount(placement).max())
        room = (busiest * (100.0 * max(lengths) + 8.0) * draw(st.floats(1.0, 3.0)),) * num_ranks
    given = Plan(
        placement=placement,
        schedule=draw(st.sampled_from([OPEN, *names])),
        num_microbatches=draw(st.just(OPEN) | st.integers(1, len(lengths))),
        num_slices=draw(st.just(OPEN) | st.integers(1, 6)),
    )
    return StepProblem(
        lengths=tuple(lengths),
        rates=costs,
        given=Plan(placement=placement) if limited else given,
        room=room,
        packs=draw(st.booleans()),
        split=draw(st.booleans()),
        cuts=Cuts(draw(st.sampled_from([1, 64])), most_slices=None),
        effort=5e3,
    )


def sliced(problem: StepProblem, plan: StepPlan) -> SlicedStep:
    return SlicedStep.of(problem, plan.groups, plan.slices)
