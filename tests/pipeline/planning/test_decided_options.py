"""A plan becomes the options of a Pipeline as it becomes a configuration: by one list of what it decides."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import Memory, Parallelism, Plan
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.planning import decided_options, with_plan
from slipstream.planner import OPEN
from slipstream.schedule import make_schedule
from slipstream.train.config.config_values import parse_config
from support.tiny_training import tiny_llama

NAMED = Plan(
    pipeline_parallel=2,
    stages_per_rank=2,
    schedule="interleaved-1f1b",
    num_microbatches=2,
    recompute="full",
    offload=0.5,
    tensor_parallel=1,
    context_parallel=2,
    context_exchange="keys",
).closed(partition=(1, 1, 1, 1), slices=(40, 24))
FOUND = Plan(recompute="none").closed(
    schedule=make_schedule("zb-v", 2, 2, 2, 2), partition=(0.5, 1, 1.5, 1), slices=(40, 24)
)


@pytest.mark.parametrize("plan", [NAMED, FOUND, FOUND.closed(slices=OPEN, recompute="3")], ids=str)
def test_a_pipeline_is_told_what_a_run_with_the_plan_in_its_configuration_is(plan: Plan) -> None:
    settings: dict[str, Any] = {
        "model": {"config": tiny_llama()},
        "data": {"files": ["x"]},
        "training": {"output": "out", "steps": 1, "seq_len": 64, "batch_size": 2},
    }
    sections = plan.dump()
    found = sections["pipeline"].pop("schedule")
    config = parse_config(settings | sections)
    wanted = config.pipeline_options()
    decided = decided_options(plan, Memory(), Parallelism())
    for name in {*decided} - {"schedule", "parallel"}:
        assert decided[name] == wanted[name]
    assert str(decided["schedule"]) == found
    if "parallel" in decided:
        assert decided["parallel"].context_exchange == config.parallel.context_exchange
    assert ("stages_per_rank" in decided) == (plan is NAMED)  # an order has its own


def test_what_a_plan_leaves_open_stays_as_it_was_given() -> None:
    given = PipelineOptions(partition=[2, 2], memory=Memory(offload=0.5, limit=1e9), slices=4)
    assert with_plan(given, Plan()) == given
    assert decided_options(Plan(), Memory(), Parallelism()) == {}
    told = with_plan(given, Plan(recompute="full"))
    assert told.memory == Memory(recompute="full", offload=0.5, limit=1e9)
    assert (told.partition, told.slices) == ([2, 2], 4)
    assert with_plan(given, FOUND, ["partition"]).slices == 4
    whole = Plan().closed(slices=(1,))
    assert with_plan(given, whole).slices == 1  # layers that take whole microbatches
