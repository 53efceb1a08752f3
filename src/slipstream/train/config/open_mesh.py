"""Fills in axes of the mesh that a configuration leaves open, and yields the meshes that these allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.train.config.config_values import parse_config
from slipstream.train.config.mesh_settings import AXES, MESH_SETTINGS
from slipstream.train.config.run_config import DECIDED_BY_PLAN, Config
from slipstream.train.config.sections import fill_replicas
from slipstream.train.config.this_machine import count_launched


def fill_mesh(values: dict[str, Any]) -> None:
    """Gives an axis that is `auto` the processes that the others leave: the launcher's, or one for each GPU. Of several
    that are, it gives the first sizes that fit, and notes that they are to be chosen. Experts have replicas over which
    they are spread."""
    parallel = values.get("parallel")
    if isinstance(parallel, dict):
        fill_replicas(parallel)
    sizes = {
        axis: (values.get(section) or {}).get(name) or getattr(Config.model_fields[section].default, name)
        for axis, (section, name) in MESH_SETTINGS.items()
        if axis in AXES
    }
    automatic = [axis for axis, size in sizes.items() if size == "auto"]
    if not automatic:
        return
    others = prod(int(size) for axis, size in sizes.items() if axis not in automatic)
    world = _num_processes(automatic[0], None if len(automatic) == 1 else _FEWEST * others)
    if world % others:
        raise SlipstreamError(
            f"--{automatic[0]}=auto: {world} processes don't divide by the {others} of the other axes; start a "
            f"multiple of {others}, or change them"
        )
    if len(automatic) == 1:
        section, name = MESH_SETTINGS[automatic[0]]
        values.setdefault(section, {})[name] = world // others
        return
    _leave_mesh_open(values, automatic)
    for filled in meshes_of(values, world // others):
        values |= filled
        with suppress(SlipstreamError):
            parse_config(values)
            return


_FEWEST = 2  # processes on a machine without a GPU


def _leave_mesh_open(values: dict[str, Any], axes: Sequence[str]) -> None:
    """Notes the open choices: axes of the mesh, and the microbatches where the configuration doesn't give them. The
    order, slices and cut are left to a plan on one rank too, unless some of that is given."""
    pipeline, memory = (values.setdefault(name, {}) for name in ("pipeline", "memory"))
    if not (DECIDED_BY_PLAN["pipeline"] & pipeline.keys() | DECIDED_BY_PLAN["memory"] & memory.keys()):
        pipeline |= {"schedule": "auto", "slices": "auto"}
    is_fixed = (values.get("data") or {}).get("packing", "fixed") == "fixed"
    free = ["microbatches"] if is_fixed and "num_microbatches" not in pipeline else []
    values.setdefault("plan", {})["open"] = [*axes, *free]


def meshes_of(values: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yields the configuration, as nested dictionaries, with each way to lay `number` ranks on the axes that are open,
    those with fewest ranks that share layers first, then fewest that share slices, then those with most pipeline ranks;
    where microbatches are open, each has one sequence."""
    is_open = values["plan"]["open"]
    axes = [axis for axis in reversed(AXES) if axis in is_open]
    for sizes in _products(number, len(axes)):
        filled = values | {section: dict(values.get(section) or {}) for section, _ in MESH_SETTINGS.values()}
        for axis, size in zip(axes, sizes, strict=True):
            section, name = MESH_SETTINGS[axis]
            filled[section][name] = size
        if "microbatches" in is_open and isinstance(rows := values["training"].get("batch_size", 1), int):
            filled["pipeline"]["num_microbatches"] = max(1, rows // filled["parallel"].get("data", 1))
        yield filled


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields `count` numbers whose product is `number`, the smallest first."""
    if count == 1:
        yield (number,)
        return
    for first in (factor for factor in range(1, number + 1) if number % factor == 0):
        yield from ((first, *rest) for rest in _products(number // first, count - 1))


def _num_processes(axis: str, without_gpu: int | None) -> int:
    if launched := count_launched():
        return launched
    import torch

    num_processes = torch.cuda.device_count() or without_gpu
    if num_processes is None:
        raise SlipstreamError(
            f"--{axis}=auto: there is no launcher and no GPU to count; give a number, such as --{axis}=2"
        )
    return num_processes
