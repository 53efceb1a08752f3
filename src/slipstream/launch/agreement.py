"""Compares what all ranks of a run must have in common, and describes the differences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

import slipstream
from slipstream.version import __version__

_Value = TypeVar("_Value")


def describe_process(settings: Mapping[str, Any], device_type: str, texts: Mapping[str, str]) -> dict[str, str]:
    """Returns what must be equal on all ranks of a run, by name: versions, sources, kind of device, settings.

    Args:
        settings: nested dictionaries of JSON values.
        device_type: "cpu" or "cuda", and whether ranks share it.
        texts: the contents of files that the settings name, by what to call them; compared by their hashes.
    """
    return {
        "slipstream": __version__,
        "slipstream's source files": hash_sources(Path(slipstream.__file__).parent),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "device": device_type,
        **dict(_flatten(dict(settings))),
        **{name: _hash(text.encode()) for name, text in texts.items()},
    }


def hash_sources(package: Path) -> str:
    """Returns a hash of the names and the contents of a package's Python files."""
    files = sorted(package.rglob("*.py"))
    return _hash(b"".join(f"{file.relative_to(package)} {_hash(file.read_bytes())}\n".encode() for file in files))


def differences(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
    """Returns a line for each name whose value differs between ranks: the values, and the ranks that have them."""
    lines = []
    for name in dict.fromkeys(chain(*facts)):
        ranks_with = ranks_by_value([each.get(name, "absent") for each in facts])
        if len(ranks_with) > 1:
            values = (f"{value} on {name_ranks(ranks, hosts)}" for value, ranks in ranks_with.items())
            lines.append(f"{name}: {'; '.join(values)}")
    return lines


def ranks_by_value(values: Sequence[_Value]) -> dict[_Value, list[int]]:
    """Returns the ranks that have each value, where `values` are of rank 0, 1, ..."""
    ranks: dict[_Value, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Returns the ranks and their hosts as text, such as `ranks 0-3 (node0), rank 5 (node1)`."""
    grouped = groupby(ranks, key=lambda rank: hosts[rank])
    return ", ".join(f"{_ranks_text(list(numbers))} ({host})" for host, numbers in grouped)


def _ranks_text(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"rank {first}"
    is_gapless = len(numbers) == last + 1 - first
    return f"ranks {first}-{last}" if is_gapless else f"ranks {', '.join(map(str, numbers))}"


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields dotted names and values as they are typed on the command line."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
