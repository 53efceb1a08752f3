"""A configuration reads, dumps and overrides every section, and names a bad value with what is allowed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.option_problems import records_in
from slipstream.schedule import one_f_one_b
from slipstream.train.config import Config
from slipstream.train.config.rules import OTHER_NAMES
from slipstream.train.config.run_config import dump_config, load_config, parse_config

MINIMAL = """
model: {config: {model_type: llama, num_hidden_layers: 2}}
data: {corpus: python-stdlib}
training: {output: runs/x, steps: 10, seq_len: 64}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    return path


def test_overrides_are_yaml_and_reach_every_section(path: Path) -> None:
    overrides = ["--training.steps=100", "--pipeline.slices=[32, 32]", "optimizer.lr=3e-4"]
    config = load_config(path, [*overrides, "--model.config.hidden_size=8"])
    assert config.training.steps == 100
    assert config.pipeline.slices == [32, 32]
    assert config.optimizer.lr == 3e-4
    assert config.model.config == {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8}


def test_there_are_as_many_ranks_as_the_launcher_started(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config(path).pipeline.num_ranks == 2
    monkeypatch.setenv("WORLD_SIZE", "8")  # of a machine whose launcher isn't ours
    assert load_config(path).pipeline.num_ranks == 2
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "6")
    assert load_config(path).pipeline.num_ranks == 6
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # a batch script, which starts local ranks
    assert load_config(path).pipeline.num_ranks == 2
    monkeypatch.setenv("RANK", "0")
    assert load_config(path).pipeline.num_ranks == 8
    found = load_config(path, ["--dp=2", "--training.batch_size=2"])
    assert (found.pipeline.num_ranks, found.num_processes) == (4, 8)
    assert load_config(path, ["--pp=3"]).pipeline.num_ranks == 3
    with pytest.raises(SlipstreamError, match="8 processes don't divide by the 3 of the other axes"):
        load_config(path, ["--dp=3", "--training.batch_size=3"])


def test_experts_are_spread_over_replicas_and_ranks_that_share_slices(path: Path) -> None:
    two = ["--pp=1", "--training.batch_size=2"]
    assert load_config(path, [*two, "--ep=2"]).mesh_text == "--pp=1 --dp=2 --tp=1 --ep=2"
    shared = load_config(path, [*two, "--ep=2", "--cp=2"])
    assert (shared.mesh_text, shared.num_processes) == ("--pp=1 --dp=1 --cp=2 --tp=1 --ep=2", 2)
    with pytest.raises(SlipstreamError, match=r"experts=4 doesn't divide parallel\.data=1 times parallel\.context=2"):
        load_config(path, [*two, "--ep=4", "--cp=2"])
    for size in ("0", "auto"):  # and nothing of the replicas, which aren't given
        with pytest.raises(SlipstreamError, match=rf"^parallel\.experts='?{size}'?: give a whole number from 1$"):
            load_config(path, [*two, f"--ep={size}"])


