"""Cases of test_processes: a head that is spread over ranks, with a clipped norm, shards and an export."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import slipstream
from slipstream import Parallelism, Pipeline
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.parallel.group_cases import Case, shared_folder
from support.pipelines import make_pipe


@no_rounding_inside()
def train(how: str, name: str) -> None:
    """Two steps of AdamW with clipping follow the unsplit model, and the export has its weights."""
    config = ARCHITECTURES[name]
    replicas = how == "replicas"
    mesh = slipstream.make_mesh(2, 2, 1, "cpu") if replicas else None
    whole = build(config, seed=3)
    pipe = make_pipe(
        config,
        seed=3,
        dtype=torch.float64,
        parallel=Parallelism(shard="optimizer" if replicas else "none"),
        schedule="1f1b" if replicas else how,
        stages_per_rank=2 if how == "zb-v" else 1,
        slices=[5, 30, 17, 12],
        num_microbatches=2,
        mesh=mesh,
        vocabulary="spread",
    )
    optimizers = [torch.optim.AdamW(parameters, lr=1e-3) for parameters in (pipe.parameters(), whole.parameters())]
    for step in range(2):
        inputs = tokens(batch=4, seed=step)
        labels = labels_of(inputs)
        for optimizer in optimizers:
            optimizer.zero_grad()
        mine = slice(2 * pipe.replica, 2 * pipe.replica + 2) if replicas else slice(None)
        loss = pipe.step(inputs[mine], labels[mine])
        assert abs(loss - unsplit_step(whole, inputs, labels)) < BOUND
        check_gradients(pipe, whole)
        norms = pipe.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        assert abs(norms[0] - norms[1]) < 1e-9
        for optimizer in optimizers:
            optimizer.step()
    with shared_folder() as folder:
        check_export(pipe, whole, folder)


def check_gradients(pipe: Pipeline, whole: torch.nn.Module) -> None:
    """Of each parameter, the rows that this rank has; the head's are as many as any other rank's, or one more."""
    wanted = dict(whole.named_parameters())
    for shard in pipe.parameter_shards():
        gradient = wanted[shard.name].grad
        assert gradient is not None
        assert shard.parameter.grad is not None
        boxes = shard.share.boxes(shard.parameter.grad, shard.first_row)
        for offsets, box in boxes:
            place = tuple(slice(first, first + size) for first, size in zip(offsets, box.shape, strict=True))
            assert gradient_error({"": gradient[place]}, {"": box}) < BOUND
        if shard.name in ("lm_head.weight", *(tied for _, tied in whole.all_tied_weights_keys.items())):
            assert len(shard.parameter) <= -(-len(gradient) // pipe.num_ranks)


def check_export(pipe: Pipeline, whole: torch.nn.Module, folder: Path) -> None:
    pipe.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(read.get_parameter(name), parameter, rtol=1e-8, atol=1e-10)


CASES: dict[str, Case] = {
    f"{how}, {name}": partial(train, how, name)
    for how, names in {
        "1f1b": ("llama, tied", "llama"),
        "zb-h1": ("gpt2", "llama"),
        "zb-v": ("gemma3", "llama"),
        "replicas": ("llama, tied", "llama"),
    }.items()
    for name in names
}
