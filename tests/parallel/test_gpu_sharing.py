"""Ranks with a GPU each talk by NCCL, others by gloo; what was asked for and can't be is refused by name."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from slipstream import Pipeline, make_mesh
from slipstream.errors import SlipstreamError
from slipstream.options import Runtime
from slipstream.parallel import (
    check_transport,
    choose_backend,
    describe_sharing,
    gpu_of,
    gpus,
    launched_group,
    share_gpus_by_nccl,
)
from slipstream.parallel.gpus import TransportName
from support.architectures import ARCHITECTURES

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("transport", "device_type", "num_gpus", "backend"),
    [
        ("auto", "cuda", 2, "nccl"),
        ("auto", "cuda", 1, "gloo"),
        ("auto", "cpu", 8, "gloo"),
        ("gloo", "cuda", 2, "gloo"),
        ("nccl", "cuda", 3, "nccl"),
        ("nccl", "cuda", 1, "nccl"),
    ],
)
def test_two_processes(
    monkeypatch: pytest.MonkeyPatch, transport: str, device_type: str, num_gpus: int, backend: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    assert choose_backend(transport, device_type, num_local=2) == backend  # type: ignore[arg-type]


def test_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [gpu_of(rank).index for rank in range(5)] == [0, 1, 0, 1, 0]
    assert describe_sharing(5) == "5 ranks share 2 GPUs"
    assert describe_sharing(2) == ""


@pytest.mark.parametrize(
    ("device", "num_gpus", "said"),
    [
        ("cpu", 1, "2 ranks compute on CPUs, and NCCL .* Leave it out or give gloo.$"),
        (None, 0, "2 ranks compute on CPUs"),
    ],
)
def test_nccl_without_a_gpu(monkeypatch: pytest.MonkeyPatch, device: str | None, num_gpus: int, said: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SlipstreamError, match=f"runtime.transport=nccl: {said}"):
        Pipeline.from_config(ARCHITECTURES["llama"], device=device, runtime=Runtime(transport="nccl"))

    with pytest.raises(SlipstreamError, match=f"make_mesh: transport=nccl: {said}"):
        make_mesh(pp=2, device_type=device or "cpu", transport="nccl")


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_nccl_takes_processes_that_share_a_gpu_for_machines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_gpus: int
) -> None:
    """NCCL is told so before its first communicator; what the user has set is kept, and the first rank says it."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    for name in {"NCCL_HOSTID", *gpus._SHARED} - {"NCCL_SOCKET_IFNAME"}:
        monkeypatch.setenv(name, "")  # so that it is unset again at the end
        monkeypatch.delenv(name)
    share_gpus_by_nccl(0, num_local=2)
    if num_gpus == 2:
        assert "NCCL_HOSTID" not in os.environ
        assert not caplog.records
        return
    assert os.environ["NCCL_HOSTID"] == "0"
    assert os.environ["NCCL_P2P_DISABLE"] == "1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    assert "2 ranks share 1 GPU, connected by NCCL over sockets" in caplog.text


@pytest.mark.parametrize(("transport", "backend"), [("auto", "nccl"), ("gloo", "gloo")])
def test_a_mesh_is_connected_as_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, transport: TransportName, backend: str
) -> None:
    """Two processes with a GPU each."""
    made = list[str]()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr(launched_group, "_make_group", lambda _environment, chosen, *_: made.append(chosen))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SlipstreamError, match="a mesh is made of the processes of a process group"):
        make_mesh(pp=2, device_type="cuda", transport=transport)
    assert made == [backend]


def test_a_mesh_of_a_group_that_is_there_already() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(SlipstreamError, match="make_mesh: transport=nccl, but the ranks compute on CPUs"):
            make_mesh(transport="nccl")
        assert make_mesh(transport="gloo").size() == 1
    finally:
        dist.destroy_process_group()


def test_a_transport_that_does_not_exist() -> None:
    with pytest.raises(SlipstreamError, match=r"^make_mesh: transport='mpi': give 'auto', 'nccl', 'gloo'\.$"):
        make_mesh(transport="mpi")  # type: ignore[arg-type]


def test_a_group_that_is_there_already() -> None:
    with pytest.raises(SlipstreamError, match=r"runtime\.transport=nccl, but the ranks compute on CPUs"):
        check_transport("nccl", CPU, "gloo")
    with pytest.raises(SlipstreamError, match="the process group connects GPUs by gloo"):
        check_transport("nccl", GPU, "gloo")
    with pytest.raises(SlipstreamError, match='init_process_group\\("gloo"\\) before anything else makes the group'):
        check_transport("gloo", GPU, "nccl")
    for transport, device, backend in (("auto", GPU, "gloo"), ("gloo", CPU, "nccl"), ("nccl", GPU, "nccl")):
        check_transport(transport, device, backend)  # type: ignore[arg-type]
