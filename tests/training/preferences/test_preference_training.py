"""A training on preferences from a file to an exported model: its reference, its figures, resumed and on replicas."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slipstream import Pipeline
from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.train.config import load_config
from slipstream.train.data import TokenisedText, load_texts
from slipstream.train.evaluation import EvaluationRequest, PairLoss, evaluate_model
from slipstream.train.export import opened_model
from slipstream.train.preferences import preference_loss
from slipstream.train.preflight import preflight
from slipstream.train.reference import load_with_reference
from slipstream.train.run_context import RunContext
from support.parameters import first_of
from support.preferences import log_probabilities
from support.tiny_training import half_of, metrics_of, run_training, tiny_llama

BETA = 0.5
SETTINGS: dict[str, Any] = {
    "model": {"config": tiny_llama(initializer_range=0.1)},
    "data": {"validation_fraction": 0.2},
    "preference": {"beta": BETA},
    "pipeline": {"num_ranks": 2, "slices": 3, "num_microbatches": 2, "schedule": "1f1b"},
    "runtime": {"self_check": False},
    "optimizer": {"lr": 0.003},
    "training": {"seq_len": 64, "batch_size": 4, "steps": 6, "eval_every": 6},
    "checkpoint": {"every": 3},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers in small letters are preferred; a pair has equal answers."""
    rows = []
    for number in range(50):
        word = ("ant", "bee", "cow", "dog")[number % 4]
        chosen = " ".join([word] * (1 + number % 3)) + "."
        rejected = chosen if number == 17 else " ".join([word.upper()] * (1 + number % 5)) + "!"
        rows.append({"prompt": f"say {word} {number}: ", "chosen": chosen, "rejected": rejected})
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(output: Path, file: Path, *more: str, num_processes: int = 2) -> str:
    settings = {**SETTINGS, "data": {**SETTINGS["data"], "dataset": str(file)}}
    return run_training(num_processes, output, settings, *more).stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Path:
    output = tmp_path_factory.mktemp("finished") / "run"
    said = train(output, file)
    assert "left out 1 of 50 pairs: 1 with equal answers (first: row 18)" in said
    assert "computed the reference of 49 pairs, kept in" in said
    return output


def lines_of(output: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in metrics_of(output) if name in line]


def found_by(model: PreTrainedModel, text: TokenisedText) -> NDArray[np.float64]:
    """The log-probability of every answer, each alone."""
    found = []
    for document in range(text.num_documents):
        both = [text.document(document), text.labels_of(document)]
        with torch.no_grad():
            found.append(log_probabilities(model, *(torch.from_numpy(each.astype(np.int64))[None] for each in both)))
    return torch.cat(found).double().numpy()


def test_the_reference_is_the_model_before_the_training(finished: Path) -> None:
    torch.manual_seed(0)
    before = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(finished / "inputs"))
    kept = load_file(finished / "reference.safetensors")
    assert sorted(kept) == ["train-0", "validation-0"]
    for part in ("train", "validation"):
        (text,) = load_texts(finished / "inputs", part)
        np.testing.assert_allclose(kept[f"{part}-0"], found_by(before, text), rtol=1e-4)


def test_the_figures_are_those_of_the_exported_model(finished: Path) -> None:
    first, *_, last = lines_of(finished, "grad_norm")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards"]["margin"] == pytest.approx(0, abs=1e-5)
    assert last["loss"] < 0.6
    (measured,) = lines_of(finished, "validation_loss")
    (text,) = load_texts(finished / "inputs", "validation")
    after = found_by(AutoModelForCausalLM.from_pretrained(finished / "model"), text)
    kept = load_file(finished / "reference.safetensors")["validation-0"]
    assert text.num_documents // 2 % 4  # the last batch of pairs is filled up
    chosen, rejected = (BETA * (after - kept)).reshape(-1, 2).T
    margins = chosen - rejected
    assert measured["validation_loss"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), rel=1e-3)
    expected = {"chosen": chosen.mean(), "rejected": rejected.mean(), "margin": margins.mean()}
    assert measured["rewards"] == pytest.approx({**expected, "accuracy": (margins > 0).mean()}, rel=1e-3)
    assert "perplexity" not in measured


