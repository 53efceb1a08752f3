"""A resumed run is the same to the bit on the same mesh, and sees every sample once on any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.checkpoint import Manifest
from slipstream.errors import SlipstreamError
from slipstream.extras.run_page import write_run_page
from slipstream.pipeline import Pipeline
from slipstream.schedule import Op, Schedule
from slipstream.train.config import load_config
from slipstream.train.optimizers import make_optimizer, make_scheduler
from support.tiny_training import TEXT, half_of, run_training, steps_of, tiny_llama, tiny_training

STEPS, HALF = 6, 3
SETTINGS = tiny_training(STEPS, HALF, num_key_value_heads=2, attention_dropout=0.1)
FOUR_STEPS = "--training.steps=4", "--checkpoint.every=2"


def train(num_processes: int, folder: Path, text: Path, *more: str, code: int = 0) -> CompletedProcess[str]:
    return run_training(num_processes, folder, SETTINGS, f"--data.files=[{text}]", *more, code=code)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A run that nothing interrupted, with dropout, on two stages and two replicas that share the optimizer."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(4, folder, text, "--dp=2", "--parallel.shard=optimizer")
    return folder


def test_the_same_mesh_goes_on_to_the_bit(whole: Path, text: Path, tmp_path: Path) -> None:
    again = half_of(whole, tmp_path / "again")
    ended = train(4, again, text, "--dp=2", "--parallel.shard=optimizer", "--checkpoint.resume=latest")
    assert f"resumed after step {HALF}" in ended.stdout
    assert "other settings" not in ended.stdout
    models = [(run / "model" / "model.safetensors").read_bytes() for run in (whole, again)]
    assert models[0] == models[1]
    figures = ("step", "loss", "lr", "grad_norm")
    assert [[line[key] for key in figures] for line in steps_of(again)] == [
        [line[key] for key in figures] for line in steps_of(whole)[HALF:]
    ]


def test_a_loop_of_ones_own_goes_on_from_a_run(whole: Path) -> None:
    """With its weights, optimizer, schedule and dropout."""
    config, step = load_config(whole / "config.yaml"), HALF
    run = Pipeline.from_config(AutoConfig.from_pretrained(whole / "inputs"), num_ranks=2, slices=4, schedule="gpipe")
    optimizer = make_optimizer(run.parameters(), config.optimizer)
    scheduler = make_scheduler(optimizer, config.optimizer, STEPS)
    at, facts = run.load(whole / "checkpoints", step, optimizer=optimizer, scheduler=scheduler)
    saved = Manifest.read(whole / "checkpoints" / f"step-{step:08}")
    assert (at, facts) == (step, {"num_samples": saved.facts["num_samples"]})
    assert run.random_state == (config.training.seed, step)
    assert scheduler.get_last_lr()[0] == steps_of(whole)[step]["lr"]
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in run.parameters()]
    assert all(moment.abs().sum() > 0 for moment in moments)
    run.load(whole / "checkpoints")
    exported = load_file(whole / "model" / "model.safetensors")
    assert all(torch.equal(run.state_dict()[name], weight) for name, weight in exported.items())


@pytest.mark.grid
@pytest.mark.parametrize(("name", "arguments"), [("sgd", "{momentum: 0.9}"), ("adamax", "{}"), ("rprop", "{}")])
def test_any_optimizer_goes_on_to_the_bit(text: Path, tmp_path: Path, name: str, arguments: str) -> None:
    optimizer = [f"--optimizer.name={name}", "--optimizer.lr=0.01", f"--optimizer.args={arguments}"]
    first, given = tmp_path / "first", [*optimizer, "--dp=2", "--parallel.shard=optimizer"]
    ended = train(4, first, text, *given)
    again = half_of(first, tmp_path / "again")
    ended = train(4, again, text, *given, "--checkpoint.resume=latest")
    assert f"resumed after step {HALF}" in ended.stdout, ended.stderr
    models = [(run / "model" / "model.safetensors").read_bytes() for run in (first, again)]
    assert models[0] == models[1]


@pytest.mark.grid
def test_replicas_that_spread_the_parameters_save_and_go_on_to_the_bit(whole: Path, text: Path, tmp_path: Path) -> None:
    """From a checkpoint of a run that spread the optimizer's state alone, and that goes on from theirs."""
    spread, back = half_of(whole, tmp_path / "spread"), tmp_path / "back"
    resume = ["--dp=2", "--checkpoint.resume=latest"]
    ended = train(4, spread, text, *resume, "--parallel.shard=parameters", "--checkpoint.every=1")
    shutil.copytree(spread / "checkpoints" / f"step-{STEPS - 1:08}", back / "checkpoints" / f"step-{STEPS - 1:08}")
    ended = train(4, back, text, *resume, "--parallel.shard=optimizer")
    assert f"resumed after step {STEPS - 1}" in ended.stdout, ended.stderr
    models = [(run / "model" / "model.safetensors").read_bytes() for run in (whole, spread, back)]
    assert models[0] == models[1] == models[2]


