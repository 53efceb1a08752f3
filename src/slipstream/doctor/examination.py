"""Runs all checks, one after another, each by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.doctor import communication, disk, machine
from slipstream.doctor.finding import Check, Finding, isolated

if TYPE_CHECKING:
    from slipstream.doctor.rank_exchange import RankExchange


@dataclass(frozen=True)
class Examination:
    """What was found out about this machine, and in a launched group about the links between its ranks."""

    findings: list[Finding]
    rank: int = 0
    """The rank that found it: 0 speaks for all."""
    exchange: RankExchange | None = None
    """With which a rank of a launched group leaves it."""

    @property
    def can_train(self) -> bool:
        """Whether nothing was found that would make training fail."""
        return all(finding.problem is None for finding in self.findings)


def examine(folder: Path, seconds: float = 30.0, tell: Callable[[str], None] = lambda _text: None) -> Examination:
    """Returns what this machine can do and what isn't here. Collective in a group that a launcher started.

    Args:
        folder: that runs go to; it needn't exist.
        seconds: that ranks wait for each other.
        tell: is called with what is looked at next.
    """
    tell("versions")
    has_torch = machine.can_import_torch()
    if has_torch:
        _read_slurm()
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    found: list[Finding] = []
    for topic, check in _checks(folder, has_torch):
        tell(topic)
        found += isolated(topic, check)
    if num_ranks == 1 or not has_torch:
        return Examination(found, rank)
    from slipstream.doctor.rank_exchange import RankExchange

    tell("exchange between ranks")
    exchange = RankExchange(seconds)
    found += isolated("exchange", lambda: exchange.run(found), is_vital=True)
    return Examination(found, rank, exchange)


def _read_slurm() -> None:
    """Names this process's rank as torchrun does, where srun has started it."""
    from slipstream.launch.slurm import is_task, torchrun_variables

    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys() and is_task(os.environ):
        os.environ.update(torchrun_variables(os.environ))


def _checks(folder: Path, has_torch: bool) -> Iterator[tuple[str, Check]]:
    yield "versions", machine.find_versions
    yield "processor", machine.find_processor
    yield "memory", machine.find_memory
    yield "folder", lambda: disk.find_folder(folder)
    yield "shared memory", disk.find_shared_memory
    if has_torch:
        yield from _checks_of_torch()


def _checks_of_torch() -> Iterator[tuple[str, Check]]:
    from slipstream.doctor import device_links, devices, kernel_rates

    yield "pinned memory", disk.find_pinned_limit
    yield "GPUs", devices.find_gpus
    yield "links", device_links.find_device_links
    yield "communication", communication.find_backends
    yield "loopback", communication.find_loopback
    yield "matrix product", kernel_rates.find_products
    yield "attention", kernel_rates.find_attention
    yield "compiler", kernel_rates.find_compiler
