"""Fills in what a configuration leaves to the machine: its processes, its GPUs, and axes of the mesh that are open."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.train.config.config_values import parse_config
from slipstream.train.config.overrides import check_names
from slipstream.train.config.run_config import DECIDED_BY_PLAN, Config
from slipstream.train.config.sections import AXES, MESH_SETTINGS, fill_replicas

# Files of drivers, without one of which there is no GPU
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def count_launched() -> int:
    """Returns how many processes torchrun or srun has started, of which this is one; 0 where neither has."""
    environment = os.environ
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "") if "SLURM_PROCID" in environment else ""
    size = environment.get("WORLD_SIZE", "") if "RANK" in environment else tasks if tasks != "1" else ""
    # Where the number is wrong, the ranks name the right one.
    return int(size) if size.isdigit() else 0


def _count_gpus(values: dict[str, Any]) -> int:
    """Returns how many GPUs this process may use. Imports torch only where there may be some, once the configuration's
    names are right."""
    if not any(map(os.path.exists, _GPU_FILES)):
        return 0
    check_names(values)
    import torch

    return torch.cuda.device_count()


def fill_in_for_this_machine(values: dict[str, Any]) -> None:
    """Gives the pipeline the ranks that the launcher started, or one for each GPU, and the weights a precision that the
    GPUs are made for, where the configuration says neither."""
    sections = ("pipeline", "parallel", "training")
    pipeline, parallel, training = (values.get(name) or {} for name in sections)
    if not all(isinstance(section, dict) for section in (pipeline, parallel, training)):
        return
    gpus = 0 if training.get("device") == "cpu" else _count_gpus(values)
    is_open = "num_ranks" not in pipeline and "auto" not in (
        parallel.get(name) for name in ("data", "context", "tensor")
    )
    if is_open and (gpus or count_launched()):
        values["pipeline"] = {**pipeline, "num_ranks": "auto"}
    if gpus and "precision" not in training and _has_bfloat16():
        values["training"] = {**training, "precision": "bf16-weights"}


def _has_bfloat16() -> bool:
    """Returns whether all GPUs multiply in bfloat16, asked without touching CUDA, which ranks couldn't use then."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        capabilities = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS_TO_ASK, check=True).stdout
        return min(map(float, capabilities.split())) >= _FIRST_WITH_BFLOAT16
    except (OSError, ValueError, subprocess.SubprocessError):
        return False


_SECONDS_TO_ASK, _FIRST_WITH_BFLOAT16 = 30.0, 8.0


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
