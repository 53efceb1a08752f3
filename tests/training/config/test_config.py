"""A configuration reads, dumps and overrides every section, and names a bad value with what is allowed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.option_errors import records_in
from slipstream.schedule import one_f_one_b
from slipstream.train.config import Config
from slipstream.train.config.config_file import load_config
from slipstream.train.config.config_values import dump_config, parse_config
from slipstream.train.config.rules import OTHER_NAMES
from support.refusals import refused
from support.tiny_training import tiny_llama, with_settings

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


def test_one_axis_takes_what_the_others_leave(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    four = "--training.batch_size=4"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = load_config(path, [four, "--pp=auto", "--tp=2"])
    assert (found.pipeline.num_ranks, found.parallel.data, found.parallel.tensor) == (4, 1, 2)
    assert found.mesh_text == "--pp=4 --dp=1 --tp=2"
    assert load_config(path, ["--pp=2", "--dp=auto", four]).mesh_text == "--pp=2 --dp=4 --tp=1"
    for settings, reason in (
        (["--pp=3", "--dp=auto"], "8 processes don't divide by the 3 of the other axes"),
        (
            ["--pp=2", "--dp=3"],
            "into parallel.data=3 equal parts; choose training.batch_size=3 or 6, or parallel.data=2",
        ),
        (["--dp=4", "--pipeline.num_microbatches=2"], "of 1 for each of parallel.data=4 replicas can't be cut into"),
    ):
        with pytest.raises(SlipstreamError, match=reason):
            load_config(path, [four, *settings])
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SlipstreamError, match="no launcher and no GPU to count; give a number, such as --dp=2"):
        load_config(path, ["--pp=2", four, "--dp=auto"])


TEXT = {
    "model": {"config": {"model_type": "llama", "num_hidden_layers": 2}},
    "data": {"corpus": "python-stdlib"},
    "training": {"output": "runs/x", "steps": 10, "seq_len": 64},
}
DOCUMENTS = with_settings(TEXT, {"data.packing": "none", "training.batch_size": 4, "pipeline.num_microbatches": 2})
BY_TOKENS = with_settings(
    TEXT,
    {
        "data.packing": "none",
        "training": {"output": "runs/x", "seq_len": 64, "batch_tokens": 200, "epochs": 1},
        "pipeline": {"slices": 3, "num_microbatches": 2},
    },
)
STREAM = with_settings(
    TEXT, {"data": {"dataset": "x.jsonl", "tokenizer": "t", "streaming": True}, "training.seq_len": 8}
)
PAIRS = with_settings(
    TEXT,
    {
        "model.config": tiny_llama(),
        "data": {"dataset": "pairs.jsonl"},
        "preference": {"beta": 0.5},
        "training.batch_size": 4,
        "pipeline": {"slices": 3, "num_microbatches": 2},
    },
)
SAMPLES = with_settings(
    TEXT,
    {"sample": {"prompt": "a", "every": 2}, "training.batch_size": 4, "pipeline.num_microbatches": 2},
)
BEST = with_settings(
    TEXT, {"training.eval_every": 2, "training.patience": 3, "checkpoint": {"keep_best": True, "every": 2}}
)

# A configuration, settings that it can't have, and words of what is said.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (TEXT, {"optimizer.lr": float("nan")}, "optimizer.lr=nan .. give a number above 0"),
    (
        TEXT,
        {"pipeline.num_microbatches": 2},
        "training.batch_size=1 .. num_microbatches=2 .. num_microbatches=1, or training.batch_size=2",
    ),
    (TEXT, {"pipeline.partition": [1, 1, 1]}, "[1, 1, 1] names 3 stages .. stages_per_rank = 2"),
    (TEXT, {"pipeline.partition": [1.25, 1.75]}, "[1.25, 1.75] must give stages of at least half .. multiples of 0.5"),
    (TEXT, {"pipeline.partition": [-1, 3]}, "[-1, 3] must give stages of at least half a layer .. the head alone"),
    (
        TEXT,
        {"pipeline.schedule": "1f1b", "pipeline.stages_per_rank": 2},
        "pipeline.stages_per_rank=2 .. '1f1b' has exactly 1",
    ),
    (
        TEXT,
        {"pipeline.schedule": "auto-v", "pipeline.stages_per_rank": 1},
        "pipeline.stages_per_rank=1 .. 'auto-v' has exactly 2",
    ),
    (TEXT, {"pipeline.schedule": "auto_v"}, "pipeline.schedule='auto_v' is not known .. did you mean 'auto-v'"),
    (TEXT, {"memory.num_flushes": 3}, "num_microbatches=1 don't divide into memory.num_flushes=3"),
    (
        TEXT,
        {"memory.recompute": "some"},
        "memory.recompute='some' .. "
        "'none', 'selective', 'full', 'stage', 'stage+full', 'segments' or a whole number from 1",
    ),
    (TEXT, {"model.path": "x"}, "either model.path .. or model.config"),
    (TEXT, {"pipeline.microbatches": [[3, [0, 64]]]}, "pipeline.microbatches[0][1][0]=0: give a whole number from 1"),
    (TEXT, {"pipeline.microbatches": [[3, 64]]}, "pipeline.microbatches[0][1]=64: give a list of whole numbers"),
    (
        TEXT,
        {"pipeline.microbatches": [[3]]},
        "microbatches[0]=[3]: give a list [a whole number from 1, a list of whole",
    ),
    (TEXT, {"pipeline.microbatches": "x"}, "give a list of lists [a whole number from 1, a list of whole numbers]"),
    (TEXT, {"data.dataset": "x"}, "one of data.corpus, data.files, data.dataset and .. given: corpus and dataset"),
    (TEXT, {"sample.every": 2}, "sample.every=2 needs a text to continue"),
    (
        SAMPLES,
        {"pipeline": {"vocabulary": "spread", "slices": 4}},
        "sample.every=2 with pipeline.vocabulary=spread",
    ),
    (SAMPLES, {"pipeline.slices": [40, 24]}, "sample.every=2 with pipeline.slices=[40, 24] .. sample.every=0 writes"),
    (SAMPLES, {"pipeline": {"microbatches": [[4, [64]]]}}, "sample.every=2 with pipeline.microbatches: a sample needs"),
    (SAMPLES, {"memory.num_flushes": 2}, "sample.every=2 with memory.num_flushes=2: a sample needs"),
    (
        TEXT,
        {"model": {"path": "base", "freeze": ["model.*"]}, "lora": {}},
        "model.freeze= .. with lora, which freezes all .. lora.target_modules",
    ),
    ({}, {}, "model is missing"),
    ({"model": {"config": {}}, "data": {}, "training": {}}, {}, "training.output is missing"),
    ({"model": {"config": {"hidden_size": 3}}, "data": {}, "training": {}}, {}, "needs a model_type"),
    (BEST, {"training.eval_every": 0, "training.patience": None}, "keep_best=true needs validations; give"),
    (BEST, {"training.eval_every": 0, "checkpoint.keep_best": False}, "patience=3 needs validations; give"),
    (BEST, {"data.validation_fraction": 0}, "validation_fraction=0 holds no text out"),
    (BEST, {"checkpoint.keep_best": False, "training.export": "best"}, "the checkpoint that checkpoint.keep_best=true"),
    (
        DOCUMENTS,
        {"pipeline.slices": [32, 32]},
        "pipeline.slices=[32, 32] with data.packing=none: it is for sequences of one",
    ),
    (DOCUMENTS, {"pipeline": {"microbatches": [[4, [64]]]}}, "pipeline.microbatches with data.packing=none"),
    (DOCUMENTS, {"memory.num_flushes": 2}, "memory.num_flushes=2 with data.packing=none"),
    (DOCUMENTS, {"training.single_process_steps": 3}, "training.single_process_steps=3 with data.packing=none"),
    (
        DOCUMENTS,
        {"pipeline.schedule": "some.txt"},
        "some.txt with data.packing=none: it is for sequences of one length",
    ),
    (
        DOCUMENTS,
        {"training.batch_tokens": 128},
        "training.batch_size=4 and training.batch_tokens=128 both set the size of a step; give one of the two, and",
    ),
    (
        BY_TOKENS,
        {"data.packing": "fixed"},
        "training.batch_tokens=200 with data.packing=fixed: it counts the tokens of documents that differ in length. "
        "Choose data.packing=none, or training.batch_size=3 sequences of training.seq_len=64",
    ),
    (
        BY_TOKENS,
        {"parallel.data": 4},
        "training.batch_tokens=200 has no room for a document of training.seq_len=64 tokens for each of "
        "parallel.data=4 replicas; choose 256 or more",
    ),
    (
        BY_TOKENS,
        {"training.batch_tokens": 63},
        "training.batch_tokens=63 has no room for a document of training.seq_len",
    ),
    (
        BY_TOKENS,
        {"pipeline": {"schedule": "plan.txt"}, "plan": {"predicted": {"seconds": 1.0}, "rates": {"seconds": {}}}},
        "plan.rates: the rates of stages can't be read .. to plan for these: --pipeline.schedule=auto",
    ),
    (
        STREAM,
        {"training.epochs": 1, "training.steps": None},
        "training.epochs=1.0 with data.streaming=true, which reads while it",
    ),
    (STREAM, {"training.eval_every": 5}, "training.eval_every=5 with data.streaming=true"),
    (STREAM, {"training.single_process_steps": 5}, "training.single_process_steps=5 with data.streaming=true"),
    (STREAM, {"data.tokenizer": None}, "a model without a tokenizer with data.streaming=true"),
    (
        STREAM,
        {"data.dataset": None, "data.sources": [{"dataset": "x.jsonl"}, {"files": ["y.jsonl"]}]},
        "Give each source one, such as weight: 1",
    ),
    (
        STREAM,
        {"data.dataset": None, "data.corpus": "python-stdlib"},
        "data.streaming=true reads rows, but data.corpus=python-stdlib has texts",
    ),
    (PAIRS, {"data.packing": "fixed"}, "data.packing=fixed with preference"),
    (PAIRS, {"data.streaming": True, "data.tokenizer": "x"}, "data.streaming=true with preference"),
    (PAIRS, {"data.form": "messages"}, "data.form=messages with preference"),
    (PAIRS, {"data.loss": "all"}, "data.loss=all with preference"),
    (PAIRS, {"data.text_column": "x"}, "data.text_column=x with preference"),
    (PAIRS, {"data.dataset": None, "data.files": ["x"]}, "preference needs pairs; give data.dataset"),
    (PAIRS, {"data.dataset": "x.txt"}, "data.dataset=x.txt has lines and no pairs"),
    (PAIRS, {"data.dataset": None, "data.sources": [{"files": ["x"]}]}, "give data.sources[0].dataset"),
    (PAIRS, {"pipeline.vocabulary": "spread"}, "pipeline.vocabulary=spread with preference"),
    (PAIRS, {"pipeline.router_loss": "per_layer"}, "pipeline.router_loss=per_layer with preference"),
    (
        PAIRS,
        {"training.batch_tokens": 100, "training.batch_size": None},
        "has no room for two answers of .. choose 128 or",
    ),
    (PAIRS, {"training.batch_size": 1}, "can't be cut into pipeline.num_microbatches=2 parts"),
    (PAIRS, {"preference.label_smoothing": 0.5}, "label_smoothing"),
    (PAIRS, {"preference.loss": "ipo"}, "preference.loss"),
    (
        PAIRS,
        {"preference": {"loss": "kto", "gamma": 1.0}},
        "preference.gamma=1.0 with preference.loss=kto: it belongs to simpo",
    ),
]


@pytest.mark.parametrize(("values", "settings", "words"), REFUSED, ids=[str(settings) for _, settings, _ in REFUSED])
def test_settings_that_do_not_go_together_are_refused(
    values: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    with refused(words):
        parse_config(with_settings(values, settings))


@pytest.mark.parametrize(
    "values",
    [TEXT, DOCUMENTS, BY_TOKENS, STREAM, PAIRS, BEST],
    ids=["text", "documents", "by tokens", "stream", "pairs", "best"],
)
def test_without_them_they_are_taken(values: dict[str, Any]) -> None:
    parse_config(values)


def test_an_override_of_a_value_s_part_is_refused(path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"can't set training\.steps\.more.*steps is the value 10"):
        load_config(path, ["--training.steps.more=1"])


def test_tokens_of_a_step_survive_the_file_that_ranks_read(tmp_path: Path) -> None:
    config = parse_config(BY_TOKENS)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml").training == config.training


def test_null_takes_back_what_a_file_gives() -> None:
    rows = {"training.batch_tokens": None, "training.batch_size": 4}
    assert parse_config(with_settings(BY_TOKENS, rows)).training.batch_tokens is None
    tokens = {"training.batch_tokens": 200, "training.batch_size": None}
    assert parse_config(with_settings(DOCUMENTS, tokens)).training.batch_tokens == 200


def test_pairs_are_taken_as_long_as_they_are() -> None:
    config = parse_config(PAIRS)
    assert config.data.packing == "none"
    assert config.pipeline_options()["vocabulary"] == "whole"


def test_a_schedule_of_ones_own_is_checked_against_the_settings(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(str(one_f_one_b(2, 1, 4)))
    assert load_config(path, [f"--pipeline.schedule={file}", "--pipeline.slices=4"]).pipeline.schedule == str(file)
    with pytest.raises(
        SlipstreamError, match=r"mine\.txt has slices 4, but pipeline\.slices=2; set --pipeline\.slices=4"
    ):
        load_config(path, [f"--pipeline.schedule={file}", "--pipeline.slices=2"])


def test_samples_between_steps_go_with_the_slices_of_a_schedule_from_a_file(path: Path, tmp_path: Path) -> None:
    file, sample = tmp_path / "mine.txt", ["--sample.prompt=def ", "--sample.every=2"]
    file.write_text(str(one_f_one_b(2, 1, 2)))
    settings = [f"--pipeline.schedule={file}", "--pipeline.slices=[40, 24]", *sample]
    assert load_config(path, settings).pipeline.slices == [40, 24]


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
