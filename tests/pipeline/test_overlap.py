"""Messages travel while GPUs compute, and no rank's host waits for its GPU before it has posted a whole step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.device_trace import Event, communication, read_events
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.comm.message import message_bytes, pack
from slipstream.model import TensorSpec
from slipstream.schedule import Action, Op
from support.forked import SHOWS_GPU, launch
from support.paths import WORKERS

WORKER = WORKERS / "pipeline/overlap.py"
# Of the time in which messages are under way. In turns with computing it would be 0; filling and draining the pipeline
# hides none.
LEAST_SHARE = 0.2


def kernel(name: str, begin: float, end: float, stream: int, device: int = 0, cat: str = "kernel") -> Event:
    place = {"device": device, "stream": stream}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": place}


def copy(name: str, begin: float, end: float, stream: int) -> Event:
    return kernel(name, begin, end, stream, cat="gpu_memcpy")


def test_the_share_of_a_made_up_trace() -> None:
    """Two kernels that compute, from 0 to 10 and from 20 to 30, and messages across their ends."""
    computing = [kernel("gemm", 0, 6, 7), kernel("flash_fwd", 6, 10, 7), kernel("gemm", 20, 30, 7)]
    messages = [
        kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 8, 14, 20),  # 2 of 6
        kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 12, 22, 24),  # at the same time, then 2 of 8
    ]
    assert communication([*computing, *messages]) == (14, 4)
    copies = [copy("Memcpy DtoH (Device -> Pinned)", 2, 4, 13), copy("Memcpy HtoD (Pinned -> Device)", 9, 11, 14)]
    assert communication([*computing, *copies]) == (4, 3)
    assert communication([*computing, *copies]).share == 0.75


def test_what_is_no_message() -> None:
    """Copies among kernels on their stream or within the GPU, reductions, other devices' kernels, and what CPUs do."""
    own = [kernel("gemm", 0, 10, 7), copy("Memcpy HtoD (Pageable -> Device)", 10, 12, 7)]
    inside = copy("Memcpy DtoD (Device -> Device)", 2, 4, 13)
    reduction = kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4, 8, 20)
    on_cpu = {"ph": "X", "cat": "cpu_op", "name": "nccl:send", "ts": 0, "dur": 5, "args": {}}
    with pytest.raises(ValueError, match="no sends"):
        communication([*own, inside, reduction, on_cpu])
    message = kernel("ncclDevKernel_SendRecv", 0, 8, 20, device=1)
    assert communication([*own, message]) == (8, 0)


class NoWaiting(TorchDispatchMode):
    """Fails where memory is copied in a way that would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype is torch.int64:
            assert args[2], "the header is waited for"
        return func(*args, **kwargs or {})


def packed(device: str) -> Tensor:
    """A message of a slice's activations in its buffer."""
    message, tensors = Action(Op.SEND_F, 0, 1, 2), (torch.ones(4, 8, device=device),)
    specs = [TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    buffer = torch.empty(message_bytes(specs), dtype=torch.uint8, device=device)
    pack(message, tensors, buffer)
    return buffer


def test_packing_a_message_waits_for_nothing() -> None:
    with NoWaiting():
        packed("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packing_a_message_does_not_wait_for_the_gpu() -> None:
    packed("cuda")  # pins the memory of headers
    torch.cuda.set_sync_debug_mode("error")
    try:
        buffer = packed("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(buffer.cpu(), packed("cpu"))


def traced(device: str, transport: str, folder: Path) -> list[list[Event]]:
    """What ran on each of two ranks in a step."""
    ended = launch(2, WORKER, device, transport, folder)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [read_events(folder / f"rank-{rank}.json") for rank in range(2)]


def test_the_program_runs_without_a_gpu(tmp_path: Path) -> None:
    """Its step goes by way of host memory, and what computes and exchanges is in the traces."""
    for events in traced("cpu", "gloo", tmp_path):
        names = [event["name"] for event in events]
        assert "aten::mm" in names
        assert "gloo:recv" in names  # a thread sends
        with pytest.raises(ValueError, match="no sends"):
            communication(events)


@pytest.mark.nccl
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_overlaps_with_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU for each rank, and with one for both, where the ranks take turns but each has both streams."""
    monkeypatch.setenv(SHOWS_GPU, "1")
    for events in traced("cuda", "nccl", tmp_path):
        assert communication(events).share > LEAST_SHARE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_to_host_memory_overlap_with_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes share the first GPU."""
    monkeypatch.setenv(SHOWS_GPU, "1")
    if torch.cuda.device_count() > 1:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for events in traced("cuda", "gloo", tmp_path):
        assert communication(events).share > LEAST_SHARE
