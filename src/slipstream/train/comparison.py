"""Compares the run with one process that trains the same model on the same batches, alone on the same machine."""

from __future__ import annotations

import copy
import gc
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.launch import reported_to_the_launcher
from slipstream.model import find_frozen, freeze, trust_remote_code, whole_pretrained_model
from slipstream.pipeline import Pipeline
from slipstream.schedule import USUAL_SLICES
from slipstream.train.config import Config, load_config
from slipstream.train.configured_pipeline import RunModel, make_pipeline, source_of
from slipstream.train.data import TrainingSequences, load_texts, sequences_of
from slipstream.train.device_choice import choose_device
from slipstream.train.folder_lock import FolderLock
from slipstream.train.optimizers import make_optimizer, make_scheduler
from slipstream.train.run_folder import RunFolder, read_lines
from slipstream.train.training_step import train_step
from slipstream.units import plural, seconds_text

_WARM_UP = 2  # steps with first touches of memory


class UnslicedModel(torch.nn.Module):
    """The whole model as transformers loads it.

    Attention runs over whole sequences, across documents: that is its fastest way.
    """

    def __init__(self, config: Config, device: torch.device, model: RunModel) -> None:
        super().__init__()
        if config.model.pretrained:
            self.model: PreTrainedModel = whole_pretrained_model(
                str(config.model.path), model.config, torch.float32, model.new_tokens, model.num_saved
            )
        else:
            self.model = AutoModelForCausalLM.from_config(copy.deepcopy(model.config))
        freeze(self.model, find_frozen(self.model, config.model.freeze, "model.freeze"))
        self.model.to(device).train()
        self.device = device

    def step(self, inputs: Tensor, targets: Tensor, document_ids: Tensor) -> Tensor:
        """Runs forward and backward of the whole batch and returns the loss; documents are ignored."""
        loss = self.model(input_ids=inputs.to(self.device), labels=targets.to(self.device), use_cache=False).loss
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients to a norm of at most `max_norm` and returns the norm before."""
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm)


def measure(config: Config) -> dict[str, float]:
    """Returns the median seconds of a step in this process, for each way of running it."""
    device = choose_device(config)
    slices = config.pipeline.slices
    microbatches = config.pipeline.microbatches
    if microbatches is not None:
        longest: list[int] = max((lengths for _, lengths in microbatches), key=len)
        slices = longest
    alone: dict[str, Any] = {"schedule": "gpipe", "stages_per_rank": 1, "partition": "auto", "microbatches": None}
    alone["vocabulary"] = "whole"
    alone["memory"] = config.memory.model_copy(update={"limit": None})
    model = RunModel.read(config)
    source = source_of(config, model)
    ways: dict[str, Callable[[], Any]] = {
        "unsliced, by transformers": lambda: UnslicedModel(config, device, model),
        "unsliced": lambda: make_pipeline(config, device, source, slices=1, **alone),
        "sliced": lambda: make_pipeline(
            config, device, source, slices=USUAL_SLICES if slices in (None, "auto") else slices, **alone
        ),
    }
    texts = load_texts(config.folder.inputs, "train")
    sequences = sequences_of(texts, "fixed", config.training.seq_len, config.training.seed, config.data.weights)
    seconds = {}
    for name, make in ways.items():
        seconds[name] = statistics.median(_time_steps(config, make(), sequences, device))
        gc.collect()
    return seconds


def _time_steps(
    config: Config, model: UnslicedModel | Pipeline, sequences: TrainingSequences, device: torch.device
) -> list[float]:
    training = config.training
    optimizer = make_optimizer(model.named_parameters(), config.optimizer)
    scheduler = make_scheduler(optimizer, config.optimizer, training.single_process_steps)
    seconds = []
    for index in range(_WARM_UP + training.single_process_steps):
        batch = sequences.batch(index * training.batch_size, training.batch_size)
        seconds.append(train_step(model, scheduler, batch, config, device).seconds)
    return seconds[_WARM_UP:]


def compare(folder: RunFolder) -> str:
    """Compares the run's steps with the result of `measure`, in words, and keeps both in `comparison.json`."""
    alone: dict[str, float] = json.loads(folder.comparison.read_text())
    steps = steps_of(folder)
    together = statistics.median(step["step_seconds"] for step in steps[min(_WARM_UP, len(steps) - 1) :])
    num_ranks = len(steps[0]["peak_memory"])
    best = min(alone, key=lambda name: alone[name])
    result = {"num_ranks": num_ranks, "seconds_per_step": together, "one_process": alone}
    with folder.replaced(folder.comparison) as part:
        part.write_text(json.dumps(result, indent=2) + "\n")
    others = ", ".join(f"{name} {seconds_text(value)}" for name, value in alone.items())
    return (
        f"{plural(num_ranks, 'rank')}: {seconds_text(together)} per step; one process: {others}\n"
        f"{alone[best] / together:.2f}x the best single process ({best})"
    )


def steps_of(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns the metrics of the steps since the run last started: before it was resumed, it may have had other ranks.

    Leaves out the steps in which "auto" was trying settings, unless there are no others. The list is empty where a run
    was resumed that had already reached its end.
    """
    lines = [*read_lines(folder.metrics)]
    # Each start leaves a line of figures.
    start = max((index for index, line in enumerate(lines) if "num_parameters" in line), default=0)
    steps = [line for line in lines[start:] if "step_seconds" in line]
    return [step for step in steps if "trial" not in step] or steps


def main() -> None:
    """Measures one process: `python -m slipstream.train.comparison config.yaml OWNER`."""
    with reported_to_the_launcher():
        config = load_config(Path(sys.argv[1]))
        if config.model.trust_remote_code:
            trust_remote_code(str(config.model.path))
        folder = config.folder
        FolderLock(folder.path, print).join(sys.argv[2], beats=False)
        folder.listed.add(folder.comparison)
        with folder.replaced(folder.comparison) as part:
            part.write_text(json.dumps(measure(config)))


if __name__ == "__main__":
    main()
