"""Describes wrong options in our own words: the given value, the allowed ones, and the nearest name."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from slipstream.errors import colon_hint, did_you_mean
from slipstream.units import numbers_meant

_SEVERAL = (list, tuple)
_KINDS = {int: "a whole number", float: "a number", str: "a text", Path: "a path", bool: "true or false"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts", Path: "paths"}
_POWER = re.compile(r"\d+(\.\d*)?[eE]\+?\d{1,2}")  # a number without a sign, which YAML 1.1 wants
_ALIKE = 0.6  # how alike two names must be, of 1


def describe_problems(error: ValidationError, record: Any) -> list[str]:
    """Returns one line for each option that is wrong: its name, its value, and the allowed ones.

    `record` is the class that refused. Where it has `other_names`, they say which option is meant by a name of another
    library, and a caution; `other_values` say so of an option's values, and `absent_values` why there is no such value.
    """
    lines: dict[str, str] = {}
    for problem in error.errors():
        place = _Place.of(record, problem["loc"])
        kind, value = problem["type"], problem["input"]
        if kind == "extra_forbidden":
            lines[place.name] = _unknown(place, record)
        elif kind == "missing" and place.is_whole:
            lines[place.name] = _missing(place)
        elif kind == "missing" and place.is_nested:
            lines.setdefault(place.parent().name, _wrong(place.parent(), value, record))
        elif kind == "value_error":
            reason = str(problem["ctx"]["error"])  # of a whole section it names the options by itself
            is_section = place.option is None or records_in(place.option.annotation)
            lines[place.name or reason] = reason if is_section else f"{place.name}={value!r}: {reason}"
        elif place.name.partition("[")[0] not in lines:  # of several types that were tried, the first says it
            lines.setdefault(place.name, _wrong(place, value, record))
    return list(lines.values())


def refuses_bool(option: FieldInfo) -> bool:
    """Returns whether an option isn't for true and false, which pydantic would take for 1 and 0."""
    return not any(kind in (bool, Any) for kind in _alternatives(option.annotation))


def as_whole_number(value: Any, option: FieldInfo) -> Any:
    """Returns the number that `1e3` is, which YAML takes for a text, for an option of whole numbers; else `value`."""
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in _alternatives(option.annotation)]
    is_power = isinstance(value, str) and _POWER.fullmatch(value) is not None
    return int(float(value)) if is_power and int in kinds and float(value).is_integer() else value


