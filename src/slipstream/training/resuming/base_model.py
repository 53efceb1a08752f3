"""Tells the weights of the model apart whose adapter a checkpoint holds."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BLOCK = 2**16  # bytes that are read of a file at each of a number of places
_PLACES = 64


def describe_base(path: str) -> dict[str, Any]:
    """Returns what tells the weights in a folder from others: of each file its size and a checksum of its header and of
    blocks at equal distances; of a name on the hub that name."""
    folder = Path(path)
    files = sorted(folder.glob("*.safetensors"))
    return {"files": {file.name: _describe(file) for file in files}} if files else {"name": path}


def differs(saved: Mapping[str, Any] | None, path: str) -> bool:
    """Returns whether the weights at `path` aren't those that a checkpoint's adapter was trained on."""
    return saved is not None and dict(saved) != describe_base(path)


def _describe(file: Path) -> list[int]:
    size, checksum = file.stat().st_size, 0
    with file.open("rb") as opened:
        for start in sorted({size * place // _PLACES for place in range(_PLACES)}):
            opened.seek(start)
            checksum = zlib.crc32(opened.read(_BLOCK), checksum)
    return [size, checksum]