@pytest.mark.more
@pytest.mark.usefixtures("compiled_search")
def test_auto_goes_on_with_what_it_found(text: Path, tmp_path: Path) -> None:
    """The first step is planned. The order that was found gets recomputation and offloading again."""
    order = ["--pipeline.schedule=auto", "--pipeline.slices=[8,16,24,16]", "--pipeline.num_microbatches=2"]
    memory = ["--memory.recompute=stage+full", "--memory.offload=0.5"]
    settings = [*order, *memory, "--training.steps=4", "--checkpoint.every=2", "--checkpoint.keep=4"]
    first = tmp_path / "first"
    ended = train(2, first, text, *settings)
    assert "auto has settled on slices of" in ended.stdout
    assert [line["step"] for line in steps_of(first) if "trial" in line] == [1]
    assert Manifest.read(first / "checkpoints" / "step-00000002").facts["tuned"]["slices"] == [8, 16, 24, 16]
    assert Schedule.parse((first / "schedule.txt").read_text()).ops >= {Op.R, Op.OFFLOAD}

    again = half_of(first, tmp_path / "again", step=2)
    ended = train(2, again, text, *settings, "--checkpoint.resume=latest")
    assert "auto plans orders or slices" not in ended.stdout
    assert (again / "schedule.txt").read_text() == (first / "schedule.txt").read_text()
    assert [line["loss"] for line in steps_of(again)] == [line["loss"] for line in steps_of(first)][2:]


@pytest.mark.more
def test_another_mesh_sees_the_next_samples(whole: Path, text: Path, tmp_path: Path) -> None:
    here = half_of(whole, tmp_path / "tp")
    settings = [
        "--pp=1",
        "--tp=2",
        "--parallel.sequence_parallel=true",
        "--pipeline.slices=2",
        "--training.batch_size=2",
    ]
    ended = train(2, here, text, *settings, "--checkpoint.resume=latest", "--training.steps=4")
    table = ended.stdout[ended.stdout.index(f"resuming after step {HALF} with other settings than before:") :]
    rows = {tuple(line.split()) for line in table.splitlines()}
    assert rows >= {("setting", "before", "now"), ("training.steps", "6", "4"), ("training.batch_size", "4", "2")}
    assert rows >= {("parallel.tensor", "1", "2"), ("pipeline.slices", "4", "2")}
    facts = Manifest.read(here / "checkpoints" / "step-00000004").facts
    assert facts["num_samples"] == HALF * 4 + 2
    assert facts["mesh"] == {"pp": 1, "dp": 1, "tp": 2}


@pytest.mark.more
def test_ranks_that_share_slices_train_and_go_on_as_stages(text: Path, tmp_path: Path) -> None:
    config = json.dumps(SETTINGS["model"]["config"] | {"attention_dropout": 0.0})
    first, here, given = tmp_path / "first", tmp_path / "here", (f"--model.config={config}", *FOUR_STEPS)
    train(2, first, text, *given, "--pp=1", "--cp=2")
    assert Manifest.read(first / "checkpoints" / "step-00000002").facts["mesh"] == {"pp": 1, "dp": 1, "cp": 2, "tp": 1}
    assert all(line["bytes_sent"]["cp"] > 0 and line["bytes_sent"]["gradients"] > 0 for line in steps_of(first))
    ended = train(2, half_of(first, here, step=2), text, *given, "--checkpoint.resume=latest")
    assert {tuple(line.split()) for line in ended.stdout.splitlines()} >= {("parallel.context", "2", "1")}
    found, wanted = steps_of(here), steps_of(first)[2:]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=1e-5)
    heads = ("--pp=1", "--cp=3", "--parallel.context_exchange=heads")
    refused = train(3, tmp_path / "refused", text, *given, *heads, code=2)
    assert "4 query heads can't be spread over cp=3 ranks. Give cp a divisor of 4: 1, 2, 4" in refused.stderr
    assert not (tmp_path / "refused").exists()


@pytest.mark.more
def test_experts_on_several_ranks_go_on_on_others_and_are_exported_whole(text: Path, tmp_path: Path) -> None:
    """Two stages on two replicas with half of the experts each, then two replicas with all of them."""
    experts = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
    config = tiny_llama(model_type="qwen3_moe", num_key_value_heads=2, **experts)
    mixture = f"--model.config={json.dumps(config)}", *FOUR_STEPS
    first, alone = tmp_path / "first", tmp_path / "alone"
    train(4, first, text, *mixture, "--pp=2", "--ep=2")
    assert Manifest.read(first / "checkpoints" / "step-00000002").facts["mesh"] == {"pp": 2, "dp": 2, "tp": 1, "ep": 2}
    assert all(line["bytes_sent"]["ep"] > 0 for line in steps_of(first))
    assert "pp 2 x dp 2 x tp 1 x ep 2" in write_run_page(first)[0].read_text()
    here = half_of(first, tmp_path / "here", step=2)
    train(2, here, text, *mixture, "--pp=1", "--dp=2", "--checkpoint.resume=latest")
    train(1, alone, text, *mixture, "--pp=1")
    wanted = [line["loss"] for line in steps_of(alone)]
    for found in (steps_of(first), steps_of(here)):
        assert [line["loss"] for line in found] == pytest.approx(wanted[-len(found) :], rel=1e-5)
    tokens = torch.arange(1, 61).view(2, 30)
    models = [AutoModelForCausalLM.from_pretrained(each / "model") for each in (alone, first, here)]
    reference, *others = [model(input_ids=tokens).logits.detach() for model in models]
    for logits in others:
        assert torch.allclose(logits, reference, atol=1e-4)
    assert torch.allclose(Pipeline.from_pretrained(here / "model").logits(tokens), others[-1], atol=1e-5)


