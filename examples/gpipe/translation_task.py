"""A language pair that is on every machine: names from Python's standard library, snake_case to camelCase.

("open_code_page", "openCodePage")
"""

from __future__ import annotations

import re
import string
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from slipstream import SlipstreamError

PADDING, START, END = 0, 1, 2
_CHARACTERS = string.ascii_letters + "_"
VOCABULARY = 3 + len(_CHARACTERS)
_NAME = re.compile(r"(?<![A-Za-z0-9_])[a-z]+(?:_[a-z]+)+(?![A-Za-z0-9_])")


def sentences(longest: int = 16) -> list[str]:
    """Returns the standard library's snake_case names of up to `longest` letters, shuffled, always in one order."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = {
        name
        for file in sorted(folder.glob("*.py"))
        for name in _NAME.findall(file.read_text(encoding="utf-8", errors="ignore"))
        if len(name) <= longest
    }
    if len(found) < 100:
        raise SlipstreamError(
            f"{folder} has {len(found)} snake_case names: is Python's standard library there as text?"
        )
    names = sorted(found)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
    return [names[i] for i in order]


def translate(name: str) -> str:
    """Translates: returns the right answer."""
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def encode(names: list[str]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns ((source (b, S), target from its start token on (b, T)), the tokens to predict (b, T), -100 for none)."""
    translations = [translate(name) for name in names]
    source = _padded([_ids(name) for name in names])
    target = _padded([[START, *_ids(text)] for text in translations])
    predicted = _padded([[*_ids(text), END] for text in translations])
    return (source, target), predicted.masked_fill(predicted == PADDING, -100)


def decode(ids: Tensor) -> str:
    """Returns the text up to the end token."""
    text = ""
    for i in ids.tolist():
        if i == END:
            break
        text += _CHARACTERS[i - 3] if i > END else "?"
    return text


def _ids(text: str) -> list[int]:
    return [3 + _CHARACTERS.index(character) for character in text]


def _padded(rows: list[list[int]]) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [PADDING] * (width - len(row)) for row in rows])
