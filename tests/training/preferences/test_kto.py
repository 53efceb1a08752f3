"""KTO: answers that are wanted or not, and their reference point; loss and gradients are TRL's in float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from datasets import Dataset

from slipstream import Pipeline, Runtime
from slipstream.errors import SlipstreamError
from slipstream.train.config import PreferenceSection, SourceSection
from slipstream.train.config.run_config import parse_config
from slipstream.train.data import BatchSize, TokenisedText, sequences_of
from slipstream.train.data.open_source import OpenSource
from slipstream.train.data.samples import SampleReader, tokenise_samples
from slipstream.train.preferences import (
    log_probabilities,
    mean_rewards,
    preference_loss,
    reward_sums,
    with_reference_point,
)
from slipstream.train.training_step import Evaluator
from support.architectures import BOUND, gradient_error, gradients, no_rounding_inside
from support.forked import COMMAND, launch
from support.tiny_training import metrics_of, tiny_llama
from training.preferences.test_trl import SEQ_LEN, llama, no_rounding_in_trl, tokenizer

ROWS = [
    {"prompt": "say a", "completion": " a b c a a c b a c", "label": True},
    {"prompt": "say b b b", "completion": " b", "label": False},
    {"prompt": "say", "completion": " b a c c c b a b a b a c", "label": False},
    {"prompt": "say c", "completion": " c c c c", "label": True},
    {"prompt": "say a a", "completion": " a", "label": True},
]
SECTION = PreferenceSection(loss="kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)


def read(rows: Sequence[dict[str, Any]] = ROWS, say: Any = pytest.fail) -> TokenisedText:
    reader = SampleReader(SourceSection(dataset="rows"), "rated", "completion", tokenizer(), None)
    return tokenise_samples(rows, reader, "rows", SEQ_LEN, say)


def pipeline(model: Any, schedule: str = "1f1b") -> Pipeline:
    options = {"num_ranks": 2, "slices": 3, "num_microbatches": 2, "runtime": Runtime(self_check=False)}
    return Pipeline(copy.deepcopy(model), schedule=schedule, loss_fn=preference_loss(SECTION), **options)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    trl = pytest.importorskip("trl")
    arguments = trl.KTOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        beta=SECTION.beta,
        desirable_weight=SECTION.desirable_weight,
        undesirable_weight=SECTION.undesirable_weight,
        per_device_train_batch_size=len(ROWS),
        report_to="none",
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
    )
    data = {"train_dataset": Dataset.from_list(ROWS), "processing_class": tokenizer()}
    trainer = trl.KTOTrainer(llama(0), ref_model=llama(1), args=arguments, **data)
    inputs = trainer.data_collator([*trainer.train_dataset])
    with no_rounding_in_trl():
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()

    def tokens(prefix: str) -> list[list[int]]:
        both = zip(inputs[f"{prefix}input_ids"], inputs[f"{prefix}attention_mask"], strict=True)
        return [ids[mask == 1].tolist() for ids, mask in both]

    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    found = {"loss": loss.item(), "gradients": gradients(trainer.model), "metrics": metrics}
    return found | {"answers": tokens(""), "mismatched": tokens("KL_")}


def test_tokens_are_trls(theirs: dict[str, Any]) -> None:
    """The first row, which waits for the last one's answer, comes last."""
    text = read()
    tokens = [text.document(number).tolist() for number in range(text.num_documents)]
    order = [1, 2, 3, 4, 0]
    assert tokens[::2] == [theirs["answers"][row] for row in order]
    assert tokens[1::2] == [theirs["mismatched"][row] for row in order]
    assert text.ratings is not None
    assert text.ratings.tolist() == [ROWS[row]["label"] for row in order]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_is_trls(theirs: dict[str, Any], schedule: str) -> None:
    text, pipe = read(), pipeline(llama(0), schedule)
    assert text.ratings is not None
    with no_rounding_inside():
        (reference,) = log_probabilities(Evaluator(pipeline(llama(1)), None), [text], BatchSize(5), lambda _: None, 3)
        signs = np.repeat(np.where(text.ratings, 1.0, -1.0), 2)
        text = replace(text, values=np.stack([reference, signs], axis=1))
        batch = with_reference_point(Evaluator(pipe, None), sequences_of([text], "none", SEQ_LEN, 0).batch(0, 5))
        loss = pipe.step(batch.input_ids, batch.labels, sequence_values=batch.sequence_values)
    assert batch.sequence_values is not None
    assert float(batch.sequence_values[0, 2]) == pytest.approx(theirs["metrics"]["kl"], rel=BOUND)
    assert theirs["metrics"]["kl"] > 0.01  # else the reference point would be 0 for any order
    assert float(loss) == pytest.approx(theirs["loss"], rel=BOUND)
    assert gradient_error(theirs["gradients"], gradients(pipe)) < BOUND
    rewards = mean_rewards(reward_sums(pipe, batch.sequence_values, SECTION))
    for own, name in {"chosen": "chosen", "rejected": "rejected", "margin": "margins"}.items():
        assert rewards[own] == pytest.approx(theirs["metrics"][f"rewards/{name}"], rel=1e-6)