def test_a_run_that_is_finished_is_left_as_it_is(whole: Path, text: Path, tmp_path: Path) -> None:
    here = tmp_path / "finished"
    shutil.copytree(whole, here)
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    ended = train(1, here, text, "--pp=1", "--checkpoint.resume=latest")
    assert f"the run has reached its last step, {STEPS}, and its model is in {here / 'model'}: nothing is left" in (
        ended.stdout
    )
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before


@pytest.mark.grid
def test_a_tied_matrix_in_parts_goes_on_in_parts_and_whole(text: Path, tmp_path: Path) -> None:
    """Checkpoints have the whole matrix, once."""
    config = SETTINGS["model"]["config"] | {"tie_word_embeddings": True, "attention_dropout": 0.0}
    tied, spread = f"--model.config={json.dumps(config)}", "--pipeline.vocabulary=spread"
    first = tmp_path / "first"
    ended = train(2, first, text, tied, spread)
    wanted = load_file(first / "model" / "model.safetensors")
    others = {
        "again": (2, [spread]),
        "replicas": (4, [spread, "--dp=2", "--parallel.shard=optimizer"]),
        "whole": (2, ["--pipeline.vocabulary=whole"]),
    }
    for name, (num_processes, settings) in others.items():
        folder = half_of(first, tmp_path / name)
        ended = train(num_processes, folder, text, tied, *settings, "--checkpoint.resume=latest")
        assert f"resumed after step {HALF}" in ended.stdout
        found = load_file(folder / "model" / "model.safetensors")
        assert found.keys() == wanted.keys()
        tolerance = 0.0 if name == "again" else 1e-4
        for key, tensor in wanted.items():
            torch.testing.assert_close(found[key], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["--training.seed=5"], "trained on different data: seed was 0, is 5"),
        (["--model.config.rope_parameters={rope_theta: 500, rope_type: default}"], "checkpoint of another model"),
        (["--checkpoint.resume=7"], "there is no checkpoint 7"),
    ],
)
def test_another_run_is_refused(whole: Path, text: Path, tmp_path: Path, settings: list[str], reason: str) -> None:
    here = half_of(whole, tmp_path / "other")
    ended = train(1, here, text, "--pp=1", "--checkpoint.resume=latest", *settings, code=2)
    assert reason in ended.stderr
    assert len(ended.stderr.splitlines()) <= 6  # no traceback


def test_a_damaged_checkpoint_is_named(whole: Path, text: Path, tmp_path: Path) -> None:
    here = tmp_path / "damaged"
    shutil.copytree(whole / "checkpoints", here / "checkpoints")
    file = here / "checkpoints" / f"step-{STEPS:08}" / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    refused = train(1, here, text, "--pp=1", "--checkpoint.resume=latest", code=2)
    assert "rank-00001.safetensors" in refused.stderr
    assert f"step {HALF}" in refused.stderr  # the one that is good


def test_one_axis_takes_what_the_others_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(SETTINGS | {"training": {**SETTINGS["training"], "output": str(tmp_path / "x")}}))
    more = ["--data.corpus=python-stdlib"]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = load_config(config, [*more, "--pp=auto", "--tp=2"])
    assert (found.pipeline.num_ranks, found.parallel.data, found.parallel.tensor) == (4, 1, 2)
    assert found.mesh_text == "--pp=4 --dp=1 --tp=2"
    found = load_config(config, [*more, "--dp=auto", "--training.batch_size=8"])
    assert found.num_processes == 8
    for settings, reason in (
        (["--pp=3", "--dp=auto"], "8 processes don't divide by the 3 of the other axes"),
        (["--dp=3"], "training.batch_size=4 doesn't divide into parallel.data=3 equal parts; choose 3 or 6"),
        (["--dp=4", "--pipeline.num_microbatches=2"], "of 1 for each of parallel.data=4 replicas can't be cut into"),
    ):
        with pytest.raises(SlipstreamError, match=reason):
            load_config(config, [*more, *settings])
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SlipstreamError, match="no launcher and no GPU to count; give a number, such as --dp=2"):
        load_config(config, [*more, "--dp=auto"])
