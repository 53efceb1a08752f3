"""`slipstream plan` shows and writes the plan that the function returns, and `slipstream train` runs it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import slipstream
from slipstream.cli.plan import plan as command
from slipstream.cli.plan import training_lines
from slipstream.cluster_plans.described_model import DescribedModel
from slipstream.cluster_plans.gpus_here import gpus_here
from slipstream.cluster_plans.plan_file import plan_settings, write_plan_file
from slipstream.cluster_plans.plan_model import choose_cluster, choose_costs
from slipstream.cost import Degrees, MeasuredCosts, ProfileSource, load_cluster, load_profile
from slipstream.errors import SlipstreamError
from slipstream.machine_memory import machine_memory
from slipstream.planner.report import MOST_REASONS, fused_advice, reasons, refusals
from slipstream.planner.search import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.profile import ProfileSettings, profile_model
from slipstream.profile.cost_cache import CostCache
from slipstream.schedule import COMMUNICATION, Schedule
from slipstream.train.config import load_config
from slipstream.train.recorded_plan import fused_advice_of
from slipstream.units import bytes_text, count_text, plural, seconds_text
from support.architectures import ARCHITECTURES, llama
from support.forked import slipstream_command
from support.hand_made_plan import MODEL, make_plan
from support.hybrids import HYBRIDS
from support.parameters import first_of
from support.small_clusters import CLUSTER, small_cluster
from support.tiny_training import run_training, steps_of

SEQ_LEN = 64


@pytest.fixture
def model(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    return path


def plan_file(model: Path, cluster: Path, output: Path, **changes: Any) -> dict[str, Any]:
    settings = {"seq_len": SEQ_LEN, "global_batch": 4, "output": output, "dtype": "float32"}
    command(**{"model": str(model), "cluster": str(cluster)} | settings | changes)
    loaded: dict[str, Any] = yaml.safe_load(output.read_text())
    return loaded


# --- what is shown and written ---------------------------------------------------------------------------------------


def test_table_reasons_and_files_agree_with_the_plan(
    model: Path, cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, report = tmp_path / "plan.yaml", tmp_path / "plan.html"
    written = plan_file(model, cluster, output, report=report, top=3, slicing="equal-time,exact")
    shown = capsys.readouterr().out
    settings: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch": 4, "dtype": "float32", "num_best": 3}
    found = slipstream.plan(model, cluster, **settings, slicing=["equal-time", "exact"])
    table = [line for line in shown.splitlines() if re.match(r" \d+ x \d+ x \d+ x \d+ \(\d+\) ", line)]
    best = found.best
    chosen = best.plan
    assert len(table) == len(found.predictions) <= 3
    for line, each in zip(table, found.predictions, strict=True):
        degrees = each.plan
        names = [degrees.tensor_parallel, degrees.context_parallel, degrees.pipeline_parallel, degrees.data_parallel]
        assert line.split()[:7:2] == [str(name) for name in names]
        assert f" {seconds_text(each.step_seconds)} " in line
        assert f" {count_text(each.tokens_per_second)} " in line
    assert f"memory of rank {best.fullest_rank}" in shown
    assert all(kind in shown for kind, size in best.memory[best.fullest_rank].items() if size)
    because = [line for line in shown.splitlines() if line.startswith("With ") and " instead of " in line]
    assert because == [*map(str, reasons(found)[:MOST_REASONS])]
    assert because
    num_more = len(reasons(found)) - len(because)
    assert (f"{plural(num_more, 'more reason')} in {report}" in shown) == (num_more > 0)
    assert f"searched {found.num_configurations:,} configurations" in shown
    wrote, train = shown.splitlines()[-2:]
    assert wrote == f"wrote {output} and {report}"
    assert train.startswith("to train on each of 2 nodes: torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d ")
    assert f" -m slipstream train {output} --data.files=[TEXT.txt] " in train
    heading = next(line for line in shown.splitlines() if "tokens/s" in line)
    for column in ("tp x cp x pp x dp (ep)", "step", "tokens/s", "MFU", "idle", "memory", "slicing"):
        assert (f"\n  {column}: " in shown) == (column in heading)
    assert written["parallel"]["tensor"] == chosen.tensor_parallel
    assert written["plan"]["predicted"]["step_seconds"] == pytest.approx(best.step_seconds, rel=1e-5)
    assert written["pipeline"]["slices"] == list(best.plan.slices)
    assert "Where the step's time goes" in unescape(report.read_text())


@pytest.mark.parametrize(
    ("tokens", "price", "said"),
    [
        (1e9, None, ["1,000,000,000 tokens: 7,813 steps, 2.6 days, 500.0 device hours"]),
        (1e9, 2.5, ["1,000,000,000 tokens: 7,813 steps, 2.6 days, 500.0 device hours, $1,250.08"]),
        (None, 2.5, ["a billion tokens: 500.0 device hours, $1,250.00"]),
        (None, None, []),
    ],
)
def test_days_and_dollars(tokens: float | None, price: float | None, said: list[str]) -> None:
    plan = make_plan()
    best = replace(plan.best, step_seconds=28.8)
    plan = replace(plan, num_devices=8, seq_len=16_000, global_batch=8, predictions=(best,))
    assert training_lines(plan, tokens, price) == said


def test_choices_are_kept_to(model: Path, cluster: Path, tmp_path: Path) -> None:
    lists = {
        "tensor_parallel": "1",
        "context_parallel": "1",
        "data_parallel": "2",
        "schedule": "gpipe",
        "num_slices": "2",
        "recompute": "stage",
    }
    written = plan_file(model, cluster, tmp_path / "a.yaml", **lists, shard="none", microbatch_size="1")
    assert written["parallel"] == {"data": 2, "tensor": 1, "shard": "none"}
    assert written["pipeline"]["schedule"] == "gpipe"
    assert len(written["pipeline"]["slices"]) == 2
    assert written["memory"]["recompute"] == "stage"
    assert written["pipeline"]["num_microbatches"] == 2


def test_the_place_of_the_optimizer_is_shown_written_and_read(
    model: Path, cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lists = {"tensor_parallel": "1", "context_parallel": "1", "schedule": "1f1b", "num_slices": "2"}
    written = plan_file(model, cluster, tmp_path / "a.yaml", **lists, optimizer="host,device")
    assert "optimizer" not in written["memory"]
    assert "optimizer on the host instead of device" not in capsys.readouterr().out
    written = plan_file(model, cluster, tmp_path / "b.yaml", **lists, optimizer="host")
    assert written["memory"]["optimizer"] == "host"
    config = load_config(
        tmp_path / "b.yaml", ["--data.corpus=python-stdlib", "--training.output=x", "--training.steps=1"]
    )
    assert config.memory.optimizer == "host"
    assert "optimizer host" in capsys.readouterr().out


def test_an_exact_slicing_is_written_as_it_is(
    model: Path, cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lists = {"pipeline_parallel": "2", "schedule": "1f1b"}
    written = plan_file(model, cluster, tmp_path / "a.yaml", **lists, slicing="exact", global_batch=2)
    assert "slicing exact" in capsys.readouterr().out
    settings: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch": 2, "dtype": "float32", "pipeline_parallel": 2}
    found = slipstream.plan(model, cluster, **settings, schedule="1f1b", slicing="exact")
    assert found.best.plan.slicing == "exact"
    assert written["pipeline"]["slices"] == list(found.best.plan.slices)
    with pytest.raises(SlipstreamError, match="slicing='exat' isn't known; did you mean 'exact'"):
        plan_file(model, cluster, tmp_path / "b.yaml", slicing="exat")


@pytest.mark.more
def test_python_takes_what_the_command_takes(model: Path, cluster: Path, tmp_path: Path) -> None:
    """Models in every form, one value or several, a counted model."""
    (tmp_path / "training.yaml").write_text(yaml.safe_dump({"model": {"path": str(model)}}))
    settings: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch": 4, "schedule": ["1f1b"], "recompute": "none"}
    settings |= {"tensor_parallel": 1, "pipeline_parallel": 2, "num_slices": 2, "offload": 0.0}
    forms = [llama(), model, model / "config.json", tmp_path / "training.yaml"]
    found = [slipstream.plan(each, cluster, **settings) for each in forms]
    assert len({each.best.plan for each in found}) == 1
    assert {each.best.plan.schedule for each in found} == {"1f1b"}
    assert found[0].model == "llama, 4 layers of 32"
    pinned = {"pipeline_parallel": 8, "schedule": "1f1b", "recompute": "none", "offload": 0.0}
    counted = slipstream.plan(MODEL, "h100-dgx", seq_len=4096, global_batch=8, **pinned)  # one node of a named cluster
    assert counted.num_devices == 8


def test_what_fused_kernels_would_gain_is_said(
    model: Path, cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command and, of its plan file, by a training. Kernels between products take long on a slow memory."""
    cluster.write_text(yaml.safe_dump(CLUSTER | {"device": CLUSTER["device"] | {"memory_bandwidth": 1e8}}))
    few: dict[str, Any] = {"devices": 1, "num_slices": "1", "offload": "0", "recompute": "none", "microbatch_size": "1"}
    plain = plan_file(model, cluster, tmp_path / "plain.yaml", **few)["plan"]["predicted"]
    shown = capsys.readouterr().out
    fused = plan_file(model, cluster, tmp_path / "fused.yaml", **few, fused=True)["plan"]["predicted"]
    gain = plain["fused_gain"]
    assert gain == pytest.approx(1 - fused["step_seconds"] / plain["step_seconds"], abs=1e-5)
    assert gain > 0.02
    assert f"the step would be {gain:.1%} shorter: add --fused\n" in shown
    assert "fused_gain" not in fused
    assert "shorter: add" not in capsys.readouterr().out
    given = "--data.corpus=python-stdlib", "--training.output=x", "--training.steps=1"
    advice = fused_advice_of(load_config(tmp_path / "plain.yaml", [*given]))
    assert advice.endswith(f"would be {gain:.1%} shorter: add --runtime.fused=true")
    assert not fused_advice_of(load_config(tmp_path / "plain.yaml", [*given, "--runtime.fused=true"]))
    assert not fused_advice_of(load_config(tmp_path / "fused.yaml", [*given]))
    assert not fused_advice(0.0199, "--fused")


