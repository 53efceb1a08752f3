"""Every bad input is found before a rank starts, says what to do, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from slipstream.checkpoint import CheckpointFolder, Manifest
from slipstream.cli import main
from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.pipeline.saving import describe_model
from slipstream.schedule import add_communication, gpipe
from slipstream.terminal import make_console
from slipstream.train.config.config_values import dump_config, parse_config
from slipstream.train.configured_pipeline import RunModel, make_pipeline, source_of
from slipstream.train.data import load_texts, sequences_of, train_tokenizer
from slipstream.train.preflight import preflight
from slipstream.train.run_folder import RunFolder
from slipstream.train.run_state import describe_data
from slipstream.train.start_training import start_training
from slipstream.train.training_rank import check_world_size
from slipstream.train.validation import LossHistory
from support.parameters import first_of
from support.tiny_training import tiny_llama, with_settings

Refuse = Callable[[dict[str, Any]], str]
LLAMA = tiny_llama(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(4):
        (folder / f"{index}.txt").write_text(f"document {index}: " + "some words to learn from. " * 40)
    return folder


@pytest.fixture
def values(tmp_path: Path, text: Path) -> dict[str, Any]:
    return {
        "model": {"config": dict(LLAMA)},
        "data": {"files": [text], "validation_fraction": 0.3},
        "pipeline": {"slices": 2},
        "runtime": {"self_check": False},
        "training": {"output": tmp_path / "output", "steps": 2, "seq_len": 32, "eval_every": 1},
    }


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    folder = tmp_path / "a-model"
    AutoModelForCausalLM.from_config(LlamaConfig(**settings)).save_pretrained(folder)
    return folder


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Gives a configuration to the command line: what it says on standard error, with code 2 and nothing written."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)

    def run(values: dict[str, Any]) -> str:
        config = parse_config(values)
        (tmp_path / "config.yaml").write_text(dump_config(config))
        before = snapshot(config.training.output)
        monkeypatch.setattr("sys.argv", ["slipstream", "train", str(tmp_path / "config.yaml")])
        monkeypatch.setattr(
            "slipstream.train.start_training.launch_ranks", lambda *_: pytest.fail("ranks were started")
        )
        with pytest.raises(SystemExit) as ending:
            main()
        assert ending.value.code == 2
        assert snapshot(config.training.output) == before
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory.offload": 0.5}, "memory.offload is set, but the schedule 'gpipe' has its sends and receives already"),
        ({"memory.recompute": "stage"}, "memory.recompute is set, but the schedule 'gpipe' has its sends and receives"),
        (
            {"memory.recompute": 5, "pipeline.schedule": "gpipe"},
            "memory.recompute=5: give 'none', 'selective', 'full', ",
        ),
    ],
)
def test_a_layout_that_no_rank_could_make(
    values: dict[str, Any], refuse: Refuse, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    file = tmp_path / "lowered.txt"
    file.write_text(str(add_communication(gpipe(2, 1, 2))))
    given = {"pipeline.num_ranks": 2, "pipeline.schedule": str(file)}
    assert message in refuse(with_settings(values, given | settings))


def test_a_host_without_room(values: dict[str, Any], refuse: Refuse) -> None:
    said = refuse(
        with_settings(values, {"memory.context": "host", "memory.host_limit": 10_000, "training.seq_len": 64})
    )
    assert "memory.host_limit=10000 (10.0 kB), but by the planner's account rank 0 would have" in said


@pytest.mark.parametrize(("limit", "place"), [(None, "device"), (150_000, "host")])
def test_the_place_of_keys_and_values_is_decided_for_all_ranks(
    values: dict[str, Any], limit: int | None, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse_config(
        with_settings(values, {"memory.context": "auto", "memory.limit": limit, "pipeline.num_ranks": 2})
    )
    inputs = preflight(config, Progress(make_console()))
    assert inputs.config.memory.context == place
    assert f"keys and values are on the {place}, as memory.context=auto: the fullest" in capsys.readouterr().out


SPREAD = {"pipeline": {"num_ranks": 2, "vocabulary": "spread"}, "training.batch_size": 2}
SHARDED = {"parallel": {"data": 2, "shard": "parameters"}, "training.batch_size": 2}
ADAFACTOR = {"optimizer": {"name": "adafactor"}, "pipeline.vocabulary": "whole", "training.batch_size": 2}
UNCUTTABLE = {"model.config.model_type": "gpt_neox"}
GPT = {"model_type": "openai-gpt", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 300}
BLOOM = {"model_type": "bloom", "hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 300}
EXPERTS = {"parallel": {"data": 2, "experts": 2}, "training.batch_size": 2}
MIXTURE = LLAMA | {"model_type": "qwen3_moe", "moe_intermediate_size": 8, "num_experts": 3, "num_key_value_heads": 2}
SPREAD_OVER_TENSOR_RANKS = "vocabulary='spread' with tp=2 in the mesh: tensor ranks share the vocabulary"
SPREAD_AND_SHARDED = "vocabulary='spread' with parallel.shard='parameters'"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (UNCUTTABLE | {"pipeline.partition": [1.5, 1.5]}, "[1.5, 1.5] adds up to 3.0 layers, but the model has 2"),
        (UNCUTTABLE | {"pipeline.partition": [1.5, 0.5]}, "'gpt_neox' can't be cut inside layer 0 (GPTNeoXLayer)"),
        (SPREAD | {"parallel.tensor": 2}, SPREAD_OVER_TENSOR_RANKS),
        (SPREAD | {"parallel.tensor": 2, "pipeline.schedule": "1f1b", "pipeline.slices": 2}, SPREAD_OVER_TENSOR_RANKS),
        (SPREAD | SHARDED, SPREAD_AND_SHARDED),
        (SPREAD | SHARDED | {"pipeline.schedule": "1f1b", "pipeline.slices": 2}, SPREAD_AND_SHARDED),
        (ADAFACTOR | {"parallel.tensor": 2}, "parallel.tensor=2 leaves each rank a part; give parallel.tensor=1"),
        (ADAFACTOR | {"parallel": {"data": 2, "shard": "optimizer"}}, "give parallel.shard=none"),
        (
            {"memory.limit": 1e9, "optimizer": {"name": "adamw", "args": {"amsgrad": True}}},
            "memory.limit with optimizer.name=adamw, which keeps 3 tensors of each parameter's size",
        ),
        (SHARDED | {"parallel.tensor": 2}, "shard='parameters' on a mesh with tp=2"),
        (SHARDED | {"model.config.tie_word_embeddings": True}, "shard='parameters' with lm_head.weight tied"),
        (
            {"parallel": {"context": 3, "context_exchange": "heads"}},
            "2 query heads can't be spread over cp=3 ranks. Give cp a divisor of 2: 1, 2; or give "
            "parallel.context_exchange=keys",
        ),
        (
            {"parallel": {"tensor": 2, "context": 2, "context_exchange": "heads"}},
            "1 query heads of each of tp=2 ranks can't be spread over cp=2 ranks. Give cp a divisor of 1: 1; or give",
        ),
        ({"parallel.context": 2, "model.config": BLOOM}, "model_type 'bloom' can't be trained with cp=2, where ranks"),
        (EXPERTS, "ep=2: 'llama' has no experts that can be spread"),
        (EXPERTS | {"model.config": MIXTURE}, "has 3 experts, which 2 ranks can't share evenly. Choose from 1, 3."),
        ({"data.vocab_size": 301}, "vocabulary has 300 tokens (0 to 299), but the text needs token id 300"),
        ({"data.validation_fraction": 0}, "needs held-out text, and there is none; give more text"),
        (
            {"model.config": GPT, "runtime.self_check": True},
            "model_type 'openai-gpt' can't be trained in token slices: layer 0 (Block)",
        ),
        ({"model": {"path": "nowhere/none"}}, "none"),
        ({"model.freeze": ["*"]}, "all of the"),
    ],
)
def test_settings_that_no_run_could_have(
    refuse: Refuse, values: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    assert message in refuse(with_settings(values, settings))


def test_a_plan_may_be_asked_for_a_spread_head(values: dict[str, Any]) -> None:
    values["pipeline"] = {"num_ranks": 2, "vocabulary": "spread"}
    preflight(parse_config(values), Progress(None))


def snapshot(folder: Path) -> dict[Path, bytes] | None:
    if not folder.exists():
        return None
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_good_run_prepares_and_writes_what_ranks_need(values: dict[str, Any], tmp_path: Path) -> None:
    config = parse_config(values)
    inputs = preflight(config, Progress(None))
    assert not config.training.output.exists()
    assert inputs.text.train[0].num_documents == 3
    assert inputs.text.validation[0].num_documents == 1
    assert inputs.model.config.eos_token_id == inputs.text.tokenizer.eos_token_id
    output = RunFolder(config.training.output)
    inputs.write()
    assert {path.name for path in output.inputs.iterdir()} >= {
        "config.json",
        "tokenizer.json",
        "train.tokens.npy",
        "validation.tokens.npy",
    }


@pytest.mark.parametrize("is_the_models", [True, False], ids=["the model's tokenizer", "another"])
def test_what_lies_beside_the_weights_waits_for_exports(
    values: dict[str, Any], model_folder: Path, tmp_path: Path, is_the_models: bool
) -> None:
    """Of a tokenizer only where it is the run's: the other one would be read with the chat template of this one."""
    of_tokenizer = ("chat_template.jinja", "added_tokens.json")
    made = train_tokenizer(["some words"], 290, Progress(None))
    for folder in (model_folder, tmp_path / "another"):
        made.save_pretrained(folder)
    (model_folder / "added_tokens.json").write_text("{}")
    (model_folder / "chat_template.jinja").write_text("{{ messages }}")
    (model_folder / "NOTICE").write_text("from elsewhere")
    values["model"] = {"path": str(model_folder)}
    values["data"]["tokenizer"] = None if is_the_models else str(tmp_path / "another")
    config = parse_config(values)
    preflight(config, Progress(None)).write()
    run = RunFolder(config.training.output)
    assert (run.beside / "NOTICE").read_text() == "from elsewhere"
    assert [(run.beside / name).exists() for name in of_tokenizer] == [is_the_models] * 2
    assert (run.inputs / "chat_template.jinja").exists() == is_the_models
    assert not (run.beside / "config.json").exists()


