"""Says why a toy of an architecture can't be run: what the configuration lacks, or what transformers' code needs."""

from __future__ import annotations

import copy
import re

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from slipstream.model.toy.toy_model import quiet_transformers

_SIZES = re.compile(r"num|dim|size|heads|experts|rank|types|parameters|width|top_?k")


def toy_failure(config: PretrainedConfig, error: Exception) -> str:
    """Returns the reason why `error` was raised, as the end of a sentence about the model."""
    if isinstance(error, ImportError):
        return f"transformers needs a package for it that isn't installed here: {' '.join(str(error).split())}"
    own = error if "NoneType" in str(error) else _own_failure(config)  # a toy has no None that the model hasn't
    if own is not None:
        return f"transformers' own code fails with this configuration ({_text(own)}){_unset(config)}"
    return f"a small copy of it, made to see how it runs, fails in transformers' code ({_text(error)})"


def _own_failure(config: PretrainedConfig) -> Exception | None:
    """Returns what transformers raises when it makes the model at its own size, without memory; None if nothing."""
    try:
        with torch.device("meta"), quiet_transformers():
            AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except Exception as error:  # the model's own code
        return error
    return None


def _unset(config: PretrainedConfig) -> str:
    fields = vars(config.get_text_config()).items()
    names = [name for name, value in fields if value in (None, {}) and _SIZES.search(name) and not name.startswith("_")]
    return f"; it leaves {', '.join(names)} open" if names else ""


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
