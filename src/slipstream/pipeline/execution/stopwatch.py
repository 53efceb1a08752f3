"""Notes when actions begin and end, without waiting for the device while the step runs."""

from __future__ import annotations

import time

import torch

from slipstream.schedule import Action
from slipstream.timeline import Span

_Mark = float | torch.cuda.Event


class Stopwatch:
    """Collects marks in order; CUDA events are read only when the step is over."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Action, _Mark, _Mark]] = []
        self._origin: tuple[float, _Mark] = time.perf_counter(), self.mark()

    def mark(self) -> _Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def record(self, action: Action, began: _Mark) -> None:
        """Records that the action which began at a mark ends now."""
        self._marks.append((action, began, self.mark()))

    def spans(self) -> list[Span]:
        if self._on_gpu:
            torch.cuda.synchronize()
        return [Span(self._rank, action, self._seconds(a), self._seconds(b)) for action, a, b in self._marks]

    def _seconds(self, mark: _Mark) -> float:
        began, origin = self._origin
        if isinstance(mark, float):
            return mark
        assert not isinstance(origin, float)
        return began + float(origin.elapsed_time(mark)) / 1e3