def allowed_text(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """Returns an option's allowed values: `'auto', a whole number from 1, or a list of whole numbers`."""
    choices, texts = [], []
    for kind in _alternatives(annotation):
        if get_origin(kind) is Literal:
            choices += [repr(value) for value in get_args(kind)]
        elif kind is not types.NoneType:
            texts.append(_type_text(kind, limits))
    *first, last = [*choices, *dict.fromkeys(texts)]
    return f"{', '.join(first)} or {last}" if first else last


@dataclass(frozen=True)
class _Place:
    """An option of a record, or of one of its sections, and how it is typed."""

    path: tuple[str, ...]  # the sections, and the option
    owner: type[BaseModel] | None  # the section that has the option, or would have it
    option: FieldInfo | None  # None where there is none of this name, or the whole record is meant
    is_whole: bool  # and not one value of several
    elements: tuple[int, ...] = ()  # of a value in a list of the option, or in lists in it, its places

    @classmethod
    def of(cls, record: type[BaseModel], place: Sequence[int | str]) -> _Place:
        """Follows pydantic's path, in which there are also names of types that were tried."""
        section = vars(record).get("section") or ""
        path, owner, option, is_whole = [section] if section else [], record, None, True
        elements: tuple[int, ...] = ()
        for key in place:
            if isinstance(key, int):
                is_whole, elements = False, (*elements, key)
                if path:
                    path[-1] += f"[{key}]"
            elif option is None or (inner := records_in(option.annotation)):
                owner = record if option is None else inner[0]
                option, is_whole, elements = owner.model_fields.get(key), True, ()
                path.append(key)
        return cls(tuple(path), owner, option, is_whole, elements)

    @property
    def name(self) -> str:
        """The option as it is typed."""
        return ".".join(self.path)

    def parent(self) -> _Place:
        """The list that has this value."""
        path = (*self.path[:-1], self.path[-1].rpartition("[")[0])
        return replace(self, path=path, elements=self.elements[:-1], is_whole=len(self.elements) == 1)

    @property
    def is_nested(self) -> bool:
        """Whether this is a value in a list of lists, or such a list in it."""
        return self.option is not None and bool(self.elements) and _is_nested(self.option.annotation)

    @property
    def annotation(self) -> Any:
        """The type of the option; of a value in lists that of the value, which the option has once."""
        hint = None if self.option is None else self.option.annotation
        for element in self.elements if self.is_nested else ():
            several = next((kind for kind in _alternatives(hint) if get_origin(kind) in _SEVERAL), None)
            inner = get_args(several)
            hint = inner[min(element, len(inner) - 1)] if inner else hint
        return hint


def _wrong(place: _Place, given: Any, record: type[BaseModel]) -> str:
    assert place.option is not None
    annotation, limits = place.annotation, () if place.is_nested else place.option.metadata
    if inner := records_in(annotation):
        settings = ", ".join(sorted(inner[0].model_fields))
        section = place.path[-1]
        if given is None:
            return f"{place.name} is an empty section: indent its settings below {section}:, which are {settings}"
        if isinstance(given, str) and (hint := colon_hint(given)):
            return f"{place.name}={given!r}: {section} is a section of settings; {hint}"
        return f"{place.name}={given!r}: {section} is a section; give its settings, which are {settings}"
    name = place.name
    if isinstance(given, list) and not place.is_nested:  # which has too few values
        name = place.name.partition("[")[0]
    line = f"{name}={given!r}: give {allowed_text(annotation, limits)}"
    if isinstance(given, bool):
        line += " (yes, no, on and off are read as true and false)"
    absent: Mapping[str, Mapping[str, str]] = getattr(record, "absent_values", {})
    if isinstance(given, str) and (reason := absent.get(place.name, {}).get(given.lower())):
        return f"{line}; {reason}"
    meant = _meant(place, given, annotation, record)
    return line + (f"; did you mean {place.name}={meant}?" if meant else "")


def _meant(place: _Place, given: Any, annotation: Any, record: type[BaseModel]) -> str:
    """Returns the value that was meant, as it is typed; "" where that isn't known."""
    others: Mapping[str, Mapping[Any, str]] = getattr(record, "other_values", {})
    for name, meant in others.get(place.name, {}).items():
        if name == (given.lower() if isinstance(given, str) else given) and type(name) is type(given):
            return meant
    kinds = _alternatives(annotation)
    names = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    if isinstance(given, str) and (near := difflib.get_close_matches(given.lower(), names, 1, _ALIKE)):
        return near[0]
    takes_several = any(get_origin(kind) in _SEVERAL for kind in kinds)
    if takes_several and isinstance(given, str) and ("," in given or not names):
        return f"[{given}]"
    numbers = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds]
    if isinstance(given, str) and not {int, float}.isdisjoint(numbers):
        return f" or {place.name}=".join(numbers_meant(given, is_whole=int in numbers))
    return ""


def _unknown(place: _Place, record: type[BaseModel]) -> str:
    """Says that there is no such option, and which was meant: of this name elsewhere, or of the nearest one here."""
    key, owner = place.path[-1], place.owner
    if glued := colon_hint(key):
        return f"unknown key {place.name}; {glued}"
    if len(place.path) > 1 and key in record.model_fields and records_in(record.model_fields[key].annotation):
        return (
            f"unknown key {place.name}; {key} is a section of its own, and not one in {place.path[-2]}: indent it less"
        )
    others: Mapping[str, tuple[str, str]] = getattr(record, "other_names", {})
    where = ".".join(place.path[:-1])
    known = [] if owner is None else sorted(owner.model_fields)
    elsewhere = dict(_names_of_all(record))
    hint = did_you_mean(key, known, where and f"{where}.")
    meant, note = others.get(place.name) or others.get(key) or (elsewhere.get(key), "")
    if note:
        hint = f"; here it is {meant!r}: {note}" if meant else f"; {note}"
    elif meant:
        hint = f"; did you mean {meant!r}?"
    elif hint == ".":
        hint = f"; {where or 'the configuration'} has: {', '.join(known)}"
    return f"unknown key {place.name}{hint}"


