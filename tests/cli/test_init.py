"""`slipstream init` writes a configuration that trains as it is, with comments of which each names a setting."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner, Result

from slipstream.cli import app
from slipstream.cost import SHIPPED, load_cluster
from slipstream.errors import SlipstreamError
from slipstream.extras.first_config.choices import choose_length, choose_pipeline, dtype_here, this_machine
from slipstream.extras.first_config.data import DataSizes, choose_data
from slipstream.launch import Progress
from slipstream.train.config import load_config
from slipstream.train.config.config_values import parse_config
from slipstream.train.config.overrides import SMALLEST
from slipstream.train.data.tokenised_text import train_tokenizer
from support.forked import COMMAND, launch
from support.tiny_training import metrics_of

SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", **SHAPE, "vocab_size": 300, "max_position_embeddings": 64}
TALK = {"messages": [{"role": "user", "content": "shout owl"}, {"role": "assistant", "content": "OWL!"}]}
TEMPLATE = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}<|endoftext|>\n{% endfor %}"
_TIP = re.compile(r"^(\s*)# ?(\s*[a-z_]+:(?: .*)?)$")


def init(*arguments: str | Path) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


def written(*arguments: str | Path) -> str:
    result = init(*arguments)
    assert result.exit_code == 0, result.exception
    return Path("config.yaml").read_text()


@dataclass(frozen=True)
class Ran:
    """A configuration that was written, and the run that it was given to."""

    said: str
    config: Path
    run: CompletedProcess[str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder, with text, conversations and models."""
    place = tmp_path_factory.mktemp("init")
    (place / "book.txt").write_text("some words to learn from. " * 120)
    (place / "talks.jsonl").write_text(f"{json.dumps(TALK)}\n" * 100)
    (place / "shape.json").write_text(json.dumps(LLAMA))
    AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA)).save_pretrained(place / "model")
    tokenizer = train_tokenizer(["shout owl"], 290, Progress(None))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place / "model")
    before = Path.cwd()
    os.chdir(place)
    yield place
    os.chdir(before)


@pytest.fixture(scope="module")
def ran(place: Path) -> Ran:
    """Text and a model without weights, trained by as many processes as were planned, started as torchrun does."""
    result = init("shape.json", "book.txt", "--output=text.yaml", "--training.steps=12")
    assert result.exit_code == 0, result.exception
    num_ranks = load_config(Path("text.yaml")).num_processes
    return Ran(result.stdout, place / "text.yaml", launch(num_ranks, COMMAND, "train", "text.yaml", "--quiet"))


def test_what_is_written_trains_as_it_is(ran: Ran, place: Path) -> None:
    assert ran.run.returncode == 0, ran.run.stderr
    assert "wrote text.yaml; to train: slipstream train text.yaml" in ran.said
    assert "text: 1 document" in ran.said
    AutoModelForCausalLM.from_pretrained(place / "runs" / "book" / "model")
    AutoTokenizer.from_pretrained(place / "runs" / "book" / "model")
    steps = metrics_of(place / "runs" / "book")
    losses = [line["loss"] for line in steps if "loss" in line]
    assert len(losses) == load_config(ran.config).training.steps
    assert losses[-1] < losses[0]


def test_a_quiet_run_says_its_result_alone(ran: Ran) -> None:
    """On all ranks: what the command says, what rank 0 says, and nothing of how they got there."""
    lines = ran.run.stdout.splitlines()
    steps = load_config(ran.config).training.steps
    assert lines[0].startswith(f"step {steps}/{steps}: loss ")
    assert lines[1].startswith("best validation loss: ")
    assert lines[2:] == ["exported to runs/book/model"]
    assert ran.run.stderr == ""


def test_nothing_is_replaced_unasked(ran: Ran) -> None:
    result = init("shape.json", "book.txt", "--output=text.yaml")
    assert isinstance(result.exception, SlipstreamError)
    assert "--output=text.yaml exists; choose another file, or give --overwrite to replace it" in str(result.exception)