def test_a_validation_file_that_is_not_there(refuse: Refuse, values: dict[str, Any], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a line of text"}\n' * 40, encoding="utf-8")
    del values["data"]["files"]
    values["data"] |= {"dataset": str(rows), "validation": "missing.jsonl"}
    assert "error: data.validation=missing.jsonl: " in refuse(values)


def test_the_pipeline_is_told_to_shard_its_parameters(values: dict[str, Any]) -> None:
    """It refuses by itself what preflight does, which is passed by here."""
    values["parallel"] = {"shard": "parameters"}
    config = parse_config(values)
    model = {key: value for key, value in LLAMA.items() if key != "model_type"}
    LlamaConfig(**model, tie_word_embeddings=True).save_pretrained(RunFolder(config.training.output).inputs)
    with pytest.raises(SlipstreamError, match=r"shard='parameters' with lm_head\.weight tied"):
        make_pipeline(config, torch.device("cpu"), source_of(config, RunModel.read(config)))


OWN = [
    "config.yaml",
    "config.json",
    "x.safetensors",
    "inputs/x",
    "model/config.json",
    "model-step-8/x",
    "checkpoints/x",
]


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": "latest"}], ids=["plainly", "overwrite", "resume"])
def test_what_no_run_has_made_is_never_replaced(
    refuse: Refuse, values: dict[str, Any], tmp_path: Path, own: str, how: dict[str, Any]
) -> None:
    path = tmp_path / "output" / own
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    values["training"]["overwrite"] = how.get("overwrite", False)
    values["checkpoint"] = {"resume": how.get("resume", "no")}
    message = refuse(values)
    assert f"already holds {own}, which isn't in its list of what runs made" in message
    assert f"choose another folder, such as --training.output={tmp_path / 'output' / 'run-1'}" in message
    assert "overwrite" not in message


@pytest.fixture
def earlier(values: dict[str, Any], tmp_path: Path) -> RunFolder:
    """What a run leaves that took steps, saved a checkpoint and exported, without having run."""
    preflight(parse_config(values), Progress(None)).write()
    output = RunFolder(tmp_path / "output")
    output.listed.add(output.metrics)
    output.metrics.write_text("{}")
    output.listed.add_folder(output.model_at(3))
    output.model_at(3).mkdir()
    output.listed.add_folder(output.checkpoints)
    place = CheckpointFolder(output.checkpoints).complete(3)
    place.mkdir(parents=True)
    sequences = sequences_of(load_texts(output.inputs, "train"), "fixed", 32, 0)
    model = describe_model(AutoConfig.from_pretrained(output.inputs))
    settings = parse_config(values).model_dump(mode="json")
    facts = {
        "data": describe_data(sequences),
        "model": model,
        "settings": settings,
        "validation": LossHistory().facts(),
    }
    Manifest(format=1, step=3, facts=facts, files={}, tensors={}).write(place)
    (output.path / "notes.txt").write_text("mine")
    return output


def test_an_earlier_run_is_gone_on_with_first(refuse: Refuse, values: dict[str, Any], earlier: RunFolder) -> None:
    message = refuse(values)
    assert (
        "already holds model-step-3; go on from its checkpoint of step 3 with --checkpoint.resume=latest, " in message
    )
    assert "choose another folder, or replace it with --training.overwrite=true" in message
    shutil.rmtree(earlier.checkpoints)
    message = refuse(values)
    assert "already holds model-step-3; choose another folder, or replace it with --training.overwrite=true" in message


def test_overwriting_removes_what_runs_made_and_nothing_else(values: dict[str, Any], earlier: RunFolder) -> None:
    values["training"]["overwrite"] = True
    preflight(parse_config(values), Progress(None)).write()
    names = sorted(path.name for path in earlier.path.iterdir())
    assert names == ["config.yaml", "inputs", "notes.txt", "slipstream-run"]


def test_a_finished_run_without_checkpoints_is_not_begun_again(refuse: Refuse, values: dict[str, Any]) -> None:
    preflight(parse_config(values), Progress(None)).write()
    output = RunFolder(values["training"]["output"])
    output.listed.add_folder(output.model)
    output.model.mkdir()
    values["checkpoint"] = {"resume": "latest"}
    assert "already holds model, and no checkpoint to go on from; choose another folder" in refuse(values)


@pytest.mark.parametrize("name", ["model", "adapter"])
@pytest.mark.parametrize("resume", first_of(["latest", "last-good", "best"]))
def test_what_a_finished_run_has_exported_is_replaced_where_that_is_wanted(
    refuse: Refuse, values: dict[str, Any], name: str, resume: str
) -> None:
    """Its checkpoints, which are listed, were never saved or have been removed since."""
    preflight(parse_config(values), Progress(None)).write()
    output = RunFolder(values["training"]["output"])
    output.listed.add_folder(output.checkpoints)
    export = output.path / name
    export.mkdir()
    output.listed.add_folder(export)
    (export / "config.json").touch()
    values["checkpoint"] = {"resume": resume, "keep_best": True}
    preflight(parse_config(values), Progress(None))  # killed while it was exporting
    output.listed.itemise(export)
    (export / "config.json").unlink()  # and moved elsewhere, but it was complete
    assert f"already holds {name}, and no checkpoint to go on from; choose another folder" in refuse(values)
    values["training"]["overwrite"] = True
    preflight(parse_config(values), Progress(None))


@pytest.mark.parametrize("left", [["slipstream-run"], ["slipstream-run", "config.yaml"], ["slipstream-run", "inputs"]])
@pytest.mark.parametrize("resume", first_of(["latest", "no"]))
def test_a_run_that_was_killed_while_it_started_is_begun_again(
    values: dict[str, Any], tmp_path: Path, left: list[str], resume: str
) -> None:
    """Whatever it had written by then: it has nothing to lose."""
    values["checkpoint"] = {"resume": resume}
    preflight(parse_config(values), Progress(None)).write()
    for path in (tmp_path / "output").iterdir():
        if path.name not in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    preflight(parse_config(values), Progress(None)).write()


@pytest.mark.usefixtures("earlier")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training.seq_len": 16}, "trained on different data: seq_len was 32, is 16"),
        ({"training.seed": 7}, "; seed was 0, is 7. Resume with the settings it was saved with"),
        ({"data.validation_fraction": 0.6}, "trained on different data: num_tokens was "),
        ({"model.config.rms_norm_eps": 0.1}, "checkpoint of another model: rms_norm_eps is "),
        ({"checkpoint.resume": 7}, "checkpoints; give one of its steps (3), latest"),
    ],
)
def test_a_run_that_cannot_go_on_from_its_checkpoint(
    refuse: Refuse, values: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    assert message in refuse(with_settings(values, {"checkpoint.resume": "latest"} | settings))


@pytest.mark.usefixtures("earlier")
def test_what_changes_is_shown_before_a_run_goes_on(values: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    changed = {"checkpoint.resume": "latest", "training.steps": 9, "training.batch_size": 2, "optimizer.lr": 0.5}
    assert not preflight(parse_config(with_settings(values, changed)), Progress(make_console())).is_finished
    printed = capsys.readouterr().out.partition("pipeline.slices=2 is given")[0]  # the note on planning is the last
    table = printed.split("resuming after step 3 with other settings than before:\n")[1]
    assert [line.split() for line in table.splitlines()] == [
        ["setting", "before", "now"],
        ["optimizer.lr", "0.0003", "0.5"],
        ["training.batch_size", "1", "2"],
        ["training.steps", "2", "9"],
    ]


def test_a_finished_run_starts_no_ranks(
    values: dict[str, Any], earlier: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slipstream.train.start_training.launch_ranks", lambda *_: pytest.fail("ranks were started"))
    values["checkpoint"] = {"resume": "latest"}
    earlier.model.mkdir()
    (earlier.model / "config.json").touch()
    earlier.listed.add_folder(earlier.model)
    assert not preflight(parse_config(values), Progress(None)).is_finished  # it was killed while it exported
    earlier.listed.itemise(earlier.model)
    start_training(parse_config(values))
    assert "the run has reached its last step, 3, and its model is in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"training.batch_size": 500, "training.eval_every": 0},
            "each step takes 500 sequences, but the training text has ",
        ),
        (
            {"model.freeze": ["model.embed_tokens*", "model.layers.0.*"]},
            r"model.freeze: [\d,]+ of [\d,]+ parameters train \(",
        ),
    ],
)
def test_what_is_said_of_a_run(
    values: dict[str, Any], capsys: pytest.CaptureFixture[str], settings: dict[str, Any], said: str
) -> None:
    preflight(parse_config(with_settings(values, settings)), Progress(make_console()))
    assert re.search(said, capsys.readouterr().out)