def _names_of_all(record: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yields all sections' options: the name alone, and as it is typed. Of equal names the first section's is last."""
    for section, option in reversed(record.model_fields.items()):
        for inner in reversed(records_in(option.annotation)):
            yield from ((name, f"{section}.{name}") for name in inner.model_fields)


def _missing(place: _Place) -> str:
    annotation = None if place.option is None else place.option.annotation
    needed = [
        name for inner in records_in(annotation) for name, option in inner.model_fields.items() if option.is_required()
    ]
    settings = [f"--{place.name}.{name}=..." for name in needed] or [f"--{place.name}=..."]
    return f"{place.name} is missing; add it to the configuration or give {' and '.join(settings)}"


def _alternatives(annotation: Any) -> list[Any]:
    """Returns the types that a union allows, without their annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        first, *metadata = get_args(annotation)
        inner = _alternatives(first)
        return [Annotated[kind, *metadata] if kind in (int, float) else kind for kind in inner]
    if origin in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in _alternatives(part)]
    return [annotation]


def _is_nested(annotation: Any) -> bool:
    """Returns whether a type has lists in a list, and no section."""
    inner = [get_args(kind) for kind in _alternatives(annotation) if get_origin(kind) in _SEVERAL]
    return any(get_origin(one) in _SEVERAL for several in inner for part in several for one in _alternatives(part))


def records_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the sections that an option's type has, alone or in a list."""
    records = []
    for kind in _alternatives(annotation):
        inner = get_args(kind)[0] if get_origin(kind) in _SEVERAL else kind
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            records.append(inner)
    return records


def _type_text(kind: Any, limits: Sequence[Any]) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _number_text(inner[0], inner[1:])
    if kind in (int, float):
        return _number_text(kind, limits)
    if origin is list:
        elements = [get_args(part)[0] if get_origin(part) is Annotated else part for part in _alternatives(inner[0])]
        what = next((_PLURALS[element] for element in reversed(elements) if element in _PLURALS), "values")
        if get_origin(inner[0]) is tuple:
            what = f"lists [{', '.join(allowed_text(argument) for argument in get_args(inner[0]))}]"
        return f"a list of {what}"
    if origin is tuple and len({str(value) for value in inner}) > 1:
        return f"a list [{', '.join(allowed_text(value) for value in inner)}]"
    if origin is tuple:
        return f"a list of {len(inner)} {_PLURALS.get(inner[0], 'values')}"
    if kind is dict or origin in (dict, Mapping):
        return "settings in braces, such as {name: value}"
    return _KINDS.get(kind, "another value")


def _number_text(kind: Any, limits: Sequence[Any]) -> str:
    """Returns `a whole number from 1`, or `a number from 0 to 1`."""
    marks: dict[str, Any] = {}
    for limit in limits:
        marks |= {name: getattr(limit, name) for name in ("gt", "ge", "lt", "le") if hasattr(limit, name)}
        marks |= dict(_number_marks(limit))
    text = _KINDS[kind]
    if "gt" in marks and kind is int:
        text += f" from {marks['gt'] + 1}"
    elif "gt" in marks:
        text += f" above {marks['gt']:g}"
    elif "ge" in marks:
        text += f" from {marks['ge']:g}"
    if "le" in marks:
        text += f" to {marks['le']:g}"
    elif "lt" in marks:
        text += f" to just below {marks['lt']:g}"
    return text


def _number_marks(limit: Any) -> Iterator[tuple[str, Any]]:
    """Yields the limits of a `Field` within an annotation."""
    if isinstance(limit, FieldInfo):
        for mark in limit.metadata:
            yield from ((name, getattr(mark, name)) for name in ("gt", "ge", "lt", "le") if hasattr(mark, name))