# --- the plan file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "best"), [({}, 0), ({}, 1), ({"num_slices": 3, "num_microbatches": 4, "num_ranks": 3}, 0)]
)
def test_the_plan_file_reads_back_as_a_configuration(changes: dict[str, int], best: int, tmp_path: Path) -> None:
    plan = make_plan(**changes)
    shown = replace(plan, predictions=plan.predictions[best:])
    path = tmp_path / "plan.yaml"
    sizes = {"num_hidden_layers": 16, "max_position_embeddings": 4096}
    write_plan_file(shown, {"config": {"model_type": "llama", **sizes}}, path)
    config = load_config(path, ["--data.corpus=python-stdlib", "--training.output=x", "--training.steps=1"])
    predicted, chosen = shown.best, shown.best.plan
    assert slipstream.Plan.load(yaml.safe_load(path.read_text())).differences(chosen) == ["slicing"]
    pipeline = config.pipeline
    assert pipeline.num_ranks == chosen.pipeline_parallel
    assert pipeline.schedule == chosen.schedule
    assert pipeline.slices == list(predicted.plan.slices)
    assert pipeline.partition == list(predicted.plan.partition)
    assert (config.memory.recompute, config.memory.offload) == (chosen.recompute, chosen.offload)
    assert pipeline.num_microbatches == predicted.plan.num_microbatches
    assert (config.training.batch_size, config.training.precision) == (shown.global_batch, "bf16-weights")
    assert config.model.config == {"model_type": "llama", **sizes}
    assert config.plan.predicted["memory_limit_bytes"] == 80_000_000_000
    assert config.plan.predicted["versions"]["slipstream"] == slipstream.__version__