def test_a_tokenizer_without_an_end_of_text(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = preflight(parse_config(values), Progress(None)).text.tokenizer
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    values["data"]["tokenizer"] = str(tmp_path / "tokenizer")
    preflight(parse_config(values), Progress(make_console()))
    out = capsys.readouterr().out
    assert "the tokenizer has no end-of-text token, so none of the 4 documents is closed by one" in out


def test_a_checkpoint_of_a_loop_of_ones_own(refuse: Refuse, values: dict[str, Any], earlier: RunFolder) -> None:
    place = CheckpointFolder(earlier.checkpoints).complete(3)
    Manifest(format=1, step=3, facts={"loop": {}, "model": {}}, files={}, tensors={}).write(place)
    values["checkpoint"] = {"resume": "latest"}
    assert "was saved by pipe.save, and doesn't say on what it was trained: pipe.load goes on from it" in refuse(values)


def test_what_ranks_that_share_a_gpu_cannot_do(
    refuse: Refuse, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    sharded = {"training.device": "cuda", "training.batch_size": 2, "parallel": {"data": 2, "shard": "parameters"}}
    message = refuse(with_settings(values, sharded | {"pipeline.num_ranks": 2, "runtime.transport": "auto"}))
    assert "parallel.shard=parameters: FSDP2 exchanges shards between GPUs by NCCL alone" in message


@pytest.mark.parametrize("kind", ["locked", "too long", "in a file", "in a locked folder"])
def test_an_output_that_cannot_be_read(values: dict[str, Any], tmp_path: Path, kind: str) -> None:
    """It is found before a text is looked for."""
    values["data"]["files"] = [str(tmp_path / "nothing")]
    (folder := tmp_path / "folder").mkdir()
    (folder / "note.txt").write_text("a note")
    places = {"locked": folder, "too long": folder / ("x" * 300), "in a file": folder / "note.txt" / "run"}
    values["training"]["output"] = places.get(kind, folder / "run")
    folder.chmod(0 if "locked" in kind else 0o755)
    config, is_root = parse_config(values), os.geteuid() == 0  # who may read anything
    if is_root:
        os.seteuid(65534)
    try:
        with pytest.raises(SlipstreamError, match=r"training\.output=.*name a folder") as error:
            preflight(config, Progress(None))
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)
    assert "\n" not in str(error.value)


BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 3}, r"\(16\) is not a multiple of the number of attention heads \(3\)"),
    ({"num_hidden_layers": "two"}, "num_hidden_layers.*expected int"),
    ({"quantization_config": BITS}, r"quantised.*bitsandbytes.*give the model that they were made of"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantised.*fp8"),
    ({"model_type": "gpt2", "num_attention_heads": 3}, r"make the 'gpt2'.*num_heads`: 3"),
]


