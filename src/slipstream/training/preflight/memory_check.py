"""What to type where memory ran out."""

from __future__ import annotations

import re

from slipstream.training.config import Config

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
