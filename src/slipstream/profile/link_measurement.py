"""Measures the times of a message between two ranks, sent as the executor sends it: on its way, and of its ends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.comm import ScatterGather, Transport, connect_transport
from slipstream.cost import MeasuredLink
from slipstream.cost.fit import fit_relative
from slipstream.model import TensorSpec
from slipstream.parallel import RankGroup, Ranks
from slipstream.schedule import Action, Channel, Op

_SIZES = tuple(4**k * 1024 for k in range(8))  # bytes: 1 KiB to 16 MiB
_WARM_UPS = 3
_REPEATS, _FEW_REPEATS = 15, 5
_LONG = 5.0  # seconds of all sums; beyond them, messages are repeated less often
_HANDLED = (2**14, 2**18, 2**20, 2**22)  # bytes
_WORK = 256  # rows and columns of a matrix that the ranks multiply meanwhile
_MEANWHILE = 8  # products before a message is sent, and while it is on its way
_PRODUCTS = 16  # products before a message is sent, and before it is received
_Message = tuple[Channel, Action]


def measure_link(
    device: torch.device, ranks: Ranks | None = None, sequence_parallel: bool = False, few_repeats: bool = False
) -> MeasuredLink | None:
    """Returns latency and bandwidth between the first two ranks of a pipeline, and of a sum over all ranks of the mesh,
    on every rank. Collective.

    All pipelines of the mesh measure at the same time. Where tensor ranks have the same message, each sends its part,
    and all gather it; where each has its own tokens, with sequence parallelism, it sends those. The bytes are those of
    the whole message.

    It returns None for a single process. A pipeline of one rank sends no messages: its link is that of the sums,
    without points. The receiver waits for the message: the delay of a rank that is busy when it arrives isn't the
    link's. On processors the sender computes meanwhile, as in a step, so that the threads that copy the message share
    its core. Their cost to a busy rank is measured apart.

    Args:
        device: the device between which and another one messages go.
        ranks: of the mesh. Default: all processes are a pipeline's.
        sequence_parallel: whether tensor ranks have different tokens.
        few_repeats: whether messages and sums are repeated less often, as more wouldn't agree better. Messages are in
            any case where the sums have taken long, as on a busy machine.
    """
    ranks = ranks or Ranks.of()
    if ranks.world.size < 2:
        return None
    repeats = _FEW_REPEATS if few_repeats else _REPEATS
    began = time.perf_counter()
    sums = fit_link([_sum_point(ranks.world, size // 4, device, repeats) for size in _SIZES[2:]], dist.get_backend())
    if ranks.broadcast(time.perf_counter() - began) > _LONG:
        repeats = _FEW_REPEATS
    if ranks.pipeline.size < 2:
        return replace(sums, points=())
    there = Channel("activations", 0, 1), Action(Op.SEND_F, 0)
    back = Channel("activations", 1, 0), Action(Op.SEND_F, 1)
    num_parts = ranks.tensor.size if sequence_parallel else 1  # parts that are messages of their own
    transport: Transport = connect_transport({there[0]: 8, back[0]: 8}, device, ranks)
    if ranks.tensor.size > num_parts:
        transport = ScatterGather(transport, ranks.tensor)
    end = ranks.pipeline.rank
    mine, theirs = (there, back) if end == 0 else (back, there)
    sizes = [size // num_parts for size in _SIZES] if end < 2 else []
    gaps = ranks.pipeline.gather([_gaps(transport, mine, theirs, size, device, end == 0, repeats) for size in sizes])
    points = tuple(zip(_SIZES, map(_travel, *gaps[:2]), strict=True))
    copies = device.type == "cpu" and end < 2
    handled = [_handling(transport, mine, theirs, size // num_parts, repeats) if copies else 0.0 for size in _HANDLED]
    ends = ranks.pipeline.gather(handled)[:2]
    # The faster of two ranks also waits for the other, so the shorter time counts.
    shorter = map(min, zip(*ends, strict=True))
    link = fit_link(points, dist.get_backend(), tuple(zip(_HANDLED, shorter, strict=True)))
    return replace(link, sum_bandwidth=sums.bandwidth)


def fit_link(
    points: Sequence[tuple[int, float]], backend: str, handling: Sequence[tuple[int, float]] = ()
) -> MeasuredLink:
    """Fits latency + bytes / bandwidth with the least squared relative error; neither is below the measured one."""
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    latency, per_byte = fit_relative(np.stack([np.ones(len(sizes)), sizes], axis=1), seconds)
    latency = min(latency, seconds.min())
    per_byte = max(per_byte, 1e-3 * float((seconds / sizes).min()))
    points, handling = ([(int(n), float(t)) for n, t in pairs] for pairs in (points, handling))
    return MeasuredLink(float(latency), float(1 / per_byte), backend, tuple(points), tuple(handling))


def _sum_point(group: RankGroup, count: int, device: torch.device, repeats: int) -> tuple[int, float]:
    """Returns the bytes that each rank of a ring passes on for a sum of `count` numbers, and the median time."""
    numbers = torch.zeros(count, device=device)
    seconds = []
    for _ in range(_WARM_UPS + repeats):
        group.barrier()
        began = time.perf_counter()
        group.sum(numbers)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * (group.size - 1) * numbers.nbytes // group.size, statistics.median(seconds[_WARM_UPS:])


def _gaps(
    transport: Transport,
    mine: _Message,
    theirs: _Message,
    num_bytes: int,
    device: torch.device,
    sends_first: bool,
    repeats: int,
) -> list[float]:
    """Returns the seconds of round trips: of the first end from its sending to its taking, of the other from its
    taking to its sending."""
    payload = torch.zeros(num_bytes // 4, device=device)
    factor = torch.ones(_WORK, _WORK)
    products = _MEANWHILE if device.type == "cpu" else 0
    seconds = []
    for _ in range(_WARM_UPS + repeats):
        transport.post_receive(*theirs, [TensorSpec(payload.shape, payload.dtype)])
        if sends_first:
            # This rank computes until the other end waits.
            _compute(factor, products)
            began = time.perf_counter()
            transport.send(*mine, (payload,))
            _compute(factor, products)
        _take(transport, theirs[1], device)
        if not sends_first:
            began = time.perf_counter()
            _compute(factor, products)
        seconds.append(time.perf_counter() - began)
        if not sends_first:
            transport.send(*mine, (payload,))
            _compute(factor, products)
        transport.release(theirs[1])
        transport.finish()
    return seconds[_WARM_UPS:]


def _take(transport: Transport, message: Action, device: torch.device) -> None:
    transport.receive(message)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _travel(first: Sequence[float], second: Sequence[float]) -> float:
    # From the gaps of both ends, whose clocks may differ.
    return statistics.median((there - here) / 2 for there, here in zip(first, second, strict=True))


def _handling(transport: Transport, mine: _Message, theirs: _Message, num_bytes: int, repeats: int) -> float:
    """Returns the seconds for which one end of a message keeps a rank from computing: half of a computing rank's loss
    of time by sending one and receiving one, the median."""
    payload = torch.zeros(num_bytes // 4)
    factor = torch.ones(_WORK, _WORK)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _, talks in product(range(_WARM_UPS + repeats), seconds):
        if talks:
            transport.post_receive(*theirs, [TensorSpec(payload.shape, payload.dtype)])
        began = time.perf_counter()
        _compute(factor, _PRODUCTS)
        if talks:
            transport.send(*mine, (payload,))
        _compute(factor, _PRODUCTS)
        if talks:
            transport.receive(theirs[1])
        seconds[talks].append(time.perf_counter() - began)
        if talks:
            transport.release(theirs[1])
            transport.finish()
    alone, talking = (statistics.median(seconds[talks][_WARM_UPS:]) for talks in (False, True))
    return max(0.0, talking - alone) / 2


def _compute(factor: Tensor, num_products: int) -> None:
    for _ in range(num_products):
        factor @ factor
