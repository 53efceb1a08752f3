"""Pipelines as most tests want them."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from slipstream import Action, Pipeline
from slipstream.schedule import COMMUNICATION
from support.options import grouped


def make_pipe(model: Any, *arguments: Any, **settings: Any) -> Pipeline:
    """Makes a Pipeline of a model, or from a configuration, without the self-check; records' options are given flat.

    Where slices are given and no order, that is the usual one: `schedule=None` has it planned.
    """
    make = Pipeline.from_config if isinstance(model, PretrainedConfig) else Pipeline
    settings = {"self_check": False} | settings
    return make(model, *arguments, **grouped(**settings if arguments else in_usual_order(**settings)))


def in_usual_order(**settings: Any) -> dict[str, Any]:
    """Adds the usual order where slices are given and no order, which else would be planned: that takes longer than all
    that most tests do, and is tested by itself."""
    if "schedule" in settings or settings.get("slices") in (None, "auto"):
        return settings
    return settings | {"schedule": "1f1b" if settings.get("stages_per_rank", 1) == 1 else "interleaved-1f1b"}


def computed_rows(pipe: Pipeline) -> list[list[Action]]:
    """What each rank computes in a training step, in order."""
    return [[action for action in row if action.op not in COMMUNICATION] for row in pipe.layout.training.actions]
