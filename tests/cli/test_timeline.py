"""`slipstream timeline` draws schedules by name or file and measured runs, and refuses what it does not know."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

import slipstream
from slipstream.cli import app
from slipstream.cluster_plans.plan_model import choose_costs
from slipstream.cost import Degrees, MeasuredCosts, load_profile
from slipstream.errors import SlipstreamError
from slipstream.pipeline.planning import StartRequest
from slipstream.profile import profile_model
from slipstream.profile.cost_cache import CostCache
from slipstream.schedule import (
    SCHEDULES,
    Schedule,
    add_communication,
    add_offload,
    gpipe,
    make_schedule,
    one_f_one_b,
    split_backwards,
)
from slipstream.simulator import simulate
from slipstream.simulator.costs import UnitCost
from slipstream.timeline import load_trace, save_trace
from slipstream.units import duration_unit
from support.architectures import llama
from support.pipelines import make_pipe
from support.run_folders import make_run
from support.timeouts import LIMIT


def run(*arguments: str | Path) -> Result:
    """The command in this process."""
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["timeline", *map(str, arguments)])


def shown(*arguments: str | Path) -> list[str]:
    result = run(*arguments)
    assert result.exit_code == 0, result.exception
    return result.stdout.splitlines()


def refused(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, SlipstreamError), result.output
    return str(result.exception)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A run of a lowered schedule in which 1/8 s goes by before every action of a rank."""
    late: dict[int, float] = {}
    spans = []
    for span in simulate(add_communication(split_backwards(one_f_one_b(2, 2, 2))), UnitCost(link=0.5)).spans:
        if span.computes:
            late[span.rank] = late.get(span.rank, 0) + 0.125
        delay = late.get(span.rank, 0)
        spans.append(replace(span, start=span.start + delay, end=span.end + delay))
    timeline = simulate(one_f_one_b(2, 2, 2), UnitCost())
    save_trace(tmp_path / "run.json", replace(timeline, spans=tuple(spans), memory=(), name="1f1b", measured=True))
    return tmp_path / "run.json"


def test_a_named_schedule_and_who_waits_for_what() -> None:
    assert shown("gpipe", "--ranks=2", "--slices=3", "--backward=1") == [
        "rank 0  F0.0 F0.1 F0.2           B0.2 B0.1 B0.0",
        "rank 1       F0.0 F0.1 F0.2 B0.2 B0.1 B0.0",
        "gpipe, simulated: 8 s, 25.0% idle",
        "(s)     busy  fill  compute  drain  idle  peak",
        "rank 0     6     0        2      0     2     1",
        "rank 1     6     1        0      1     2     1",
    ]


def test_what_copies_have_put_on_the_host(tmp_path: Path) -> None:
    """Also of a trace that was saved."""
    (tmp_path / "order.txt").write_text(str(add_offload(gpipe(1, 1, 4))))
    *_, head, row = shown(tmp_path / "order.txt")
    assert head.split()[-2:] == ["peak", "host"]
    assert row.split()[-2:] == ["0.5", "0.75"]
    *_, written = shown(tmp_path / "order.txt", f"--output={tmp_path / 'trace.json'}")
    assert written.startswith("wrote")
    assert shown(tmp_path / "trace.json")[-1] == row


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_by_its_name(name: str) -> None:
    lines = shown(name, "--ranks=3", "--microbatches=3", "--slices=3")
    assert [line[:6] for line in lines[:3]] == ["rank 0", "rank 1", "rank 2"]
    assert max(map(len, lines)) <= 100
    assert any(line.startswith(f"{name}, simulated: ") for line in lines)


