"""What a Trainer makes of a small Llama, and a SlipstreamTrainer on any mesh, also from a checkpoint on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer, TrainingArguments

from slipstream.extras.hf_trainer import SlipstreamTrainer
from support.architectures import BOUND, no_rounding_inside
from support.trainers import (
    FULL,
    accuracy,
    arguments,
    check_logs,
    history,
    pipeline,
    rows,
    trainer,
    unsplit_model,
    unsplit_trainer,
)

CHECKPOINT = "stages/checkpoint-4"  # of two epochs of three updates


def resumed_arguments(folder: Path, num_replicas: int = 1, **changes: Any) -> TrainingArguments:
    """Of all replicas together the batches are the same."""
    size = 8 // num_replicas
    sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size, "gradient_accumulation_steps": 1}
    return arguments(folder, **sizes | changes)


def write_expected(folder: Path) -> None:
    """Writes what a Trainer with the unsplit model logs, the weights with which it ends, and what these predict."""
    with no_rounding_inside():
        alone = unsplit_trainer(unsplit_model("llama"), resumed_arguments(folder), compute_metrics=accuracy, **FULL)
        alone.train()
        predicted = logits(alone)
    (folder / "expected.json").write_text(json.dumps(history(alone)))
    weights = {name: each.detach() for name, each in alone.model.named_parameters()}
    save_file(weights | {"logits": predicted}, folder / "expected.safetensors")


def logits(made: Trainer) -> Tensor:
    """Those of the tokens that count, in the order of the rows, which don't fill the batches. Collective."""
    output = made.predict(rows(11))
    return torch.from_numpy(output.predictions[output.label_ids != -100])


def slipstream_trainer(folder: Path, mesh: DeviceMesh | None = None, **changes: Any) -> SlipstreamTrainer:
    """One whose mesh is given, with the same model before its training."""
    pipe = pipeline("llama", mesh=mesh, num_microbatches=2)
    args = resumed_arguments(folder, pipe.num_replicas, **changes)
    return trainer(pipe, args, compute_metrics=accuracy, **FULL)


def check_end(made: SlipstreamTrainer, folder: Path, resumed: bool) -> None:
    """Logs, weights and predictions are those of the training that nobody has interrupted. Collective."""
    expected, found = json.loads((folder / "expected.json").read_text()), history(made)
    if resumed:
        expected, found = expected[:-1], found[:-1]  # the last has the mean of the steps that ran
    check_logs(found, expected, "total_flos")  # in which padding counts, of which replicas have less
    weights = load_file(folder / "expected.safetensors")
    torch.testing.assert_close(logits(made), weights.pop("logits"), rtol=0, atol=BOUND)
    state = made.model.state_dict()
    assert not state or state.keys() == weights.keys()  # on the first rank alone
    for name, weight in state.items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=BOUND)
