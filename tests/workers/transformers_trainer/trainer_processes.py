"""Each of two processes of test_trainer_checkpoints: two stages, then two replicas."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import Pipeline, SlipstreamError, make_mesh
from support.architectures import BOUND
from support.trainers import FULL, accuracy, arguments, check_logs, collate, history, pipeline, rows, trainer


def unknown_processes(folder: Path) -> None:
    """On CPUs accelerate knows of one process, unless it is told."""
    with pytest.raises(SlipstreamError, match=r"of the Pipeline's mesh: 2. Give TrainingArguments\(use_cpu=True\)"):
        trainer(pipeline(), arguments(folder, use_cpu=False))


def stages(folder: Path) -> None:
    """Logs are a Trainer's, transformers loads the model, and training goes on from a checkpoint to the bit."""
    expected = json.loads((folder / "stages.json").read_text())
    args = arguments(folder / "stages", save_strategy="steps", save_steps=4)
    whole = trainer(pipeline(), args, compute_metrics=accuracy)
    whole.train()
    check_logs(history(whole), expected)
    whole.save_model()
    check_saved(folder / "stages", whole.pipe)
    again = trainer(pipeline(), args, compute_metrics=accuracy)
    again.train(resume_from_checkpoint=True)
    assert history(again)[:-1] == history(whole)[:-1]  # the last has the mean of the steps that ran
    mine = dict(again.pipe.named_parameters())
    assert all(mine[name].equal(weight) for name, weight in whole.pipe.named_parameters())
    metrics = whole.predict(rows(5)).metrics
    assert round(metrics["test_steps_per_second"] * metrics["test_runtime"]) == 2


def check_saved(folder: Path, pipe: Pipeline) -> None:
    batch = collate(rows(3))
    logits = pipe.logits({key: value for key, value in batch.items() if key != "labels"})
    if isinstance(logits, torch.Tensor):
        with torch.no_grad():
            expected = AutoModelForCausalLM.from_pretrained(folder)(**batch).logits
        assert (logits - expected)[batch["attention_mask"].bool()].abs().max() < BOUND


def replicas(folder: Path) -> None:
    """Each takes its rows of what is one batch of a Trainer alone."""
    expected = json.loads((folder / "replicas.json").read_text())
    pipe = pipeline(mesh=make_mesh(dp=2))
    made = trainer(pipe, arguments(folder / "replicas", max_steps=3, gradient_accumulation_steps=1), **FULL)
    made.train()
    check_logs(history(made), expected, "total_flos")  # in which padding counts, of which replicas have less


def repeated_rows(folder: Path) -> None:
    """Rows that fill up accelerate's last batch count nowhere: logs are those of a Trainer alone. Of the last 6
    of 8 rows in training replica 1 has 2, of 3 rows in an evaluation none."""
    expected = json.loads((folder / "repeated.json").read_text())
    pipe = pipeline(mesh=make_mesh(dp=2))
    args = arguments(folder / "repeated", max_steps=6, gradient_accumulation_steps=1)
    made = trainer(pipe, args, eval_dataset=rows(3), compute_metrics=accuracy)
    made.train()
    check_logs(history(made), expected, "total_flos", "num_input_tokens_seen")
    flat = trainer(pipe, args, eval_dataset=rows(3), data_collator=flattened)
    assert flat.evaluate()["eval_loss"] == pytest.approx(expected[-2]["eval_loss"], rel=1e-10)


def flattened(chosen: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows next to each other in one, as DataCollatorWithFlattening makes them."""
    columns = {key: torch.cat([torch.tensor(row[key]) for row in chosen]) for key in ("input_ids", "labels")}
    positions = torch.cat([torch.arange(len(row["labels"])) for row in chosen])
    return {key: tensor[None] for key, tensor in (columns | {"position_ids": positions}).items()}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(rows())


def streams(folder: Path) -> None:
    """Nobody knows how many of a stream's last rows are repeated ones."""
    pipe = pipeline(mesh=make_mesh(dp=2))
    made = trainer(pipe, arguments(folder, max_steps=1), train_dataset=Stream(), eval_dataset=Stream())
    assert len([*made.get_train_dataloader()]) == 2  # of 22 rows in batches of 4 on each of 2 replicas
    with pytest.raises(SlipstreamError, match=r"a data set without a length on 2 replicas.* give one with a length"):
        made.evaluate()


if __name__ == "__main__":
    unknown_processes(Path(sys.argv[1]))
    stages(Path(sys.argv[1]))
    replicas(Path(sys.argv[1]))
    repeated_rows(Path(sys.argv[1]))
    streams(Path(sys.argv[1]))
