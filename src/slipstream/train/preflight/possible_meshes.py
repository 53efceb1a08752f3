"""The meshes that are possible where a configuration leaves axes open, and the one to begin with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from slipstream.errors import SlipstreamError
from slipstream.train.config import Config, dump_config
from slipstream.train.config.config_values import parse_config
from slipstream.train.config.this_machine import meshes_of
from slipstream.train.preflight.model_checks import check_layers, check_shares
from slipstream.train.preflight.optimizer_check import check_optimizer
from slipstream.train.preflight.resumed_run import find_saved
from slipstream.train.recorded_plan import is_open, plan_obstacle


def possible_meshes(config: Config, model_config: Any) -> Iterator[Config]:
    """Yields the configuration with each mesh that its batch, the model's layers and heads, and the optimizer allow.

    Raises SlipstreamError where there is none, or where the configuration gives some of a plan's choices.
    """
    axes = " and ".join(f"--{axis}=auto" for axis in config.plan.open if axis != "microbatches")
    if not is_open(config):
        reason = plan_obstacle(config).partition(", so the run")[0] or "schedule and slices are given"
        raise SlipstreamError(
            f"{axes}: meshes are compared by the best plan of each, but {reason}. Leave that out, or give the sizes of "
            "all axes but one"
        )
    problem, num_meshes = None, 0
    values = yaml.safe_load(dump_config(config))
    left = config.num_processes // config.num_ranks_without(config.plan.open)
    for filled in meshes_of(values, left):
        try:
            tried = parse_config(filled)
            check_layers(tried, model_config)
            check_shares(tried, model_config)
            check_optimizer(tried, model_config)
        except SlipstreamError as error:
            problem = problem or error
            continue
        num_meshes += 1
        yield tried
    if not num_meshes:
        raise SlipstreamError(f"{axes}: no mesh of {config.num_processes} ranks is possible: {problem}")


def first_mesh(config: Config, model_config: Any) -> Config:
    """Returns the configuration with the mesh of the checkpoint that it resumes from, if that is of as many ranks, and
    else, until one is chosen, with the first that is possible."""
    if not config.plan.open:
        return config
    saved = find_saved(config)
    if saved is not None and "settings" in saved.facts:
        sizes = {axis: saved.facts["mesh"].get(axis, 1) for axis in ("pp", "dp", "cp", "tp")}
        mesh = config.on_mesh(sizes, saved.facts["settings"]["pipeline"]["num_microbatches"])
        chosen = mesh.model_copy(update={"plan": config.plan.model_copy(update={"open": []})})
        candidate = parse_config(yaml.safe_load(dump_config(chosen)))
        if candidate.num_processes == config.num_processes:
            return candidate
    return next(possible_meshes(config, model_config))