def test_every_comment_that_looks_like_a_setting_is_one(place: Path) -> None:
    text = written("model", "talks.jsonl", "--pipeline.num_ranks=2")
    lines, config = text.splitlines(), Path("tried.yaml")
    assert "data:\n  dataset: talks.jsonl\n" in text
    assert load_config(Path("config.yaml")).model.pretrained
    tips = [number for number, line in enumerate(lines) if _TIP.match(line)]
    assert len(tips) > 15
    names = set()
    for number in tips:
        is_whole = not lines[number].startswith("  ")  # of a section that isn't used
        tried = [_TIP.sub(r"\1\2", line) if at == number or is_whole else line for at, line in enumerate(lines)]
        if is_whole:
            block = _block(lines, number)
            tried = [_TIP.sub(r"\1\2", line) if at in block else line for at, line in enumerate(lines)]
        config.write_text("\n".join(tried))
        load_config(config)
        assert yaml.safe_load(config.read_text()) != yaml.safe_load(text)
        names.add(_TIP.sub(r"\2", lines[number]).strip().partition(":")[0])
    assert {"lora", "r", "memory", "recompute", "patience", "chat_template", "prompt"} <= names


def _block(lines: list[str], number: int) -> range:
    """The lines of the section, all of them comments, in which a line is."""
    first, last = number, number
    while lines[first]:
        first -= 1
    while last < len(lines) and lines[last]:
        last += 1
    return range(first + 1, last)


def test_what_is_given_is_taken(place: Path) -> None:
    given = [
        "--training.steps=7",
        "--data.loss=all",
        "--data.validation_fraction=0.1",
        "--pipeline.num_ranks=1",
        "--pipeline.slices=[40,24]",
        "--runtime.self_check=false",
    ]
    config = yaml.safe_load(written("model", "talks.jsonl", "--overwrite", *given))
    assert load_config(Path("config.yaml")).data.loss == "all"  # which is written once
    assert config["training"]["steps"] == 7
    assert config["pipeline"] == {"num_ranks": 1, "slices": [40, 24]}
    assert config["runtime"] == {"self_check": False}


def test_epochs_take_the_place_of_steps(place: Path) -> None:
    config = yaml.safe_load(written("model", "talks.jsonl", "--overwrite", "--training.epochs=2"))
    assert config["training"]["epochs"] == 2
    assert "steps" not in config["training"]


def test_pairs_train_an_adapter_where_the_weights_leave_no_room(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = this_machine()
    small = replace(machine, device=replace(machine.device, memory=1000.0))
    monkeypatch.setattr("slipstream.extras.first_config.written_config.this_machine", lambda: small)
    pair = {"prompt": "owl: ", "chosen": "owl", "rejected": "OWL!"}
    Path("pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 100)
    text = written("model", "pairs.jsonl", "--overwrite", "--pipeline.num_ranks=2")
    config = load_config(Path("config.yaml"))
    assert config.lora is not None
    assert config.preference is not None
    assert (config.data.packing, config.training.seq_len, config.training.batch_size) == ("none", 64, 4)
    assert config.optimizer.lr == 5e-6
    assert "as all weights with their optimizer don't fit this machine" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model", "gone.jsonl", "--output=x.yaml"], "there is no file gone.jsonl"),
        (["model", "talks.jsonl", "--output=no/x.yaml"], "create it first"),
        (["model", "talks.jsonl", "--output=x.yaml", "--data=books"], "data='books'"),
        (["model", "talks.jsonl", "--output=x.yaml", "--training.seq_len=128"], "at most 64"),
        (["model", "talks.jsonl", "--output=x.yaml", "--training.stpes=1"], "did you mean 'training.steps'?"),
        (["modle", "talks.jsonl", "--output=x.yaml"], "did you mean 'model'?"),
    ],
)
def test_a_mistake_is_found_before_a_file_is_written(place: Path, words: list[str], said: str) -> None:
    result = init(*words)
    assert isinstance(result.exception, SlipstreamError)
    assert said in str(result.exception)
    assert not Path("x.yaml").exists()