def test_what_is_written_of_a_model_is_what_was_given(model: Path, tmp_path: Path) -> None:
    assert DescribedModel("meta-llama/Llama-3.1-8B").section == {"path": "meta-llama/Llama-3.1-8B"}
    assert DescribedModel(model).section == {"path": str(model)}
    assert DescribedModel(model / "config.json").section["config"]["model_type"] == "llama"
    assert DescribedModel(llama()).section["config"]["hidden_size"] == 32
    settings = plan_settings(make_plan(dtype="float16"), {"path": "x"}, "1f1b")
    assert settings["training"] == {"seq_len": 4096, "batch_size": 2, "precision": "fp16"}


def test_a_plan_of_shared_tokens_and_fused_kernels_is_written_as_the_run_needs_it(cluster: Path) -> None:
    settings: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch": 4, "dtype": "float32", "schedule": "1f1b"}
    settings |= {"pipeline_parallel": 1, "num_slices": 1, "recompute": "none", "offload": 0.0, "microbatch_size": 1}
    fused, plain = (
        slipstream.plan(llama(), cluster, tensor_parallel=2, fused=each, **settings) for each in (True, False)
    )
    written = plan_settings(fused, {"path": "x"}, "1f1b")
    assert written["parallel"]["sequence_parallel"] is True
    assert written["runtime"] == {"fused": True}
    assert fused.best.peak_memory < plain.best.peak_memory
    assert fused.best.step_seconds < plain.best.step_seconds
    alone = plan_settings(slipstream.plan(llama(), cluster, tensor_parallel=1, **settings), {"path": "x"}, "1f1b")
    assert "sequence_parallel" not in alone["parallel"]
    assert "runtime" not in alone
    with pytest.raises(SlipstreamError, match="fused with measured costs"):
        slipstream.plan(llama(), None, seq_len=SEQ_LEN, global_batch=4, fused=True)
    with pytest.raises(SlipstreamError, match="leave fused out"):
        slipstream.plan(MODEL, cluster, seq_len=SEQ_LEN, global_batch=4, fused=True)


def test_a_dtype_has_torchs_other_names_too(cluster: Path) -> None:
    named, other = (choose_costs(llama(), cluster, seq_len=SEQ_LEN, dtype=name) for name in ("float32", "float"))
    assert [each.costs(Degrees(), 1).dtype_bytes for each in (named, other)] == [4, 4]