@pytest.mark.parametrize(
    ("capability", "settings", "ranks", "precision"),
    [
        ("9.0\n9.0\n", [], 4, "bf16-weights"),
        ("9.0\n7.0\n", [], 4, "float32"),
        ("", [], 4, "float32"),
        ("9.0\n", ["--tp=2"], 2, "bf16-weights"),
        ("9.0\n", ["--pp=2", "--training.precision=float32"], 2, "float32"),
        ("9.0\n", ["--dp=2", "--training.batch_size=2", "--parallel.shard=parameters"], 2, "bf16-weights"),
        ("9.0\n", ["--training.device=cpu"], 2, "float32"),
    ],
)
def test_gpus_have_a_rank_each_and_weights_in_bfloat16(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: str,
    settings: list[str],
    ranks: int,
    precision: str,
) -> None:
    """As if there were four GPUs, with the file and the program of their driver."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{capability}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    exists = os.path.exists
    monkeypatch.setattr("os.path.exists", lambda path: path == "/dev/nvidiactl" or exists(path))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    found = load_config(path, settings)
    assert (found.pipeline.num_ranks, found.training.precision) == (ranks, precision)


def test_paths_are_looked_for_next_to_the_configuration_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there" / "model").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    for name in ("both.txt", "beside.txt"):
        (tmp_path / "there" / name).touch()
    for name in ("both.txt", "here.txt"):
        (tmp_path / "here" / name).touch()
    monkeypatch.chdir(tmp_path / "here")
    training = "training: {output: runs/x, steps: 10, seq_len: 64}"
    data = "data: {sources: [{files: [both.txt, here.txt, beside.txt]}, {dataset: no/where}], tokenizer: model}"
    file = Path("../there/config.yaml")
    file.write_text(f"model: {{path: model}}\n{data}\n{training}\n")
    found = load_config(file)
    assert found.model.path == found.data.tokenizer == "../there/model"
    assert found.data.sources is not None
    assert list(map(str, found.data.sources[0].files or [])) == ["both.txt", "here.txt", "../there/beside.txt"]
    assert found.data.sources[1].dataset == "no/where"  # of the hub
    assert str(found.training.output) == "runs/x"
    assert load_config(file, ["--model.path=model"]).model.path == "model"  # which was typed here
    (tmp_path / "there" / "runs" / "x").mkdir(parents=True)
    assert str(load_config(file).training.output) == "../there/runs/x"  # a run that is found again
    assert str(load_config(file, ["--training.output=runs/x"]).training.output) == "runs/x"


def test_the_dump_reads_back_as_the_same_configuration(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["--sample.prompt=def ", "--pipeline.slices=[60, 4]"])
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--training.step=3", ["unknown key training.step", "did you mean 'training.steps'?"]),
        ("--pipline.slices=3", ["unknown key pipline", "did you mean 'pipeline'?"]),
        ("--sample.promt=x", ["unknown key sample.promt", "did you mean 'sample.prompt'?"]),
        ("--optimizer.foo=red", ["unknown key optimizer.foo", "optimizer has: args, betas, clip_norm"]),
        ("--training.steps=-1", ["training.steps=-1", "give a whole number from 1"]),
        ("--training.precision=fp8", ["training.precision='fp8'", "'float32', 'bf16', 'bf16-weights' or 'fp16'"]),
        ("--pipeline.partition=x", ["pipeline.partition='x'", "give 'auto' or a list of numbers"]),
        ("--optimizer.lr=.nan", ["optimizer.lr=nan", "give a number above 0"]),
        ("--pipeline.slices=[32, 33]", ["[32, 33] add up to 65", "training.seq_len=64", "pipeline.slices=2"]),
        ("--pipeline.slices=65", ["pipeline.slices=65", "64 tokens", "1 to 64"]),
        ("--pipeline.num_microbatches=2", ["training.batch_size=1", "num_microbatches=2", "1 to 1"]),
        ("--pipeline.partition=[1, 1, 1]", ["[1, 1, 1] names 3 stages", "stages_per_rank = 2"]),
        ("--pipeline.partition=[1.25, 1.75]", ["[1.25, 1.75] must give stages of at least half", "multiples of 0.5"]),
        ("--pipeline.partition=[-1, 3]", ["[-1, 3] must give stages of at least half a layer", "the head alone"]),
        ("--pipeline.schedule=1f1p", ["pipeline.schedule='1f1p' is not known", "did you mean '1f1b'"]),
        ("--pipeline.stages_per_rank=2", ["pipeline.stages_per_rank=2", "'1f1b' has exactly 1"]),
        ("--pipeline.schedule=auto-v", ["pipeline.stages_per_rank=1", "'auto-v' has exactly 2"]),
        ("--pipeline.schedule=auto_v", ["pipeline.schedule='auto_v' is not known", "did you mean 'auto-v'"]),
        ("--memory.num_flushes=3", ["num_microbatches=1 don't divide into memory.num_flushes=3"]),
        (
            "--memory.recompute=some",
            [
                "memory.recompute='some'",
                "'none', 'selective', 'full', 'stage', 'stage+full', 'segments' or a whole number from 1",
            ],
        ),
        ("--memory.offload=2", ["memory.offload=2", "give a number from 0 to 1"]),
        ("--training.epochs=2", ["either training.steps or training.epochs"]),
        ("--model.path=x", ["either model.path", "or model.config"]),
        ("--pipeline.microbatches=[[3,[0,64]]]", ["pipeline.microbatches[0][1][0]=0: give a whole number from 1"]),
        ("--pipeline.microbatches=[[3,64]]", ["pipeline.microbatches[0][1]=64: give a list of whole numbers"]),
        ("--pipeline.microbatches=[[3]]", ["microbatches[0]=[3]: give a list [a whole number from 1, a list of whole"]),
        ("--pipeline.microbatches=x", ["give a list of lists [a whole number from 1, a list of whole numbers]"]),
        ("--data.dataset=x", ["one of data.corpus, data.files, data.dataset and", "given: corpus and dataset"]),
        ("--training.steps", ["'--training.steps' isn't a setting with a value", "--training.steps=100"]),
        ("--training.steps.more=1", ["can't set training.steps.more", "steps is the value 10"]),
        ("--training.steps=[", ["training.steps='['", "isn't valid YAML"]),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(path: Path, override: str, words: list[str]) -> None:
    with pytest.raises(SlipstreamError) as error:
        load_config(path, [override])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "model is missing"),
        ({"model": {"config": {}}, "data": {}, "training": {}}, "training.output is missing"),
        ({"model": {"config": {"hidden_size": 3}}, "data": {}, "training": {}}, "needs a model_type"),
    ],
)
def test_missing_settings_are_listed(values: dict[str, Any], word: str) -> None:
    with pytest.raises(SlipstreamError, match=word):
        parse_config(values)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"can't read the configuration .*No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(SlipstreamError, match="isn't valid YAML"):
        load_config(tmp_path / "bad.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(SlipstreamError, match="holds no settings"):
        load_config(tmp_path / "empty.yaml")


def test_a_schedule_of_ones_own_is_checked_against_the_settings(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(str(one_f_one_b(2, 1, 4)))
    assert load_config(path, [f"--pipeline.schedule={file}", "--pipeline.slices=4"]).pipeline.schedule == str(file)
    with pytest.raises(
        SlipstreamError, match=r"mine\.txt has slices 4, but pipeline\.slices=2; set --pipeline\.slices=4"
    ):
        load_config(path, [f"--pipeline.schedule={file}", "--pipeline.slices=2"])


def test_a_schedule_is_found_next_to_the_configuration_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever both are moved together; what is typed is found from where it is typed."""
    for folder in ("plan", "typed"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plan.txt").write_text(str(one_f_one_b(2, 1, 4)))
    (tmp_path / "plan" / "plan.yaml").write_text(f"{MINIMAL}\npipeline: {{schedule: plan.txt, slices: 4}}\n")
    monkeypatch.chdir(tmp_path / "typed")
    for given, overrides in (("plan", []), ("typed", ["--pipeline.schedule=plan.txt"])):
        config = load_config(Path("../plan/plan.yaml"), overrides)
        file = Path(config.pipeline.schedule)
        assert file.is_absolute()
        assert file.samefile(tmp_path / given / "plan.txt")
        (tmp_path / "again.yaml").write_text(dump_config(config))
        assert load_config(tmp_path / "again.yaml") == config
    (tmp_path / "plan" / "plan.txt").unlink()
    with pytest.raises(SlipstreamError, match=r"plan/plan\.txt can't be used: .*No such file"):
        load_config(Path("../plan/plan.yaml"))


def test_a_schedule_of_an_impossible_order_is_refused_with_grid_and_rule(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "wrong.txt"
    file.write_text(str(one_f_one_b(2, 1, 2)).replace("0F0.0 0F0.1", "0F0.1 0F0.0"))
    with pytest.raises(SlipstreamError) as raised:
        load_config(path, [f"--pipeline.schedule={file}", "--pipeline.slices=2"])
    assert ">0F0.1<" in str(raised.value)
    assert "slice 1 attends to slice 0" in str(raised.value)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_what_other_tools_call_it(name: str, path: Path) -> None:
    """Each name leads to a setting that there is, or to a note."""
    setting, note = OTHER_NAMES[name]
    typed = name if "." in name else f"training.{name}"  # some are meant in one section alone
    section, _, key = setting.partition(".")
    if setting:
        (record,) = records_in(Config.model_fields[section].annotation)
        assert not key or key in record.model_fields
    with pytest.raises(SlipstreamError) as error:
        load_config(path, [f"--{typed}=1"])
    assert f"unknown key {typed}; " in str(error.value)
    assert note in str(error.value)
    assert setting in str(error.value)
