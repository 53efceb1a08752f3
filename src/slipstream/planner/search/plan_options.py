"""The options of a plan: the values that its choices may take, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.planner.plan import CHOICES
from slipstream.planner.plan_fields import COUNTS, PLAN_FIELDS

_LEAST_MEMORY = 1e6  # bytes; a smaller number was meant as gigabytes
_NUM_SIMULATED = 200
_NUM_BEST = 5
_NUMBERS = "memory_limit", "host_memory_limit", "num_simulated", "num_best"


@dataclass(frozen=True, init=False)
class PlanOptions:
    """The values that each choice of a plan may take, and how far a search goes.

    Args:
        memory_limit: bytes that may be used of a device. None: 95%.
        host_memory_limit: bytes that may be used of a host for each of its devices. None: all.
        num_simulated: the most configurations that are simulated. None: 200.
        num_best: the most configurations that are reported. None: 5.
        choices: a value or several of each choice, by the names of the fields of `slipstream.Plan` up to `vocabulary`,
            such as `tensor_parallel=(1, 2)`. None: every value that divides.

    Raises:
        SlipstreamError: for an unknown option or an impossible value; it suggests the one that was meant.
    """

    allowed: Mapping[str, tuple[Any, ...]]
    """The values of the choices that may not take every one."""
    memory_limit: float | None
    host_memory_limit: float | None
    num_simulated: int
    num_best: int

    def __init__(
        self,
        *,
        memory_limit: float | None = None,
        host_memory_limit: float | None = None,
        num_simulated: int | None = None,
        num_best: int | None = None,
        **choices: Any,
    ) -> None:
        for name in choices:
            if name not in CHOICES:
                names = (*CHOICES, *_NUMBERS)
                hint = did_you_mean(name, names)
                raise SlipstreamError(f"there is no option {name!r}{hint} The options are {', '.join(names)}.")
        values = {
            "allowed": {name: _checked(name, value) for name, value in choices.items() if value is not None},
            "memory_limit": _memory("memory_limit", memory_limit),
            "host_memory_limit": _memory("host_memory_limit", host_memory_limit),
            "num_simulated": _NUM_SIMULATED if num_simulated is None else check_count("num_simulated", num_simulated),
            "num_best": _NUM_BEST if num_best is None else check_count("num_best", num_best),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def values(self, choice: str, otherwise: Sequence[Any] = ()) -> Sequence[Any]:
        """Returns the values that a choice may take; `otherwise` where it may take every one that divides."""
        return self.allowed.get(choice) or otherwise

    def allows(self, choice: str, value: object) -> bool:
        """Returns whether a choice may take a value."""
        return choice not in self.allowed or value in self.allowed[choice]

    def changed(self, **options: Any) -> PlanOptions:
        """Returns the options with other values of some."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return PlanOptions(**numbers | {**self.allowed} | options)


def _checked(name: str, value: Any) -> tuple[Any, ...]:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(_checked_value(name, item) for item in (value if several else (value,)))


def _checked_value(name: str, value: Any) -> Any:
    PLAN_FIELDS[name].check(value, suggests=True)
    return value


def check_count(name: str, value: Any) -> int:
    """Returns a value that is a whole number of 1 or more; SlipstreamError otherwise."""
    COUNTS.check(name, value)
    return int(value)


def _memory(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= _LEAST_MEMORY:
        meant = f": type {value:g}e9 if gigabytes were meant" if isinstance(value, (int, float)) and value > 0 else ""
        raise SlipstreamError(f"{name}={value!r} is implausible, it is in bytes{meant}.")
    return float(value)
