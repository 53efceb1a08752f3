"""Sequences of different lengths, plans for them at random, and what the unsplit model gives for each alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

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


def padded_batch(inputs: list[Tensor], labels: list[Tensor], width: int = 0) -> dict[str, Tensor]:
    """What a collator of transformers makes of sequences: rows that are padded at the right, to at least this width."""

    def rows(sequences: list[Tensor], value: int) -> Tensor:
        longest = max(width, *map(len, sequences))
        return torch.stack([pad(sequence, (0, longest - len(sequence)), value=value) for sequence in sequences])

    masks = [torch.ones_like(sequence) for sequence in inputs]
    return {"input_ids": rows(inputs, 0), "attention_mask": rows(masks, 0), "labels": rows(labels, -100)}


def one_by_one(name: str, inputs: list[Tensor], labels: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole model on each sequence alone, as the mean over all valid tokens."""
    return alone(MODELS[name], inputs, labels)


def alone(
    model: Any, inputs: list[Tensor], labels: list[Tensor], documents: list[list[int]] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of an unsplit model for each sequence, which has seen no other, as the mean over all valid
    tokens. Of documents of these lengths, each is run by a model that has seen the longest of its sequence."""
    cuts = documents or [[len(ids)] for ids in inputs]
    parts_of = [part for label, cut in zip(labels, cuts, strict=True) for part in label.split(cut)]
    count = sum(int((part[1:] != -100).sum()) for part in parts_of)
    total, found = torch.zeros((), dtype=torch.float64), dict[str, Tensor]()
    for ids, label, cut in zip(inputs, labels, cuts, strict=True):
        whole = copy.deepcopy(model)
        for part, targets in zip(ids.split(cut), label.split(cut), strict=True):
            positions = torch.arange(len(part))
            if len(part) < max(cut):  # another token, which no other sees, says how long the sequence is
                part, positions = (torch.cat([each, torch.tensor([max(cut) - 1])]) for each in (part, positions))
            logits = whole(input_ids=part[None], position_ids=positions[None], use_cache=False).logits
            loss = causal_cross_entropy(logits[:, : len(targets) - 1], targets[None, 1:])[0] / count
            loss.backward()  # whose rounding within a model depends on the scale
            total += loss.detach()
        for key, gradient in gradients(whole).items():
            found[key] = found.get(key, 0) + gradient
    return total, found


def together(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients as transformers gives them, of a model that keeps what it has seen."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


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
