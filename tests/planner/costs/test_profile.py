"""A profile gives the cost of every stage as a sum of the measured few, survives its file, and refuses the rest."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.cost import (
    LONE_UPDATE,
    OPS,
    Degrees,
    Hardware,
    MeasuredCosts,
    MeasuredLink,
    MeasuredStage,
    Measurement,
    ModelIdentity,
    Profile,
    ProfileSource,
    StageParts,
    StateBytes,
    Update,
    fit_times,
    load_profile,
)
from slipstream.cost.measured_stages import choose_stages, combine, stage_row
from slipstream.cost.work import part_kinds, parts_of
from slipstream.errors import SlipstreamError
from slipstream.planner.find_plan import find_plan
from slipstream.planner.joint import SlicedUnits
from slipstream.planner.search import ClusterProblem, PlanOptions
from slipstream.schedule import Op, gpipe
from slipstream.simulator import simulate
from support.hand_made_plan import stages_of
from support.paths import ROOT

HARDWARE = Hardware("cpu", "a processor", cores=2, threads=1, processes=2)
MODEL = ModelIdentity("llama", num_layers=6, hidden_size=32, vocab_size=61, config_hash="abc")
KINDS = (0, 1, 0, 1, 0, 1)
LENGTHS = (1, 16, 64)
SECONDS = {  # of F per token, of parts that add up
    "stage": 1e-6,
    "a": 5e-6,
    "b": 9e-6,
    "embedding": 2e-6,
    "head": 2e-5,
}
FACTORS = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.25, Op.W: 0.75}
BYTES = {"stage": 10, "a": 100, "b": 150, "embedding": 30, "head": 1000}


PARTS = ("embedding", *("ab"[kind] for kind in KINDS), "head")


def parts(layers: range) -> list[str]:
    """The parts of a stage with these layers."""
    return ["stage", *(PARTS[part] for part in parts_of(layers, len(KINDS), 1))]


def seconds(own: list[str], op: Op, length: int, context: int) -> float:
    """By hand: every part's time per token, layers' growing with the tokens that it attends to."""
    factor = FACTORS[op]
    grown = 1 + (context + (length + 1) / 2) / 100
    return sum(factor * SECONDS[part] * length * (grown if part in "ab" else 1) for part in own)


def measured(stage: range) -> MeasuredStage:
    own = ["stage", *(PARTS[part] for part in stage)]
    num_layers = sum(part in "ab" for part in own)
    points = [(i, j) for i in LENGTHS for j in (0, 16, 48) if i + j <= 64]
    values = {op: {(i, j): seconds(own, op, i, j) for i, j in points} for op in OPS}
    size = sum(BYTES[part] for part in own)
    return MeasuredStage(
        first=stage.start,
        last=stage.stop - 1,
        fits={op: fit_times(values[op]) for op in OPS},
        points={
            op: tuple(
                Measurement(*point, value, 0.01, held_out=point == (16, 16)) for point, value in values[op].items()
            )
            for op in OPS
        },
        activation_bytes=tuple((length, size * length) for length in LENGTHS),
        context_bytes=8 * num_layers,
        context_gradient_bytes=16 * num_layers,
        num_parameters=sum(BYTES[part] for part in own if part != "stage"),
    )


@pytest.fixture(scope="module")
def profile() -> Profile:
    return Profile(
        hardware=HARDWARE,
        model=MODEL,
        versions={"torch": "2"},
        dtype="float32",
        dtype_bytes=4,
        microbatch_size=3,
        seq_len=64,
        kinds=KINDS,
        kind_names=("a", "b"),
        units_per_layer=1,
        stages=tuple(map(measured, choose_stages(part_kinds(KINDS, 1)))),
        optimizer_seconds=1e-9,
        link=MeasuredLink(1e-4, 1e9, "gloo", ((1024, 1e-4),), ((1000, 2e-4), (2000, 3e-4))),
    )


@pytest.mark.parametrize(
    "kinds",
    [
        kinds
        for n in range(1, 7)
        for kinds in itertools.product((0, 1), repeat=n)
        if kinds[0] == 0 and list(dict.fromkeys(kinds)) == list(range(max(kinds) + 1))
    ],
    ids=str,
)
@pytest.mark.parametrize("units_per_layer", [1, 2])
def test_the_chosen_stages_make_up_every_stage(kinds: tuple[int, ...], units_per_layer: int) -> None:
    """However the kinds alternate, however few layers there are, and wherever a stage begins and ends."""
    own = part_kinds(kinds, units_per_layer)
    chosen = choose_stages(own)
    assert max(map(len, chosen)) <= 6
    for start, stop in itertools.combinations(range(len(own) + 1), 2):
        assert np.isfinite(combine(own, chosen, stage_row(own, range(start, stop)))).all()


def test_one_kind_is_measured_in_four_stages_or_with_halves_in_five() -> None:
    """A unit of each kind, the ends, and six units together, which have the fixed part once."""
    assert choose_stages(part_kinds((0,) * 8, 1)) == (range(1, 2), range(0, 1), range(9, 10), range(1, 7))
    halves = choose_stages(part_kinds((0,) * 8, 2))
    assert halves == (range(1, 2), range(2, 3), range(0, 1), range(17, 18), range(1, 7))
    assert choose_stages(part_kinds((0, 0), 1))[-1] == range(4)  # the whole model


def test_an_error_of_one_measurement_is_not_multiplied_in_a_stage_of_several_layers() -> None:
    """In percent of what was measured, where every stage is off by at most 1% in either direction."""
    own = part_kinds((0,) * 8, 2)
    chosen = choose_stages(own)
    seconds = [0.1 + len(stage) for stage in chosen]
    weights = combine(own, chosen, stage_row(own, range(1, 8)))
    error = sum(abs(weight) * each for weight, each in zip(weights, seconds, strict=True))
    assert error < 1.7 * (0.1 + 7)


def test_a_row_that_is_not_spanned_is_an_error() -> None:
    own = part_kinds((0,), 1)
    with pytest.raises(ValueError, match="don't span"):
        combine(own, [range(1, 2)], stage_row(own, range(2)))


@pytest.mark.parametrize("partition", [[6], [3, 3], [1, 4, 1], [1, 1, 1, 1, 1, 1]], ids=str)
def test_costs_are_sums_of_parts(profile: Profile, partition: list[int]) -> None:
    slices = [32, 16, 8, 8]
    cost = MeasuredCosts(profile).cost(partition, slices)
    for index, layers in enumerate(stages_of(partition)):
        for number, (length, context) in enumerate(zip(slices, (0, 32, 48, 56), strict=True)):
            for op in OPS:
                by_hand = seconds(parts(layers), op, length, context)
                messages = (index > 0) + (index < len(partition) - 1) if op is not Op.W else 0
                by_hand += messages * 3 * length * 32 * 4 * 1.5e-7
                assert cost.times[index, number, op] == pytest.approx(by_hand, rel=1e-9)
            computed = seconds(parts(layers), Op.F, length, context)
            assert cost.times[index, number, Op.R] == pytest.approx(computed)
            by_hand = length * sum(BYTES[part] for part in parts(layers))
            assert cost.activations[index, number] == pytest.approx(by_hand)
            assert cost.kept[index, number] == (3 * length * 32 * 4 if index else 0)
    assert cost.message_bytes == [3 * length * 32 * 4 for length in slices]
    assert (cost.latency, cost.bandwidth) == (1e-4, 1e9)


def test_messages_keep_ranks_from_computing_longer_the_longer_they_are() -> None:
    points = (1024, 1e-4), (4096, 2e-4)
    found = MeasuredLink(1e-4, 1e9, "gloo", points, ((1000, 2e-4), (2000, 3e-4)))
    np.testing.assert_allclose(found.handling_seconds(np.array([500, 1500, 4000])), [2e-4, 2.5e-4, 6e-4])
    np.testing.assert_allclose(replace(found, handling=()).handling_seconds(np.array([500, 1500])), 0)


def test_the_simulator_takes_them(profile: Profile) -> None:
    timeline = simulate(gpipe(1, 1, 2), MeasuredCosts(profile).cost([6], [32, 32]))
    both = (Op.F, Op.B)
    expected = sum(seconds(parts(range(6)), op, 32, context) for op in both for context in (0, 32))
    assert timeline.makespan == pytest.approx(expected)


def test_parts_are_told_apart(profile: Profile) -> None:
    for name in ("stage", "a", "b", "embedding", "head"):
        time = profile.part_time(name, Op.B)
        assert time(16, 0) == pytest.approx(seconds([name], Op.B, 16, 0))
    with pytest.raises(SlipstreamError, match="did you mean 'head'"):
        profile.part_time("heads", Op.F)


def test_a_half_that_two_kinds_of_layers_have_in_common() -> None:
    """Dense layers and those with experts, of which the attention half is measured once."""
    kinds, unit_kinds = (0, 1, 0, 1), (0, 1, 0, 2)
    own = part_kinds(kinds, 2, unit_kinds)
    assert own == (3, 0, 1, 0, 2, 0, 1, 0, 2, 4)
    seconds_of_kinds = [5e-6, 9e-6, 3e-5, 2e-6, 2e-5]

    def stage(bounds: range) -> MeasuredStage:
        seconds = 1e-6 + sum(seconds_of_kinds[own[part]] for part in bounds)
        points = {(length, 0): seconds * length for length in LENGTHS}
        return MeasuredStage(bounds.start, bounds.stop - 1, dict.fromkeys(OPS, fit_times(points)), {}, (), 0, 0, 0)

    chosen = choose_stages(own)
    assert len(chosen) == 6
    stages = tuple(map(stage, chosen))
    sizes = {"microbatch_size": 1, "seq_len": 64, "dtype_bytes": 4, "optimizer_seconds": 0.0}
    names = ("dense layer", "expert layer")
    found = Profile(
        HARDWARE, MODEL, {}, "float32", kinds=kinds, kind_names=names, units_per_layer=2, stages=stages, **sizes,
        unit_kinds=unit_kinds,
    )  # fmt: skip
    common, dense, expert = (
        f"{name} half" for name in ("dense layer, attention", "dense layer, feed-forward", "expert layer, feed-forward")
    )
    assert found.part_names == ("stage", common, dense, expert, "embedding", "head")
    expected = {
        common: 5e-6,
        "expert layer, attention half": 5e-6,
        expert: 3e-5,
        "expert layer": 3.5e-5,
        "dense layer": 1.4e-5,
        "head": 2e-5,
    }
    for name, seconds in expected.items():
        assert found.part_time(name, Op.F)(16, 0) == pytest.approx(16 * seconds)
    seconds = MeasuredCosts(found).seconds(StageParts(3, 7), Op.F, 16, 0)
    assert seconds == pytest.approx(16 * (1e-6 + 5e-6 + 3e-5 + 5e-6 + 9e-6))


def test_a_plan_and_the_simulator_read_the_same_seconds(profile: Profile) -> None:
    """Of a disturbed profile too, by which a part would take less than nothing."""
    *others, last = profile.stages
    slow = {op: fit_times({(p.length, p.context): 3 * p.seconds for p in last.points[op]}) for op in OPS}
    noisy = replace(profile, stages=(*others, replace(last, fits=slow)), disturbed=0.04)
    costs = MeasuredCosts(noisy)
    slices = (32, 16, 16)
    assert noisy.part_time("stage", Op.F)(16, 0) == 0
    for partition in ([6], [2, 4], [0, 5, 1, 0]):
        parts = StageParts.of_partition(partition, 6, 1)
        table = SlicedUnits(costs, slices, costs.link(2)).table((*(part.start for part in parts), parts[-1].stop))
        cost = costs.cost(partition, slices)
        for key, seconds in table.times.items():
            assert cost.times[key] == pytest.approx(seconds, rel=1e-9)
        assert (cost.message_bytes, cost.latency) == (table.message_bytes, table.latency)


def test_what_little_the_machine_did_besides_goes_on(profile: Profile) -> None:
    """Times are those of computing; another program, which needs more, may have ended when the steps come."""
    seconds = MeasuredCosts(profile).seconds(range(1, 3), Op.B, 16, 32)
    for disturbed, expected in [(0.02, seconds / 0.98), (0.3, seconds)]:
        busy = replace(profile, disturbed=disturbed)
        assert MeasuredCosts(busy).seconds(range(1, 3), Op.B, 16, 32) == pytest.approx(expected)
        assert busy.is_disturbed == (disturbed == 0.3)


def test_memory_of_a_stage(profile: Profile) -> None:
    assert MeasuredCosts(profile).context_bytes(range(1, 5), 10) == pytest.approx(8 * 4 * 10)
    assert MeasuredCosts(profile).context_gradient_bytes(range(1, 5), 10) == pytest.approx(16 * 4 * 10)
    assert MeasuredCosts(profile).num_parameters(range(3, 6)) == 150 + 100 + 150 + 1000
    assert MeasuredCosts(profile).optimizer_step_seconds(range(3, 6), LONE_UPDATE) == pytest.approx(1.4e-6)


def test_replicas_reduce_gradients_over_the_measured_link(profile: Profile) -> None:
    """A ring of three: four messages of a third of the gradients each, after the other."""
    link = profile.link
    assert link is not None
    stage = range(3, 6)
    third = 4 * MeasuredCosts(profile).num_parameters(stage) / 3 / link.bandwidth
    three = replace(LONE_UPDATE, copies=3)
    assert MeasuredCosts(profile).gradient_seconds(stage, three) == pytest.approx(4 * (link.latency + third))
    assert MeasuredCosts(profile).gradient_seconds(stage, LONE_UPDATE) == 0
    twice = replace(profile, link=replace(link, sum_bandwidth=2 * link.bandwidth))
    assert MeasuredCosts(twice).gradient_seconds(stage, three) == pytest.approx(4 * (link.latency + third / 2))
    whole, half = (
        MeasuredCosts(profile).optimizer_step_seconds(stage, update)
        for update in (LONE_UPDATE, replace(LONE_UPDATE, copies=2, shard="optimizer"))
    )
    assert half == whole / 2
    source = ProfileSource(profile, num_ranks=4)
    options = PlanOptions(pipeline_parallel=(2,), schedule=("1f1b",), stages_per_rank=(1,), num_slices=(2,))
    found = find_plan(ClusterProblem(source, 64, 6, options=options)).best
    cut = StageParts.of_partition(found.plan.partition, len(profile.kinds), 1)
    assert found.plan.data_parallel == 2
    update = Update(source.state, 2, found.plan.shard)
    reduced = [pytest.approx(MeasuredCosts(profile).gradient_seconds(each, update)) for each in cut]
    assert found.seconds_by_cause["gradient reduction"] in reduced
    assert any("computed from the measured link" in note for note in source.notes())
    assert any("can't measure a link" in note for note in ProfileSource(replace(profile, link=None), 1).notes())


@pytest.mark.parametrize(("dtype", "weights"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bf16", "float32")])
def test_state_is_that_of_the_weights_that_were_measured(profile: Profile, dtype: str, weights: str) -> None:
    """Under autocast they are float32, though half as many bytes are sent between stages."""
    source = ProfileSource(replace(profile, dtype=dtype, dtype_bytes=4 if dtype == "float32" else 2), num_ranks=2)
    assert source.state == StateBytes.of(weights)
    stage, costs, link = range(3, 6), source.costs(Degrees(), 1), profile.link
    assert link is not None
    gathered = costs.gather_seconds(stage, Update(source.state, 2, "optimizer"))
    num_bytes = source.state.weights * costs.num_parameters(stage)
    assert gathered == pytest.approx(link.latency + num_bytes / 2 / link.ring_bandwidth)


def test_a_file_comes_back_equal(profile: Profile, tmp_path: Path) -> None:
    for each in (profile, replace(profile, link=None)):
        each.save(tmp_path / "profile.json")
        assert load_profile(tmp_path / "profile.json") == each
    assert MeasuredCosts(each).cost([3, 3], [64]).bandwidth is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "can't read the profile"),
        ("nonsense", "isn't a profile"),
        ("[]", "format=None"),
        ('{"format": 99}', r"json has format=99, this version reads 2; measure again with `slipstream profile`\.$"),
        ('{"format": 2}', "hardware: field required"),
        ({"seq_len": "long"}, r"isn't a profile: seq_len: .*integer"),
    ],
)
def test_other_files_are_refused(
    profile: Profile, tmp_path: Path, text: str | dict[str, str] | None, reason: str
) -> None:
    path = tmp_path / "profile.json"
    if isinstance(text, dict):
        profile.save(path)
        text = json.dumps(json.loads(path.read_text()) | text)
    if text is not None:
        path.write_text(text)
    with pytest.raises(SlipstreamError, match=reason):
        load_profile(path)


def test_the_profile_among_the_examples_can_be_read() -> None:
    profile = load_profile(ROOT / "examples" / "profiles" / "xeon-two-processes.json")
    assert profile.part_names == ("stage", "layer", "embedding", "head")
    assert profile.error < 0.02


def test_what_differs_is_named(profile: Profile) -> None:
    profile.check(MODEL, "float32")
    profile.check(MODEL)
    with pytest.raises(
        SlipstreamError, match=r"model.hidden_size is 32 in the profile, 64 here; model.config_hash is 'abc'"
    ):
        profile.check(replace(MODEL, hidden_size=64, config_hash="def"))
    with pytest.raises(SlipstreamError, match="dtype is float32 in the profile, bfloat16 here"):
        profile.check(MODEL, "bfloat16")


@pytest.mark.parametrize(
    ("partition", "slices", "reason"),
    [
        ([3, 2], [64], "has 5 layers.*6 in all"),
        ([3, 0, 3], [64], "give every stage at least 1, in whole numbers"),
        ([3.5, 2.5], [64], "whole numbers, as its layers can't be cut in half"),
        ([3, 3], [64, 1], "profile's 64. Profile with --seq-len=65"),
        ([3, 3], [32, 0], "each of 1 token or more"),
    ],
)
def test_pipelines_that_were_not_measured(
    profile: Profile, partition: list[float], slices: list[int], reason: str
) -> None:
    with pytest.raises(SlipstreamError, match=reason):
        MeasuredCosts(profile).cost(partition, slices)


def test_the_error_is_of_the_points_held_out(profile: Profile) -> None:
    assert profile.error == pytest.approx(0, abs=1e-9)
    stage = profile.stages[0]
    points = stage.points[Op.F]
    spoiled = tuple(replace(p, seconds=2 * p.seconds) if p.held_out else p for p in points)
    bad = replace(profile, stages=(replace(stage, points=stage.points | {Op.F: spoiled}), *profile.stages[1:]))
    assert bad.error == pytest.approx(0.5 / (len(profile.stages) * len(OPS)))
    assert bad.points_off(0.02) == pytest.approx({(16, 16): 0.5})
