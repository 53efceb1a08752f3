"""Keeps costs of a configuration's model in which the head weighs many layers, as if they had been measured here.

keep_heavy_head.py run.yaml PROCESSES
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig

from slipstream.cost import (
    OPS,
    ActionBytes,
    AttentionWindow,
    MeasuredLink,
    MeasuredStage,
    Profile,
    TimeFit,
    choose_stages,
    part_kinds,
)
from slipstream.pipeline.planning import StartRequest
from slipstream.profile.cost_cache import CostCache
from slipstream.profile.profile_run import identify_hardware, identify_model, versions
from slipstream.train.config import Config, load_config

UNITS = 2  # of a layer, its halves
EMBEDDING, HEAD = 2, 3  # the kinds of parts after the halves
SECONDS = {0: 1e-5, 1: 1e-5, EMBEDDING: 0.0, HEAD: 2e-4}  # of a token's forward, by kind
FIXED = 1e-6  # of a stage


def costs_of(config: Config, num_processes: int) -> tuple[CostCache, Profile]:
    """The place of the run's costs, and these."""
    training, pipeline = config.training, config.pipeline
    assert config.model.config is not None
    model = AutoConfig.for_model(**config.model.config)
    request = StartRequest(
        seq_len=training.seq_len,
        microbatch_size=training.batch_size // config.parallel.data // pipeline.num_microbatches,
        num_microbatches=pipeline.num_microbatches,
        num_ranks=pipeline.num_ranks,
        dtype="float32",
    )
    cpu, settings = torch.device("cpu"), request.profile
    kinds = (0,) * model.num_hidden_layers
    parts = part_kinds(kinds, UNITS)
    stages = choose_stages(parts)
    profile = Profile(
        hardware=identify_hardware(cpu, num_processes),
        model=identify_model(model),
        versions=versions(),
        dtype="float32",
        dtype_bytes=4,
        microbatch_size=request.microbatch_size,
        seq_len=training.seq_len,
        kinds=kinds,
        kind_names=("layer",),
        units_per_layer=UNITS,
        stages=tuple(stage_of(stage, [parts[part] for part in stage], settings.longest) for stage in stages),
        optimizer_seconds=1e-9,
        link=MeasuredLink(1e-6, 1e10, "gloo", ((1024, 1e-6),), ((1024, 1e-9),)),
    )
    return CostCache(model, settings, cpu, num_processes), profile


def stage_of(stage: range, kinds: list[int], longest: int) -> MeasuredStage:
    forward = sum(SECONDS[kind] for kind in kinds)
    each = {op: (2 if op.name == "B" else 1) * forward for op in OPS}
    windows = (AttentionWindow(),)
    return MeasuredStage(
        first=stage.start,
        last=stage.stop - 1,
        fits={
            op: TimeFit((1, longest), (FIXED + t, FIXED + longest * t), windows, (0.0,) * 4) for op, t in each.items()
        },
        points=dict.fromkeys(OPS, ()),
        activation_bytes=((1, 1000), (longest, 1000 * longest)),
        context_bytes=0,
        context_gradient_bytes=0,
        num_parameters=1000 * len(kinds),
        actions=tuple((n, ActionBytes(1000.0 * n, 0.0, dict.fromkeys(OPS, 0.0))) for n in (1, longest)),
    )


if __name__ == "__main__":
    cache, profile = costs_of(load_config(Path(sys.argv[1])), int(sys.argv[2]))
    cache.keep(profile, print)
