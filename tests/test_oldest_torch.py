"""Sources use nothing of torch's modules for devices that the oldest torch allowed doesn't have."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from tools.oldest_torch import NAMES, lacking, sources

from support.paths import ROOT


def test_sources_use_what_is_there() -> None:
    assert lacking(sources()) == []


def test_the_names_are_of_the_oldest_that_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = json.loads(NAMES.read_text(encoding="utf-8"))["torch"].partition("+")[0]
    assert f"torch>={oldest.removesuffix('.0')}" in project["dependencies"]


def test_what_is_newer_is_found(tmp_path: Path) -> None:
    """However it is named; what is asked for by getattr may be missing."""
    source = tmp_path / "source.py"
    source.write_text(
        """import torch
import torch.distributed as dist
from torch.cuda import CUDAGraph, newer_graph
from torch import distributed
torch.cuda.newer_stream(torch.cuda.Stream().newer)
dist.newer_gather(getattr(dist, "newer_scatter", None))
distributed.tensor.newer_placement
"""
    )
    assert sorted(each.partition(":")[2] for each in lacking([source])) == [
        "3: torch.cuda.newer_graph",
        "5: torch.cuda.newer_stream",
        "6: torch.distributed.newer_gather",
        "7: torch.distributed.tensor.newer_placement",
    ]
