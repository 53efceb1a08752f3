from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

import pytest

from support.examples import register_profiles
from support.paths import ROOT

_CACHE = tempfile.mkdtemp(prefix="slipstream-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)

# Before anything imports torch, transformers or datasets: tests start several processes on few cores, never
# ask the network and never write into the caches of the user. Processes that tests start inherit it. On more threads
# a matrix product would also sum in another order, where tests compare bits.
os.environ.update(
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_HOME=_CACHE,
    XDG_CACHE_HOME=_CACHE,
    SLIPSTREAM_SHARED_CORES="1",  # two tests run at a time
    PYTORCH_NVML_BASED_CUDA_CHECK="1",  # or a question whether there is a GPU would keep ranks from being forked
    TORCHINDUCTOR_COMPILE_THREADS="1",
)
# What one worker has compiled no other compiles again: they inherit the folder of the process that starts them.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(_CACHE, "inductor"))

register_profiles()

# Their tests start processes and take longest: begun last, one worker would wait for the other.
_BEGUN_FIRST = ("training", "pipeline/memory", "launch", "parallel", "cli", "examples", "profiler", "pipeline/planning")


@pytest.fixture(scope="session")
def compiled_search() -> None:
    """The compiled search for orders is in numba's cache on disk, so that the processes of a test needn't each wait
    for the compiler."""
    from slipstream import Op, TableCost, find_order

    times = {(stage, number, op): 1.0 for stage in range(2) for number in range(2) for op in (Op.F, Op.B, Op.I, Op.W)}
    find_order([0, 1], 1, 2, TableCost(times))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long folders come first, otherwise in the order of collection; where files are named, that is the order."""
    if any(".py" in argument for argument in config.args):
        return

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(ROOT / "tests").parent.as_posix()
        return next((n for n, first in enumerate(_BEGUN_FIRST) if folder.startswith(first)), len(_BEGUN_FIRST))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """All that was imported stays: the collector needn't look at it again and again, nor tests that ask it which
    tensors there are."""
    gc.collect()
    gc.freeze()
