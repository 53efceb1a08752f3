"""`python -m benchmarks` knows every benchmark, each says what it measures, and each record names one of them."""

from __future__ import annotations

import ast

import pytest
from benchmarks.__main__ import FOLDER, ON_REQUEST, TRIALS, first_line
from benchmarks.records import SUBJECTS

PAGES = {"records", "papers.page", "gpipe.page", "soak.page"}  # programs that write pages


def programs() -> set[str]:
    """Returns the modules that run as programs."""
    found = set()
    for path in FOLDER.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body):
            found.add(".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix("__main__").rstrip("."))
    return found - {""}


def test_every_program_is_listed_with_a_trial() -> None:
    assert programs() == set(TRIALS) | PAGES
    assert set(TRIALS) >= ON_REQUEST


def test_every_record_is_of_a_listed_program() -> None:
    assert {subject.program for subject in SUBJECTS.values()} <= set(TRIALS)


@pytest.mark.parametrize("name", TRIALS)
def test_a_program_says_what_it_measures_and_takes_options(name: str) -> None:
    path = FOLDER.joinpath(*name.split("."))
    source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert first_line(name)
    assert "ArgumentParser(" in source.read_text(encoding="utf-8")
