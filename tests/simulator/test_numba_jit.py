"""The cache of compiled functions on disk, which other versions of Slipstream may have written."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.timeouts import LIMIT

SOURCE = """
from typing import NamedTuple

from slipstream.numba_jit import compiled

class {pair}(NamedTuple):
    first: int
    second: int

@compiled
def total(pair):
    return pair.first + pair.second

def run():
    return total({pair}(1, 2)), sum(total.stats.cache_hits.values())
"""


def test_a_renamed_class_in_the_index_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def run(pair: str) -> tuple[int, int]:
        (tmp_path / "upgraded.py").write_text(SOURCE.format(pair=pair))
        sys.modules.pop("upgraded", None)
        importlib.invalidate_caches()
        return importlib.import_module("upgraded").run()

    assert run("Graph") == (3, 0)
    assert run("ActionGraph") == (3, 0)  # `total` is where it was, and the index names a class that is gone
    del sys.modules["upgraded"]
    assert importlib.import_module("upgraded").run() == (3, 1)
    monkeypatch.delitem(sys.modules, "upgraded")


CALLED = """
from slipstream.numba_jit import compiled

@compiled
def step(number):
    return number + {more}
"""
CALLER = """
from called import step
from slipstream.numba_jit import compiled

@compiled
def twice(number):
    return step(step(number))
"""


def test_a_change_of_a_called_function_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "caller.py").write_text(CALLER)

    def run(more: int) -> int:
        (tmp_path / "called.py").write_text(CALLED.format(more=more))
        for name in ("caller", "called"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("caller").twice(0)

    assert (run(1), run(200)) == (2, 400)
    for name in ("caller", "called"):
        monkeypatch.delitem(sys.modules, name)


WITHOUT_A_PLACE = """
from slipstream.numba_jit import compiled
names = {}
exec(compile("def one(x):\\n    return x + 1\\ndef two(x):\\n    return x + 2\\n", "/proc/self/status", "exec"), names)
print(compiled(names["one"])(1), compiled(names["two"])(1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a folder in which nobody can write")
def test_without_a_place_for_the_cache_it_compiles_and_says_so_once() -> None:
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment = kept | {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere"}
    command = [sys.executable, "-c", WITHOUT_A_PLACE]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert ended.stdout == "2 3\n", ended.stderr
    assert ended.stderr.count("it is compiled anew in each process") == 1
