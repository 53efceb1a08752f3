"""Runs the cases of own_layers, and says what became of each."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from slipstream import Layers, Memory, Pipeline, SlipstreamError
from slipstream.sequential import flatten_layers
from support.architectures import BOUND, gradient_error, gradients
from support.sequences.own_layers import BY_MICROBATCH, DIFFERS, EXACT, ROWS, TOKENS, WIDTH, LayerCase

NUM_MICROBATCHES = 2  # of 3 and 2 rows
Found = tuple[float, dict[str, Tensor]]  # loss and gradients


@dataclass(frozen=True)
class Way:
    """A way of running a sequence on two ranks."""

    slices: int = 1
    recompute: str = "none"

    @property
    def name(self) -> str:
        return f"{'sliced' if self.slices > 1 else 'whole'}, recompute {self.recompute}"


WHOLE, SLICED = [Way(1, each) for each in ("none", "full", "segments", "selective")], [Way(3), Way(3, "full")]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(ROWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, WIDTH, (ROWS, TOKENS), generator=generator)
    targets[1, 3:] = -100
    return inputs, targets


def unsplit(case: LayerCase, num_microbatches: int) -> Found:
    """Returns what the sequence itself gives."""
    model, (inputs, targets) = case.model(), batch()
    num_valid, loss = (targets != -100).sum(), 0.0
    model.train()
    _seed()
    for rows in torch.arange(ROWS).tensor_split(num_microbatches):
        part = functional.cross_entropy(model(inputs[rows]), targets[rows], reduction="sum") / num_valid
        part.backward()
        loss += float(part.detach())
    return loss, _dense(gradients(model))


def pipelined(case: LayerCase, way: Way, num_ranks: int | None) -> Found:
    """Returns what a pipeline gives, of all its ranks; None: as many as there are processes."""
    model, (inputs, targets) = case.model(), batch()
    total = len(flatten_layers(model))
    first = total - 2 if case.together else 2 + (total - 3) // 2
    pipe = Pipeline(
        model,
        "1f1b",
        num_microbatches=NUM_MICROBATCHES,
        num_ranks=num_ranks,
        slices=way.slices,
        partition=[total] if num_ranks == 1 else [first, total - first],
        memory=Memory(recompute=way.recompute),
        layers=Layers(example=inputs[:2]),
    )
    _seed()
    loss = float(pipe.step(inputs, targets))
    found = _dense(gradients(pipe))
    if num_ranks is None:
        shares: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(shares, found)
        found = {name: gradient for share in shares for name, gradient in share.items()}
    pipe.state_dict()
    return loss, found


def references(case: LayerCase, way: Way) -> dict[str, Found]:
    """Returns what a pipeline may give, by outcome. Of layers that draw, one rank's, which recomputes nothing."""
    if case.expected(way.slices > 1, way.recompute != "none") not in (EXACT, BY_MICROBATCH, DIFFERS):
        return {}
    if case.draws:
        return {EXACT: pipelined(case, Way(way.slices), 1)}
    return {EXACT: unsplit(case, 1), BY_MICROBATCH: unsplit(case, NUM_MICROBATCHES)}


def outcome(case: LayerCase, way: Way, known: dict[str, Found], num_ranks: int | None = 2) -> str:
    """Returns EXACT and such, or why it is refused. What isn't a SlipstreamError is raised."""
    try:
        loss, found = pipelined(case, way, num_ranks)
    except SlipstreamError as error:
        return str(error)
    for name, (expected, wanted) in known.items():
        if abs(loss - expected) < BOUND and found.keys() == wanted.keys() and gradient_error(wanted, found) < BOUND:
            return name
    return DIFFERS


def _seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def _dense(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient.to_dense() for name, gradient in found.items()}


def alone(cases: Sequence[LayerCase], way: Way) -> list[dict[str, Found]]:
    """Returns the references of cases before this process joins others."""
    size = os.environ.pop("WORLD_SIZE", None)  # with it, a pipeline would be one of all processes
    found = [references(case, way) for case in cases]
    if size is not None:
        os.environ["WORLD_SIZE"] = size
    return found
