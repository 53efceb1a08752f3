"""Reads from a trace of torch.profiler how much of a GPU's communication runs while it computes.

A trace (Chrome's format) has an event for each kernel and each copy, with its device and stream. Messages are NCCL's
kernels of sends and receives, and copies between a GPU and its host on streams of their own; computing is every other
kernel.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]
Interval = tuple[float, float]


class Communication(NamedTuple):
    """The time in which messages are under way, in microseconds, and how much of it the GPU computes as well."""

    total: float
    overlapped: float

    @property
    def share(self) -> float:
        """The part of the time that computing hides."""
        return self.overlapped / self.total


def read_events(trace: Path) -> list[Event]:
    """The events of a trace that have a length."""
    return [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]


def communication(events: Iterable[Event]) -> Communication:
    """The communication of all devices of a trace. Raises ValueError where there is none."""
    by_device: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            by_device[event["args"]["device"]].append(event)
    found = [_on_one_device(each) for each in by_device.values()]
    total, overlapped = (sum(numbers) for numbers in zip(*found, strict=True)) if found else (0.0, 0.0)
    if not total:
        raise ValueError("the trace has no sends, receives, or copies on streams of their own")
    return Communication(total, overlapped)


def _on_one_device(events: Sequence[Event]) -> Communication:
    computing = [event for event in events if event["cat"] == "kernel" and "nccl" not in event["name"].lower()]
    streams = {event["args"]["stream"] for event in computing}
    messages = _union(event for event in events if _is_message(event, streams))
    return Communication(_length(messages), _length(_common(messages, _union(computing))))


def _is_message(event: Event, computing: set[int]) -> bool:
    name = event["name"].lower()
    if event["cat"] == "kernel":
        return "nccl" in name and "sendrecv" in name
    return ("dtoh" in name or "htod" in name) and event["args"]["stream"] not in computing


def _union(events: Iterable[Event]) -> list[Interval]:
    """When any of the events runs, as intervals in order that don't touch."""
    found: list[Interval] = []
    for begin, end in sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """When both run, of intervals in order that don't touch: a trace may have a hundred thousand of them."""
    found: list[Interval] = []
    i = j = 0
    while i < len(some) and j < len(others):
        begin = max(some[i][0], others[j][0])
        end = min(some[i][1], others[j][1])
        if begin < end:
            found.append((begin, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
