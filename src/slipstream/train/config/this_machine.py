"""Fills in what a configuration leaves to the machine: its processes and its GPUs."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from slipstream.train.config.overrides import check_names

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
