"""What a run's checkpoints are good for: it goes on from them, to the bit on its own mesh and with every sample once on
any other, and the model of each is the one that the run itself exports, evaluates and lets continue a prompt."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from slipstream.checkpoint import CheckpointFolder, Manifest
from slipstream.cli import main
from slipstream.errors import SlipstreamError
from slipstream.extras.run_page import write_run_page
from slipstream.launch import Progress
from slipstream.pipeline import Pipeline
from slipstream.schedule import Op, Schedule
from slipstream.train.config import load_config
from slipstream.train.evaluation import settings_of_model
from slipstream.train.export import check_export_folder, choose_checkpoint, opened_model
from slipstream.train.optimizers import make_optimizer, make_scheduler
from slipstream.train.run_folder import RunFolder
from support.forked import slipstream_command
from support.parameters import first_of
from support.tiny_training import TEXT, half_of, run_training, steps_of, tiny_llama, tiny_training

STEPS, HALF = 6, 3
LAST = f"step-{STEPS:08}"
LLAMA = tiny_llama(num_key_value_heads=2, attention_dropout=0.1, initializer_range=0.1)
RESUME = "--checkpoint.resume=latest"
WITHOUT_DROPOUT = "--model.config.attention_dropout=0.0", "--optimizer.lr=3e-4"
FOUR_STEPS = "--training.steps=4", "--checkpoint.every=2"
TIED = "--model.config.tie_word_embeddings=true"
SPREAD = [TIED, "--pipeline.vocabulary=spread"]
REPLICAS = ["--dp=2", "--parallel.shard=optimizer"]
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
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
    (2, SPREAD),
    (2, [TIED]),
    (2, ["--pp=1", "--tp=2"]),
    (2, ["--pp=1", "--dp=2", "--parallel.shard=parameters"]),
    (2, ["--training.precision=bf16-weights"]),
    (1, ["--pp=1", "--tp=1"]),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


def train(
    num_ranks: int, folder: Path, text: Path, *more: str, code: int = 0, model: dict[str, Any] | None = None
) -> CompletedProcess[str]:
    """A run of six steps with dropout, and a checkpoint and an export after three."""
    settings = tiny_training(STEPS, HALF) | {"model": model or {"config": LLAMA}, "optimizer": {"lr": 0.01}}
    settings["data"] = {"validation_fraction": 0, "files": [str(text)]}
    settings["training"]["export_every"] = HALF
    return run_training(num_ranks, folder, settings, *more, code=code)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> RunFolder:
    """One that nothing interrupted, of two stages on two replicas that share the optimizer's state, and of a head whose
    rows are on both stages."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(4, folder, text, *REPLICAS, *SPREAD)
    return RunFolder(folder)


def weights_of(*runs: Path) -> list[bytes]:
    return [(run / "model" / "model.safetensors").read_bytes() for run in runs]


@pytest.mark.parametrize("other", first_of([[], ["--memory.optimizer=host"]]))
def test_the_same_mesh_goes_on_to_the_bit(other: list[str], run: RunFolder, text: Path, tmp_path: Path) -> None:
    """Wherever the optimizer runs."""
    again = half_of(run.path, tmp_path / "again")
    ended = train(4, again, text, *REPLICAS, *SPREAD, RESUME, *other)
    assert f"resumed after step {HALF}" in ended.stdout
    assert ("other settings" in ended.stdout) == bool(other)
    first, second = weights_of(run.path, again)
    assert first == second
    figures = ("step", "loss", "lr", "grad_norm")
    found, wanted = ([[line[key] for key in figures] for line in steps_of(each)] for each in (again, run.path))
    assert found == wanted[HALF:]


