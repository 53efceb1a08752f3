"""The model of any checkpoint of a run, whichever mesh wrote it, is the one that the run itself exports."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.train.evaluation import settings_of_model
from slipstream.train.export import check_export_folder, choose_checkpoint, opened_model
from slipstream.train.run_folder import RunFolder
from support.forked import COMMAND, launch, slipstream_command
from support.tiny_training import tiny_llama

STEPS, HALF = 4, 2
LLAMA: dict[str, Any] = tiny_llama(num_key_value_heads=2, initializer_range=0.1)
SETTINGS: dict[str, Any] = {
    "model": {"config": LLAMA},
    "data": {"validation_fraction": 0},
    "pipeline": {"num_ranks": 2, "slices": 4},
    "runtime": {"self_check": False},
    "optimizer": {"lr": 0.01},
    "training": {"seq_len": 64, "batch_size": 4, "steps": STEPS, "export_every": HALF},
    "checkpoint": {"every": HALF},
}
SPREAD = ["--pipeline.vocabulary=spread", "--model.config.tie_word_embeddings=true"]
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
CONFIGURATION = """
from transformers import LlamaConfig

class SpiralConfig(LlamaConfig):
    model_type = "spiral"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_spiral import SpiralConfig

class SpiralForCausalLM(LlamaForCausalLM):
    config_class = SpiralConfig
"""
MESHES: list[tuple[int, list[str]]] = [
    (4, ["--dp=2", "--parallel.shard=optimizer", *SPREAD]),
    (2, SPREAD),
    (2, ["--model.config.tie_word_embeddings=true"]),
    (2, ["--pp=1", "--tp=2"]),
    (2, ["--pp=1", "--dp=2", "--parallel.shard=parameters"]),
    (2, ["--training.precision=bf16-weights"]),
    (1, ["--pp=1", "--tp=1"]),
]


def make_run(folder: Path, num_ranks: int, *changes: str, model: dict[str, Any] | None = None) -> RunFolder:
    """A run of four steps, with two checkpoints and an export at each of them."""
    folder.mkdir(exist_ok=True)
    text, config = folder / "text.txt", folder / "config.yaml"
    text.write_text("\n".join(f"{n} is {n * n % 97} more than {n % 13}." for n in range(800)))
    config.write_text(yaml.safe_dump(SETTINGS | {"model": model or SETTINGS["model"]}))
    places = [f"--training.output={folder / 'run'}", f"--data.files=[{text}]"]
    ended = launch(num_ranks, COMMAND, "train", config, *places, *changes)
    assert ended.returncode == 0, ended.stderr
    return RunFolder(folder / "run")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Of two stages on two replicas that share the optimizer's state, and of a head whose rows are on both stages."""
    return make_run(tmp_path_factory.mktemp("runs"), MESHES[0][0], *MESHES[0][1])