def test_an_evaluation_finds_the_figures_of_the_validation(finished: Path, file: Path, tmp_path: Path) -> None:
    (measured,) = lines_of(finished, "validation_loss")
    request = EvaluationRequest(None, seq_len=None, slice_len=10)
    with opened_model(str(finished), False, Progress(None)) as opened:
        found = evaluate_model(opened, request, Progress(None))
        with pytest.raises(SlipstreamError, match=r"random weights.* --reference=MODEL, or leave FILE out"):
            evaluate_model(opened, replace(request, file=str(file)), Progress(None))
    assert isinstance(found, PairLoss)
    assert found.loss == pytest.approx(measured["validation_loss"], rel=1e-5)
    assert found.rewards == pytest.approx(measured["rewards"], rel=1e-4)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:3]))
    settings = ["--preference.beta=0.5"]
    with opened_model(str(finished / "model"), False, Progress(None)) as opened:
        request = EvaluationRequest(str(rows), 64, 10, settings, reference=str(finished / "model"))
        alike = evaluate_model(opened, request, Progress(None))
    assert isinstance(alike, PairLoss)
    assert (alike.num_pairs, alike.loss) == (3, pytest.approx(math.log(2)))


@pytest.mark.more
@pytest.mark.parametrize("loss", first_of(["simpo", "orpo"], 1, "grid"))
def test_a_run_without_a_reference_is_evaluated(loss: str, file: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", file, f"--preference.loss={loss}")
    assert not (tmp_path / "run" / "reference.safetensors").exists()
    first, *_, last = lines_of(tmp_path / "run", "grad_norm")
    assert last["loss"] < first["loss"]
    (measured,) = lines_of(tmp_path / "run", "validation_loss")
    with opened_model(str(tmp_path / "run"), False, Progress(None)) as opened:
        found = evaluate_model(opened, EvaluationRequest(None, seq_len=None, slice_len=10), Progress(None))
    assert isinstance(found, PairLoss)
    assert found.loss == pytest.approx(measured["validation_loss"], rel=1e-5)
    assert found.rewards == pytest.approx(measured["rewards"], rel=1e-4)


def begun(whole: Path, output: Path, *parts: str) -> Path:
    """A folder with the checkpoint of step 3, and these parts of the run."""
    half_of(whole, output)
    for part in parts:
        shutil.copy(whole / part, output / part)
    return output


@pytest.mark.more
def test_a_resumed_run_is_the_same_to_the_bit(finished: Path, file: Path, tmp_path: Path) -> None:
    output = begun(finished, tmp_path / "half", "reference.safetensors")
    said = train(output, file, "--checkpoint.resume=latest")
    assert "computed the reference" not in said
    wanted, found = (lines_of(each, "grad_norm") for each in (finished, output))
    assert len(found) == 3
    for name in ("step", "loss", "grad_norm", "tokens", "rewards"):
        assert [step[name] for step in found] == [step[name] for step in wanted[3:]]
    kept = [(each / "reference.safetensors").read_bytes() for each in (finished, output)]
    assert kept[0] == kept[1]


def test_a_resumed_run_reads_the_reference(finished: Path) -> None:
    """Which the model would find otherwise by then."""
    config = load_config(finished / "config.yaml")
    assert config.preference is not None
    pipe = Pipeline.from_pretrained(finished / "model", num_ranks=1, loss_fn=preference_loss(config.preference))
    found = load_with_reference(RunContext.of(config, pipe.device, Progress(None)), pipe, resumes=True)
    kept = load_file(finished / "reference.safetensors")
    for part in ("train", "validation"):
        (text,) = found[part]
        assert np.array_equal(text.values, kept[f"{part}-0"])


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_a_run_without_a_reference_is_resumed_with_the_lengths_of_its_answers(
    loss: str, finished: Path, file: Path, tmp_path: Path
) -> None:
    resumed(begun(finished, tmp_path / "half"), file, f"preference.loss={loss}")
    config = load_config(finished / "config.yaml", [f"--preference.loss={loss}"])
    assert config.preference is not None
    pipe = Pipeline.from_pretrained(finished / "model", num_ranks=1, loss_fn=preference_loss(config.preference))
    run = RunContext.of(config, pipe.device, Progress(None))
    first, again = (load_with_reference(run, pipe, resumes=each) for each in (False, True))
    for part in ("train", "validation"):
        ((wanted,), (text,)) = first[part], again[part]
        assert np.array_equal(text.values, wanted.values)
        answers = text.values if loss == "simpo" else text.values[:, 1]
        assert [*answers] == [(text.labels_of(document)[1:] != -100).sum() for document in range(text.num_documents)]


@pytest.mark.more
def test_replicas_train_alike(finished: Path, file: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", file, "--pp=1", "--dp=2")
    kept = [load_file(each / "reference.safetensors") for each in (finished, tmp_path / "run")]
    for name in kept[0]:
        np.testing.assert_allclose(kept[0][name], kept[1][name], rtol=1e-5)
    for ours, theirs in zip(lines_of(tmp_path / "run", "grad_norm"), lines_of(finished, "grad_norm"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        if ours["step"] == 1:  # all rewards are 0, but for rounding, and which one is larger is chance
            del ours["rewards"]["accuracy"], theirs["rewards"]["accuracy"]
        assert ours["rewards"] == pytest.approx(theirs["rewards"], rel=1e-2, abs=1e-3)


@pytest.mark.more
def test_rated_answers_on_replicas_have_the_losses_of_one_pipeline(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"say {n}: ", "completion": ("yes " if n % 3 else "NO ") * (1 + n % 4), "label": bool(n % 3)}
        for n in range(60)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--preference.loss=kto", "--optimizer.lr=0.01", "--training.batch_size=6", "--training.steps=4"]
    meshes = {"pipeline": [], "replicas": ["--pp=1", "--dp=2", "--pipeline.num_microbatches=1"]}
    for name, mesh in meshes.items():
        train(tmp_path / name, file, *given, "--training.eval_every=4", *mesh)
    for name in ("loss", "validation_loss"):
        losses, others = ([line[name] for line in lines_of(tmp_path / mesh, name)] for mesh in meshes)
        assert others == pytest.approx(losses, rel=1e-3)
    first, *_, last = lines_of(tmp_path / "pipeline", "grad_norm")
    assert first["loss"] == pytest.approx(0.5, abs=1e-4)  # as all rewards are 0
    assert last["loss"] < 0.5
    assert last["rewards"]["margin"] > 0


@pytest.mark.grid
@pytest.mark.parametrize("precision", ["bf16", "float32", "bf16-weights"])
def test_with_a_plan_that_is_open(finished: Path, file: Path, tmp_path: Path, precision: str) -> None:
    """Schedule, slices and cut planned from measured costs: another plan of the same losses."""
    is_open = ["--pipeline.schedule=auto", "--pipeline.slices=auto", f"--training.precision={precision}"]
    said = train(tmp_path / "run", file, *is_open)
    assert "wrote the plan to" in said
    ours, theirs = ([each["loss"] for each in lines_of(run, "grad_norm")] for run in (tmp_path / "run", finished))
    if precision == "float32":
        assert ours == pytest.approx(theirs, rel=1e-3)
    else:  # whose rewards are rounded, however they are computed
        assert ours[0] == pytest.approx(math.log(2), abs=0.05)
        assert ours[-1] < ours[0] - 0.05


@pytest.mark.parametrize("is_on", [False, True])
def test_dropout_is_off_unless_it_is_asked_for(is_on: bool, file: Path, tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 300}
    settings = {**SETTINGS, "data": {**SETTINGS["data"], "dataset": str(file)}, "model": {"config": gpt2}}
    more = ["--training.steps=1", "--training.eval_every=0", f"--preference.dropout={str(is_on).lower()}"]
    said = " ".join(run_training(2, tmp_path / "run", settings, *more).stdout.split())
    (only,) = lines_of(tmp_path / "run", "grad_norm")
    assert (only["loss"] == pytest.approx(math.log(2), abs=1e-6)) != is_on
    assert ("attn_pdrop=0.1" in said) != is_on
    assert ("is off under preferences; --preference.dropout=true turns it on" in said) != is_on
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["attn_pdrop"] == 0.1


@pytest.mark.more
def test_an_adapter_begins_at_its_reference(finished: Path, file: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    output = tmp_path / "run"
    base = ["--model.config=null", f"--model.path={finished / 'model'}", "--lora={}", "--lora.export=adapter"]
    train(output, file, *base, "--pp=1", "--training.steps=2", num_processes=1)
    first, second = lines_of(output, "grad_norm")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert second["loss"] < first["loss"]
    assert (output / "adapter").exists()


def resumed(output: Path, file: Path, *more: str) -> None:
    config = output.with_suffix(".yaml")
    config.write_text(yaml.safe_dump({**SETTINGS, "data": {**SETTINGS["data"], "dataset": str(file)}}))
    overrides = [f"training.output={output}", "checkpoint.resume=latest", *more]
    preflight(load_config(config, overrides), Progress(None))


def test_a_run_without_its_reference_is_not_resumed(finished: Path, file: Path, tmp_path: Path) -> None:
    output = begun(finished, tmp_path / "half")
    with pytest.raises(SlipstreamError, match=r"there is no .*reference.safetensors.* put it back, or train from"):
        resumed(output, file)
    shutil.copy(finished / "reference.safetensors", output)
    resumed(output, file)
    whole = (output / "reference.safetensors").read_bytes()
    (output / "reference.safetensors").write_bytes(whole[:-8])
    with pytest.raises(SlipstreamError, match=r"reference.safetensors is damaged"):
        resumed(output, file)
    save_file(load_file(finished / "reference.safetensors"), output / "reference.safetensors", {"slipstream": "{}"})
    with pytest.raises(SlipstreamError, match="is of other weights and answers and held-out answers than the run has"):
        resumed(output, file)