def test_a_loop_of_ones_own_goes_on_from_a_run(run: RunFolder) -> None:
    """With its weights, optimizer, schedule and dropout."""
    config = load_config(run.config)
    pipe = Pipeline.from_config(AutoConfig.from_pretrained(run.inputs), num_ranks=2, slices=4, schedule="gpipe")
    optimizer = make_optimizer(pipe.named_parameters(), config.optimizer)
    scheduler = make_scheduler(optimizer, config.optimizer, STEPS)
    at, facts = pipe.load(run.checkpoints, HALF, optimizer=optimizer, scheduler=scheduler)
    saved = Manifest.read(run.checkpoints / f"step-{HALF:08}")
    assert (at, facts) == (HALF, {"num_samples": saved.facts["num_samples"]})
    assert pipe.random_state == (config.training.seed, HALF)
    assert scheduler.get_last_lr()[0] == steps_of(run.path)[HALF]["lr"]
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in pipe.parameters()]
    assert all(moment.abs().sum() > 0 for moment in moments)
    pipe.load(run.checkpoints)
    exported = load_file(run.model / "model.safetensors")
    assert all(torch.equal(pipe.state_dict()[name], weight) for name, weight in exported.items())


@pytest.mark.grid
@pytest.mark.parametrize(("name", "arguments"), [("sgd", "{momentum: 0.9}"), ("adamax", "{}"), ("rprop", "{}")])
def test_any_optimizer_goes_on_to_the_bit(text: Path, tmp_path: Path, name: str, arguments: str) -> None:
    given = [*REPLICAS, f"--optimizer.name={name}", f"--optimizer.args={arguments}"]
    train(4, tmp_path / "first", text, *given)
    again = half_of(tmp_path / "first", tmp_path / "again")
    assert f"resumed after step {HALF}" in train(4, again, text, *given, RESUME).stdout
    first, second = weights_of(tmp_path / "first", again)
    assert first == second


@pytest.mark.grid
def test_replicas_that_spread_the_parameters_save_and_go_on_to_the_bit(text: Path, tmp_path: Path) -> None:
    """From a checkpoint of a run that spread the optimizer's state alone, and that goes on from theirs."""
    whole, back = tmp_path / "whole", tmp_path / "back"
    train(4, whole, text, *REPLICAS)
    spread = half_of(whole, tmp_path / "spread")
    train(4, spread, text, "--dp=2", RESUME, "--parallel.shard=parameters", "--checkpoint.every=1")
    ended = train(4, half_of(spread, back, STEPS - 1), text, *REPLICAS, RESUME)
    assert f"resumed after step {STEPS - 1}" in ended.stdout
    first, second, third = weights_of(whole, spread, back)
    assert first == second == third


@pytest.mark.more
@pytest.mark.usefixtures("compiled_search")
def test_auto_goes_on_with_what_it_found(text: Path, tmp_path: Path) -> None:
    """The first step is planned. The order that was found gets recomputation and offloading again."""
    order = ["--pipeline.schedule=auto", "--pipeline.slices=[8,16,24,16]", "--pipeline.num_microbatches=2"]
    settings = [*order, "--memory.recompute=stage+full", "--memory.offload=0.5", *FOUR_STEPS, "--checkpoint.keep=4"]
    first = tmp_path / "first"
    ended = train(2, first, text, *settings)
    assert "auto has settled on slices of" in ended.stdout
    assert [line["step"] for line in steps_of(first) if "trial" in line] == [1]
    assert Manifest.read(first / "checkpoints" / "step-00000002").facts["tuned"]["plan"]["pipeline"]["slices"] == [
        8,
        16,
        24,
        16,
    ]
    assert Schedule.parse((first / "schedule.txt").read_text()).ops >= {Op.R, Op.OFFLOAD}

    again = half_of(first, tmp_path / "again", step=2)
    ended = train(2, again, text, *settings, RESUME)
    assert "auto plans orders or slices" not in ended.stdout
    assert (again / "schedule.txt").read_text() == (first / "schedule.txt").read_text()
    assert [line["loss"] for line in steps_of(again)] == [line["loss"] for line in steps_of(first)][2:]