def check_same_model(one: Path, other: Path) -> None:
    """Same configuration, weights and tokenizer on the disk, and same logits by transformers alone."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((one / file).read_text()) == json.loads((other / file).read_text())
    weights = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    tokens = AutoTokenizer.from_pretrained(one)("7 is 49 more than 7.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (one, other)]
    assert logits[0].equal(logits[1])


def test_the_model_of_a_checkpoint_is_the_one_that_the_run_exported(run: RunFolder, tmp_path: Path) -> None:
    ended = slipstream_command("export", run.path, "--output", tmp_path / "last")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith(f"exported step {STEPS} of {run.path} to {tmp_path / 'last'}\n")
    check_same_model(tmp_path / "last", run.model)
    ended = slipstream_command("export", run.path, "--step", str(HALF), "--output", tmp_path / "new" / "half")
    assert ended.returncode == 0, ended.stderr
    check_same_model(tmp_path / "new" / "half", run.model_at(HALF))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "new"]  # and nothing unfinished


@pytest.mark.grid
@pytest.mark.parametrize(("num_ranks", "changes"), MESHES[1:])
def test_whichever_mesh_wrote_it(num_ranks: int, changes: list[str], tmp_path: Path) -> None:
    made = make_run(tmp_path, num_ranks, *changes)
    ended = slipstream_command("export", made.checkpoints / f"step-{STEPS:08}", "--output", tmp_path / "model")
    assert ended.returncode == 0, ended.stderr
    check_same_model(tmp_path / "model", made.model)


@pytest.mark.more
def test_of_a_run_that_began_with_a_model(run: RunFolder, tmp_path: Path) -> None:
    """Its configuration has been loaded and saved once more often; how it generates, and what lies beside the weights,
    is kept, also where the given folder is gone."""
    given = tmp_path / "given"
    shutil.copytree(run.model, given)
    how = GenerationConfig(eos_token_id=[5, 9])
    (given / "generation_config.json").write_text(how.to_json_string())
    (given / "LICENSE").write_text("MIT")
    tokenizer = AutoTokenizer.from_pretrained(given)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(given)
    (given / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    further = make_run(tmp_path, 1, "--pp=1", model={"path": str(given)})
    shutil.rmtree(given)
    ended = slipstream_command("export", further.path, "--output", tmp_path / "model")
    assert ended.returncode == 0, ended.stderr
    check_same_model(tmp_path / "model", further.model)
    for folder in (tmp_path / "model", further.model, further.model_at(HALF)):
        assert sorted(GenerationConfig.from_pretrained(folder).eos_token_id) == [0, 5, 9]  # 0 is the tokenizer's
        assert (folder / "LICENSE").read_text() == "MIT"
        assert (folder / "special_tokens_map.json").exists()
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    assert not list(further.model.glob("*.npy"))


@pytest.mark.more
def test_what_belongs_to_a_model_but_is_not_trained_is_there(tmp_path: Path) -> None:
    """The biases by which DeepSeek balances its experts, of a new model and of one that brought its own."""
    new = make_run(tmp_path / "new", 1, "--pp=1", model={"config": DEEPSEEK})
    weights = load_file(new.model / "model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    save_file(weights | {bias: torch.full((4,), 0.25)}, new.model / "model.safetensors", {"format": "pt"})
    further = make_run(tmp_path / "further", 1, "--pp=1", model={"path": str(new.model)})
    for each in (new, further):
        ended = slipstream_command("export", each.path, "--output", each.path.with_name("model"))
        assert ended.returncode == 0, ended.stderr
    again = load_file(tmp_path / "new" / "model" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(again[name].equal(weights[name]) for name in weights)
    assert load_file(tmp_path / "further" / "model" / "model.safetensors")[bias].eq(0.25).all()
    check_same_model(tmp_path / "further" / "model", further.model)


def test_a_mistake_ends_with_code_2_and_says_what_there_is(run: RunFolder, tmp_path: Path) -> None:
    ended = slipstream_command("export", run.path, "--step=3", "--output", tmp_path / "model")
    assert ended.returncode == 2
    assert f"there is no checkpoint 3 in {run.checkpoints}; give one of its steps (4, 2)" in ended.stderr
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").touch()
    ended = slipstream_command("export", run.path, "--output", tmp_path / "model")
    assert ended.returncode == 2
    assert "already holds notes.txt, and nothing is replaced; name a new folder" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("place", "step", "message"),
    [
        ("absent", None, "there is no folder .*absent; give a run's output folder or a checkpoint: runs/a"),
        ("model", None, "there are no checkpoints in .*model: runs with --checkpoint.every"),
        ("checkpoints/step-00000004", "2", "--step=2 chooses among the checkpoints of a run"),
        ("step-00000004", None, "isn't in the folder checkpoints/ of a run"),
        (".", "best", "--step=best isn't a step; give that of a checkpoint, latest or last-good"),
    ],
)
def test_what_is_not_a_checkpoint_is_refused(run: RunFolder, place: str, step: str | None, message: str) -> None:
    (run.path / "step-00000004").mkdir(exist_ok=True)
    with pytest.raises(SlipstreamError, match=message):
        choose_checkpoint(run.path / place, step)


def test_the_folder_of_the_run_is_left_alone(run: RunFolder, tmp_path: Path) -> None:
    for inside in (run.model, run.path / "model-step-3", run.path):
        with pytest.raises(SlipstreamError, match=r"is in the run's own folder .*-model"):
            check_export_folder(inside, run)
    (tmp_path / "file").touch()
    with pytest.raises(SlipstreamError, match="is a file, which isn't replaced"):
        check_export_folder(tmp_path / "file", run)


def copy_of(run: RunFolder, folder: Path) -> RunFolder:
    """The run's inputs and checkpoints alone, in another place."""
    for path in (run.inputs, run.checkpoints):
        shutil.copytree(path, folder / path.name)
    return RunFolder(folder)


