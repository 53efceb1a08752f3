"""Any Python from 3.11 to 3.13 and the oldest allowed torch will do: sources and lock serve each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from tools.oldest_torch import NAMES, lacking, sources

from support.paths import ROOT

VERSIONS = ["3.11", "3.12", "3.13"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REMOVED = {  # from the standard library, by 3.12 and 3.13
    *("asynchat", "asyncore", "distutils", "imp", "smtpd"),
    *("aifc", "audioop", "cgi", "cgitb", "chunk", "crypt", "imghdr", "lib2to3", "mailcap", "msilib", "nis", "nntplib"),
    *("ossaudiodev", "pipes", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib"),
}


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"python3.11": "", "python3.12": "", "python3": ""}, "python3.11"),
        ({"python3.11": "exit 127", "python3.12": ""}, "python3.12"),  # a name of a version that isn't active
        ({"python3.13": "", "python3": ""}, "python3.13"),
        ({"python3": ""}, "python3"),
        ({"python3": "3, 10"}, None),
        ({"python3": "3, 14"}, None),
        ({}, None),
    ],
)
def test_make_takes_the_first_that_it_finds(there: dict[str, str], taken: str | None, tmp_path: Path) -> None:
    for name, what in there.items():
        version = f"sys.version_info = ({what})" if "," in what else ""
        run = what if what.startswith("exit") else f'exec {sys.executable} -c "import sys; {version}\n$2"'
        (tmp_path / name).write_text(f"#!/bin/sh\n{run}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    make = shutil.which("make")
    assert make is not None
    shown = [make, "--dry-run", "--always-make", "install"]
    said = subprocess.run(shown, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=100)
    if taken is None:
        assert said.returncode == 2
        assert "There is no Python 3.11, 3.12 or 3.13 here: install one, or type where it is" in said.stderr
    else:
        assert said.returncode == 0, said.stderr
        assert said.stdout.startswith(f"{taken} -m venv .venv\n")


def test_the_project_names_them() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert named == VERSIONS
    assert [f"3.{minor}" for minor in range(9, 16) if f"3.{minor}.0" in allowed] == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_the_lock_has_all_that_it_needs(version: str) -> None:
    """By what the locked packages say of themselves: the versions of Python, and what each needs there."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    locked = dict(line.split("==") for line in lines if "==" in line)
    versions = {canonicalize_name(name): number for name, number in locked.items()}
    platform = {"python_version": version, "python_full_version": f"{version}.0", "extra": ""}
    for name in locked:
        package = distribution(name).metadata
        assert f"{version}.0" in SpecifierSet(package["Requires-Python"] or ""), name
        for text in package.get_all("Requires-Dist") or ():
            needed = Requirement(text)
            if (needed.marker is None or needed.marker.evaluate(platform)) and not _of_a_gpu(needed.name):
                found = versions.get(canonicalize_name(needed.name))
                assert found is not None, (name, text)
                assert needed.specifier.contains(found, prereleases=True), (name, text)


def _of_a_gpu(package: str) -> bool:
    """Whether PyTorch needs it on a GPU alone: the lock leaves it to the build of PyTorch that is installed."""
    return package.startswith(("nvidia-", "cuda-", "triton"))


def test_nothing_is_imported_that_was_removed() -> None:
    """New syntax is refused by ruff, whose `target-version` is the oldest."""
    imports = re.compile(r"^\s*(?:import|from) (\w+)", re.MULTILINE)
    for path in (
        path for folder in ("src", "benchmarks", "examples", "tools") for path in (ROOT / folder).rglob("*.py")
    ):
        assert not REMOVED & {*imports.findall(path.read_text(encoding="utf-8"))}, path


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
