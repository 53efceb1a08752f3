"""The house stays easy to see: folders that say what they are for, one class of a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from support.paths import ROOT

SRC = ROOT / "src" / "slipstream"
FOLDERS = sorted({path.parent for path in SRC.rglob("*.py")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SRC.parent)))
def test_a_folder_says_what_it_is_for(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def test_no_two_public_classes_have_one_name() -> None:
    homes = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(SRC)))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_nothing_is_called_utils() -> None:
    assert [path for path in SRC.rglob("*") if "util" in path.name] == []
