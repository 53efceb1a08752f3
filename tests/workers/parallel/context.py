"""What each process of a mesh with context parallelism runs: slices that ranks share train as one process does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream import Pipeline, make_mesh
from support.architectures import ARCHITECTURES, BOUND, build, labels_of, no_rounding_inside, tokens, unsplit_step
from support.exact_steps import document_ids, steps_alone
from support.parallel.group_cases import run_cases
from support.parallel.shared_models import CONFIGS
from support.pipelines import make_pipe
from workers.parallel.exactness import error

SLICES = [5, 20, 1, 38]  # of one token some rank has none
FOUR = {"pp2 cp2": {"pp": 2, "cp": 2}, "cp4": {"cp": 4}, "cp2 tp2": {"cp": 2, "tp": 2}, "dp2 cp2": {"dp": 2, "cp": 2}}
MODELS = ("llama, tied", "qwen3", "gemma3", "gpt_oss", "gpt2")


def model_of(name: str) -> PreTrainedModel:
    return build(CONFIGS.get(name) or ARCHITECTURES[name], seed=3)


def gradients_of(whole: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def rows(name: str, mesh: dict[str, int], **settings: Any) -> Pipeline:
    """A step on rows, an evaluation and the norm are one process's."""
    whole, num_rows = model_of(name), 2 * mesh.get("dp", 1)
    inputs, labels = tokens(num_rows), labels_of(tokens(num_rows))
    with no_rounding_inside():
        expected = unsplit_step(whole, inputs, labels)
        settings = {"slices": SLICES, "num_microbatches": 2} | settings
        pipe = make_pipe(model_of(name), mesh=make_mesh(**mesh), **settings)
        mine = slice(2 * pipe.replica, 2 * pipe.replica + 2)
        for run in (pipe.step, pipe.evaluate):
            assert abs(run(inputs[mine], labels[mine]) - expected) < BOUND * expected
    found = error(pipe, gradients_of(whole), "grad")
    assert found < BOUND, (name, mesh, settings, found)
    norm = torch.nn.utils.get_total_norm(gradients_of(whole).values())
    assert abs(pipe.clip_grad_norm_(torch.inf) - norm) < BOUND * norm
    return pipe


def documents(name: str, mesh: dict[str, int], **settings: Any) -> None:
    """Packed documents, which end inside of ranks' parts of slices, are each as if alone."""
    lengths, whole, inputs = [(29, 21, 14), (40, 3, 21)], model_of(name), tokens()
    with no_rounding_inside():
        steps_alone(whole, [part for row, cut in zip(inputs, lengths, strict=True) for part in row.split(cut)])
        pipe = make_pipe(model_of(name), mesh=make_mesh(**mesh), **{"slices": SLICES} | settings)
        pipe.step(inputs, inputs, document_ids=document_ids(*lengths))
    found = error(pipe, gradients_of(whole), "grad")
    assert found < BOUND, (name, mesh, settings, found)


def sequences(name: str, mesh: dict[str, int], **settings: Any) -> None:
    """Sequences of different lengths, packed by the step itself, are each as if alone."""
    every = tokens(5)
    given = [row[:length] for row, length in zip(every, (50, 7, 33, 2, 18), strict=True)]
    whole = model_of(name)
    with no_rounding_inside():
        steps_alone(whole, given)
        pipe = make_pipe(model_of(name), mesh=make_mesh(**mesh), **{"slices": 3, "num_microbatches": 2} | settings)
        pipe.step(given, given)
    found = error(pipe, gradients_of(whole), "grad")
    assert found < BOUND, (name, mesh, settings, found)


TWO: dict[str, Callable[[], object]] = {f"{name}": partial(rows, name, {"cp": 2}) for name in MODELS}
TWO |= {f"documents, {name}": partial(documents, name, {"cp": 2}) for name in ("llama", "gemma3", "gpt_oss")}
TWO |= {f"sequences, {name}": partial(sequences, name, {"cp": 2}) for name in ("llama", "phi3")}
TWO |= {f"recompute={kind}": partial(rows, "llama", {"cp": 2}, recompute=kind) for kind in ("full", "selective")}
MESHES: dict[str, Callable[[], object]] = {
    f"{mesh}, {name}": partial(rows, name, FOUR[mesh])
    for mesh, name in product(FOUR, MODELS)
    if (mesh[-3:], name) != ("tp2", "gpt_oss")
}
CASES = TWO | MESHES

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:])
