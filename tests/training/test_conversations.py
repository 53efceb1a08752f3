"""A run on conversations of two sources: its validation loss is that of transformers, and it is resumed to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.pipeline import Pipeline
from slipstream.train.config import dump_config, load_config
from slipstream.train.data import TokenBatch, load_texts, sequences_of
from slipstream.train.evaluation import EvaluationRequest, TextLoss, evaluate_model
from slipstream.train.export import opened_model
from slipstream.train.run_context import RunContext
from slipstream.train.run_folder import TolerantWrites
from slipstream.train.validation import Validator
from support.forked import COMMAND, launch
from support.parameters import first_of
from support.tiny_training import metrics_of, tiny_llama

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS: dict[str, Any] = {
    "model": {"config": tiny_llama(max_position_embeddings=128, initializer_range=0.1)},
    "pipeline": {"num_ranks": 2, "slices": 3, "num_microbatches": 2},
    "runtime": {"self_check": False},
    "optimizer": {"lr": 0.01},
    "training": {"seq_len": 96, "batch_size": 4, "steps": 6, "eval_every": 6},
    "checkpoint": {"every": 3},
}


def turns(number: int) -> list[dict[str, str]]:
    question = {"role": "user", "content": f"say {number}"}
    return [question, {"role": "assistant", "content": f"it is {number} " * (1 + number % 4)}] * (1 + number % 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": turns(n)}) + "\n" for n in range(40)))
    (folder / "held-out.jsonl").write_text("".join(json.dumps({"messages": turns(n)}) + "\n" for n in range(40, 60)))
    pairs = [{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(90)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def train(output: Path, files: Path, *more: str) -> str:
    sources = [{"dataset": f"{files}/chat.jsonl", "weight": 2}, {"dataset": f"{files}/pairs.jsonl", "weight": 1}]
    data = {"sources": sources, "chat_template": f"{files}/chat.jinja", "validation": f"{files}/held-out.jsonl"}
    config = output.with_suffix(".yaml")
    config.write_text(yaml.safe_dump({**SETTINGS, "data": data}))
    ended = launch(2, COMMAND, "train", str(config), f"--training.output={output}", *more)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module", params=first_of(["fixed", "none"]))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, files: Path) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("finished") / "run"
    said = train(output, files, f"--data.packing={request.param}")
    assert "messages: 40 samples, of which the assistant's turns count" in said
    assert "prompt-completion: 90 samples, of which the completion counts" in said
    assert "<assistant>[[it is 0 <|endoftext|>]]" in said
    return output, request.param


def records_of(output: Path) -> list[dict[str, Any]]:
    return metrics_of(output)


def alone(batch: TokenBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels of each conversation."""
    if batch.document_ids is None:
        yield from zip(batch.input_ids, batch.labels, strict=True)
        return
    for row, labels, documents in zip(batch.input_ids, batch.labels, batch.document_ids, strict=True):
        for document in range(int(documents.max()) + 1):
            yield row[documents == document], labels[documents == document]


def test_the_validation_loss_is_that_of_transformers(finished: tuple[Path, str]) -> None:
    """Of the whole conversations of the file, with the labels that transformers takes."""
    output, packing = finished
    (measured,) = [line["validation_loss"] for line in records_of(output) if "validation_loss" in line]
    sequences = sequences_of(load_texts(output / "inputs", "validation"), packing, 96, None)
    assert sequences.texts[0].num_documents == 20
    batch = sequences.batch(0, sequences.num_sequences)
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    total, count = 0.0, 0
    for ids, labels in alone(batch):
        with torch.no_grad():
            loss = model(input_ids=ids[None], labels=labels[None]).loss
        valid = int((labels[1:] != -100).sum())
        total, count = total + float(loss) * valid, count + valid
    assert count == batch.num_predicted
    assert measured == pytest.approx(total / count, rel=1e-4)
    losses = [line["loss"] for line in records_of(output) if "loss" in line]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("is_named", [True, False], ids=["of the file", "of what the run held out"])
