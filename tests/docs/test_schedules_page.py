"""Every picture on the documentation's page of schedules is what the code above it prints."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slipstream.schedule import SCHEDULES
from support.paths import ROOT

PAGE = ROOT / "docs" / "schedules.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def test_what_the_page_shows_is_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    shown = 0
    for code, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        exec(code, names)
        printed = capsys.readouterr().out
        assert text == printed
        shown += bool(printed)
    assert shown > len(SCHEDULES)


def test_every_schedule_has_a_section_and_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in SCHEDULES:
        assert f"\n## {name}\n" in text
        assert f"\n| `{name}` | " in text