@pytest.mark.more
def test_another_mesh_sees_the_next_samples(run: RunFolder, text: Path, tmp_path: Path) -> None:
    here = half_of(run.path, tmp_path / "tp")
    mesh = [TIED, "--pp=1", "--tp=2", "--parallel.sequence_parallel=true"]
    settings = [*mesh, "--pipeline.slices=2", "--training.batch_size=2", "--training.steps=4"]
    ended = train(2, here, text, *settings, RESUME)
    table = ended.stdout[ended.stdout.index(f"resuming after step {HALF} with other settings than before:") :]
    rows = {tuple(line.split()) for line in table.splitlines()}
    assert rows >= {("setting", "before", "now"), ("training.steps", "6", "4"), ("training.batch_size", "4", "2")}
    assert rows >= {("parallel.tensor", "1", "2"), ("pipeline.slices", "4", "2")}
    facts = Manifest.read(here / "checkpoints" / "step-00000004").facts
    assert facts["num_samples"] == HALF * 4 + 2
    assert facts["mesh"] == {"pp": 1, "dp": 1, "tp": 2}


@pytest.mark.more
def test_ranks_that_share_slices_train_and_go_on_as_stages(text: Path, tmp_path: Path) -> None:
    first, here, given = tmp_path / "first", tmp_path / "here", (*WITHOUT_DROPOUT, *FOUR_STEPS)
    train(2, first, text, *given, "--pp=1", "--cp=2")
    assert Manifest.read(first / "checkpoints" / "step-00000002").facts["mesh"] == {"pp": 1, "dp": 1, "cp": 2, "tp": 1}
    assert all(line["bytes_sent"]["cp"] > 0 and line["bytes_sent"]["gradients"] > 0 for line in steps_of(first))
    ended = train(2, half_of(first, here, step=2), text, *given, RESUME)
    assert {tuple(line.split()) for line in ended.stdout.splitlines()} >= {("parallel.context", "2", "1")}
    found, wanted = steps_of(here), steps_of(first)[2:]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=1e-5)


@pytest.mark.more
def test_experts_on_several_ranks_go_on_on_others_and_are_exported_whole(text: Path, tmp_path: Path) -> None:
    """Two stages on two replicas with half of the experts each, then two replicas with all of them."""
    experts = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
    model = {"config": tiny_llama(model_type="qwen3_moe", num_key_value_heads=2, **experts)}
    given, first, alone = ("--optimizer.lr=3e-4", *FOUR_STEPS), tmp_path / "first", tmp_path / "alone"
    train(4, first, text, *given, "--pp=2", "--ep=2", model=model)
    assert Manifest.read(first / "checkpoints" / "step-00000002").facts["mesh"] == {"pp": 2, "dp": 2, "tp": 1, "ep": 2}
    assert all(line["bytes_sent"]["ep"] > 0 for line in steps_of(first))
    assert "pp 2 x dp 2 x tp 1 x ep 2" in write_run_page(first)[0].read_text()
    here = half_of(first, tmp_path / "here", step=2)
    train(2, here, text, *given, "--pp=1", "--dp=2", RESUME, model=model)
    train(1, alone, text, *given, "--pp=1", model=model)
    wanted = [line["loss"] for line in steps_of(alone)]
    for found in (steps_of(first), steps_of(here)):
        assert [line["loss"] for line in found] == pytest.approx(wanted[-len(found) :], rel=1e-5)
    tokens = torch.arange(1, 61).view(2, 30)
    models = [AutoModelForCausalLM.from_pretrained(each / "model") for each in (alone, first, here)]
    reference, *others = [each(input_ids=tokens).logits.detach() for each in models]
    for logits in others:
        assert torch.allclose(logits, reference, atol=1e-4)
    assert torch.allclose(Pipeline.from_pretrained(here / "model").logits(tokens), others[-1], atol=1e-5)


@pytest.mark.grid
def test_a_tied_matrix_in_parts_goes_on_in_parts_and_whole(text: Path, tmp_path: Path) -> None:
    """Checkpoints have the whole matrix, once."""
    first, given = tmp_path / "first", [*WITHOUT_DROPOUT, TIED]
    train(2, first, text, *given, *SPREAD)
    wanted = load_file(first / "model" / "model.safetensors")
    for number, (num_ranks, settings, tolerance) in enumerate(
        [(2, SPREAD, 0.0), (4, [*SPREAD, *REPLICAS], 1e-4), (2, ["--pipeline.vocabulary=whole"], 1e-4)]
    ):
        folder = half_of(first, tmp_path / f"again-{number}")
        assert f"resumed after step {HALF}" in train(num_ranks, folder, text, *given, *settings, RESUME).stdout
        found = load_file(folder / "model" / "model.safetensors")
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            torch.testing.assert_close(found[key], tensor, rtol=tolerance, atol=tolerance)