def test_tensor_parallelism_stays_in_a_node_unless_it_is_asked_for(cluster: Path) -> None:
    """Two nodes of two devices: all four share layers only where that is given."""
    source = choose_costs(llama(), cluster, seq_len=SEQ_LEN, dtype="float32")
    degrees = {
        given: {
            mesh.degrees.tensor for mesh in PlanSpace(source, SEQ_LEN, 4, PlanOptions(tensor_parallel=given)).meshes()
        }
        for given in (None, 4)
    }
    assert degrees == {None: {1, 2}, 4: {4}}


def test_ranks_that_share_slices_and_experts_are_written_for_training(cluster: Path, tmp_path: Path) -> None:
    ARCHITECTURES["gpt_oss"].save_pretrained(tmp_path / "model")
    given = {"context_parallel": "2", "expert_parallel": "2", "pipeline_parallel": "1", "num_slices": "1"}
    written = plan_file(tmp_path / "model", cluster, tmp_path / "plan.yaml", **given)
    assert written["parallel"] == {"data": 2, "tensor": 1, "context_exchange": "heads", "context": 2} | {
        "experts": 2,
        "shard": "optimizer",
    }
    assert written["plan"]["predicted"]["num_devices"] == 4
    data = {"data": {"corpus": "python-stdlib"}, "training": written["training"] | {"output": "x", "steps": 1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(written | data))
    assert load_config(tmp_path / "run.yaml").num_processes == 4


def test_why_ranks_share_no_other_slices_and_experts(cluster: Path) -> None:
    """A line says how much longer a step takes with other degrees than the fastest plan's, or why there are none."""
    settings: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch": 4, "dtype": "float32", "schedule": ["1f1b"]}
    found = slipstream.plan(ARCHITECTURES["gpt_oss"], cluster, **settings)
    said = "\n".join(map(str, reasons(found)))
    for choice in ("context_parallel", "expert_parallel"):
        chosen = found.best.plan.choice(choice)
        assert re.search(rf"{choice.replace('_', ' ')} \d instead of {chosen}", said)
    recurrent = "\n".join(refusals(slipstream.plan(HYBRIDS["lfm2"], cluster, **settings)))
    assert "context parallel 1: layer 0 carries a state" in recurrent


def test_eight_bits_are_refused_even_where_a_description_has_their_rate(tmp_path: Path) -> None:
    device = CLUSTER["device"] | {"flops": {"float8_e4m3fn": 4e9}}
    (tmp_path / "narrow.yaml").write_text(yaml.safe_dump(CLUSTER | {"device": device}))
    with pytest.raises(SlipstreamError, match="can't be trained in dtype='float8_e4m3fn', nor planned"):
        choose_costs(llama(), tmp_path / "narrow.yaml", seq_len=SEQ_LEN, dtype="float8_e4m3fn")


@pytest.mark.more
def test_files_are_replaced_only_when_told(model: Path, cluster: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.yaml"
    settings = {"pipeline_parallel": "2", "schedule": "1f1b", "num_slices": "2", "recompute": "none", "offload": "0"}
    plan_file(model, cluster, output, tensor_parallel="1", **settings)
    before = output.read_text()
    with pytest.raises(SlipstreamError, match=r"--output=.* exists; choose another file, or give --overwrite"):
        plan_file(model, cluster, output, tensor_parallel="2")
    with pytest.raises(SlipstreamError, match=r"--report=.* exists"):
        plan_file(model, cluster, tmp_path / "b.yaml", report=output)
    assert output.read_text() == before
    assert not (tmp_path / "b.yaml").exists()
    plan_file(model, cluster, output, tensor_parallel="2", overwrite=True, **settings)
    assert output.read_text() != before


# --- training --------------------------------------------------------------------------------------------------------


def train(num_processes: int, plan: Path) -> None:
    """Two steps by the plan's file, in a folder next to it."""
    text = plan.with_name("text.txt")
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    more = ["--training.steps=2", "--runtime.self_check=false", "--model.config.vocab_size=300"]
    files = f"--data.files=[{text}]", "--data.validation_fraction=0"
    run_training(num_processes, plan.with_name("run"), plan, *files, *more)
    assert len(steps_of(plan.with_name("run"))) == 2


QUICK: dict[str, Any] = {"seq_len": SEQ_LEN, "longest_slice": SEQ_LEN, "granularity": 32, "repeats": 2, "budget": 5.0}


def measure(model: Path, *more: str) -> tuple[Path, list[str]]:
    """Measures by the command; returns the profile's file, and the lines that were said."""
    file = model.with_name("profile.json")
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in QUICK.items()]
    ended = slipstream_command("profile", model, "--output", file, "--device=cpu", *settings, *more)
    assert ended.returncode == 0, ended.stderr
    return file, ended.stdout.splitlines()


@pytest.mark.more
def test_a_model_is_measured_and_a_plan_from_that_is_trained(model: Path, tmp_path: Path) -> None:
    """Its parts and the link between two processes, which is real."""
    (measured, said), settings, output = measure(model), tmp_path / "model.yaml", tmp_path / "plan.yaml"
    profile, told = load_profile(measured), " ".join(" ".join(said).split())
    assert said[-1] == f"wrote {measured}"
    for part in ("stage", "layer", "embedding", "head", "error at points", "link (gloo): latency"):
        assert part in told, said
    assert (profile.seq_len, profile.dtype, profile.hardware.processes) == (SEQ_LEN, "float32", 2)
    assert profile.link is not None
    assert profile.link.bandwidth == MeasuredCosts(profile).cost([1, 3], [32, 32]).bandwidth > 0
    sizes, seconds = zip(*profile.link.handling, strict=True)
    assert max(sizes) == 4 * 2**20
    assert min(seconds) >= 0 < max(seconds)  # four megabytes take more than a measurement's noise
    assert "a message of 1.05 MB keeps" in told
    sums = profile.link.sum_bandwidth or 0
    assert sums > 0
    assert f"sums of gradients: each rank passes on {bytes_text(sums)}/s" in told

    settings.write_text(yaml.safe_dump({"model": {"config": llama().to_diff_dict()}}))
    planned = slipstream_command(
        *("plan", settings, measured, f"--seq-len={SEQ_LEN}", "--global-batch=2", "--output", output),
        *("--pipeline-parallel", "2", "--num-slices", "2,4"),
    )
    assert planned.returncode == 0, planned.stderr
    chosen = yaml.safe_load(output.read_text())
    assert chosen["pipeline"]["num_ranks"] == 2
    assert chosen["training"]["precision"] == "float32"
    assert chosen["plan"]["predicted"]["mfu"] is None
    train(2, output)
    used = load_config(tmp_path / "run" / "config.yaml")
    assert used.pipeline.slices == chosen["pipeline"]["slices"]
    assert used.pipeline.partition == chosen["pipeline"]["partition"]


@pytest.mark.more
def test_what_ranks_measured_together_is_planned_for_as_many(tmp_path: Path) -> None:
    """Two processes that share every slice and have half of the experts each."""
    mixture = ARCHITECTURES["gpt_oss"]
    mixture.save_pretrained(tmp_path / "model")
    file, _ = measure(tmp_path / "model", "--ranks=1", "--cp=2", "--ep=2")
    profile = load_profile(file)
    assert profile.degrees == Degrees(context=2, experts=2)._replace(exchange="auto")
    assert profile.hardware.processes == 2
    plan = slipstream.plan(mixture, file, seq_len=SEQ_LEN, global_batch=2)
    chosen = plan.best.plan
    assert (chosen.context_parallel, chosen.expert_parallel, chosen.num_devices) == (2, 2, 2)
    assert plan_settings(plan, {}, chosen.schedule)["parallel"]["context_exchange"] == "auto"
    with pytest.raises(SlipstreamError, match="divide"):
        slipstream.plan(mixture, file, seq_len=SEQ_LEN, global_batch=2, context_parallel=4)


@pytest.mark.more
@pytest.mark.parametrize("vocabulary", first_of(["spread", "whole"], 1, "grid"))
def test_a_cut_and_an_order_that_were_found_are_trained_as_they_are(
    cluster: Path, tmp_path: Path, vocabulary: str
) -> None:
    """By two processes: the cut in halves, the slices and the order of the plan are those of the run."""
    settings, output = tmp_path / "model.yaml", tmp_path / "plan.yaml"
    settings.write_text(yaml.safe_dump({"model": {"config": llama().to_diff_dict()}}))
    device = CLUSTER["device"] | {"kernel_seconds": 1e-5}  # so that few slices are best, which are soon searched
    cluster.write_text(yaml.safe_dump(CLUSTER | {"num_nodes": 1, "device": device}))
    degrees = {"pipeline_parallel": "2", "schedule": "auto", "recompute": "none", "offload": "0"}
    written = plan_file(settings, cluster, output, **degrees, global_batch=1, vocabulary=vocabulary)["pipeline"]
    assert written.get("vocabulary", "whole") == vocabulary
    assert written["schedule"] == "plan.txt"
    output = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved")) / "plan.yaml"
    tmp_path = output.parent
    order = Schedule.parse(output.with_name("plan.txt").read_text())
    assert order.spreads_vocabulary == (vocabulary == "spread")
    assert order.spreads_vocabulary or any(layers != int(layers) for layers in written["partition"])
    assert len(written["partition"]) == order.num_stages
    assert len(written["slices"]) > 1
    train(2, output)
    used = load_config(tmp_path / "run" / "config.yaml")
    assert (used.pipeline.slices, used.pipeline.partition) == (written["slices"], written["partition"])
    ran = Schedule.parse((tmp_path / "run" / "schedule.txt").read_text())
    assert ran.placement == order.placement
    computed = [[a for a in row if a.op not in COMMUNICATION] for row in ran.actions]
    assert computed == [list(row) for row in order.actions]


@pytest.mark.grid
def test_a_plan_with_replicas_and_shared_layers_is_trained(cluster: Path, tmp_path: Path) -> None:
    model, output = tmp_path / "model.yaml", tmp_path / "plan.yaml"
    model.write_text(yaml.safe_dump({"model": {"config": llama().to_diff_dict()}}))
    degrees = {"tensor_parallel": "2", "data_parallel": "2", "pipeline_parallel": "1", "shard": "optimizer"}
    written = plan_file(model, cluster, output, **degrees)
    assert written["parallel"] == {"data": 2, "tensor": 2, "shard": "optimizer", "sequence_parallel": True}
    train(4, output)
    assert len(steps_of(tmp_path / "run")[-1]["peak_memory"]) == 4


@pytest.mark.more
def test_a_plan_with_sharded_parameters_is_trained(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bfloat16, with float32 rows for the optimizer."""
    model, output = tmp_path / "model.yaml", tmp_path / "plan.yaml"
    model.write_text(yaml.safe_dump({"model": {"config": llama().to_diff_dict()}}))
    given = {"num_nodes": 1, "data_parallel": "2", "shard": "parameters", "dtype": "bfloat16"}
    written = plan_file(model, cluster, output, **given)
    assert "sharded parameters" in capsys.readouterr().out
    assert written["parallel"] == {"data": 2, "tensor": 1, "shard": "parameters"}
    assert written["training"]["precision"] == "bf16-weights"
    train(2, output)
    assert len(steps_of(tmp_path / "run")[-1]["peak_memory"]) == 2


# --- what can't be planned -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "/no/such/model"}, "no model at '/no/such/model'"),
        ({"model": "/no/such.yaml"}, "can't read the model's configuration /no/such.yaml"),
        ({"cluster": "h100-dgz"}, "did you mean 'h100-dgx'"),
        ({"seq_len": 65}, "seq_len=65 is more than the model's 64 positions"),
        (
            {"global_batch": 3, "data_parallel": "2"},
            "data_parallel=2 fits nothing: it must divide the 4 devices and the batch of 3 sequences. "
            "Choose from 1, or leave it out",
        ),
        ({"dtype": "float16"}, "dtype='float16' has no peak on small: use bfloat16, float32"),
        ({"dtype": "fp8"}, "can't be trained in dtype='fp8', nor planned: choose float32, bfloat16 or float16"),
        ({"schedule": "1f2b"}, "schedule='1f2b' isn't known; did you mean '1f1b'"),
        ({"recompute": "half"}, "recompute='half' isn't known. Choose one of none, selective, full, stage"),
        ({"tensor_parallel": "two"}, "--tensor-parallel=two can't be read"),
        ({"tensor_parallel": "0"}, "tensor_parallel=0: give a whole number of 1 or more"),
        (
            {"expert_parallel": "2"},
            "expert_parallel=2 can't be planned for .* 'llama' has no experts that can be spread",
        ),
        ({"context_parallel": "3"}, "^context_parallel=3 fits nothing: .* Choose from 1, 2, 4, or"),
        ({"shard": "optimiser"}, "did you mean 'optimizer'"),
        ({"offload": "1.5"}, "offload=1.5: give the share of slices"),
        ({"memory_limit": 80.0}, "memory_limit=80.0 is implausible, it is in bytes: type 80e9"),
        ({"num_ranks": 2}, "num_ranks=2 is for a profile"),
        ({"output": Path("/no/plan.yaml")}, "there is no folder /no; create it first"),
    ],
)
def test_bad_input_writes_nothing(
    model: Path, cluster: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SlipstreamError, match=reason):
        plan_file(**{"model": model, "cluster": cluster, "output": tmp_path / "plan.yaml"} | changes)
    assert not (tmp_path / "plan.yaml").exists()


FEW = {"seq_len": SEQ_LEN, "global_batch": 4, "num_simulated": 20, "slicing": "equal-time", "dtype": "float16"}


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_a_plan_for_some_devices_of_a_node(devices: int) -> None:
    """Whatever their number, and each of them used."""
    found = slipstream.plan(llama(), "a100-dgx", devices=devices, **FEW)
    assert (found.num_devices, found.best.plan.num_devices) == (devices, devices)
    if devices == 1:
        kinds = "tensor", "context", "expert", "pipeline", "data"
        degrees = {f"{kind}_parallel": 1 for kind in kinds}
        assert slipstream.plan(llama(), "a100-dgx", devices=1, **FEW, **degrees).num_devices == 1


def test_where_a_cluster_has_no_bfloat16_float16_is_taken_and_said(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few: dict[str, Any] = {"schedule": "1f1b", "num_slices": "1", "offload": "0", "top": 1}
    said = "t4-g4dn.12xlarge has no bfloat16, so this is planned in float16"
    for dtype, cluster, is_said in (
        (None, "t4-g4dn.12xlarge", True),
        ("float16", "t4-g4dn.12xlarge", False),
        (None, "h100-dgx", False),
    ):
        written = plan_file(model, cluster, tmp_path / f"{dtype}-{cluster}.yaml", dtype=dtype, devices=2, **few)
        assert written["training"]["precision"] == ("bf16-weights" if cluster == "h100-dgx" else "fp16")
        shown = capsys.readouterr().out
        assert (said in shown) == is_said
        assert f"{cluster}, 2 devices, in {'bfloat16' if cluster == 'h100-dgx' else 'float16'}" in shown
        assert "\nto train: slipstream train" in shown


def test_devices_are_those_of_one_node_unless_more_nodes_are_given(tmp_path: Path) -> None:
    shipped, own = load_cluster("a100-selene"), small_cluster(num_nodes=2, devices_per_node=2)
    assert choose_cluster(own, None, None) == own
    for cluster, num_nodes, devices, found in (
        ("a100-selene", None, None, (1, 8)),
        ("a100-selene", None, 2, (1, 2)),
        ("a100-selene", 3, 6, (3, 2)),
        (shipped, None, 8, (1, 8)),
        (own, None, 2, (1, 2)),
    ):
        chosen = choose_cluster(cluster, num_nodes, devices)
        assert (chosen.num_nodes, chosen.devices_per_node) == found
    for num_nodes, devices, words in (
        (None, 9, "devices=9, but a node of a100-selene has 8. Give at most 8, or num_nodes=2, which have 16."),
        (2, 20, "devices=20, but 2 nodes of a100-selene have 16. Give at most 16, or num_nodes=3, which have 24."),
        (2, 5, "devices=5 can't be spread evenly over num_nodes=2. Give a multiple of 2."),
        (None, 0, "devices=0"),
    ):
        with pytest.raises(SlipstreamError, match=re.escape(words)):
            choose_cluster("a100-selene", num_nodes, devices)
    (tmp_path / "profile.json").write_text("{}")
    for profile in (None, tmp_path / "profile.json"):
        with pytest.raises(
            SlipstreamError,
            match="devices=2 is for a cluster: name one, such as h100-dgx",
        ):
            slipstream.plan(llama(), profile, seq_len=SEQ_LEN, global_batch=4, devices=2)


def test_files_that_describe_no_model(cluster: Path, tmp_path: Path) -> None:
    for name, text, reason in (
        ("a.json", "{", "a.json isn't valid JSON"),
        ("a.yaml", "{", "a.yaml isn't valid YAML"),
        ("b.yaml", "training: {steps: 1}", "b.yaml describes no model"),
        ("c.json", '{"model_type": "lama"}', "c.json with model_type='lama' isn't usable"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(SlipstreamError, match=reason):
            plan_file(tmp_path / name, cluster, tmp_path / "plan.yaml")


def test_a_profile_of_something_else_is_refused(tmp_path: Path) -> None:
    measured = tmp_path / "profile.json"
    profile = profile_model(llama(), ProfileSettings(**QUICK), torch.device("cpu"))
    profile.save(measured)
    settings: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch": 2}
    with pytest.raises(SlipstreamError, match=r"model\.vocab_size is 61 in the profile, 99 here"):
        slipstream.plan(llama(vocab_size=99), measured, **settings)
    with pytest.raises(SlipstreamError, match="dtype is float32 in the profile, bfloat16 here"):
        slipstream.plan(llama(), measured, dtype="bfloat16", **settings)
    slipstream.plan(llama(), measured, dtype="float", **settings)  # torch's other name of float32
    with pytest.raises(SlipstreamError, match="num_nodes=2 is for a cluster; with a profile give num_ranks"):
        slipstream.plan(llama(), measured, num_nodes=2, **settings)
    for choice, reason in (({"recompute": "selective"}, "recompute='selective'"), ({"offload": 0.5}, "offload=0.5")):
        with pytest.raises(SlipstreamError, match=f"{reason} can't be predicted for .*: .* not measured"):
            slipstream.plan(llama(), measured, **settings, **choice)
    (tmp_path / "broken.json").write_text(json.dumps({"format": profile.format}))
    with pytest.raises(SlipstreamError, match=r"broken.json isn't a profile"):
        slipstream.plan(llama(), tmp_path / "broken.json", **settings)


def test_without_a_cluster_the_kept_costs_of_this_machine_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch": 1, "num_slices": 2}
    with pytest.raises(SlipstreamError, match=r"has no costs of this model .* `slipstream profile MODEL --seq-len=64"):
        slipstream.plan(llama(), **settings)
    device, asked = torch.device("cpu"), ProfileSettings(**QUICK)
    profile = profile_model(llama(), asked, device)
    CostCache(llama(), asked, device, 1).keep(profile, print)
    plan = slipstream.plan(llama(), **settings)
    assert plan.notes == ProfileSource(profile, 1).notes()
    assert plan.num_devices == 1
    for other in ({"num_ranks": 2}, {"dtype": "bfloat16"}, {"model": llama(vocab_size=99)}):
        with pytest.raises(SlipstreamError, match="no cluster is given"):
            slipstream.plan(**{"model": llama()} | settings | other)
    with pytest.raises(SlipstreamError, match=r"`slipstream profile MODEL --seq-len=\d+ --ranks=\d+ --tp=2 --output"):
        slipstream.plan(llama(), **settings, tensor_parallel=2)
    hardware = replace(profile.hardware, processes=4)
    spread = replace(profile, hardware=hardware, degrees=Degrees(tensor=2))
    CostCache(llama(), asked, device, 4, Degrees(2, 1, 1)).keep(spread, print)
    for plan in (slipstream.plan(llama(), **settings), slipstream.plan(llama(), **settings, tensor_parallel=2)):
        degrees = plan.best.plan
        assert (plan.num_devices, degrees.tensor_parallel, degrees.pipeline_parallel) == (4, 2, 2)
    assert slipstream.plan(llama(), **settings, tensor_parallel=1).num_devices == 1
    CostCache(llama(), asked, device, 4, Degrees(2, 1, 1)).keep(replace(spread, sequence_parallel=True), print)
    assert slipstream.plan(llama(), **settings).num_devices == 1
    with pytest.raises(SlipstreamError, match="a counted model needs a cluster"):
        slipstream.plan(MODEL, **settings)


def test_impossible_clusters_and_too_little_memory(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(CLUSTER | {"inside": {"bandwidth": 25, "latency": 1e-6}}))
    with pytest.raises(SlipstreamError, match=r"inside\.bandwidth is 25: implausible"):
        plan_file(model, path, tmp_path / "plan.yaml")
    tiny = PlanOptions(memory_limit=1e6).memory_limit
    path.write_text(yaml.safe_dump(CLUSTER))
    big = llama(hidden_size=512, intermediate_size=2048, head_dim=128)
    with pytest.raises(SlipstreamError, match="weights, gradients and optimizer state alone take"):
        slipstream.plan(big, path, seq_len=SEQ_LEN, global_batch=4, dtype="float32", memory_limit=tiny)


def test_unknown_options_suggest_the_nearest() -> None:
    with pytest.raises(SlipstreamError, match="there is no option 'tensor_paralel'; did you mean 'tensor_parallel'"):
        PlanOptions(tensor_paralel=1)


def test_errors_end_with_code_2(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.yaml"
    result = slipstream_command(
        "plan", model, "nowhere", f"--seq-len={SEQ_LEN}", "--global-batch=4", "--output", output
    )
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: cluster='nowhere' is not known")
    assert not output.exists()


def test_without_a_cluster_and_kept_costs_this_machines_gpus_are_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which there is none here: what torch says of two is put in its place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ["Tesla T4", "Tesla T4"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index=0: names[index])
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=15e9))
    settings: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch": 2, "schedule": "1f1b", "num_slices": 1}
    for asked, number in (
        ({}, 2),
        ({"devices": 1}, 1),
        ({"fused": True}, 2),
        ({"freeze": ["model.embed_tokens.*"]}, 2),
    ):
        found = slipstream.plan(llama(), **settings, **asked)
        assert (found.cluster, found.num_devices, found.dtype) == ("2 of Tesla T4", number, "float16")
        assert found.best.memory_limit == pytest.approx(0.95 * 15e9)
    here = gpus_here()
    assert here is not None
    assert here.device.host_memory == pytest.approx(machine_memory().usable / 2)
    with pytest.raises(SlipstreamError, match="has no costs of this model"):
        slipstream.plan(llama(), **settings, num_ranks=2)
    names[:] = ["NVIDIA GeForce GTX 1080"]
    with pytest.raises(SlipstreamError, match=r"such as h100-dgx\. What NVIDIA GeForce GTX 1080 can do isn't known"):
        slipstream.plan(llama(), **settings)
    names[:] = ["Tesla T4", "NVIDIA L40S"]
    with pytest.raises(SlipstreamError, match="What NVIDIA L40S and Tesla T4 can do isn't known"):
        slipstream.plan(llama(), **settings)
