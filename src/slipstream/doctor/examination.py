"""Runs all checks, one after another, each by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.doctor import communication, disk, machine
from slipstream.doctor.finding import Check, Finding, isolated


@dataclass(frozen=True)
class Examination:
    """What was found out about this machine."""

    findings: list[Finding]

    @property
    def can_train(self) -> bool:
        """Whether nothing was found that would make training fail."""
        return all(finding.problem is None for finding in self.findings)


def examine(folder: Path, tell: Callable[[str], None] = lambda _text: None) -> Examination:
    """Returns what this machine can do and what isn't here.

    Args:
        folder: that runs go to; it needn't exist.
        tell: is called with what is looked at next.
    """
    found: list[Finding] = []
    for topic, check in _checks(folder):
        tell(topic)
        found += isolated(topic, check)
    return Examination(found)


def _checks(folder: Path) -> Iterator[tuple[str, Check]]:
    yield "versions", machine.find_versions
    yield "processor", machine.find_processor
    yield "memory", machine.find_memory
    yield "folder", lambda: disk.find_folder(folder)
    yield "shared memory", disk.find_shared_memory
    if machine.can_import_torch():
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
