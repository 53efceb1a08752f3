"""Checks that hosts have room for what ranks keep there: within `memory.host_limit`, and on this machine."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.machine_memory import MachineMemory, TemporaryFolder, machine_memory, temporary_folder
from slipstream.pipeline import UNCOUNTABLE, less_on_host
from slipstream.simulator import MemoryKind
from slipstream.train.config import Config
from slipstream.train.device_choice import choose_device_type, count_local_ranks
from slipstream.train.preflight.memory_check import step_account
from slipstream.units import bytes_text, plural, sizes_text

# On a CPU these are in files.
_IN_FILES = MemoryKind.CONTEXT, MemoryKind.ACTIVATIONS


def check_hosts(config: Config, model_config: Any) -> None:
    """Raises SlipstreamError where a rank would have more on its host than `memory.host_limit`, or this machine's ranks
    together more than it, or the container, has free.

    That is by the account of plans, for the longest sequences. Of a model that can't be counted only the ranks know it.
    """
    if not config.memory.uses_host:
        return
    held: tuple[dict[MemoryKind, float], ...] = ()
    with suppress(*UNCOUNTABLE):
        held = step_account(config, model_config)().host_memory()
    if not held:
        return
    _check_limit(config, held)
    here = Counter[MemoryKind]()
    for rank in _pipeline_ranks_here(config):
        here.update(held[rank])
    on_device = choose_device_type(config) == "cuda"
    _check_machine(config, here, {} if on_device else {kind: here[kind] for kind in _IN_FILES}, machine_memory())


def _check_limit(config: Config, held: tuple[dict[MemoryKind, float], ...]) -> None:
    limit = config.memory.host_limit
    peaks = [sum(kinds.values()) for kinds in held]
    if limit is None or max(peaks) <= limit:
        return
    rank = peaks.index(max(peaks))
    raise SlipstreamError(
        f"memory.host_limit={limit:.6g} ({bytes_text(limit)}), but by the planner's account rank {rank} would have "
        f"{bytes_text(peaks[rank])} on its host: {sizes_text(held[rank])}. Give --memory.host_limit="
        f"{math.ceil(peaks[rank])} or more, {_advice(config, held[rank])}"
    )


def _check_machine(
    config: Config, here: Mapping[MemoryKind, float], in_files: Mapping[MemoryKind, float], machine: MachineMemory
) -> None:
    """Raises SlipstreamError where the memory of this machine, or its temporary folder, has no room for what its ranks
    keep there, in files and in all."""
    ranks = plural(count_local_ranks(config), "rank")
    need = "needs" if ranks == "1 rank" else "need"
    size_of_files = sum(in_files.values())
    folder: TemporaryFolder | None = temporary_folder() if size_of_files else None
    if folder is not None and size_of_files > folder.free:
        raise SlipstreamError(
            f"by the planner's account the {ranks} here {need} {bytes_text(size_of_files)} in TMPDIR={folder.path} "
            f"({sizes_text(in_files)}), where {bytes_text(folder.free)} are free. Set TMPDIR to a folder on a larger "
            f"disk, {_advice(config, in_files)}"
        )
    takes_memory = folder is None or folder.takes_memory
    in_memory = {kind: size for kind, size in here.items() if takes_memory or kind not in in_files}
    needed = sum(in_memory.values())
    if needed <= machine.free:
        return
    has = "this machine" if machine.limit is None else "this container"
    disk = "" if folder is None or not takes_memory else "Set TMPDIR to a folder on a disk, as files in memory count, "
    advice = _advice(config, in_memory).removeprefix("or ")
    raise SlipstreamError(
        f"by the planner's account the {ranks} here {need} {bytes_text(needed)} of the host's memory "
        f"({sizes_text(in_memory)}), but {has} has {bytes_text(machine.free)} free of {bytes_text(machine.usable)}. "
        + (f"{disk}or {advice}" if disk else advice[0].upper() + advice[1:])
    )


def _pipeline_ranks_here(config: Config) -> Iterator[int]:
    """Yields for each rank of this machine its place on the pipeline."""
    first = int(os.environ.get("RANK", 0)) - int(os.environ.get("LOCAL_RANK", 0))
    per_place = config.num_processes // config.pipeline.num_ranks
    for rank in range(first, min(first + count_local_ranks(config), config.num_processes)):
        yield rank // per_place


def _advice(config: Config, held: Mapping[MemoryKind, float]) -> str:
    """Returns the end of a sentence: the settings by which less is on the host."""
    training = config.training
    settings = less_on_host(config.memory, held)
    if training.precision == "float32":
        settings.pop("context_gradients", None)
    typed = [f"--memory.{name}={value}" for name, value in settings.items()]
    if held.get(MemoryKind.OPTIMIZER) and config.parallel.num_copies > 1 and config.parallel.shard == "none":
        typed.insert(0, "--parallel.shard=optimizer")
    if held.get(MemoryKind.CONTEXT) or held.get(MemoryKind.ACTIVATIONS):
        typed.append(f"--training.seq_len={max(1, training.seq_len // 2)}")
    return f"or type one of {', '.join(typed)}" if len(typed) > 1 else f"or type {typed[0]}"
