"""Copies between memory and memory that end some time after they were begun, as those between a GPU and its host."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from slipstream.comm import StagedTransport, staged_transport
from slipstream.pipeline import runtime as pipeline_runtime


class SlowMoment:
    """The end of a copy, with what transports ask of an event."""

    def __init__(self, copy: Future[None]) -> None:
        self._copy = copy

    def query(self) -> bool:
        return self._copy.done()

    def synchronize(self) -> None:
        self._copy.result()


class SlowCopies:
    """A CopyStream that takes up to two milliseconds for each copy, and fails where `fails_at` copies are done."""

    fails_at = -1
    num_copies = 0

    def __init__(self, device: torch.device) -> None:
        self._random, self._thread = random.Random(0), ThreadPoolExecutor(1)

    def copy(self, target: Tensor, source: Tensor, after: SlowMoment | None) -> SlowMoment:
        return SlowMoment(self._thread.submit(self._copy, target, source, after))

    def _copy(self, target: Tensor, source: Tensor, after: SlowMoment | None) -> None:
        if after is not None:
            after.synchronize()
        time.sleep(self._random.uniform(0, 2e-3))
        if SlowCopies.num_copies == SlowCopies.fails_at:
            raise RuntimeError("an illegal memory access was encountered")
        SlowCopies.num_copies += 1
        target.copy_(source)


def install() -> None:
    """Lets pipelines of this process exchange messages by way of host memory, which takes a while. Computing, which
    isn't delayed, waits for what it needs."""
    pipeline_runtime.connect_transport = StagedTransport  # type: ignore[assignment]
    staged_transport.CopyStream = SlowCopies  # type: ignore[assignment,misc]
    staged_transport.hold_until = lambda moment, _: moment.synchronize()  # type: ignore[assignment,union-attr]
