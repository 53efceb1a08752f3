"""Tells models apart by their configurations."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from slipstream.profiler import without_origin


def describe_model(config: PretrainedConfig) -> dict[str, Any]:
    """Returns what tells models apart: the settings that differ from the defaults of the model's class."""
    return {"model_type": config.model_type, **without_origin(config.to_diff_dict())}
