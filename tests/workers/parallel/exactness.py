"""What each process of a mesh runs: every model and way to train, compared with the whole model in one process.

    torchrun --nproc-per-node=8 tests/workers/parallel/exactness.py PP DP TP [MODEL]  # a JSON line per case, on rank 0

A case takes three steps of AdamW on rows with unequal numbers of valid tokens, in float64. Its error is the largest of
the first step's gradients (the design's measure), of the losses, and of the parameters after three steps.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from slipstream import Pipeline, make_mesh
from slipstream.model.trained_weights import find_frozen, freeze
from support.architectures import ARCHITECTURES, build, no_rounding_inside, tokens, unsplit_step
from support.options import grouped
from workers.parallel.tensor_parallel import adapted

ADAPTED = "llama, adapted"
MODELS = ("llama", "llama, tied", "qwen3", "gpt2", "mixtral", ADAPTED)
ADAPTER = {"target_modules": "all-linear", "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM"}
FROZEN = ("*embed_tokens*", "*wte*", "*wpe*", "*.0.*", "*norm.weight")  # the first stage, and parts of others
SLICES = [5, 30, 17, 12]
STEPS = 3
MICROBATCHES = 2  # of each replica, a row each


@dataclass(frozen=True)
class Case:
    """One way to train one model on the mesh."""

    model: str
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recompute: str = "none"
    sequence: bool = False
    shard: str = "none"
    freeze: tuple[str, ...] = ()

    def settings(self) -> dict[str, object]:
        return {
            "schedule": self.schedule,
            "stages_per_rank": self.stages_per_rank,
            "recompute": self.recompute,
            "sequence_parallel": self.sequence,
            "shard": self.shard,
            "num_microbatches": MICROBATCHES,
            "slices": SLICES,
        }


def cases(pp: int, dp: int, tp: int) -> Iterator[Case]:
    """Slices everywhere; interleaving, recomputation, sequence parallelism, ZeRO-1 and frozen parts each with every
    model."""
    for model in MODELS:
        yield Case(model, sequence=False, shard="optimizer" if dp > 1 else "none")
        if pp > 1:
            yield Case(model, "interleaved-1f1b", 2, "full", sequence=tp > 1)
        elif tp > 1 or dp > 1:
            yield Case(model, "1f1b", 1, "selective", sequence=tp > 1)
        if pp > 1:
            frozen = () if model == ADAPTED else FROZEN
            yield Case(model, "zb-v", 2, "none", tp > 1, "optimizer" if dp > 1 else "none", frozen)


def config_of(model: str, pp: int, tp: int) -> PretrainedConfig:
    """A layer for each of two stages a rank; more heads where eight ranks share them."""
    config = copy.deepcopy(ARCHITECTURES[model.removesuffix(", adapted")])
    config.num_hidden_layers = max(4, 2 * pp)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * config.num_hidden_layers
    if tp > 4:
        config.num_attention_heads = 8
        if model != "gpt2":
            config.num_key_value_heads, config.head_dim = 4, 4
    return config


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of which every next one has fewer labels that count."""
    inputs = tokens(batch=rows, seed=step)
    labels = inputs.clone()
    for row in range(rows):
        labels[row, : 3 * row] = -100
    return inputs, labels


def run(case: Case, mesh: tuple[int, int, int], device_mesh: object, device: str | None = None) -> float:
    """The case's error on this rank; the whole model is on the pipeline's device, since models round the cosines of
    positions to float32, and devices differ in those."""
    config = config_of(case.model, mesh[0], mesh[2])
    whole: Any = build(config, seed=3).to(device or "cpu")
    if case.model == ADAPTED:
        whole = adapted(whole, peft.LoraConfig(r=4, **ADAPTER))
    patterns = [each for each in case.freeze if fnmatch.filter([name for name, _ in whole.named_parameters()], each)]
    frozen = find_frozen(whole, patterns)
    freeze(whole, frozen)
    settings = {"dtype": torch.float64, "mesh": device_mesh, "self_check": False, "device": device, **case.settings()}
    if case.model == ADAPTED:
        pipe = Pipeline(copy.deepcopy(whole), **grouped(**settings))
    elif case.model == "mixtral":  # transformers' own way with experts, unlike the one of `build`, has no float64
        own = build(config, seed=3)
        freeze(own, frozen)
        pipe = Pipeline(own, **grouped(**settings))
    else:
        pipe = Pipeline.from_config(config, seed=3, freeze=patterns, **grouped(**settings))
    optimizers = [torch.optim.AdamW(parameters, lr=1e-3) for parameters in (pipe.parameters(), whole.parameters())]
    errors, rows = [], MICROBATCHES * mesh[1]
    mine = slice(pipe.replica * MICROBATCHES, (pipe.replica + 1) * MICROBATCHES)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs, labels = (each.to(device or "cpu") for each in batch(step, rows))
        loss = pipe.step(inputs[mine], labels[mine])
        errors.append(abs(float(loss) - float(unsplit_step(whole, inputs, labels))))
        if step == 0:
            gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
            errors.append(error(pipe, gradients, "grad"))
        norms = pipe.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        errors.append(abs(float(norms[0]) - float(norms[1])) / float(norms[1]))
        for optimizer in optimizers:
            optimizer.step()
    pipe.evaluate(inputs[mine], labels[mine])  # publishes the last update
    errors.append(error(pipe, dict(whole.named_parameters()), "data"))
    assert all(map(math.isfinite, errors)), errors
    return max(errors)


def error(pipe: Pipeline, whole: dict[str, Tensor], what: str) -> float:
    """The design's measure of this rank's pieces, each against the size of the whole parameter's values."""
    floor = 1e-6 * max(float(tensor.detach().abs().max()) for tensor in whole.values())
    errors = [0.0]
    for piece in pipe.parameter_shards():
        if not piece.parameter.requires_grad:
            continue  # frozen
        all_rows = whole[piece.name].detach().cpu()
        own = getattr(piece.parameter, what).detach().cpu()
        rows = piece.share.take(all_rows)[piece.first_row :][: len(own)]
        errors.append(float((own - rows).abs().max() / max(all_rows.abs().max(), floor)))
    assert all(map(math.isfinite, errors)), errors
    return max(errors)


def main() -> None:
    mesh = (int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    device_mesh = make_mesh(*mesh)
    for case in (case for case in cases(*mesh) if case.model in (sys.argv[4:] or MODELS)):
        began = time.perf_counter()
        with no_rounding_inside():
            own = run(case, mesh, device_mesh)
        found: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(found, own)
        if dist.get_rank() == 0:
            seconds = round(time.perf_counter() - began, 2)
            print(json.dumps({"mesh": mesh, **asdict(case), "error": max(found), "seconds": seconds}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
