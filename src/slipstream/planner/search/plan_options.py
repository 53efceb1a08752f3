"""The options of a plan: the values that its choices may take, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.planner.plan import ALLOWED
from slipstream.schedule import schedule_hint

_LEAST_MEMORY = 1e6  # bytes; a smaller number was meant as gigabytes


@dataclass(frozen=True)
class PlanOptions:
    """The values that each choice of a plan may take; None: every value that divides."""

    tensor_parallel: tuple[int, ...] | None = None
    pipeline_parallel: tuple[int, ...] | None = None
    data_parallel: tuple[int, ...] | None = None
    stages_per_rank: tuple[int, ...] | None = None
    schedule: tuple[str, ...] | None = None
    microbatch_size: tuple[int, ...] | None = None  # sequences
    num_slices: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    offload: tuple[float, ...] | None = None  # share of the slices, 0 to 1
    shard: tuple[str, ...] | None = None
    slicing: tuple[str, ...] | None = None
    context_parallel: tuple[int, ...] | None = None
    expert_parallel: tuple[int, ...] | None = None
    context_exchange: tuple[str, ...] | None = None
    vocabulary: tuple[str, ...] | None = None
    memory_limit: float | None = None  # bytes that may be used of a device; None: 95%
    num_simulated: int = 200  # configurations that are simulated, at most
    num_best: int = 5  # configurations that are reported

    def allows(self, choice: str, value: object) -> bool:
        """Returns whether a choice may take a value."""
        values = getattr(self, choice)
        return values is None or value in values


def make_options(**values: Any) -> PlanOptions:
    """Returns the options from one value or several for each choice; None stands for the default.

    Raises:
        SlipstreamError: for an unknown option or an impossible value; it suggests the one that was meant.
    """
    names = [field.name for field in fields(PlanOptions)]
    for name in values:
        if name not in names:
            hint = did_you_mean(name, names)
            raise SlipstreamError(f"there is no option {name!r}{hint} The options are {', '.join(names)}.")
    return PlanOptions(**{name: _checked(name, value) for name, value in values.items() if value is not None})


def _checked(name: str, value: Any) -> Any:
    if name == "memory_limit":
        return _memory(value)
    if name in ("num_simulated", "num_best"):
        return check_count(name, value)
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(_checked_value(name, item) for item in (value if several else (value,)))


def _checked_value(name: str, value: Any) -> Any:
    if name in ALLOWED:
        if value not in ALLOWED[name]:
            hint = (schedule_hint if name == "schedule" else did_you_mean)(str(value), ALLOWED[name])
            raise SlipstreamError(f"{name}={value!r} isn't known{hint} Choose one of {', '.join(ALLOWED[name])}.")
    elif name == "offload":
        if not (isinstance(value, (int, float)) and 0 <= value <= 1):
            raise SlipstreamError(f"offload={value!r}: give the share of slices that is offloaded, 0 to 1.")
    else:
        check_count(name, value)
    return value


def check_count(name: str, value: Any) -> int:
    """Returns a value that is a whole number of 1 or more; SlipstreamError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SlipstreamError(f"{name}={value!r}: give a whole number of 1 or more.")
    return value


def _memory(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= _LEAST_MEMORY:
        meant = f": type {value:g}e9 if gigabytes were meant" if isinstance(value, (int, float)) and value > 0 else ""
        raise SlipstreamError(f"memory_limit={value!r} is implausible, it is in bytes{meant}.")
    return float(value)
