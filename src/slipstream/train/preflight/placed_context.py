"""Decides before any rank starts where keys and values lie, where `memory.context` is auto."""

from __future__ import annotations

from typing import Any

from slipstream.launch import Progress
from slipstream.model import find_anatomy
from slipstream.pipeline import context_place, host_context_refusal
from slipstream.train.config import Config
from slipstream.train.device_choice import memory_of_a_rank
from slipstream.train.preflight.memory_check import step_account


def placed_context(config: Config, model_config: Any, progress: Progress) -> Config:
    """Returns the configuration with the place of keys and values, the same on all ranks, and says it.

    Raises:
        SlipstreamError: where they don't fit the device and can't be on the host, or what ranks hold can't be counted.
    """
    if config.memory.context != "auto":
        return config
    account = step_account(config, model_config)
    room = memory_of_a_rank(config) if config.memory.limit is None else config.memory.limit
    refusal = host_context_refusal(find_anatomy(model_config), f"model_type {model_config.model_type!r}")
    place = context_place(lambda: max(account(context="device").peaks()), room, refusal)
    progress.say(str(place))
    return config.model_copy(update={"memory": config.memory.model_copy(update={"context": place.name})})
