"""A run on conversations has the losses and gradients of transformers, and a stream of them goes on."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.pipeline import Pipeline
from slipstream.train.config import dump_config, load_config
from slipstream.train.data import TokenisedText, load_texts, sequences_of
from slipstream.train.evaluation import EvaluationRequest, TextLoss, evaluate_model
from slipstream.train.export import opened_model
from slipstream.train.run_context import RunContext
from slipstream.train.run_folder import TolerantWrites
from slipstream.train.validation import Validator
from support.architectures import BOUND, gradient_error, gradients
from support.forked import launch
from support.parameters import first_of
from support.paths import WORKERS
from support.pipelines import make_pipe
from support.ragged_batches import MODELS, one_by_one
from support.tiny_training import exported_loss, half_of, losses_of, metrics_of, run_training, steps_of, tiny_llama

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS: dict[str, Any] = {
    "model": {"config": tiny_llama(max_position_embeddings=128, initializer_range=0.1)},
    "pipeline": {"num_ranks": 2, "slices": 3, "num_microbatches": 2, "schedule": "1f1b"},
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
    return run_training(2, output, {**SETTINGS, "data": data}, *more).stdout


@pytest.fixture(scope="module", params=first_of(["fixed", "none"], 1, "grid"))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, files: Path) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("finished") / "run"
    said = train(output, files, f"--data.packing={request.param}")
    assert "messages: 40 samples, of which the assistant's turns count" in said
    assert "prompt-completion: 90 samples, of which the completion counts" in said
    assert "<assistant>[[it is 0 <|endoftext|>]]" in said
    return output, request.param


def test_the_validation_loss_is_that_of_transformers(finished: tuple[Path, str]) -> None:
    """Of the whole conversations of the file, with the labels that transformers takes."""
    output, packing = finished
    (measured,) = [line["validation_loss"] for line in metrics_of(output) if "validation_loss" in line]
    sequences = sequences_of(load_texts(output / "inputs", "validation"), packing, 96, None)
    assert sequences.texts[0].num_documents == 20
    loss = exported_loss(output, sequences.batch(0, sequences.num_sequences))
    assert measured == pytest.approx(loss, rel=1e-4)
    losses = losses_of(output)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("is_named", [True, False], ids=["of the file", "of what the run held out"])
def test_an_evaluation_finds_the_validation_loss(finished: tuple[Path, str], files: Path, is_named: bool) -> None:
    output, _ = finished
    (measured,) = [line["validation_loss"] for line in metrics_of(output) if "validation_loss" in line]
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
def test_a_stream_goes_on_on_another_mesh(finished: tuple[Path, str], files: Path, tmp_path: Path) -> None:
    """Each step has the samples that it would have had without the interruption: of one stream, and of two."""
    run, packing = finished
    sources = [{"dataset": f"{files}/chat.jsonl", "weight": 2}, {"files": [f"{files}/pairs.jsonl"], "weight": 1}]
    read = {"dataset": f"{files}/chat.jsonl"} if packing == "fixed" else {"sources": sources}
    data = {**read, "tokenizer": str(run / "inputs"), "streaming": True, "shuffle_rows": 9}
    settings = {**SETTINGS, "data": {**data, "packing": packing}}
    settings["training"] = {**SETTINGS["training"], "eval_every": 0}

    def streamed(output: Path, *more: str) -> list[dict[str, Any]]:
        assert "stream: the first 9 rows" in run_training(2, output, settings, *more).stdout
        return steps_of(output)

    wanted = streamed(tmp_path / "whole")
    output = half_of(tmp_path / "whole", tmp_path / "half")
    found = streamed(output, "--checkpoint.resume=latest", "--pp=1", "--dp=2")
    assert [step["step"] for step in found] == [4, 5, 6]
    for ours, theirs in zip(found, wanted[3:], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


LENGTH = 24


def conversations() -> TokenisedText:
    """Samples of 4 to 24 tokens, of which few or all count, in the middle or at the end."""
    random = np.random.default_rng(0)
    tokens = [random.integers(1, 61, length).astype(np.int32) for length in (24, 4, 9, 15, 7, 11, 20, 6)]
    counts = [np.zeros(len(each), dtype=bool) for each in tokens]
    for number, each in enumerate(counts):
        each[-2 - number :] = True
        each[len(each) // 2] = number % 2 == 0
    labels = [np.where(each, ids, -100).astype(np.int32) for each, ids in zip(counts, tokens, strict=True)]
    return TokenisedText.join(tokens, labels)


@pytest.fixture(scope="module", params=["llama, tied", "gpt2"])
def expected(request: pytest.FixtureRequest) -> tuple[str, torch.Tensor, dict[str, torch.Tensor]]:
    text = conversations()
    both = [(text.document(n), text.labels_of(n)) for n in range(text.num_documents)]
    ids, labels = ([torch.from_numpy(each.astype(np.int64)) for each in column] for column in zip(*both, strict=True))
    return request.param, *one_by_one(request.param, ids, labels)


@pytest.mark.parametrize(
    "order",
    first_of(
        [
            {"schedule": "zb-v", "stages_per_rank": 2},
            {"schedule": "1f1b"},
            {"schedule": "zb-h1"},
            {"schedule": "interleaved-1f1b", "stages_per_rank": 2},
        ]
    ),
    ids=lambda order: order["schedule"],
)
@pytest.mark.parametrize("packing", ["fixed", "none"])
def test_gradients_are_those_of_the_plain_loss(
    expected: tuple[str, torch.Tensor, dict[str, torch.Tensor]], order: dict[str, Any], packing: str
) -> None:
    name, loss, grads = expected
    sequences = sequences_of([conversations()], packing, LENGTH, seed=0)
    batch = sequences.batch(0, sequences.num_sequences)
    slices = [11, 1, 7, 5] if packing == "fixed" else 4
    pipe = make_pipe(copy.deepcopy(MODELS[name]), slices=slices, num_microbatches=2, num_ranks=2, **order)
    found = pipe.step(batch.input_ids, batch.labels, document_ids=batch.document_ids)
    assert abs(found - loss) < BOUND
    assert gradient_error(grads, gradients(pipe)) < BOUND
    measured = pipe.evaluate(batch.input_ids, batch.labels, document_ids=batch.document_ids)
    assert float(measured) == pytest.approx(float(loss), rel=1e-12)


@pytest.mark.parametrize(
    ("kinds", "meshes"),
    [
        pytest.param(["fixed", "none", "pairs"], ["1,2,1,1", "1,1,2,1"], id="dp, tp"),
        pytest.param(["pairs"], ["1,1,1,2"], id="pairs, cp", marks=pytest.mark.more),
        # Four replicas have one or two of six rows.
        pytest.param(
            ["fixed", "none"],
            ["2,2,1,1", "2,1,2,1", "1,2,2,1", "1,4,1,1"],
            id="dp x pp, pp x tp, dp x tp, dp",
            marks=pytest.mark.grid,
        ),
    ],
)
def test_processes_divide_by_what_counts_in_all_of_them(kinds: list[str], meshes: list[str]) -> None:
    """Replicas, in which unequally many tokens count; parts of layers, of the vocabulary and of slices; packed and
    ragged, and pairs of answers by the formula of DPO."""
    num_processes = prod(map(int, meshes[0].split(",")))
    cases = [f"{kind}:{mesh}" for mesh in meshes for kind in kinds]
    ended = launch(num_processes, WORKERS / "training" / "sample_meshes.py", *cases)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = ended.stdout.splitlines()
    assert len(lines) == len(cases) * num_processes
    assert max(float(line) for line in lines) < BOUND
