"""Stands in for the machine of a GPU session: a copy of what goes there, and a Python that finds no other packages.

That machine has PyTorch, transformers and packages too large to carry with what they require, those that are carried to
it, and the working tree but for what git ignores. A task that needs more fails in a dry run as it would there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, requires
from pathlib import Path
from typing import NamedTuple

THERE = ("torch", "transformers", "matplotlib", "numba", "pandas", "pip", "pyarrow", "setuptools")
# What Python runs first where it finds it: the finder of installed packages leaves some out, and their metadata.
_SITE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset({hidden!r})
PRESENT = frozenset({present!r})


class Finder:
    invalidate_caches = PathFinder.invalidate_caches

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name in HIDDEN else PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*context):
        found = PathFinder.find_distributions(*context)
        return (each for each in found if each.metadata["Name"].lower().replace("_", "-") in PRESENT)


sys.meta_path = [Finder if each is PathFinder else each for each in sys.meta_path]
"""


class BareMachine(NamedTuple):
    """Where processes of the stand-in run, and their environment."""

    tree: Path
    environment: Mapping[str, str]


def make_machine(root: Path, folder: Path, carried: Iterable[str]) -> BareMachine:
    """Makes the stand-in in a folder from the working tree at `root`."""
    tree, site = folder / "tree", folder / "site"
    _copy(root, tree)
    site.mkdir()
    present = {*_required(THERE), *map(_canonical, carried)}
    # What setuptools brings is found as packages by those who have imported it.
    brought = (each for each in distributions() if "_vendor" in Path(str(each.locate_file(""))).parts)
    present |= {_canonical(each.metadata["Name"]) for each in brought}
    hidden = [
        module
        for module, packages in packages_distributions().items()
        if module != "slipstream" and not present & set(map(_canonical, packages))
    ]
    (site / "sitecustomize.py").write_text(_SITE.format(hidden=hidden, present=sorted(present)), encoding="utf-8")
    path = os.pathsep.join(map(str, (site, tree / "src", tree)))
    return BareMachine(tree, os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""})


def _copy(root: Path, tree: Path) -> None:
    """Copies the files that git has or would add."""
    listing = ("git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    for source in (root / name for name in names if name):
        if source.is_file():  # removed ones are listed too
            target = tree / source.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _required(names: Iterable[str]) -> set[str]:
    """Returns the packages and all that they require here, without extras."""
    from packaging.requirements import Requirement

    found, waiting = set[str](), list(names)
    while waiting:
        name = _canonical(waiting.pop())
        if name in found:
            continue
        found.add(name)
        try:
            wanted = [Requirement(each) for each in requires(name) or ()]
        except PackageNotFoundError:
            continue  # of another system
        waiting += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
