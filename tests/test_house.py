"""The house stays easy to see: modules read in one go, folders that say what they are for, one class of a name."""

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


def test_a_module_has_at_most_six_hundred_lines() -> None:
    lengths = {str(path.relative_to(SRC)): len(path.read_bytes().splitlines()) for path in SRC.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 600} == {}


MOST_LINES_OF_CODE = 41_301
"""Lines of code that there are, of the 32,500 that are wanted: a change that needs fewer lowers it."""


def test_there_is_no_more_code_than_there_was() -> None:
    """Lines without imports, docstrings, whole-line comments and blanks; what is shorter is to be said once."""
    assert sum(map(_lines_of_code, SRC.rglob("*.py"))) <= MOST_LINES_OF_CODE


def _lines_of_code(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(number not in left_out and bool(line.split("#")[0].strip()) for number, line in lines)


def test_there_are_at_most_three_hundred_modules() -> None:
    assert len(list(SRC.rglob("*.py"))) <= 300


def test_a_small_module_has_several_importers() -> None:
    """What one module next door alone uses belongs there, unless it is large, or its import waits."""
    importers: dict[str, set[str]] = defaultdict(set)
    waiting: dict[str, set[str]] = defaultdict(set)
    for path in sorted(SRC.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                at_once = node in tree.body
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    (importers if at_once else waiting)[name].add(_module(path))
    shredded = {}
    for path in sorted(SRC.rglob("*.py")):
        name, length = _module(path), len(path.read_bytes().splitlines())
        users = importers[name] | waiting[name]
        next_door = {user for user in users if user.rpartition(".")[0] == name.rpartition(".")[0]}
        alone = len(users) == 1 and users == next_door and users == importers[name]
        if path.stem != "__init__" and length < 80 and alone:
            shredded[name] = (length, users)
    assert shredded == {}


def _module(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_two_public_classes_have_one_name() -> None:
    homes = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(SRC)))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_nothing_is_called_utils() -> None:
    assert [path for path in SRC.rglob("*") if "util" in path.name] == []