def test_a_damaged_checkpoint_is_named(run: RunFolder, text: Path, tmp_path: Path) -> None:
    here = tmp_path / "damaged"
    shutil.copytree(run.checkpoints, here / "checkpoints")
    file = here / "checkpoints" / LAST / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    refused = train(2, here, text, TIED, RESUME, code=2)
    assert "rank-00001.safetensors" in refused.stderr
    assert f"step {HALF}" in refused.stderr  # the one that is good
    assert len(refused.stderr.splitlines()) <= 6  # no traceback


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


def command(*words: str | Path) -> str:
    """What a command says that ends well."""
    ended = slipstream_command(*words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_model_of_a_checkpoint_is_the_one_that_the_run_exported(run: RunFolder, tmp_path: Path) -> None:
    said = command("export", run.path, "--output", tmp_path / "last")
    assert said.endswith(f"exported step {STEPS} of {run.path} to {tmp_path / 'last'}\n")
    check_same_model(tmp_path / "last", run.model)
    command("export", run.path, "--step", str(HALF), "--output", tmp_path / "new" / "half")
    check_same_model(tmp_path / "new" / "half", run.model_at(HALF))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "new"]  # and nothing unfinished


@pytest.mark.grid
@pytest.mark.parametrize(("num_ranks", "changes"), MESHES)
def test_whichever_mesh_wrote_it(num_ranks: int, changes: list[str], text: Path, tmp_path: Path) -> None:
    made = RunFolder(tmp_path / "run")
    train(num_ranks, made.path, text, *changes)
    command("export", made.checkpoints / LAST, "--output", tmp_path / "model")
    check_same_model(tmp_path / "model", made.model)


@pytest.mark.more
def test_of_a_run_that_began_with_a_model(run: RunFolder, text: Path, tmp_path: Path) -> None:
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
    further = RunFolder(tmp_path / "further")
    train(1, further.path, text, "--pp=1", model={"path": str(given)})
    shutil.rmtree(given)
    command("export", further.path, "--output", tmp_path / "model")
    check_same_model(tmp_path / "model", further.model)
    for folder in (tmp_path / "model", further.model, further.model_at(HALF)):
        assert sorted(GenerationConfig.from_pretrained(folder).eos_token_id) == [0, 5, 9]  # 0 is the tokenizer's
        assert (folder / "LICENSE").read_text() == "MIT"
        assert (folder / "special_tokens_map.json").exists()
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    assert not list(further.model.glob("*.npy"))