@pytest.mark.parametrize(("changes", "reason"), UNUSABLE, ids=[str(each) for each, _ in UNUSABLE])
@pytest.mark.parametrize("command", ["train", "check"])
def test_a_folder_of_which_no_model_can_be_trained(
    command: str,
    changes: dict[str, Any],
    reason: str,
    values: dict[str, Any],
    refuse: Refuse,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = model_folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": None} | changes))
    if command == "train":
        values["model"], values["data"]["files"] = {"path": str(model_folder)}, ["nothing"]
        (said,) = [line for line in refuse(values).splitlines() if line.startswith("error: ")]
    else:
        monkeypatch.setattr("sys.argv", ["slipstream", "check", str(model_folder)])
        with pytest.raises(SystemExit) as ending:
            main()
        written = capsys.readouterr()
        _, error, said = written.err.partition("error: ")
        assert ending.value.code == (2 if error else 1)
        said = said or " ".join(written.out.split())
    assert re.search(reason, said), said


DAMAGED: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "truncated": (
        lambda content: content[:-100],
        "model.safetensors is corrupt or truncated .*copy or download it again",
    ),
    "corrupt": (
        lambda content: b"\xff" * 8 + content[8:],
        "model.safetensors is corrupt or .*copy or download it again",
    ),
    "missing": (lambda content: None, "holds no .safetensors file.*--model.init=random"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_weights(refuse: Refuse, values: dict[str, Any], model_folder: Path, damage: str) -> None:
    change, message = DAMAGED[damage]
    weights = model_folder / "model.safetensors"
    if content := change(weights.read_bytes()):
        weights.write_bytes(content)
    else:
        weights.unlink()
    values["model"] = {"path": str(model_folder)}
    assert re.search(message, refuse(values), re.DOTALL)


@pytest.mark.parametrize("marks", [[], ["<extra>"]], ids=["its-own", "another"])
def test_tokens_with_other_numbers_than_the_models_are_said(
    values: dict[str, Any], model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], marks: list[str]
) -> None:
    texts = ["some words to learn"] * 9
    train_tokenizer(texts, 290, Progress(None)).save_pretrained(model_folder)
    named = train_tokenizer(texts, 290, Progress(None), marks)  # a mark moves all others
    named.save_pretrained(tmp_path / "named")
    values["model"] = {"path": str(model_folder)}
    values["data"]["tokenizer"] = str(tmp_path / "named")
    preflight(parse_config(values), Progress(make_console()))
    said = " ".join("".join(capsys.readouterr()).split())
    assert ("is another model's: 1 of the 2" in said) == bool(marks), said


def test_weights_of_another_shape_are_found_before_any_text_is_read(
    refuse: Refuse, values: dict[str, Any], model_folder: Path
) -> None:
    file = model_folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 48}))
    values["model"], values["data"]["files"] = {"path": str(model_folder)}, ["nothing"]
    said = refuse(values)
    assert "mlp.down_proj.weight is [16, 32], and by config.json [16, 48], and so are 5 more" in said
    assert "report" not in said