def test_nothing_is_written_of_a_damaged_checkpoint_or_of_another_model(run: RunFolder, tmp_path: Path) -> None:
    copy, output = copy_of(run, tmp_path / "copy"), tmp_path / "model"
    settings = json.loads((copy.inputs / "config.json").read_text())
    (copy.inputs / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 0.5}))
    ended = slipstream_command("export", copy.path, "--output", output)
    assert ended.returncode == 2
    assert "isn't a checkpoint of the model in" in ended.stderr
    assert "rms_norm_eps is 1e-06 in it and 0.5 here" in ended.stderr
    (copy.inputs / "tokenizer_config.json").unlink()
    ended = slipstream_command("export", copy.path, "--output", output)
    assert ended.returncode == 2
    assert "inputs/tokenizer_config.json: the folder inputs/ of a run has" in ended.stderr
    file = sorted((copy.checkpoints / f"step-{STEPS:08}").glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1])
    ended = slipstream_command("export", copy.path, "--output", output)
    assert ended.returncode == 2
    assert f"the checkpoint of step {STEPS}" in ended.stderr
    assert "truncated" in ended.stderr
    assert not output.exists()


def evaluated(*arguments: str | Path) -> tuple[int, int, float]:
    """The tokens of a text, those that are predicted, and the loss, as `slipstream eval` prints them."""
    ended = slipstream_command("eval", *arguments)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r" ([\d,]+) tokens, ([\d,]+) predicted\nloss: ([\d.]+) nats per token, perplexity", ended.stdout)
    assert found, ended.stdout
    return int(found[1].replace(",", "")), int(found[2].replace(",", "")), float(found[3])


@pytest.mark.more
def test_the_loss_is_that_of_each_whole_document(run: RunFolder, tmp_path: Path) -> None:
    """In slices of seven tokens of the checkpoint alone, and by transformers of the export."""
    rows = [f"{n} is {n * n % 97} more than {n % 13}." for n in range(5)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"words": row}) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    model = AutoModelForCausalLM.from_pretrained(run.model)
    documents = [[*tokenizer(row)["input_ids"], tokenizer.eos_token_id] for row in rows]
    predicted, total = sum(map(len, documents)) - len(rows), 0.0
    for document in documents:
        tokens = torch.tensor([document])
        with torch.no_grad():
            total += float(model(tokens, labels=tokens).loss) * (len(document) - 1)
    expected = (predicted + len(rows), predicted, pytest.approx(total / predicted, abs=1e-4))
    alone = copy_of(run, tmp_path / "alone").path
    assert max(map(len, documents)) > 7
    assert evaluated(alone, file, "--column=words", "--slice-len=7", "--data.packing=none") == expected
    assert evaluated(run.model, file, "--column=words") == expected