@pytest.mark.parametrize(
    ("rows", "settings", "are_pairs"),
    [
        ([{"text": "a"}], {}, False),
        ([TALK], {}, False),
        ([{"prompt": "a", "completion": "b"}], {}, False),
        ([{"prompt": "a", "completion": "b", "text": "a b"}], {"form": "prompt-completion"}, False),
        ([{"body": "a", "stars": 3}], {"text_column": "body"}, False),
        ([{"body": "a", "tags": ["x"], "from": {"site": "y"}}], {"text_column": "body"}, False),
        ([{"turns": TALK["messages"], "source": "x"}], {"messages_column": "turns"}, False),
        ([{"conversations": [{"from": "human", "value": "hello"}]}], {}, False),
        ([{"talk": [{"from": "human", "value": "hello"}]}], {"messages_column": "talk"}, False),
        ([{"instruction": "a", "input": "", "output": "b", "text": "ab"}], {"form": "question-answer"}, False),
        ([{"question": "a", "answer": "b"}], {}, False),
        ([{"input_ids": [1, 2, 3]}], {}, False),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], {}, True),
    ],
)
def test_what_rows_are_is_found(
    tmp_path: Path, rows: list[dict[str, object]], settings: dict[str, str], are_pairs: bool
) -> None:
    table = tmp_path / "table.jsonl"
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = choose_data(str(table), {}, print)
    assert found.settings == {"dataset": str(table), **settings}
    assert found.are_pairs == are_pairs


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tags": ["x"]}, "no column 'text'; choose data.text_column.*from: tags"),
        ({"vector": [0.5, 1.0], "meta": {"site": "y"}}, "no column 'text'.*from: vector, meta"),
    ],
)
def test_rows_without_text(tmp_path: Path, row: dict[str, object], said: str) -> None:
    table = tmp_path / "table.jsonl"
    table.write_text(json.dumps(row) + "\n")
    with pytest.raises(SlipstreamError, match=said):
        choose_data(str(table), {}, print)


@pytest.mark.parametrize(
    ("columns", "are_pairs"), [("prompt,chosen,rejected", True), ("prompt,completion,note", False)]
)
def test_a_csv_is_a_table_too(tmp_path: Path, columns: str, are_pairs: bool) -> None:
    table = tmp_path / "table.csv"
    table.write_text(f"{columns}\na,1,2\n")
    found = choose_data(str(table), {}, print)
    assert (found.settings, found.are_pairs) == ({"files": [str(table)]}, are_pairs)


def test_what_a_folder_has_most_of_is_read(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "README.md", ".git/x.txt", ".git/y.txt", ".git/z.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert choose_data(str(tmp_path), {}, print).settings == {"files": [str(tmp_path)], "suffixes": [".py"]}
    (tmp_path / "a.py").unlink()
    (tmp_path / "b.py").unlink()
    assert choose_data(str(tmp_path), {}, print).settings == {"files": [str(tmp_path)]}


def test_sequences_have_room_for_what_the_data_has_and_the_model_takes() -> None:
    books = DataSizes(np.full(100, 3000), 100, is_text=True, largest=0)
    assert choose_length(books, None, is_packed=True) == 4096
    assert choose_length(books, 2048, is_packed=True) == 2048
    short = DataSizes(np.array([900]), 1, is_text=True, largest=0)
    assert choose_length(short, None, is_packed=True) == 64  # of which there are more than a dozen
    talks = DataSizes(np.array([100, 700]), 2, is_text=False, largest=0)
    assert choose_length(talks, None, is_packed=True) == 704
    assert choose_length(talks, 512, is_packed=True) == 512
    pairs = DataSizes(np.array([10, 30]), 2, is_text=False, largest=0)
    assert choose_length(pairs, None, is_packed=False) == 64


BILLION = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32_000,
    max_position_embeddings=16_384,
)


