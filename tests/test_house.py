"""The house stays easy to see: folders of at most fourteen modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.paths import ROOT

SRC = ROOT / "src" / "slipstream"
FOLDERS = sorted({path.parent for path in SRC.rglob("*.py")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SRC.parent)))
def test_a_folder_has_at_most_fourteen_modules_and_says_what_it_is_for(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= 14
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def test_nothing_is_called_utils() -> None:
    assert [path for path in SRC.rglob("*") if "util" in path.name] == []