def test_a_long_text_is_cut_at_the_longest_sequence(run: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("7 is 49 more than 7. " * 60)
    num_tokens, predicted, _ = evaluated(run.model, file)
    assert num_tokens > 3 * 64
    assert predicted == num_tokens - -(-num_tokens // 64)


def test_the_end_of_a_packed_text_counts_too(run: RunFolder, tmp_path: Path) -> None:
    """As in a validation, whose last sequence is filled up."""
    file = tmp_path / "text.txt"
    file.write_text("7 is 49 more than 7. " * 5)
    length = len(AutoTokenizer.from_pretrained(run.model)(file.read_text())["input_ids"]) + 1  # with the end of text
    assert length % 64
    assert evaluated(run.path, file)[:2] == (length, length - -(-length // 64))


def test_sequences_of_an_evaluation_may_be_shorter_than_the_slices_of_a_training() -> None:
    found = settings_of_model("model", "rows.jsonl", 5, ["--data.loss=all"])
    assert (found.training.seq_len, found.data.loss, found.data.packing) == (5, "all", "none")


def test_a_model_that_is_being_written_is_not_taken(run: RunFolder, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path / "copy")
    shutil.copytree(run.model, copy.model)
    with opened_model(str(copy.path), trusts_code=False, progress=Progress(None)) as opened:
        assert opened.path == str(copy.model)
    copy.listed.add_folder(copy.model)
    with opened_model(str(copy.path), trusts_code=False, progress=Progress(None)) as opened:
        assert opened.path != str(copy.model)
        check_same_model(Path(opened.path), run.model)
    assert not Path(opened.path).exists()


def test_a_prompt_is_continued_as_transformers_does(run: RunFolder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    model = AutoModelForCausalLM.from_pretrained(run.model)
    inputs = tokenizer("7 is", return_tensors="pt", return_token_type_ids=False)
    likeliest = model.generate(**inputs, max_new_tokens=9, do_sample=False, pad_token_id=0)
    ended = slipstream_command("generate", run.path, "7 is", "--max-new-tokens=9")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == tokenizer.decode(likeliest[0], skip_special_tokens=True) + "\n"
    assert ended.stderr == ""
    of_checkpoint = slipstream_command("generate", run.checkpoints / f"step-{STEPS:08}", "7 is", "--max-new-tokens=9")
    assert of_checkpoint.stdout == ended.stdout  # the text alone, also where a checkpoint has to be read before


@pytest.mark.more
def test_code_that_comes_with_a_model_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    names = {"AutoConfig": "configuration_spiral.SpiralConfig"}
    names["AutoModelForCausalLM"] = "modeling_spiral.SpiralForCausalLM"
    (source / "config.json").write_text(json.dumps(LLAMA | {"model_type": "spiral", "auto_map": names}))
    (source / "configuration_spiral.py").write_text(CONFIGURATION)
    (source / "modeling_spiral.py").write_text(MODELING)
    model = {"path": str(source), "init": "random", "trust_remote_code": True}
    made = make_run(tmp_path / "made", 1, "--pp=1", "--data.vocab_size=300", model=model)
    for command in (["export", made.path, "--output", output], ["generate", made.path, "7 is", "--max-new-tokens=9"]):
        refused = slipstream_command(*command)
        assert refused.returncode == 2
        assert "--trust-remote-code" in refused.stderr
        trusted = slipstream_command(*command, "--trust-remote-code")
        assert trusted.returncode == 0, trusted.stderr
    assert (output / "modeling_spiral.py").is_file()


@pytest.mark.more
def test_the_seed_decides_what_is_drawn(run: RunFolder) -> None:
    drawn = ["generate", run.path, "7 is", "--temperature=1.5", "--max-new-tokens=20"]
    texts = [slipstream_command(*drawn, f"--seed={seed}").stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["eval", "{run}", "{empty}"], "empty.txt is empty; give a file with text"),
        pytest.param(["eval", "{run}", "{absent}"], "there is no file ", marks=pytest.mark.more),
        pytest.param(["eval", "{run}", "{rows}"], "--column of `slipstream eval`, from: words", marks=pytest.mark.more),
        pytest.param(["eval", "{blank}", "{text}"], "there are no checkpoints in ", marks=pytest.mark.more),
        pytest.param(["eval", "{run}", "{text}", "--seq-len=65"], "--seq-len=65 is more than", marks=pytest.mark.more),
        (["generate", "{absent}", "7 is"], "give a model's folder or hub name, a run's output folder, or a checkpoint"),
        (["generate", "{untokenised}", "7 is"], "the folder has no tokenizer.json. Copy the files of its tokenizer"),
        pytest.param(["generate", "{run}", ""], "the prompt '' has no tokens", marks=pytest.mark.more),
        pytest.param(["generate", "{run}", "7 is"], "and --max-new-tokens=", marks=pytest.mark.more),
    ],
)
def test_a_mistake_says_what_to_give(run: RunFolder, tmp_path: Path, command: list[str], message: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "text.txt").write_text("7 is 49 more than 7.")
    (tmp_path / "rows.jsonl").write_text('{"words": "7 is 49 more than 7."}')
    (tmp_path / "blank").mkdir()
    (tmp_path / "untokenised").mkdir()
    shutil.copy(run.model / "config.json", tmp_path / "untokenised")
    places = {"run": run.path, "text": tmp_path / "text.txt", "empty": tmp_path / "empty.txt"}
    places |= {name: tmp_path / name for name in ("absent", "blank", "untokenised")} | {"rows": tmp_path / "rows.jsonl"}
    ended = slipstream_command(*(word.format(**places) for word in command))
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
