"""Trainers of transformers on few short rows of unequal lengths: with the unsplit model, and with a Pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction, PretrainedConfig, Trainer, TrainingArguments

from slipstream import Pipeline
from slipstream.extras.hf_trainer import SlipstreamTrainer
from support.architectures import ARCHITECTURES, VOCABULARY, build
from support.pipelines import make_pipe


def _row(length: int, generator: torch.Generator) -> dict[str, list[int]]:
    ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
    return {"input_ids": ids, "labels": [-100] * (length // 4) + ids[length // 4 :]}


def rows(number: int = 22) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [_row(8 + 5 * (place % 4), generator) for place in range(number)]


def collate(chosen: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """As DataCollatorForSeq2Seq pads, without a tokenizer."""
    ids, labels = ([torch.tensor(each[key]) for each in chosen] for key in ("input_ids", "labels"))
    mask = [torch.ones_like(each) for each in ids]
    padded = {"input_ids": (ids, 0), "attention_mask": (mask, 0), "labels": (labels, -100)}
    return {key: pad_sequence(each, batch_first=True, padding_value=value) for key, (each, value) in padded.items()}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Six updates, each of two unequal batches, the last of 2 rows; gradients are clipped at some of them."""
    own: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "max_grad_norm": 0.9,
        "include_num_input_tokens_seen": "non_padding",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**own | changes)


def float64_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The models' own rounds logits to float32."""
    total = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Depends on the logits of every token that counts."""
    logits, labels = (torch.as_tensor(each) for each in (prediction.predictions, prediction.label_ids))
    counts = labels[:, 1:] != -100
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    return {"mean_log_probability": float(chosen[counts].mean()), "rows": len(labels)}


def data(**changes: Any) -> dict[str, Any]:
    return {"train_dataset": rows(), "eval_dataset": rows(7), "data_collator": collate} | changes


FULL = data(train_dataset=rows(24), eval_dataset=rows(8))  # as many rows as fill the batches of two replicas


def unsplit_trainer(model: Any, args: TrainingArguments, **changes: Any) -> Trainer:
    return Trainer(model, args, compute_loss_func=float64_loss, **data(**changes))


def pipeline(architecture: str | PretrainedConfig = "gpt2", **options: Any) -> Pipeline:
    config = ARCHITECTURES[architecture] if isinstance(architecture, str) else architecture
    return make_pipe(config, seed=0, **{"dtype": torch.float64, "num_microbatches": 3, "slices": 2} | options)


def trainer(pipe: Pipeline, args: TrainingArguments, **changes: Any) -> SlipstreamTrainer:
    return SlipstreamTrainer(pipe, args, **data(**changes))


def history(ended: Trainer) -> list[dict[str, float]]:
    """What was logged, without times."""
    times = ("_runtime", "_per_second", "preparation_time")
    return [
        {name: value for name, value in logs.items() if not name.endswith(times)} for logs in ended.state.log_history
    ]


def check_logs(found: list[dict[str, float]], expected: list[dict[str, float]], *but: str) -> None:
    """Losses are added up in float32 by the Trainer; everything else is of float64. `but` isn't compared."""
    assert [each.keys() for each in found] == [each.keys() for each in expected]
    for mine, other in zip(found, expected, strict=True):
        for name, value in mine.items():
            if name in but:
                continue
            bound = 1e-6 if name in ("loss", "train_loss") else 1e-10
            assert abs(value - other[name]) <= bound * max(1e-3, abs(other[name])), (name, value, other[name])


def unsplit_model(name: str = "gpt2") -> Any:
    return build(ARCHITECTURES[name])
