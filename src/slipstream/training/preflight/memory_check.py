"""Checks that the memory limit has room for what every step holds, and says what to type where memory ran out."""

from __future__ import annotations

import math
import re
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.model import meta_model
from slipstream.model.adapters import find_frozen, freeze
from slipstream.training.config import Config
from slipstream.units import bytes_text

# Bytes of a parameter at least: float32, or bfloat16 with a float32 master, whose gradient may be in either
_FROZEN_BYTES, _TRAINED_BYTES, _STATE_BYTES = 4, 8, 8

_RAN_OUT = re.compile(r"out of memory|can't allocate memory|MemoryError|bad_alloc|ended by SIGKILL", re.IGNORECASE)


def less_memory(failure: str, config: Config) -> list[str]:
    """Returns a sentence about what to change and by how much, where the last line of a failure is one of memory.

    What changes no numbers comes first.
    """
    if not _RAN_OUT.search(failure.splitlines()[-1]):
        return []
    pipeline, memory, training = config.pipeline, config.memory, config.training
    rows, changes = training.batch_size // config.parallel.data, []
    if training.batch_tokens is None and pipeline.num_microbatches < rows and pipeline.microbatches is None:
        more = min(2 * pipeline.num_microbatches, rows)
        changes.append(f"--pipeline.num_microbatches={more} (now {pipeline.num_microbatches})")
    if memory.recompute == "none":
        changes.append("--memory.recompute=full")
    elif memory.offload < 1:
        changes.append(f"--memory.offload={min(1.0, memory.offload + 0.5):g} (now {memory.offload:g})")
    if config.parallel.data > 1 and not config.parallel.shard_optimizer:
        changes.append("--parallel.shard_optimizer=true")
    changes.append(f"a training.seq_len of half (now {training.seq_len}), or more ranks")
    why = "That is how Linux ends what runs out of memory. " if "SIGKILL" in failure.splitlines()[-1] else ""
    return [f"{why}To need less memory, try in this order: {'; '.join(changes)}"]


def check_memory(config: Config, model_config: Any) -> None:
    """Raises SlipstreamError where weights, gradients and AdamW's state alone are more than `memory.limit`.

    They are counted as if the ranks had equal parts, of which one at least has the mean. What a step holds besides is
    known only to the ranks, which refuse it before their first step.
    """
    limit, parallel, num_ranks = config.memory.limit, config.parallel, config.pipeline.num_ranks
    if limit is None:
        return
    state = _STATE_BYTES / (parallel.data if parallel.shard_optimizer else 1)
    whole = meta_model(model_config)
    freeze(whole, find_frozen(whole, config.model.freeze, "model.freeze"))
    number = sum(parameter.numel() for parameter in whole.parameters())
    trained = sum(parameter.numel() for parameter in whole.parameters() if parameter.requires_grad)
    trained = 0 if config.lora is not None else trained
    shared = num_ranks * parallel.tensor * (parallel.data if parallel.shard_parameters else 1)
    least = (_FROZEN_BYTES * (number - trained) + (_TRAINED_BYTES + state) * trained) / shared
    if least <= limit:
        return
    what = "the frozen weights" if config.lora is not None else "weights, gradients and AdamW's state"
    on = "the rank holds" if shared == 1 else f"one of the {config.num_processes} ranks holds"
    raise SlipstreamError(
        f"memory.limit={limit:.6g} ({bytes_text(limit)}), but {on} {bytes_text(least)} or more of {what} alone, of "
        f"{number:,} parameters. Give --memory.limit={math.ceil(2 * least):.1e} or so, "
        f"--pipeline.num_ranks={math.ceil(2 * num_ranks * least / limit)}, or a smaller model"
    )
