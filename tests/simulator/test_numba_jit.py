"""The cache of compiled functions on disk, which other versions of Slipstream may have written."""

import importlib
import sys
from pathlib import Path

import pytest

SOURCE = """
from typing import NamedTuple

from slipstream.simulator.numba_jit import compiled

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
