"""From a user's settings to what runs where: a lowered schedule, its evaluation, and the layers of every stage."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model.anatomy import Anatomy
from slipstream.model.toy import quiet_transformers
from slipstream.planner.partition import partition_layers
from slipstream.schedule.action import Schedule
from slipstream.schedule.generators import GENERATORS
from slipstream.schedule.lowering import add_communication, check_communication, forward_only, split_backwards


@dataclass(frozen=True)
class Layout:
    """Two lowered schedules over the same stages, and which layers each stage owns."""

    training: Schedule
    evaluation: Schedule
    layers: tuple[range, ...]

    @property
    def num_ranks(self) -> int:
        return self.training.num_ranks

    def stages_of(self, ranks: Iterable[int]) -> list[int]:
        wanted = set(ranks)
        return [stage for stage, rank in enumerate(self.training.placement) if rank in wanted]


def plan_layout(
    config: PretrainedConfig,
    anatomy: Anatomy,
    schedule: str | Schedule,
    num_microbatches: int,
    slices: int | Sequence[int],
    partition: str | Sequence[int],
    num_ranks: int,
) -> Layout:
    """Check that everything fits together. Raises SlipstreamError with what was given, allowed, and to type."""
    if not isinstance(schedule, Schedule):
        num_slices = slices if isinstance(slices, int) else len(slices)
        schedule = make_schedule(schedule, num_ranks, num_microbatches, num_slices)
    if schedule.num_ranks != num_ranks:
        raise SlipstreamError(
            f"the schedule {schedule.name!r} is for {schedule.num_ranks} ranks, but there are {num_ranks}. "
            f"Start {schedule.num_ranks} processes or make a schedule for {num_ranks}."
        )
    if not isinstance(slices, int) and len(slices) != schedule.num_slices:
        raise SlipstreamError(
            f"slices={list(slices)} are {len(slices)} lengths, but the schedule {schedule.name!r} has "
            f"{schedule.num_slices} slices. Give {schedule.num_slices} lengths."
        )
    lowered = schedule if schedule.is_lowered else add_communication(schedule)
    check_communication(lowered)
    counts = _layers_per_stage(config, anatomy, partition, schedule.num_stages)
    layers = tuple(range(a, b) for a, b in pairwise(accumulate(counts, initial=0)))
    return Layout(lowered, _evaluation(schedule), layers)


def make_schedule(name: str, num_stages: int, num_microbatches: int, num_slices: int) -> Schedule:
    """A schedule by its name, its gradients sent before the weights' are computed; SlipstreamError suggests the nearest
    name."""
    if name not in GENERATORS:
        near = difflib.get_close_matches(name.lower(), GENERATORS, n=1, cutoff=0.3)
        raise SlipstreamError(
            f"schedule={name!r} is not known; {'did you mean ' + repr(near[0]) + '? ' if near else ''}"
            f"Choose one of {', '.join(GENERATORS)}, or pass a Schedule."
        )
    return split_backwards(GENERATORS[name](num_stages, num_microbatches, num_slices))


def _evaluation(schedule: Schedule) -> Schedule:
    """Forwards only, on the same stages. Their order within a rank follows from the training schedule's."""
    return add_communication(forward_only(schedule))


def _layers_per_stage(
    config: PretrainedConfig, anatomy: Anatomy, partition: str | Sequence[int], num_stages: int
) -> list[int]:
    if isinstance(partition, str):
        if partition != "auto":
            raise SlipstreamError(f"partition={partition!r}: give 'auto' or the number of layers of every stage.")
        return partition_layers(layer_costs(config, anatomy), num_stages)
    num_layers = len(layer_costs(config, anatomy))
    if len(partition) != num_stages or sum(partition) != num_layers or min(partition) < 1:
        raise SlipstreamError(
            f"partition={list(partition)} has {len(partition)} stages and {sum(partition)} layers; needed are "
            f"{num_stages} stages of at least one layer, {num_layers} layers in all."
        )
    return list(partition)


def layer_costs(config: PretrainedConfig, anatomy: Anatomy) -> list[float]:
    """What each layer computes per token, in multiplications with weights; the last layer's includes the head's."""
    with torch.device("meta"), quiet_transformers():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    costs = [_multiplications(layer, config) for layer in model.get_submodule(anatomy.layers).children()]
    costs[-1] += sum(_multiplications(model.get_submodule(name), config) for name in anatomy.after)
    return costs


def _multiplications(module: nn.Module, config: PretrainedConfig) -> float:
    """Matrices multiply once with every token; of experts, held as one 3-D tensor, only those a token is sent to."""
    text = config.get_text_config()
    experts = next(
        (n for k in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(text, k, None))),
        1,
    )
    used = min(1.0, (getattr(text, "num_experts_per_tok", None) or 1) / experts)
    return sum(p.numel() * (used if p.dim() == 3 else 1.0) for p in module.parameters() if p.dim() > 1)