def test_costs() -> None:
    """Forward 2 and backward 4, half each for I and W; a rank's two stages share them; the head adds a half."""
    timeline = ["interleaved-1f1b", "--ranks=1", "--slices=1", "--forward=2", "--backward=4", "--head=0.5"]
    assert "interleaved-1f1b, simulated: 9 s, 0.0% idle" in shown(*timeline)
    assert "interleaved-1f1b, simulated: 9 s, 0.0% idle" in shown(*timeline, "--stages-per-rank=3")
    split = ["zb-h1", "--ranks=1", "--slices=1", "--forward=2", "--backward=4"]
    assert "zb-h1, simulated: 6 s, 0.0% idle" in shown(*split)
    assert "zb-h1, simulated: 10 s, 0.0% idle" in shown(*split, "--input-gradient=5", "--weight-gradient=3")
    assert "gpipe, simulated: 8 s, 62.5% idle" in shown("gpipe", "--ranks=2", "--slices=1", "--link=1")


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".json"])
def test_a_schedule_file_as_a_file(tmp_path: Path, suffix: str) -> None:
    plan = tmp_path / "schedule.txt"
    plan.write_text(str(one_f_one_b(3, 2, 2)))
    output = tmp_path / f"timeline{suffix}"
    *lines, wrote = shown(plan, "--output", output)
    assert wrote == f"wrote {output}"
    assert f"--output={output} exists; choose another file, or give --overwrite" in refused(plan, "--output", output)
    assert shown(plan, "--output", output, "--overwrite") == [*lines, wrote]
    assert lines[0] == "1f1b, simulated: 18 s, 33.3% idle"
    assert output.stat().st_size > 1000
    if suffix == ".json":
        assert load_trace(output)[0].schedule.actions == one_f_one_b(3, 2, 2).actions
        assert shown(output)[3:] == lines
    if suffix == ".svg":
        assert "(microbatches)" in output.read_text(encoding="utf-8")


def test_a_measured_timeline_and_its_simulation_above_it(measured: Path, tmp_path: Path) -> None:
    alone = shown(measured)
    assert alone[2].startswith("1f1b, measured: ")
    assert alone[3].split() == ["(s)", "busy", "fill", "compute", "message", "overhead", "drain", "idle"]
    both = shown(measured, "--against=simulated")
    titles = [line for line in both if line.startswith("1f1b, ")]
    assert [title.split(":")[0] for title in titles] == ["1f1b, simulated", "1f1b, measured"]
    simulated, run_ = (float(title.split()[2]) for title in titles)
    assert simulated < run_
    assert [line for line in both if "overhead" in line] == [line for line in alone if "overhead" in line]
    shown(measured, "--against=simulated", "--output", tmp_path / "both.json")
    again, before = load_trace(tmp_path / "both.json")
    assert (again.measured, before) == (False, load_trace(measured)[0])
    assert len(again.spans) == len(before.spans)
    shown(measured, "--against=simulated", "--output", tmp_path / "both.svg")
    drawn = (tmp_path / "both.svg").read_text(encoding="utf-8")
    assert drawn.index("1f1b, simulated") < drawn.index("1f1b, measured")
    assert shown(tmp_path / "both.json") == both


def test_a_runs_folder_is_its_timeline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first")
    assert shown(run.path) == shown(run.perfetto)
    assert shown("1f1b", "--against", run.path)[-3:] == shown(run.path)[-3:]
    assert (
        f"isn't a run's folder: it has no timeline.json. Give what training.output was, such as {run.path}"
        in refused(tmp_path / "runs")
    )
    run.perfetto.unlink()
    assert "has no timeline.json, which is written after its last step" in refused(run.path)


def test_two_schedules_on_one_scale() -> None:
    lines = shown("gpipe", "--against=interleaved-1f1b", "--microbatches=4", "--slices=1")
    titles = [line.split(":")[0] for line in lines if "simulated" in line]
    assert titles == ["gpipe, simulated", "interleaved-1f1b, simulated"]
    ends = [len(line) for line in lines if line.startswith("rank 0  ") and "B" in line]
    assert ends[0] > ends[1]


def test_what_is_not_known(tmp_path: Path, measured: Path) -> None:
    assert refused("zb-h3").startswith(
        "there is no schedule or file 'zb-h3'; did you mean 'zb-h2'? Choose one of gpipe, "
    )
    assert "there is no schedule or file 'plan.txt'" in refused("plan.txt")
    assert "must end in .png, .svg, .pdf or .json" in refused("gpipe", "--output=x.gif")
    assert "stages_per_rank=3, but the schedule 'zb-v' has exactly 2" in refused("zb-v", "--stages-per-rank=3")
    assert "gpipe is not one measured timeline" in refused("gpipe", "--against=simulated")
    assert "can't read the timeline" in refused(tmp_path / "nothing.json")
    assert "isn't a run's folder: it has no timeline.json. Give what training.output was" in refused(tmp_path)
    assert "there is no schedule or file 'simulted'" in refused(measured, "--against=simulted")
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    assert "other.json is not a timeline" in refused(tmp_path / "other.json")
    (tmp_path / "schedule.txt").write_text("nonsense")
    assert "'nonsense' has no colon" in refused(tmp_path / "schedule.txt")


