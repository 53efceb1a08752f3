"""Finds what sources use of torch's modules for devices and processes that the oldest torch allowed doesn't have.

    python -m tools.oldest_torch          # names such uses; oldest_torch.json beside this file has what is there
    python -m tools.oldest_torch --write  # with the oldest torch installed: writes that file

What runs on GPUs alone can't show it where there are none, and type checkers see the torch that is installed.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from benchmarks.records import ROOT

NAMES = Path(__file__).with_suffix(".json")
MODULES = (
    *("torch.accelerator", "torch.backends.cuda", "torch.backends.cudnn", "torch.cpu", "torch.cuda"),
    *("torch.distributed", "torch.distributed.device_mesh", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.nn.attention", "torch.nn.attention.flex_attention", "torch.profiler"),
)
FOLDERS = ("src", "benchmarks", "tests")


def lacking(paths: Iterable[Path]) -> list[str]:
    """Returns the uses in source files, each with its file and line."""
    there = {module: frozenset(names.split()) for module, names in json.loads(NAMES.read_text())["names"].items()}
    found = []
    for path in paths:
        for line, used in _uses(ast.parse(path.read_text(encoding="utf-8"))):
            module = max((each for each in there if used.startswith(f"{each}.")), key=len, default="")
            name = used.removeprefix(f"{module}.").partition(".")[0]
            if module and name not in there[module]:
                found.append(f"{path}:{line}: {module}.{name}")
    return found


def sources(folders: Iterable[str] = FOLDERS) -> list[Path]:
    """Returns the sources in folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and full name of whatever a module names of torch."""
    full = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            yield from ((node.lineno, f"{node.module}.{each.name}") for each in node.names)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        names, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            names, inner = [inner.attr, *names], inner.value
        if isinstance(inner, ast.Name) and inner.id in full:
            yield node.lineno, ".".join([full[inner.id], *names])


def _names(module: ModuleType) -> list[str]:
    """Returns what a module has, its own modules included; of one that stands for another, what both have."""
    inside = [each.name for each in iter_modules(getattr(module, "__path__", ()))]
    return sorted({*dir(module), *dir(getattr(module, "m", module)), *inside})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="take the names of the torch that is installed")
    if parser.parse_args().write:
        names = {each: " ".join(_names(import_module(each))) for each in MODULES}
        NAMES.write_text(json.dumps({"torch": version("torch"), "names": names}, indent=1) + "\n")
        print(f"wrote {NAMES}")
        return
    found = lacking(sources())
    print("\n".join(found) or "all is there")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
