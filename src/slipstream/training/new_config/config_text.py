"""A configuration with comments: its sections and settings, and those that aren't used, as YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any

import yaml

_WIDTH = 110  # columns, in which a comment stands beside its setting


@dataclass(frozen=True)
class Setting:
    """A line of a section. One that isn't used is a comment, which becomes a setting without its #."""

    name: str
    value: Any
    comment: str = ""
    is_used: bool = True

    def lines(self) -> Iterator[str]:
        """Yields the lines, with the comment on the first or above it."""
        first, *rest = _yaml(self.name, self.value).splitlines()
        mark = "" if self.is_used else "# "
        beside = f"{first}  # {self.comment}"
        if self.comment and len(beside) > _WIDTH:
            yield f"# {self.comment}"
        yield f"{mark}{beside if self.comment and len(beside) <= _WIDTH else first}"
        yield from (f"{mark}{line}" for line in rest)


@dataclass(frozen=True)
class ConfigPart:
    """A section of the configuration, and lines on what it is for. One that isn't used is a comment as a whole."""

    name: str
    comment: str
    settings: tuple[Setting, ...]

    def with_values(self, values: Mapping[str, Any]) -> ConfigPart:
        """Returns the section with these values: in the place of its own, or after them."""
        known = {setting.name for setting in self.settings}
        kept = (Setting(each.name, values[each.name]) if each.name in values else each for each in self.settings)
        more = (Setting(name, value) for name, value in values.items() if name not in known)
        return replace(self, settings=(*kept, *more))

    def values(self) -> dict[str, Any]:
        """Returns the settings that are used."""
        return {setting.name: setting.value for setting in self.settings if setting.is_used}

    def lines(self) -> Iterator[str]:
        """Yields the section's lines."""
        is_used = bool(self.values())
        yield from (f"# {line}" for line in self.comment.splitlines())
        yield f"{self.name}:" if is_used else f"# {self.name}:"
        for setting in self.settings:
            shown = setting if is_used else replace(setting, is_used=True)
            yield from (f"  {line}" if is_used else f"#   {line}" for line in shown.lines())


def config_text(head: Sequence[str], parts: Sequence[ConfigPart]) -> str:
    """Returns the file: lines of comment, and the sections."""
    blocks = [[f"# {line}" if line else "#" for line in head], *([*part.lines()] for part in parts)]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _yaml(name: str, value: Any) -> str:
    """Returns YAML: a section within a section as a block, any other value in a line."""
    text = yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=10_000)
    if isinstance(value, dict):
        return f"{name}:\n{indent(text, '  ')}"
    return f"{name}: {text}".removesuffix("...\n")
