"""The file that `slipstream plan` writes and `slipstream train` reads: the best plan as training settings."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from slipstream.number_format import precision_of
from slipstream.planner import PlanReport
from slipstream.version import __version__

_DIGITS = 6  # of the predicted numbers that are written


def schedule_file(path: Path) -> Path:
    """Returns the file of a found order, next to the plan file."""
    return path.with_suffix(".txt")


def write_plan_file(plan: PlanReport, model: dict[str, Any], path: Path, lora: dict[str, Any] | None = None) -> None:
    """Writes the best plan as a training configuration, without the text to train on and the folder for results.

    An order that has no name is written to a text file next to it, which is named without its folder, so that both can
    be moved together. `model` is the configuration's `model` section, `lora` that of an adapter.
    """
    schedule = plan.best.plan.schedule_name
    if plan.best.joint is not None:
        schedule = schedule_file(path).name
        schedule_file(path).write_text(f"{plan.best.joint.schedule}\n", encoding="utf-8")
    settings = plan_settings(plan, model, schedule) | ({} if lora is None else {"lora": lora})
    path.write_text(plan_text(settings, path, "slipstream plan"), encoding="utf-8")


def plan_text(settings: dict[str, Any], path: Path, command: str, source: str = "corpus=python-stdlib") -> str:
    """Returns the file `path` of a plan's settings, as YAML under the command that writes it and one that trains by it,
    from this source of data."""
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120)
    train = f"slipstream train {path} --data.{source} --training.output=runs/x --training.steps=10"
    return f"# Written by `{command}`.\n# {train}\n{text}"


def plan_settings(plan: PlanReport, model: dict[str, Any], schedule: str) -> dict[str, Any]:
    """Returns the best plan as the nested dictionaries of a training configuration; `schedule` is a name or file."""
    best, chosen = plan.best, plan.best.plan
    training: dict[str, Any] = {"seq_len": plan.seq_len, "batch_size": plan.global_batch}
    if precision := precision_of(plan.dtype):
        training["precision"] = precision
    stages = {"stages_per_rank": chosen.stages_per_rank} if best.joint is None else {}  # a file has its own
    return {
        "model": model,
        "pipeline": {
            "num_ranks": chosen.pipeline_parallel,
            **stages,
            "schedule": schedule,
            "num_microbatches": chosen.num_microbatches,
            "slices": [int(length) for length in chosen.slices],
            "partition": partition_setting(chosen.partition),
            **({"vocabulary": "spread"} if chosen.vocabulary == "spread" else {}),
        },
        "memory": {"recompute": chosen.recompute, "offload": float(chosen.offload)},
        "parallel": {
            "data": chosen.data_parallel,
            **chosen.degrees.settings,
            "shard": chosen.shard,
            **({"sequence_parallel": True} if plan.sequence_parallel else {}),
        },
        **({"runtime": {"fused": True}} if plan.fused else {}),
        "training": training,
        "plan": {"predicted": _predicted(plan)},
    }


def _predicted(plan: PlanReport) -> dict[str, Any]:
    """Returns the predictions and their basis, which training doesn't read."""
    best = plan.best
    return {
        "model": plan.model,
        "cluster": plan.cluster,
        "num_devices": plan.num_devices,
        "dtype": plan.dtype,
        "step_seconds": rounded(best.step_seconds),
        "tokens_per_second": rounded(best.tokens_per_second),
        "mfu": None if best.mfu is None else rounded(best.mfu),
        "idle_fraction": rounded(best.idle_fraction),
        "peak_memory_bytes": round(best.peak_memory),
        "memory_limit_bytes": round(best.memory_limit) if isfinite(best.memory_limit) else None,
        "versions": {"slipstream": __version__} | {name: metadata.version(name) for name in ("torch", "transformers")},
        "notes": list(plan.notes),
    }


def partition_setting(partition: Sequence[float]) -> list[float]:
    """Returns the layers of each stage as they are written, whole ones without a fraction."""
    return [int(layers) if layers == int(layers) else float(layers) for layers in partition]


def rounded(number: float) -> float:
    """Returns a predicted number with the digits that are written."""
    return float(f"{number:.{_DIGITS}g}")
