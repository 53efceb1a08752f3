"""The file that `slipstream plan` writes and `slipstream train` reads: the best plan as training settings."""

from __future__ import annotations

from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from slipstream.number_format import precision_of
from slipstream.planner import PlanReport
from slipstream.schedule import Schedule
from slipstream.version import __version__

_DIGITS = 6  # of the predicted numbers that are written


def schedule_file(path: Path) -> Path:
    """Returns the file of a found order, next to the plan file."""
    return path.with_suffix(".txt")


def write_plan_file(report: PlanReport, model: dict[str, Any], path: Path, lora: dict[str, Any] | None = None) -> None:
    """Writes the best plan as a training configuration, without the text to train on and the folder for results.

    An order that has no name is written to a text file next to it, which is named without its folder, so that both can
    be moved together. `model` is the configuration's `model` section, `lora` that of an adapter.
    """
    order = report.best.plan.schedule
    if isinstance(order, Schedule):
        schedule_file(path).write_text(f"{order}\n", encoding="utf-8")
    settings = plan_settings(report, model, schedule_file(path).name) | ({} if lora is None else {"lora": lora})
    if report.fused_gain:
        settings["plan"]["predicted"]["fused_gain"] = rounded(report.fused_gain)
    path.write_text(plan_text(settings, path, "slipstream plan"), encoding="utf-8")


def plan_text(settings: dict[str, Any], path: Path, command: str, source: str = "corpus=python-stdlib") -> str:
    """Returns the file `path` of a plan's settings, as YAML under the command that writes it and one that trains by it,
    from this source of data."""
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120)
    train = f"slipstream train {path} --data.{source} --training.output=runs/x --training.steps=10"
    return f"# Written by `{command}`.\n# {train}\n{text}"


def plan_settings(report: PlanReport, model: dict[str, Any], order: str) -> dict[str, Any]:
    """Returns the best plan as the nested dictionaries of a training configuration; `order` names the file of an order
    that was found."""
    training: dict[str, Any] = {"seq_len": report.seq_len, "batch_size": report.global_batch}
    if precision := precision_of(report.dtype):
        training["precision"] = precision
    sections = report.best.plan.dump(order)
    if report.sequence_parallel:
        sections["parallel"]["sequence_parallel"] = True
    return {
        "model": model,
        **sections,
        **({"runtime": {"fused": True}} if report.fused else {}),
        "training": training,
        "plan": {"predicted": _predicted(report)},
    }


def _predicted(report: PlanReport) -> dict[str, Any]:
    """Returns the predictions and their basis."""
    best = report.best
    return {
        "model": report.model,
        "cluster": report.cluster,
        "num_devices": report.num_devices,
        "dtype": report.dtype,
        "step_seconds": rounded(best.step_seconds),
        "tokens_per_second": rounded(best.tokens_per_second),
        "mfu": None if best.mfu is None else rounded(best.mfu),
        "idle_fraction": rounded(best.idle_fraction),
        "peak_memory_bytes": round(best.peak_memory),
        "memory_limit_bytes": round(best.memory_limit) if isfinite(best.memory_limit) else None,
        "versions": {"slipstream": __version__} | {name: metadata.version(name) for name in ("torch", "transformers")},
        "notes": list(report.notes),
    }


def rounded(number: float) -> float:
    """Returns a predicted number with the digits that are written."""
    return float(f"{number:.{_DIGITS}g}")