@pytest.mark.parametrize(
    ("processes", "instead"), [(3, "--pipeline.num_ranks=3. "), (4, "--pipeline.num_ranks=4, or --parallel.data=2 for")]
)
def test_a_world_size_that_does_not_fit(values: dict[str, Any], processes: int, instead: str) -> None:
    with pytest.raises(SlipstreamError) as error:
        check_world_size(parse_config(values), {"RANK": "0", "WORLD_SIZE": str(processes)})
    assert f"started {processes} processes, but pipeline.num_ranks=2 needs 2" in str(error.value)
    assert f"torchrun --nproc-per-node=2 or {instead}" in str(error.value)


def test_more_processes_than_layers(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")
    values["pipeline"] = {"num_ranks": 6, "slices": 2}
    layers = LLAMA["num_hidden_layers"]
    expected = rf"choose 1 to {layers}\. The launcher started 6 processes: .* --nproc-per-node={layers}.* --pp=\d --dp="
    with pytest.raises(SlipstreamError, match=expected):
        preflight(parse_config(values), Progress(None))


def test_pretrained_weights_use_their_own_tokenizer(values: dict[str, Any], model_folder: Path) -> None:
    trained = preflight(parse_config(values), Progress(None))
    trained.text.tokenizer.save_pretrained(model_folder)
    values["model"] = {"path": str(model_folder)}
    inputs = preflight(parse_config(values), Progress(None))
    assert torch.equal(torch.from_numpy(inputs.text.train[0].tokens), torch.from_numpy(trained.text.train[0].tokens))


def test_an_output_that_cannot_be_written(values: dict[str, Any], tmp_path: Path) -> None:
    values["training"]["output"] = tmp_path / "file" / "output"
    inputs = preflight(parse_config(values), Progress(None))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SlipstreamError, match=r"can't write to training.output=.*file/output"):
        inputs.write()
