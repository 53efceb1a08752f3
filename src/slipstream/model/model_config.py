"""Makes models' configs, and checks inputs against what they say: the longest sequence and the largest token id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from slipstream.errors import SlipstreamError


def load_config(path: str) -> PretrainedConfig:
    """Returns the config of a model folder or hub name; raises SlipstreamError where there is none."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        known = "a folder with config.json" if Path(path).exists() else "an existing folder or a hub name"
        raise SlipstreamError(f"no model at {path!r}: expected {known}. {error}") from error


def config_from_settings(settings: Mapping[str, Any], name: str) -> PretrainedConfig:
    """Returns a config made of these settings, one of which is `model_type`.

    Raises SlipstreamError, which calls the settings `name`, where transformers doesn't accept them.
    """
    values = {"model_type": None, **settings}
    try:
        return AutoConfig.for_model(**values)
    except Exception as error:  # each architecture checks its settings in its own way
        raise SlipstreamError(f"{name} with model_type={values['model_type']!r} isn't usable: {error}") from error


def check_length(config: PretrainedConfig, length: int, setting: str = "") -> None:
    """Raises SlipstreamError for a sequence longer than the model's positions; `setting` names what gave the length.

    Rope of type dynamic grows with the sequence: there max_position_embeddings is only where it begins to.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None or length <= limit or rope.get("rope_type") == "dynamic":
        return
    given = f"the sequence has {length} tokens, but {config.model_type!r} has max_position_embeddings={limit}"
    if setting:
        given = f"{setting}={length} is more than the model's {limit} positions (max_position_embeddings)"
    raise SlipstreamError(f"{given}. Use at most {limit} tokens, or a config with more positions.")


def check_token_ids(config: PretrainedConfig, smallest: int, largest: int) -> None:
    """Raises SlipstreamError for a token id outside the model's vocabulary."""
    size = config.get_text_config().vocab_size
    if smallest < 0 or largest >= size:
        raise SlipstreamError(
            f"there is a token id {smallest if smallest < 0 else largest}, but the model has a vocabulary of {size} "
            f"(ids 0 to {size - 1}). Use the tokenizer the model was made for, or a config with a larger vocab_size."
        )
