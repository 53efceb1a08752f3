"""Arguments of a SlipstreamTrainer at random, against a transformers.Trainer of the unsplit model."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.random_exactness import cuts
from benchmarks.random_exactness.causal import changes
from benchmarks.random_exactness.cuts import Dice, Place, happens

ROUNDED = 1e-6  # the Trainer adds up losses in float32


class TrainerCase:
    """A case; `axes` say what was drawn, as the record has it."""

    def __init__(self, seed: str, place: Place) -> None:
        changes()  # makes the tests' support importable
        self.support = importlib.import_module("support.trainers")
        dice, self.place = Dice(f"{seed} trainer"), place
        self.architecture = dice.choice(["gpt2", "llama", "llama, tied", "qwen3", "mistral, window of 7", "gemma2"])
        rows = dice.randint(1, 5)
        settings: dict[str, Any] = cuts.order(dice, place) | {"num_ranks": place.pp}
        settings |= {"num_microbatches": dice.randint(1, rows), "slices": dice.randint(1, 5)}
        memory = {name: value for name, value in cuts.memory(dice, True).items() if name in ("recompute", "offload")}
        self.settings = settings | memory
        self.arguments = {
            "per_device_train_batch_size": rows,
            "per_device_eval_batch_size": dice.randint(rows, 6),
            "gradient_accumulation_steps": dice.randint(1, 3),
            **dice.choice([{"num_train_epochs": 1}, {"num_train_epochs": 1.4}, {"max_steps": 4}]),
            "logging_steps": dice.choice([1, 2, 3]),
            "logging_first_step": happens(dice, 0.3),
            "lr_scheduler_type": dice.choice(["linear", "cosine", "constant", "constant_with_warmup"]),
            "warmup_steps": dice.choice([0, 2]),
            "weight_decay": dice.choice([0.0, 0.1]),
            "max_grad_norm": dice.choice([0.0, 0.9, 1e3]),
            "optim": dice.choice(["adamw_torch", "sgd", "adagrad", "rmsprop"]),
            **dice.choice([{}, {"eval_strategy": "epoch"}, {"eval_strategy": "no"}, {"eval_on_start": True}]),
            "dataloader_drop_last": happens(dice, 0.3),
            "include_num_input_tokens_seen": dice.choice(["no", "all", "non_padding"]),
            "seed": dice.randrange(100),
            **dice.choice([{}, {}, {"train_sampling_strategy": "sequential"}]),
            **dice.choice([{}, {}, {"train_sampling_strategy": "group_by_length"}]),
            **dice.choice([{}, {}, {}, {"prediction_loss_only": True}, {"torch_empty_cache_steps": 1}]),
            **dice.choice([{}, {}, {}, {"average_tokens_across_devices": False}, {"logging_nan_inf_filter": False}]),
        }
        self.metrics = happens(dice, 0.3)
        self.data = {"train_dataset": self.support.rows(dice.randint(7, 16)), "eval_dataset": self.support.rows(6)}
        self.axes: dict[str, Any] = {"architecture": self.architecture, "ranks": place.pp, **self.settings}
        self.axes |= {"arguments": self.arguments, "metrics": self.metrics}

    def compare(self) -> tuple[float, str]:
        """Returns the largest relative error of logs and weights, and where it is."""
        support, more = self.support, dict(self.data)
        if self.metrics:
            more["compute_metrics"] = support.accuracy
        model = support.unsplit_model(self.architecture)
        with tempfile.TemporaryDirectory() as folder:
            other = support.unsplit_trainer(model, support.arguments(Path(folder, "other"), **self.arguments), **more)
            other.train()
            pipe = support.pipeline(self.architecture, **self.settings)
            mine = support.trainer(pipe, support.arguments(Path(folder, "mine"), **self.arguments), **more)
            mine.train()
        worst, where = 0.0, ""
        expected, found = support.history(other), support.history(mine)
        if [each.keys() for each in expected] != [each.keys() for each in found]:
            return float("inf"), f"logs {expected} and {found}"
        for theirs, ours in zip(expected, found, strict=True):
            for name, value in theirs.items():
                bound = ROUNDED if name in ("loss", "train_loss") else 1.0
                error = abs(value - ours[name]) / max(1e-3, abs(value)) * (1e-9 / bound if bound < 1 else 1.0)
                if error > worst:
                    worst, where = error, f"{name} of the logs: {ours[name]} and {value}"
        weights = dict(model.named_parameters())
        for name, own in pipe.named_parameters():
            theirs = weights[name].detach()
            error = float((own.detach() - theirs).abs().max() / theirs.abs().max())
            if error > worst:
                worst, where = error, f"weights: {name}"
        return worst, where
