"""A plan is one value of everything that is decided: what is open, what follows, what contradicts, what is written."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import yaml

from slipstream.errors import SlipstreamError
from slipstream.planner.plan import CHOICES, FIELDS, MESH, ONE_DEVICE, OPEN, Plan
from slipstream.planner.plan_fields import PLAN_FIELDS
from slipstream.planner.search import GlobalBatch, PlanOptions, evaluate
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.schedule import add_communication, make_schedule, spread_vocabulary
from support.small_clusters import SEQ_LEN, source

NAMED = replace(
    ONE_DEVICE,
    tensor_parallel=2,
    pipeline_parallel=2,
    data_parallel=3,
    stages_per_rank=2,
    schedule="interleaved-1f1b",
    recompute="full",
    shard="optimizer",
    num_microbatches=4,
).closed(partition=(2, 1, 2, 1), slices=(300, 212))
NAMED_ORDER = make_schedule("interleaved-1f1b", 2, 4, 2, 2)
RAGGED = make_schedule("interleaved-1f1b", 2, 2, (2, 1), 2)
ORDER = make_schedule("zb-v", 2, 4, 2, 2)
FOUND = Plan(schedule=ORDER, data_parallel=1, recompute="stage", offload=0.5).closed(
    slices=(9, 7), partition=(1, 2, 2, 1)
)


def test_every_choice_of_a_search_is_a_field() -> None:
    """Each is described by one entry: its values, its words in a line, and its column."""
    assert {*MESH} < {*CHOICES} < {*PLAN_FIELDS} < {*FIELDS}
    assert all(name == field.name for name, field in PLAN_FIELDS.items())
    shown = " ".join(PLAN_FIELDS[name].named_value(NAMED) for name in CHOICES)
    assert "tensor parallel 2 pipeline parallel 2 data parallel 3 stages per rank 2 schedule interleaved-1f1b" in shown
    assert "slices 2 recompute full offload none context on the device optimizer device sharded optimizer" in shown


def test_the_options_of_a_search_are_the_choices_of_a_plan() -> None:
    """Checked however they are made, and changed one by one."""
    every = {name: NAMED.choice(name) for name in CHOICES}
    options = PlanOptions(**every, num_best=3)
    assert options.allowed == {name: (value,) for name, value in every.items()}
    assert all(options.allows(name, value) and not options.allows(name, "other") for name, value in every.items())
    assert options.changed(num_best=None, **dict.fromkeys(every)) == PlanOptions(num_best=5, num_simulated=200)
    assert options.changed(shard=["none", "optimizer"]).values("shard") == ("none", "optimizer")
    assert PlanOptions(memory_limit=1e9).changed(offload=0.5).memory_limit == 1e9
    with pytest.raises(
        SlipstreamError, match=r"no option 'partition'.* The options are tensor_parallel, .*, num_best\."
    ):
        PlanOptions(partition=(2, 2))
    with pytest.raises(SlipstreamError, match="shard='all' isn't known"):
        options.changed(shard="all")
    with pytest.raises(SlipstreamError, match=r"offload=1\.5: give the share of slices that is offloaded, 0 to 1"):
        options.changed(offload=(0, 1.5))


def test_what_is_open_is_one_object_wherever_it_goes() -> None:
    assert Plan().schedule is OPEN
    assert pickle.loads(pickle.dumps(Plan())).schedule is OPEN
    assert copy.deepcopy(Plan()) == Plan()
    assert repr(OPEN) == "OPEN"
    assert repr(Plan(pipeline_parallel=2, shard="none")) == "Plan(pipeline_parallel=2, shard='none')"
    assert repr(Plan(schedule=ORDER)) == "Plan(schedule=<zb-v>)"


def test_what_follows_from_what_is_decided() -> None:
    """An order says its ranks, its placement and its microbatches, a name its placement, slices their number."""
    assert (NAMED.placement, NAMED.num_slices) == ((0, 1, 0, 1), 2)
    assert NAMED.open_fields == ()
    assert (FOUND.placement, FOUND.stages_per_rank, FOUND.pipeline_parallel) == ((0, 1, 1, 0), 2, 2)
    assert (FOUND.num_microbatches, FOUND.num_slices, FOUND.vocabulary) == (4, 2, "whole")
    assert (FOUND.schedule_name, NAMED.schedule_name) == ("auto", "interleaved-1f1b")
    spread = spread_vocabulary(make_schedule("1f1b", 2, 2, 1), lambda action: 1.0, lambda action: 0.0, embedding=False)
    assert Plan(schedule=spread).closed().vocabulary == "spread"
    assert NAMED.mesh.open_fields == tuple(name for name in FIELDS if name not in MESH)
    assert NAMED.num_devices == 12


def test_differences_are_named() -> None:
    assert NAMED.differences(replace(NAMED, shard="none", slices=(212, 300))) == ["shard", "slices"]
    again = replace(FOUND, schedule=make_schedule("zb-v", 2, 4, 2, 2))
    assert (again, hash(again)) == (FOUND, hash(FOUND))
    assert len({FOUND, again, NAMED, Plan()}) == 3


def test_a_plan_is_described_on_one_line() -> None:
    assert NAMED.describe() == str(NAMED)
    assert NAMED.describe() == (
        "tensor 2 x context 1 x pipeline 2 x data 3, expert 1, schedule interleaved-1f1b, 2 stages per rank, 2 slices, "
        "1 sequence per microbatch, recompute full, optimizer state sharded"
    )
    shared = replace(ONE_DEVICE, context_parallel=2, context_exchange="keys", expert_parallel=2, slicing="exact")
    assert shared.describe() == (
        "tensor 1 x context 2 by keys x pipeline 1 x data 1, expert 2, schedule 1f1b, 1 stage per rank, "
        "1 exact slice, 1 sequence per microbatch"
    )
    assert Plan(pipeline_parallel=4, offload=0.5).describe() == "pipeline 4, 50% offloaded"
    assert Plan(context_exchange="keys", stages_per_rank=2, shard="parameters", vocabulary="spread").describe() == (
        "2 stages per rank, vocabulary spread, parameters sharded"
    )
    assert Plan().describe() == ""


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (replace(NAMED, schedule="1f1c"), "schedule='1f1c' isn't known. Choose one of gpipe, "),
        (replace(NAMED, recompute="all"), "recompute='all' isn't known. Choose one of none, "),
        (replace(NAMED, data_parallel=0), "data_parallel=0: give a whole number of 1 or more."),
        (replace(NAMED, offload="all"), "offload='all': give the share of slices that is offloaded, 0 to 1."),
        (replace(NAMED, context_exchange="all"), "context_exchange='all' isn't known. Choose one of heads, keys."),
        (replace(NAMED, offload=2.0), "offload=2.0: give the share of slices that is offloaded, 0 to 1."),
        (replace(NAMED, slices=(512, 0)), r"slices=\[512, 0\]: give the tokens of each slice, at least 1."),
        (replace(NAMED, num_slices=3), "num_slices=3, but slices has 2. Make them equal."),
        (replace(NAMED, placement=(0, 1, 1, 0)), "placement=0 1 1 0, but schedule has 0 1 0 1. Make them equal."),
        (replace(NAMED, partition=(3, 3)), r"partition=\[3, 3\] has 2 stages, but placement=\[0, 1, 0, 1\] has 4."),
        (replace(FOUND, pipeline_parallel=3), "pipeline_parallel=3, but schedule has 2. Make them equal."),
        (replace(FOUND, num_microbatches=5), "num_microbatches=5, but schedule has 4. Make them equal."),
        (replace(FOUND, vocabulary="spread"), "vocabulary=spread, but schedule has whole. Make them equal."),
        (replace(FOUND, slices=(16,), num_slices=1), r"slices=\[16\] are 1, but schedule has 2. Make them equal."),
    ],
)
def test_what_contradicts_itself_is_refused(plan: Plan, said: str) -> None:
    NAMED.check()
    FOUND.check()
    with pytest.raises(SlipstreamError, match=said):
        plan.check()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"partition": OPEN, "recompute": OPEN},
            r"leaves recompute and partition open \(tensor 2 x .*recompute=\.\.\.",
        ),
        ({"num_slices": OPEN, "slices": OPEN}, "leaves num_slices and slices open"),
        ({"slices": (300, 213)}, r"slices=\[300, 213\] have 513 tokens, but seq_len=512"),
        ({"num_microbatches": 5}, "global_batch=12, but data_parallel=3 times num_microbatches=5 times"),
        ({"shard": "optimiser"}, "shard='optimiser' isn't known"),
    ],
)
def test_nothing_is_evaluated_that_is_open_or_for_another_batch(changes: dict[str, Any], said: str) -> None:
    space = PlanSpace(source(), SEQ_LEN, 12, PlanOptions())
    costs = space.costs(NAMED.degrees, 1)
    batch = GlobalBatch(512, 12)
    assert evaluate(NAMED, costs, batch, space.source.state).seconds > 0
    with pytest.raises(SlipstreamError, match=said):
        evaluate(replace(NAMED, **changes), costs, batch, space.source.state)


# --- a training's settings -------------------------------------------------------------------------------------------

SHARED = replace(
    NAMED,
    context_parallel=2,
    context_exchange="keys",
    expert_parallel=3,
    tensor_parallel=1,
    recompute="3",
    partition=(2, 1.5, 1.5, 1),
)


@pytest.mark.parametrize("plan", [NAMED, FOUND, SHARED, FOUND.closed(slices=OPEN), NAMED.mesh, Plan()], ids=str)
def test_a_plan_is_written_and_read_back(plan: Plan) -> None:
    """Through YAML. How slices were found isn't a setting, and a step's sequences stand in another section. A file with
    a mesh that doesn't say what is on the host is of before anything could be."""
    settings = yaml.safe_load(yaml.safe_dump(plan.dump()))
    again = Plan.load(settings)
    assert {*again.differences(plan)} <= {
        "microbatch_size",
        "slicing",
        *(["context", "optimizer", "loss_tokens"] if plan == NAMED.mesh else []),
    }
    assert again.dump() == plan.dump()
    rows = {"training": {"batch_size": 12}}
    if plan in (NAMED, SHARED):
        assert Plan.load(settings | rows).microbatch_size == 1


