"""Reads JSON and YAML that anybody may have written: nested as deep as may be, huge once expanded, or in no file.

What can't be read is an error of the caller's usual kind, and never a RecursionError, an endless wait or a full memory.
"""

from __future__ import annotations

import errno
import json
import stat
from pathlib import Path
from typing import Any

_MOST_DEEP = 100  # lists and objects within each other
# A YAML text may stand for this many values, each alias counted as all that it repeats.
_MOST_VALUES = 1_000_000
# Pipes such as those of `<(command)` have a writer, so reading them ends.
_OPEN_PIPES = ("/dev/", "/proc/")


def read_text(path: Path) -> str:
    """Returns the text of a file in UTF-8. Raises OSError, also for a named pipe, whose reader may wait for ever."""
    if stat.S_ISFIFO(path.stat().st_mode) and not str(path).startswith(_OPEN_PIPES):
        raise OSError(errno.EINVAL, "it is a named pipe, and not a file")
    return path.read_text(encoding="utf-8")


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError where it isn't JSON, or is nested too deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    level = [value]
    for _ in range(_MOST_DEEP):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return value
    raise ValueError(_too_deep())


def _inside(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in values if isinstance(inner, dict | list)]


def parse_yaml(text: str, loader_class: Any = None) -> Any:
    """Returns the value of a YAML text, by `yaml.SafeLoader` or another class. Raises yaml.YAMLError where it isn't
    YAML, is nested too deep, holds a number that is too long, or expands to more than a million values."""
    import yaml

    loader = (loader_class or yaml.SafeLoader)(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node)
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError(_too_deep()) from None
    except ValueError as error:
        # A number may be too long, or a date impossible.
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def _check_nodes(root: Any) -> None:
    """Raises YAMLError where the nodes, of which an alias repeats one, are nested too deep or stand for too many."""
    import yaml

    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()
    todo = [(root, False)]
    while todo:
        node, is_done = todo.pop()
        inside = [] if isinstance(node, yaml.ScalarNode) else _children(node)
        if is_done:
            open_nodes.discard(id(node))
            sizes[id(node)] = 1 + sum(sizes[id(child)] for child in inside)
            if sizes[id(node)] > _MOST_VALUES:
                raise yaml.YAMLError(f"its aliases (*name) stand for more than {_MOST_VALUES:,} values")
        elif id(node) in open_nodes:
            raise yaml.YAMLError("an alias (*name) is inside of what it stands for")
        elif id(node) not in sizes:
            open_nodes.add(id(node))
            if len(open_nodes) > _MOST_DEEP:
                raise yaml.YAMLError(_too_deep())
            todo.append((node, True))
            todo += [(child, False) for child in inside]


def _children(node: Any) -> list[Any]:
    return [child for item in node.value for child in (item if isinstance(item, tuple) else (item,))]


def _too_deep() -> str:
    return f"more than {_MOST_DEEP} lists and objects are inside of each other"