@pytest.mark.more
def test_what_belongs_to_a_model_but_is_not_trained_is_there(text: Path, tmp_path: Path) -> None:
    """The biases by which DeepSeek balances its experts, of a new model and of one that brought its own."""
    new, further = RunFolder(tmp_path / "new"), RunFolder(tmp_path / "further")
    train(1, new.path, text, "--pp=1", model={"config": tiny_llama(**DEEPSEEK)})
    weights = load_file(new.model / "model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    save_file(weights | {bias: torch.full((4,), 0.25)}, new.model / "model.safetensors", {"format": "pt"})
    train(1, further.path, text, "--pp=1", model={"path": str(new.model)})
    for each in (new, further):
        command("export", each.path, "--output", each.path.with_suffix(".model"))
    again = load_file(tmp_path / "new.model" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(again[name].equal(weights[name]) for name in weights)
    assert load_file(tmp_path / "further.model" / "model.safetensors")[bias].eq(0.25).all()
    check_same_model(tmp_path / "further.model", further.model)


def copy_of(run: RunFolder, folder: Path) -> RunFolder:
    """The run's inputs and checkpoints alone, in another place."""
    for path in (run.inputs, run.checkpoints):
        shutil.copytree(path, folder / path.name)
    return RunFolder(folder)


@pytest.fixture
def mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Types a command in this process; returns what it says on standard error, with exit code 2."""

    def run(*words: str | Path) -> str:
        monkeypatch.setattr("sys.argv", ["slipstream", *map(str, words)])
        with pytest.raises(SystemExit) as ending:
            main()
        assert ending.value.code == 2
        return capsys.readouterr().err

    return run


def test_nothing_is_written_of_a_damaged_checkpoint_or_of_another_model(
    run: RunFolder, tmp_path: Path, mistake: Callable[..., str]
) -> None:
    copy, output = copy_of(run, tmp_path / "copy"), tmp_path / "model"
    settings = json.loads((copy.inputs / "config.json").read_text())
    (copy.inputs / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 0.5}))
    said = mistake("export", copy.path, "--output", output)
    assert "isn't a checkpoint of the model in" in said
    assert "rms_norm_eps is 1e-06 in it and 0.5 here" in said
    (copy.inputs / "tokenizer_config.json").unlink()
    said = mistake("export", copy.path, "--output", output)
    assert "inputs/tokenizer_config.json: the folder inputs/ of a run has" in said
    file = sorted((copy.checkpoints / LAST).glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1])
    said = mistake("export", copy.path, "--output", output)
    assert f"the checkpoint of step {STEPS}" in said
    assert "truncated" in said
    assert not output.exists()


@pytest.mark.parametrize(
    ("place", "step", "message"),
    [
        ("{run}/absent", None, "there is no folder .*absent; give a run's output folder or a checkpoint: runs/a"),
        (
            "{run}/model",
            None,
            "there are no checkpoints in .*model: runs leave them in .*, unless",
        ),
        ("{run}/checkpoints/" + LAST, "2", "--step=2 chooses among the checkpoints of a run"),
        ("{here}/step-00000004", None, "isn't in the folder checkpoints/ of a run"),
        ("{run}", "best", "--step=best isn't a step; give that of a checkpoint, latest or last-good"),
        ("{run}", "2", rf"there is no checkpoint 2 in .*checkpoints; give one of its steps \({STEPS}, {HALF}\)"),
    ],
)
def test_what_is_not_a_checkpoint_is_refused(
    run: RunFolder, tmp_path: Path, place: str, step: str | None, message: str
) -> None:
    (tmp_path / "step-00000004").mkdir()
    with pytest.raises(SlipstreamError, match=message):
        choose_checkpoint(Path(place.format(run=run.path, here=tmp_path)), step).read(pytest.fail)


def test_no_folder_is_written_to_that_holds_something(run: RunFolder, tmp_path: Path) -> None:
    for inside in (run.model, run.path / "model-step-2", run.path):
        with pytest.raises(SlipstreamError, match=r"is in the run's own folder .*-model"):
            check_export_folder(inside, run)
    (tmp_path / "file").touch()
    with pytest.raises(SlipstreamError, match="is a file, which isn't replaced"):
        check_export_folder(tmp_path / "file", run)
    with pytest.raises(SlipstreamError, match="already holds file, and nothing is replaced; name a new folder"):
        check_export_folder(tmp_path, run)


def evaluated(*arguments: str | Path) -> tuple[int, int, float]:
    """The tokens of a text, those that are predicted, and the loss, as `slipstream eval` prints them."""
    said = command("eval", *arguments)
    found = re.search(r" ([\d,]+) tokens, ([\d,]+) predicted\nloss: ([\d.]+) nats per token, perplexity", said)
    assert found, said
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


@pytest.mark.parametrize(("of", "number"), [("model", 60), ("run", 5)], ids=["a model, cut", "a run, packed"])
def test_every_token_of_a_long_text_counts(run: RunFolder, tmp_path: Path, of: str, number: int) -> None:
    """It is cut at the longest sequence, and as in a validation the last one is filled up."""
    file = tmp_path / "text.txt"
    file.write_text("7 is 49 more than 7. " * number)
    length = len(AutoTokenizer.from_pretrained(run.model)(file.read_text())["input_ids"]) + 1  # with the end of text
    assert length % 64
    assert of == "run" or length > 3 * 64
    assert evaluated(run.model if of == "model" else run.path, file)[:2] == (length, length - -(-length // 64))


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
    # The text alone, also where a checkpoint has to be read before.
    for place in (run.path, run.checkpoints / LAST):
        ended = slipstream_command("generate", place, "7 is", "--max-new-tokens=9")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout == tokenizer.decode(likeliest[0], skip_special_tokens=True) + "\n"
        assert place != run.path or ended.stderr == ""


@pytest.mark.more
def test_code_that_comes_with_a_model_runs_only_where_it_is_trusted(text: Path, tmp_path: Path) -> None:
    source, made, output = tmp_path / "source", tmp_path / "made", tmp_path / "model"
    source.mkdir()
    names = {"AutoConfig": "configuration_spiral.SpiralConfig"}
    names["AutoModelForCausalLM"] = "modeling_spiral.SpiralForCausalLM"
    (source / "config.json").write_text(json.dumps(LLAMA | {"model_type": "spiral", "auto_map": names}))
    (source / "configuration_spiral.py").write_text(CONFIGURATION)
    (source / "modeling_spiral.py").write_text(MODELING)
    model = {"path": str(source), "init": "random", "trust_remote_code": True}
    train(1, made, text, "--pp=1", "--data.vocab_size=300", model=model)
    for words in (["export", made, "--output", output], ["generate", made, "7 is", "--max-new-tokens=9"]):
        refused = slipstream_command(*words)
        assert refused.returncode == 2
        assert "--trust-remote-code" in refused.stderr
        command(*words, "--trust-remote-code")
    assert (output / "modeling_spiral.py").is_file()


@pytest.mark.more
def test_the_seed_decides_what_is_drawn(run: RunFolder) -> None:
    drawn = ["generate", run.path, "7 is", "--temperature=1.5", "--max-new-tokens=20"]
    texts = [command(*drawn, f"--seed={seed}") for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "{run}", "{here}/empty.txt"], "empty.txt is empty; give a file with text"),
        (["eval", "{run}", "{here}/absent"], "there is no file "),
        (["eval", "{run}", "{here}/rows.jsonl"], "--column of `slipstream eval`, from: words"),
        (["eval", "{run}", "{here}/text.txt", "--seq-len=65"], "--seq-len=65 is more than"),
        (["generate", "{run}", ""], "the prompt '' has no tokens"),
        (["generate", "{run}", "7 is"], "and --max-new-tokens="),
    ],
)
def test_a_mistake_says_what_to_give(
    run: RunFolder, tmp_path: Path, mistake: Callable[..., str], words: list[str], message: str
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "text.txt").write_text("7 is 49 more than 7.")
    (tmp_path / "rows.jsonl").write_text('{"words": "7 is 49 more than 7."}')
    assert message in mistake(*(word.format(run=run.path, here=tmp_path) for word in words))


def test_a_finished_run_is_never_trained_again_unasked(text: Path, tmp_path: Path) -> None:
    """Where nothing is said about checkpoints, and where there are to be none."""
    settings = tiny_training(1, 0) | {"checkpoint": {}}
    settings["data"] |= {"files": [str(text)]}
    said, again = tmp_path / "said", ("--pp=1", RESUME)
    ended = run_training(1, said, settings, *again)
    assert "checkpoint.resume=latest: there is no checkpoint, so step 1 is the first" in ended.stdout
    assert CheckpointFolder(said / "checkpoints").steps() == [1]
    (weights,) = weights_of(said)
    assert "nothing is left to do" in run_training(1, said, settings, *again, "--training.seed=0").stdout
    assert weights_of(said) == [weights]

    none = tmp_path / "none"
    ended = run_training(1, none, settings, "--pp=1", "--checkpoint.every=0")
    assert ended.stdout.rstrip().endswith("there is no checkpoint of the last step: this run can't be resumed")
    (weights,) = weights_of(none)
    refused = run_training(1, none, settings, *again, "--optimizer.lr=0.5", code=2)
    assert "already holds model, and no checkpoint to go on from; choose another folder" in refused.stderr
    assert weights_of(none) == [weights]