_ALWAYS_TRIED = ("h100-dgx", "gb200-nvl72")


@pytest.mark.parametrize(
    ("cluster", "is_packed"),
    [
        *(
            (name, True) if name in _ALWAYS_TRIED else pytest.param(name, True, marks=pytest.mark.more)
            for name in SHIPPED
        ),
        ("a6000-pcie", False),
    ],
)
def test_as_many_processes_are_written_as_are_planned_for(cluster: str, is_packed: bool) -> None:
    machine = replace(load_cluster(cluster), num_nodes=1)
    numbers = {"seq_len": 16_384, "global_batch": 2}
    dtype = "bfloat16" if "bfloat16" in machine.device.flops else "float16"
    choice = choose_pipeline(BILLION, machine, dtype, is_packed, numbers)
    settings = {name: dict(values) for name, values in choice.settings.items()}
    training = {"seq_len": 16_384, "batch_size": 2, "output": "x", "steps": 1}
    config = parse_config(
        SMALLEST | {"model": {"path": "x"}, "data": {"corpus": "python-stdlib"}, "training": training} | settings
    )
    assert config.num_processes == machine.num_devices
    assert ("slices" in settings["pipeline"]) == is_packed


def test_the_cores_here_get_as_many_processes_as_are_planned_for(ran: Ran) -> None:
    number = re.search(r"planned for (\d+) x CPU core", ran.config.read_text())
    assert number
    assert load_config(ran.config).num_processes == int(number[1])


def test_documents_of_which_no_share_is_enough_are_all_trained_on(place: Path, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "long.txt").write_text("shout owl " * 600)
    (tmp_path / "two" / "short.txt").write_text("shout owl")
    for more, held_out, said in (
        ([], 0.0, "no validations: of 2 documents no share is enough for one; hold a file out with --data.validation="),
        (["--training.eval_every=5"], 0.05, ""),
        ([f"--data.validation={tmp_path / 'two' / 'long.txt'}"], 0.05, ""),
    ):
        result = init("model", tmp_path / "two", "--output=two.yaml", *more)
        assert result.exit_code == 0, result.exception
        assert ("no validations" in result.output) == bool(said)
        assert said in " ".join(result.output.split())
        settings = yaml.safe_load(Path("two.yaml").read_text())
        assert settings["data"]["validation_fraction"] == held_out
        assert ("eval_every" in settings["training"]) != bool(said)
        Path("two.yaml").unlink()


def test_a_gpu_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which there is none here: what torch says of four is put in its place."""
    facts = {"is_available": True, "device_count": 4, "is_bf16_supported": True}
    for name, value in facts.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=85e9))
    found, described = this_machine(), load_cluster("h100-dgx")
    assert (found.num_devices, found.device.memory, dtype_here()) == (4, 85e9, "bfloat16")
    assert (found.device.flops, found.inside) == (described.device.flops, described.inside)


@pytest.mark.parametrize("num_devices", [1, 8])
def test_one_rank_has_a_number_of_slices_alone_that_any_length_takes(num_devices: int) -> None:
    """Eight GPUs may be eight replicas of one rank."""
    machine = replace(load_cluster("h100-dgx"), num_nodes=1, devices_per_node=num_devices)
    numbers = {"seq_len": 16_384, "global_batch": 8}
    model = LlamaConfig(**LLAMA | {"max_position_embeddings": 32_768})
    choice = choose_pipeline(model, machine, "bfloat16", True, numbers)
    pipeline = choice.of("pipeline")
    assert pipeline["num_ranks"] == 1
    assert isinstance(pipeline["slices"], int)
    assert {*pipeline} == {"num_ranks", "num_microbatches", "slices"}
    assert "Without slices, a sequence of one rank gets 8, or as many as a step needs to fit" in choice.reason