def test_settings_say_what_is_open_by_leaving_it_out_or_by_auto() -> None:
    assert Plan().dump() == {"pipeline": {}, "memory": {}, "parallel": {}}
    auto = {"pipeline": {"schedule": "auto-v", "slices": "auto", "partition": "auto", "vocabulary": "auto"}}
    assert Plan.load(auto) == Plan.load({}) == Plan()
    assert SHARED.dump()["pipeline"]["partition"] == [2, 1.5, 1.5, 1]
    assert FOUND.dump(order="plan.txt")["pipeline"]["schedule"] == "plan.txt"
    assert "stages_per_rank" not in FOUND.dump()["pipeline"]
    assert SHARED.dump()["parallel"] == {
        "data": 3,
        "context": 2,
        "tensor": 1,
        "experts": 3,
        "context_exchange": "keys",
        "shard": "optimizer",
    }
    assert SHARED.dump()["memory"]["recompute"] == 3


def test_a_file_that_decides_the_mesh_may_lack_what_has_come_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a setting is what it was before. A user's configuration leaves it open."""
    older = NAMED.dump()
    assert {"context", "experts"}.isdisjoint(older["parallel"])
    assert Plan.load(older).degrees == NAMED.degrees
    assert Plan.load({"parallel": {"shard": "none", "tensor": "auto"}}) == Plan(shard="none")
    assert Plan.load({"parallel": {"context": 2, "tensor": None}}) == Plan(context_parallel=2)
    # As if sharding were new
    monkeypatch.setitem(fields := dict(PLAN_FIELDS), "shard", replace(PLAN_FIELDS["shard"], absent="none"))
    monkeypatch.setattr("slipstream.planner.plan.PLAN_FIELDS", fields)
    del older["parallel"]["shard"]
    assert Plan.load(older).shard == "none"
    assert Plan.load(older | {"parallel": older["parallel"] | {"shard": "auto"}}).shard is OPEN
    assert Plan.load({"memory": {"recompute": "full"}, "parallel": {"data": 2}}).shard is OPEN
    unsharded = replace(NAMED, shard="none")
    assert unsharded.dump() == older
    assert Plan.load(older).differences(unsharded) == ["microbatch_size", "slicing"]
    alone = Plan(shard="none")
    assert Plan.load(alone.dump()) == alone