def test_an_impossible_order_ends_with_code_2_the_grid_the_rule_and_both_actions(tmp_path: Path) -> None:
    good = make_schedule("1f1b", 2, 2)
    first, last = good.actions
    bad = replace(good, actions=(first, (last[1], last[0], *last[2:])))
    (tmp_path / "bad.txt").write_text(str(bad))
    command = [sys.executable, "-m", "slipstream", "timeline", str(tmp_path / "bad.txt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (result.returncode, result.stdout) == (2, "")
    assert "1B0 (rank 1) waits for 1F0" in result.stderr  # the two actions
    assert "a backward follows its own forward" in result.stderr  # the rule
    assert result.stderr.splitlines()[-1].startswith("rank 1 >1B0<  1F0")  # the grid


# --- from a profile --------------------------------------------------------------------------------------------------

PROFILE = Path(__file__).parents[2] / "examples" / "profiles" / "xeon-two-processes.json"


def test_a_profile_gives_the_costs_of_any_cut(tmp_path: Path) -> None:
    profile = load_profile(PROFILE)
    num_layers, seq_len = len(profile.kinds), profile.seq_len
    first, last = seq_len // 64 * 32, seq_len - seq_len // 64 * 32
    cut = [0, num_layers - 1, 1, 0] if profile.units_per_layer == 1 else [0, num_layers - 1.5, 1.5, 0]
    schedule = make_schedule("interleaved-1f1b", 2, 1, 2, 2)
    expected = simulate(schedule, MeasuredCosts(profile).cost(cut, [first, last])).makespan
    given = f"--partition={','.join(map(str, cut))}", f"--lengths={first},{last}"
    lines = shown("interleaved-1f1b", "--ranks=2", "--slices=2", f"--profile={PROFILE}", *given)
    assert any(f": {expected:.4g} s, " in line for line in lines)
    picture = tmp_path / "timeline.svg"
    shown("1f1b", "--ranks=2", "--slices=2", f"--profile={PROFILE}", f"--output={picture}")
    assert "(microbatches)" not in picture.read_text(encoding="utf-8")


def test_cuts_that_a_profile_has_no_costs_of() -> None:
    given = ("1f1b", "--ranks=2", "--slices=2", f"--profile={PROFILE}")
    assert "--partition has 3 numbers, but the schedule '1f1b' needs 2" in refused(*given, "--partition=3,3,2")
    assert "partition=[3.3, 4.7] has 8 layers; give every stage" in refused(*given, "--partition=3.3,4.7")
    assert "--partition=3,x can't be read" in refused(*given, "--partition=3,x")
    assert "--lengths has 1 numbers" in refused(*given, "--lengths=64")
    said = "--partition is for the costs of a model: give --model and --cluster, or --profile=profile.json, too"
    assert said in refused("1f1b", "--partition=1,2,3,4")
    assert "--seq-len and --cluster are for" in refused("1f1b", "--cluster=h100-dgx", "--seq-len=64")
    assert "leave out --model, --cluster, --num-nodes and --dtype" in refused(*given, "--dtype=float32")
    assert "--lengths=64,64 add up to 128, but --seq-len=256" in refused(*given, "--lengths=64,64", "--seq-len=256")


# --- of a model ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, of which no costs are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Four devices on which kernels cost nothing, so that slices are short."""
    numbers = {"memory": 1e9, "memory_bandwidth": 1e10, "kernel_seconds": 0, "matmul_efficiency": 1}
    device = {"name": "small", "flops": {"float32": 1e9}, **numbers}
    links = {"inside": {"bandwidth": 1e10, "latency": 1e-6}, "between": {"bandwidth": 1e9, "latency": 1e-5}}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"name": "four", "num_nodes": 1, "devices_per_node": 4, "device": device, **links}))
    return path


