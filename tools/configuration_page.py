"""Writes docs/configuration.md, docs/configuration-pipeline.md and docs/coming-from.md from the sections of a
configuration and the names that other tools have for them: `python -m tools.configuration_page`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import yaml
from pydantic.fields import FieldInfo

from slipstream.option_errors import allowed_text, records_in
from slipstream.options import Record
from slipstream.train.config import Config
from slipstream.train.config.rules import OTHER_NAMES, OTHER_TOOLS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
PIPELINE_PAGE = ROOT / "docs" / "configuration-pipeline.md"
PIPELINE_SECTIONS = ("pipeline", "memory", "parallel", "runtime", "plan")
PREFACE = """\
# Configuration

`slipstream train config.yaml` reads a YAML file with the sections below. Every setting can also be given on the command
line, as `--section.setting=value`; values are YAML there too: `--pipeline.slices=[128,256,640]`,
`--optimizer.clip_norm=null`. `--pp`, `--dp`, `--cp`, `--tp` and `--ep` are short for `--pipeline.num_ranks`,
`--parallel.data`, `--parallel.context`, `--parallel.tensor` and `--parallel.experts`. An unknown key is an error.
In paths `~` is your home folder, also after `=` and in lists, where a shell leaves it as it is.

What is trained, on what, and how long: {here}. [How it is split and run](configuration-pipeline.md): {there}.

A minimal file, the demo's:
"""
PIPELINE_PREFACE = """\
# Configuration of the pipeline

The sections that say how a run is split and run: {here}. All others are in [Configuration](configuration.md). `memory`,
`parallel` and `runtime` are also arguments of the [Pipeline](api.md).
"""
# Settings of a Pipeline that a run takes from elsewhere
ELSEWHERE = {"runtime.stall_limit": "`training.stall_limit`"}


COMING_FROM = ROOT / "docs" / "coming-from.md"
COMING_FROM_PREFACE = """\
# Coming from other tools

`slipstream init MODEL DATA` writes a configuration to begin with. A configuration of {tools} isn't read; `slipstream
train` says so where it is given one. What their settings are called here, and what they take where that differs:

| there | here | what it takes |
| --- | --- | --- |
"""


def coming_from() -> str:
    """Returns the page on other tools' names as they are now."""
    *first, last = OTHER_TOOLS
    preface = COMING_FROM_PREFACE.format(tools=f"{', '.join(first)} or {last}")
    return preface + "".join(
        f"| `{name}` | {f'`{setting}`' if setting else 'none'} | {note} |\n"
        for name, (setting, note) in OTHER_NAMES.items()
    )


def page() -> str:
    """Returns the page of what is trained, as its sections are now."""
    example = (ROOT / "examples" / "demo.yaml").read_text(encoding="utf-8")
    here = [name for name in Config.model_fields if name not in PIPELINE_SECTIONS]
    preface = PREFACE.replace("{here}", _links(here)).replace("{there}", _links(PIPELINE_SECTIONS, PIPELINE_PAGE.name))
    return "\n".join([preface, f"```yaml\n{example}```\n", *_sections(here)])


def pipeline_page() -> str:
    """Returns the page of how it is split and run, as its sections are now."""
    return "\n".join([PIPELINE_PREFACE.format(here=_links(PIPELINE_SECTIONS)), *_sections(PIPELINE_SECTIONS)])


def _links(names: Iterable[str], page: str = "") -> str:
    return ", ".join(f"[{name}]({page}#{name})" for name in names)


def _sections(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        field = Config.model_fields[name]
        (record,) = records_in(field.annotation)
        yield from _section(name, record, _need(field))


def _need(field: FieldInfo) -> str:
    """Returns whether a section must be given, and what holds where it isn't."""
    if field.is_required():
        return "Required."
    return "Where it is left out, there is none." if field.default is None else ""


def _section(name: str, record: type[Record], need: str) -> Iterator[str]:
    yield f"## {name}\n\n{' '.join(filter(None, (_flat(record.__doc__), need)))}\n"
    yield _table(name, record, record.model_fields)
    for key, field in record.model_fields.items():
        for inner in records_in(field.annotation):
            own = [each for each in inner.model_fields if each not in record.model_fields]
            shared = ", ".join(f"`{each}`" for each in inner.model_fields if each in record.model_fields)
            yield f"### {name}.{key}\n\n{_flat(inner.__doc__)} Each has {shared} as above, and:\n"
            yield _table(f"{name}.{key}", inner, own)


def _table(section: str, record: type[Record], keys: Iterable[str]) -> str:
    texts = descriptions(record)
    rows = ["| setting | what it may be | default | what it does |", "| --- | --- | --- | --- |"]
    for key in keys:
        field, place = record.model_fields[key], ELSEWHERE.get(f"{section}.{key}")
        what = f"Of a Pipeline alone; a run takes {place}." if place else texts[key]
        cells = (f"`{key}`", _allowed(field), _default(field), what)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def descriptions(record: type[Record]) -> dict[str, str]:
    """Returns the docstring beneath each option of a record, its bases' included.

    Raises KeyError later, in the table, for an option without one.
    """
    found: dict[str, str] = {}
    for base in reversed(record.__mro__):
        if not issubclass(base, Record):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for option, text in zip(body.body, body.body[1:], strict=False):
            match option, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                    found[name] = _flat(said)
    return found


def _allowed(field: FieldInfo) -> str:
    """Returns what an option may be, in words; choices are in code as they are typed."""
    if records_in(field.annotation):
        return "a list, whose settings are below; or `null`"
    text = allowed_text(field.annotation, field.metadata)
    quoted = text.split("'")  # the odd ones are choices
    text = "".join(f"`{part}`" if index % 2 else part for index, part in enumerate(quoted))
    return f"{text}, or `null`" if NoneType in get_args(field.annotation) else text


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"`{_typed(field.get_default(call_default_factory=True))}`"


def _typed(value: Any) -> str:
    """Returns a value as it is typed in YAML, on one line."""
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    PIPELINE_PAGE.write_text(pipeline_page(), encoding="utf-8")
    COMING_FROM.write_text(coming_from(), encoding="utf-8")