def test_an_order_in_a_file_is_read_with_it() -> None:
    settings = FOUND.dump(order="plan.txt")
    assert Plan.load(settings, ORDER) == FOUND
    with pytest.raises(SlipstreamError, match=r"pipeline.schedule=plan.txt: the order in that file isn't given"):
        Plan.load(settings)
    with pytest.raises(SlipstreamError, match="num_microbatches=5, but schedule has 4"):
        Plan.load(settings | {"pipeline": settings["pipeline"] | {"num_microbatches": 5}}, ORDER)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recompute": "3"}, "recompute='3' can't be predicted"),
        ({"recompute": "segments"}, "recompute='segments' can't be predicted"),
        ({"vocabulary": "spread"}, "vocabulary='spread' can't be predicted with schedule='interleaved-1f1b'"),
        ({"schedule": add_communication(NAMED_ORDER)}, "the schedule 'interleaved-1f1b' has messages"),
        ({"schedule": RAGGED, "num_microbatches": 2}, r"has microbatches of \[2, 1\] slices"),
        ({"offload": 0.5}, r"offload=0.5 without a host: give its memory as `host`"),
        ({"optimizer": "host"}, r"optimizer=host without a host: give its memory as `host`, or optimizer=device"),
        ({"tensor_parallel": 1}, r"the costs are of Degrees\(tensor=2, .* but the plan has Degrees\(tensor=1"),
        ({"microbatch_size": 2, "data_parallel": 1, "num_microbatches": 6}, "but the plan has .* microbatch_size=2"),
        ({"partition": (2, 2, 1, 2)}, r"partition=\[2, 2, 1, 2\] has 7 layers; .* model's 6 in all"),
        ({"partition": (2, 1.5, 1.5, 1)}, "whole numbers, as its layers can't be cut in half"),
    ],
)
def test_what_no_costs_are_known_of_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    space = PlanSpace(source(), SEQ_LEN, 12, PlanOptions())
    plan = replace(NAMED, **changes)
    rows = plan.data_parallel * plan.num_microbatches * plan.microbatch_size
    with pytest.raises(SlipstreamError, match=said):
        evaluate(plan, space.costs(NAMED.degrees, 1), GlobalBatch(512, rows), space.source.state)
