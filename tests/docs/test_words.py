"""Pages, help texts and messages read as a native engineer would write them, as far as a list of phrases can tell."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = sorted((ROOT / "src").rglob("*.py"))
# What stood in them and has a plainer form, which follows the colon.
PHRASES = {
    "of what is drawn": "random seed",
    "the least that is said": "minimum log level",
    "take away the": "uncomment",
    "takes that file along": "copy this file too",
    "wanted were": "the target was",
    "take their place": "falls back to",
    "so many that the least": "the interval that minimises",
    "the allocator holds beside": "reserves on top",
    "mend it": "fix the line",
    "forwards alone": "run forward only",
    "end where nothing improves": "early stopping",
    "likewise for": "also for",
    "what is none": "what isn't one",
    "in place of the": "instead of the",
    "is to blame": "is at fault",
    "beside a mapping": "together with a mapping",
    "goes by validations": "needs validations",
    "nothing new is to be saved": "there is nothing new to save",
    "of which the answers count": "only answers count",
    "where nothing is said": "by default",
    "this process alone": "one process",
}
AT_MOST_THRICE = ("by name", "to the bit")


def messages(path: Path) -> Iterator[str]:
    """Yields the texts of a module that users may see: its strings without docstrings, but for those of settings."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance((body := node.body)[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden:
            yield " ".join(node.value.split())


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Returns all that a user may read, in small letters, by file."""
    read = {path: path.read_text() for path in PAGES} | {path: "\n".join(messages(path)) for path in MODULES}
    return {str(path.relative_to(ROOT)): " ".join(text.lower().split()) for path, text in read.items()}


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_page_or_message_has_a_phrase_that_nobody_would_say(texts: dict[str, str], phrase: str) -> None:
    assert not [name for name, text in texts.items() if phrase in text], f"write: {PHRASES[phrase]}"


@pytest.mark.parametrize("phrase", AT_MOST_THRICE)
def test_favourite_phrases_are_rare(texts: dict[str, str], phrase: str) -> None:
    found = {name: text.count(phrase) for name, text in texts.items() if phrase in text}
    assert sum(found.values()) <= 3, found
