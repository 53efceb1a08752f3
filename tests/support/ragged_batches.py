"""Sequences of different lengths, plans for them at random, and what the unsplit model gives for each alone."""

from __future__ import annotations

import copy
from itertools import accumulate, pairwise
from random import Random

import torch
from torch import Tensor

from slipstream import find_order, make_schedule
from slipstream.model import causal_cross_entropy
from slipstream.planner.ragged import StepPlan
from slipstream.schedule import SCHEDULES, Schedule
from slipstream.simulator import UnitCost
from support.architectures import ARCHITECTURES, build, gradients, labels_of, tokens

MODELS = {name: build(ARCHITECTURES[name]) for name in ("llama, tied", "gpt2", "mistral, window of 7")}
ORDERS = [(name, v) for name in SCHEDULES for v in (1, 2) if v in SCHEDULES[name].stages_per_rank]


def batch_of(lengths: list[int], seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Sequences of these lengths, and their labels, some of which don't count."""
    inputs = tokens(batch=len(lengths), length=max(*lengths, 2), seed=seed)
    both = (zip(rows, lengths, strict=True) for rows in (inputs, labels_of(inputs)))
    cut, labels = ([row[:length] for row, length in pairs] for pairs in both)
    return cut, labels


def one_by_one(name: str, inputs: list[Tensor], labels: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole model on each sequence alone, as the mean over all valid tokens."""
    whole = copy.deepcopy(MODELS[name])
    sums = torch.zeros((), dtype=torch.float64)
    count = sum(int((label[1:] != -100).sum()) for label in labels)
    for row, label in zip(inputs, labels, strict=True):
        logits = whole(input_ids=row[None], use_cache=False).logits
        total, _ = causal_cross_entropy(logits[:, :-1], label[None, 1:])
        (total / count).backward()
        sums += total.detach()
    return sums / count, gradients(whole)


def random_plan(random: Random, lengths: list[int], order: Schedule, most_slices: int = 5) -> StepPlan:
    """Sequences in any microbatches, each in any slices, in the kind of order of `order` or a found one."""
    numbers = random.sample(range(len(lengths)), len(lengths))
    ends = accumulate(parts(random, len(numbers), len(numbers)), initial=0)
    groups = tuple(tuple(numbers[a:b]) for a, b in pairwise(ends))
    rows = [sum(lengths[number] for number in group) for group in groups]
    slices = tuple(tuple(parts(random, row, most_slices)) for row in rows)
    counts = [len(each) for each in slices]
    if random.random() < 0.3:
        found = find_order([*order.placement], len(counts), counts, UnitCost(), effort=1e3)
        return StepPlan(groups, slices, found)
    stages_per_rank = order.num_stages // order.num_ranks
    return StepPlan(groups, slices, make_schedule(order.name, order.num_ranks, len(counts), counts, stages_per_rank))


def parts(random: Random, whole: int, most: int) -> list[int]:
    """Between one and `most` numbers above 0 that add up to it."""
    cuts = random.sample(range(1, whole), min(random.randrange(most), whole - 1))
    return [b - a for a, b in pairwise([0, *sorted(cuts), whole])]
