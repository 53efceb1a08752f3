"""Pipelines as most tests want them."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from slipstream import Action, Pipeline
from slipstream.schedule import COMMUNICATION
from support.options import grouped


def make_pipe(model: Any, *arguments: Any, **settings: Any) -> Pipeline:
    """Makes a Pipeline of a model, or from a configuration, without the self-check; records' options are given flat."""
    make = Pipeline.from_config if isinstance(model, PretrainedConfig) else Pipeline
    return make(model, *arguments, **grouped(**{"self_check": False} | settings))


def computed_rows(pipe: Pipeline) -> list[list[Action]]:
    """What each rank computes in a training step, in order."""
    return [[action for action in row if action.op not in COMMUNICATION] for row in pipe.layout.training.actions]