def of_plan(schedule: Schedule, partition: Iterable[float], slices: Iterable[int], folder: Path) -> list[str | Path]:
    """The arguments for what a plan has found."""
    (folder / "found.txt").write_text(str(schedule))
    lists = {"partition": partition, "lengths": slices}
    return [folder / "found.txt", *(f"--{name}={','.join(map(str, each))}" for name, each in lists.items())]


def makespan(*arguments: str | Path) -> str:
    """The length of the step that is shown, with its unit."""
    (line,) = (line for line in shown(*arguments) if ", simulated: " in line)
    return line.partition("simulated: ")[2].partition(",")[0]


def as_shown(seconds: float) -> str:
    per_second, unit = duration_unit(seconds)
    return f"{seconds * per_second:.4g} {unit}"


def test_a_cluster_gives_the_costs_that_a_plan_has(model: Path, cluster: Path, tmp_path: Path) -> None:
    """Of stages that two devices share, also where a cut is inside a layer."""
    degrees = {"tensor_parallel": 2, "pipeline_parallel": 2}
    others: dict[str, Any] = {"schedule": "1f1b", "num_slices": 3, "recompute": "none", "offload": 0.0}
    plan = slipstream.plan(model, cluster, seq_len=64, global_batch=1, dtype="float32", **degrees, **others)
    best, schedule = plan.best, plan.timeline.schedule
    given = of_plan(schedule, best.plan.partition, best.plan.slices, tmp_path)
    options = f"--model={model}", f"--cluster={cluster}", "--dtype=float32", "--tensor-parallel=2"
    assert makespan(*given, *options) == as_shown(plan.timeline.makespan)
    costs = choose_costs(llama(), cluster, seq_len=64, dtype="float32").costs(Degrees(tensor=2), 1)
    given = of_plan(schedule, [1.5, 2.5], best.plan.slices, tmp_path)
    expected = simulate(schedule, costs.cost([1.5, 2.5], best.plan.slices)).makespan
    assert makespan(*given, *options) == as_shown(expected) != as_shown(plan.timeline.makespan)
    for changed, said in (
        ("--tensor-parallel=3", "tensor_parallel=3 can't be predicted for four: choose one of 1, 2, 4."),
        ("--partition=1,2", "partition=[1.0, 2.0] has 3 layers"),
    ):
        assert said in refused("gpipe", "--ranks=2", "--slices=2", "--seq-len=64", *options, changed)
    assert "how long are the sequences? give --seq-len" in refused("gpipe", *options)


@pytest.mark.more
def test_a_run_a_plan_and_a_timeline_read_the_same_kept_costs(model: Path, tmp_path: Path) -> None:
    assert "has no costs of this model in sequences of 64 tokens" in refused("1f1b", f"--model={model}", "--seq-len=64")
    request = StartRequest(seq_len=64, microbatch_size=1, num_microbatches=1, num_ranks=2, dtype="float32")
    cpu = torch.device("cpu")
    measured = profile_model(llama(), request.profile, cpu)
    kept = replace(measured, hardware=replace(measured.hardware, processes=2))
    CostCache(llama(), request.profile, cpu, num_processes=1).keep(kept, print)

    for vocabulary in ("whole", "spread"):
        options: dict[str, Any] = {"schedule": "auto", "slices": "auto", "seq_len": 64, "vocabulary": vocabulary}
        pipe = make_pipe(llama(), num_ranks=2, **options)
        chosen = pipe.plan
        assert chosen is not None
        assert chosen.schedule.spreads_vocabulary == (vocabulary == "spread")
        given = of_plan(chosen.schedule, chosen.partition, chosen.slices, tmp_path)
        assert makespan(*given, f"--model={model}") == as_shown(chosen.seconds)

    planned = slipstream.plan(model, seq_len=64, global_batch=1, pipeline_parallel=2, schedule="auto")
    found = planned.best.joint
    assert found is not None
    given = of_plan(found.schedule, found.partition, found.slices, tmp_path)
    assert makespan(*given, f"--model={model}") == as_shown(planned.timeline.makespan)