def test_pairs_are_rated_by_which_is_chosen() -> None:
    text = read(
        [{"prompt": "say a", "chosen": " a", "rejected": " b c"}, {"prompt": "say", "chosen": " c", "rejected": " a"}]
    )
    assert text.ratings is not None
    assert text.ratings.tolist() == [False, True, False, True]
    assert [len(text.document(number)) for number in (0, 2)] == [5, 3]  # their end of text included


def test_ratings_survive_the_disk_and_the_split(tmp_path: Path) -> None:
    text = read()
    text.save(tmp_path, "train")
    again = TokenisedText.load(tmp_path, "train")
    for part in again.split(0.4, seed=1):
        assert part.ratings is not None
        for number, is_wanted in enumerate(part.ratings):
            answer = part.document(2 * number).tolist()
            row = next(each for each in range(5) if text.document(2 * each).tolist() == answer)
            assert text.ratings is not None
            assert is_wanted == text.ratings[row]
            assert part.document(2 * number + 1).tolist() == text.document(2 * row + 1).tolist()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "say", "completion": " a", "label": 7}], "row 1: label must say whether the completion is wanted"),
        ([{"prompt": "say", "completion": " a", "label": None}], "left out 1 of 1 samples: 1 without content"),
    ],
)
def test_rows_without_a_rating_are_named(rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(SlipstreamError, match=words):
        read(rows)


def test_columns_that_say_no_rating_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    with pytest.raises(SlipstreamError, match="kto needs prompt, completion and label"):
        OpenSource.of(SourceSection(dataset=str(tmp_path / "rows.jsonl")), print, "rated")


def test_settings_of_another_loss_are_refused() -> None:
    given = {"model": {"config": tiny_llama()}, "data": {"dataset": "a.jsonl"}}
    training = {"output": "x", "steps": 1, "seq_len": 8}
    with pytest.raises(SlipstreamError, match=r"preference.gamma=1.0 with preference.loss=kto: it belongs to simpo"):
        parse_config({**given, "training": training, "preference": {"loss": "kto", "gamma": 1.0}})


@pytest.mark.more
def test_a_run_on_replicas_has_the_losses_of_one_pipeline(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"say {n}: ", "completion": ("yes " if n % 3 else "NO ") * (1 + n % 4), "label": bool(n % 3)}
        for n in range(60)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": {"config": tiny_llama(initializer_range=0.1)},
        "data": {"dataset": str(tmp_path / "rows.jsonl"), "validation_fraction": 0.2},
        "preference": {"loss": "kto", "beta": 0.5},
        "pipeline": {"num_ranks": 2, "slices": 3, "num_microbatches": 2},
        "runtime": {"self_check": False},
        "optimizer": {"lr": 0.01},
        "training": {"seq_len": 64, "batch_size": 6, "steps": 4, "eval_every": 4},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))

    def train(name: str, *more: str) -> list[dict[str, Any]]:
        words = ["train", str(tmp_path / "config.yaml"), f"--training.output={tmp_path / name}", *more]
        ended = launch(2, COMMAND, *words)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return metrics_of(tmp_path / name)

    one, two = train("pipeline"), train("replicas", "--pp=1", "--dp=2", "--pipeline.num_microbatches=1")
    for name in ("loss", "validation_loss"):
        losses, others = ([line[name] for line in lines if name in line] for lines in (one, two))
        assert others == pytest.approx(losses, rel=1e-3)
    steps = [line for line in one if "grad_norm" in line]
    assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-4)  # as all rewards are 0
    assert steps[-1]["loss"] < 0.5
    assert steps[-1]["rewards"]["margin"] > 0
