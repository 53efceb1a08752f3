"""Reads what stands on a picture."""

from __future__ import annotations

import re
from pathlib import Path


def drawn_text(path: Path) -> set[str]:
    """Everything that is written on an SVG picture; matplotlib leaves it as a comment above the letters' shapes."""
    return set(re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8")))