def test_an_evaluation_finds_the_validation_loss(finished: tuple[Path, str], files: Path, is_named: bool) -> None:
    output, _ = finished
    (measured,) = [line["validation_loss"] for line in records_of(output) if "validation_loss" in line]
    request = EvaluationRequest(str(files / "held-out.jsonl") if is_named else None, seq_len=None, slice_len=40)
    with opened_model(str(output), False, Progress(None)) as opened:
        found = evaluate_model(opened, request, Progress(None))
        assert isinstance(found, TextLoss)
        assert found.loss == pytest.approx(measured, rel=1e-5)
        every = replace(request, settings=["--data.loss=all"])
        if is_named:
            all_tokens = evaluate_model(opened, every, Progress(None))
            assert isinstance(all_tokens, TextLoss)
            assert all_tokens.num_predicted > 1.5 * found.num_predicted
        else:
            with pytest.raises(SlipstreamError, match=r"--data.loss=all without FILE: what the run held out"):
                evaluate_model(opened, every, Progress(None))
            with pytest.raises(SlipstreamError, match=r"packing=fixed with preference|no pairs of answers"):
                evaluate_model(opened, replace(request, settings=["--preference.beta=1"]), Progress(None))


def test_an_evaluation_takes_the_batches_that_validations_take(finished: tuple[Path, str], tmp_path: Path) -> None:
    """Which `eval_batches` limits: the first and a middle one of four sequences, and not the rest."""
    output = tmp_path / "run"
    shutil.copytree(finished[0], output)
    changes = [f"--training.output={output}", "--training.eval_batches=2", "--training.batch_size=2"]
    config = load_config(output / "config.yaml", [*changes, "--pipeline.num_ranks=1"])
    (output / "config.yaml").write_text(dump_config(config))
    pipe = Pipeline.from_pretrained(str(output / "model"), slices=1)
    device, texts, writes = (
        torch.device("cpu"),
        load_texts(output / "inputs", "validation"),
        TolerantWrites(pytest.fail),
    )
    run = RunContext(config, config.folder, pipe.axes["dp"], device, Progress(None), writes)
    measured, _ = Validator(run, pipe, texts).validate(6)
    with opened_model(str(output), False, Progress(None)) as opened:
        found = evaluate_model(opened, EvaluationRequest(None, seq_len=None, slice_len=40), Progress(None))
    assert isinstance(found, TextLoss)
    assert found.loss == pytest.approx(measured.validation_loss, rel=1e-5)
    assert found.num_tokens < sum(len(text.tokens) for text in texts)


@pytest.mark.more
def test_a_resumed_run_is_the_same_to_the_bit(finished: tuple[Path, str], files: Path, tmp_path: Path) -> None:
    whole, packing = finished
    output = tmp_path / "half"
    (output / "checkpoints").mkdir(parents=True)
    shutil.copytree(whole / "checkpoints" / "step-00000003", output / "checkpoints" / "step-00000003")
    train(output, files, f"--data.packing={packing}", "--checkpoint.resume=latest")
    wanted, found = ([line for line in records_of(each) if "loss" in line] for each in (whole, output))
    for name in ("step", "loss", "grad_norm", "tokens"):
        assert [step[name] for step in found] == [step[name] for step in wanted[3:]]


@pytest.mark.more
def test_a_stream_goes_on_on_another_mesh(finished: tuple[Path, str], files: Path, tmp_path: Path) -> None:
    """Each step has the samples that it would have had without the interruption: of one stream, and of two."""
    run, packing = finished
    sources = [{"dataset": f"{files}/chat.jsonl", "weight": 2}, {"files": [f"{files}/pairs.jsonl"], "weight": 1}]
    read = {"dataset": f"{files}/chat.jsonl"} if packing == "fixed" else {"sources": sources}
    data = {**read, "tokenizer": str(run / "inputs"), "streaming": True, "shuffle_rows": 9}
    settings = {**SETTINGS, "data": {**data, "packing": packing}}
    settings["training"] = {**SETTINGS["training"], "eval_every": 0}

    def streamed(output: Path, *more: str) -> list[dict[str, Any]]:
        config = output.with_suffix(".yaml")
        config.write_text(yaml.safe_dump(settings))
        ended = launch(2, COMMAND, "train", str(config), f"--training.output={output}", *more)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert "stream: the first 9 rows" in ended.stdout
        return [line for line in records_of(output) if "loss" in line]

    wanted = streamed(tmp_path / "whole")
    output = tmp_path / "half"
    (output / "checkpoints").mkdir(parents=True)
    step = Path("checkpoints", "step-00000003")
    shutil.copytree(tmp_path / "whole" / step, output / step)
    found = streamed(output, "--checkpoint.resume=latest", "--pp=1", "--dp=2")
    assert [step["step"] for step in found] == [4, 5, 6]
    for ours, theirs in zip(found, wanted[3:], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
