"""Checks can't end each other, calls that hang are named, and limits of cgroups are read."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.extras.doctor import devices, examination
from slipstream.extras.doctor.finding import ExchangeError, Finding, isolated, run_within
from slipstream.extras.doctor.rank_exchange import neighbour_pairs
from support.timeouts import LIMIT


def test_an_exception_ends_its_check_alone() -> None:
    def check() -> Iterator[Finding]:
        yield Finding("one", "is here")
        raise OSError("no such bus\nmore")

    assert isolated("two", check) == [
        Finding("one", "is here"),
        Finding("two", "couldn't be determined: OSError: no such bus"),
    ]
    assert isolated("two", check, is_vital=True)[1].problem == "couldn't be determined: OSError: no such bus"


def test_calls_end_in_their_order() -> None:
    begun, ends = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert ends.wait(LIMIT)
        time.sleep(0.2)

    def quick() -> None:
        assert begun.wait(LIMIT)
        threading.Timer(0.1, ends.set).start()

    took = run_within(LIMIT, {"slow": slow, "quick": quick})
    assert list(took) == ["quick", "slow"]
    assert took["quick"] < took["slow"]
    assert took["slow"] >= 0.2


def test_calls_that_hang_or_fail_are_named() -> None:
    ends = threading.Event()
    with pytest.raises(ExchangeError, match=r"^stuck did not end within 1 s$"):
        run_within(1, {"stuck": ends.wait, "quick": lambda: None})
    with pytest.raises(ExchangeError, match=r"^broken failed \(ZeroDivisionError: .*zero\)$"):
        run_within(LIMIT, {"stuck": ends.wait, "broken": lambda: 1 // 0})
    ends.set()


def test_neighbours_are_those_of_a_pipeline() -> None:
    assert neighbour_pairs(2) == [(0, 1)]
    assert neighbour_pairs(4) == [(0, 1), (1, 2), (2, 3), (3, 0)]


def test_limits_of_cgroups_are_read(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1000000000\n")
    *_, cores = examination.find_processor(tmp_path)
    assert cores.text.startswith(f"0.5 usable of {os.cpu_count()} (")
    assert "the cgroup gives 0.5 cores" in (cores.advice or "")
    (memory,) = examination.find_memory(tmp_path)
    assert memory.text.endswith("limited to 1.00 GB (cgroup)")
    (tmp_path / "memory.current").write_text("250000000\n")
    (memory,) = examination.find_memory(tmp_path)
    assert memory.text.endswith("limited to 1.00 GB (cgroup), of which 250 MB are in use")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    *_, cores = examination.find_processor(tmp_path)
    assert "cgroup" not in cores.text


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_temporary_folder_says_whether_it_takes_memory(
    in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Path("/dev/shm")
    if in_memory and not shared.is_dir():
        pytest.skip("needs /dev/shm")
    monkeypatch.setattr("tempfile.tempdir", str(shared if in_memory else tmp_path))
    (found,) = examination.find_temporary_folder()
    assert re.match(rf"{shared if in_memory else tmp_path}: .* free", found.text)
    assert ("on tmpfs" in found.text and "set TMPDIR to a folder on a disk" in (found.advice or "")) or not in_memory


@pytest.mark.parametrize(
    ("local", "number", "own", "exchange"), [(1, 2, "cuda:1", "cuda:1"), (0, 1, "cuda:0", "cpu"), (1, 1, "cpu", "cpu")]
)
def test_ranks_that_share_a_gpu_exchange_as_in_training(
    local: int, number: int, own: str, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    assert [str(device) for device in devices.devices()] == [own]
    assert str(devices.exchange_device()) == exchange
    if own == "cpu":
        found, *_ = devices.find_gpus()
        assert found.text == "2 ranks share 1 GPU, and exchange through the host's memory"
