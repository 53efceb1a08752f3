"""The ways to save memory that a search combines: what each is called, what its values cost, and which are tried."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from slipstream.array_types import Floats
from slipstream.cost import CostSource, divided_by, possible_shards
from slipstream.options import host_share
from slipstream.planner.plan import Plan
from slipstream.planner.search.plan_options import PlanOptions


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A way to save memory: a choice of plans that holds less and takes longer, or as long.

    Args:
        choice: the name of its field in a plan.
        possible: returns the values that a search tries of a source's model on a mesh, those that cost least first.
        fastest: a value that is never slower than any.
        faster: further values that are never slower than a value.
        costs: how late each value is tried, of equally promising ones: those of lower numbers come first. Empty: the
            values are numbers, which say it themselves, and others than the possible ones may be asked for.
        weight: by which its costs count beside those of other ways: a way of more weight is tried later.
        if_asked: values that are tried only where they are asked for.
        allows: returns whether a value that isn't among the possible ones may be asked for.
        copies: returns whether a value copies to the host, which takes time.
        of_update: whether it is known to the update that ends a step, not to the actions.
    """

    choice: str
    possible: Callable[[CostSource, Plan], Collection[Any]]
    fastest: Any
    faster: Mapping[Any, tuple[Any, ...]] = field(default_factory=dict)
    costs: Mapping[Any, float] = field(default_factory=dict)
    weight: int = 0
    if_asked: tuple[Any, ...] = ()
    allows: Callable[[Any], bool] = lambda value: False
    copies: Callable[[Any], bool] = lambda value: False
    of_update: bool = False

    def tried(self, options: PlanOptions, source: CostSource, mesh: Plan) -> tuple[Any, ...]:
        """Returns the values that a search tries on a mesh, those that cost least first."""
        possible = self.possible(source, mesh)
        if not self.costs:
            return tuple(options.values(self.choice, tuple(possible)))
        if self.choice not in options.allowed:
            return tuple(value for value in possible if value not in self.if_asked)
        allowed = (value for value in possible if options.allows(self.choice, value))
        asked = options.values(self.choice)
        return *allowed, *(value for value in asked if value not in possible and self.allows(value))

    @property
    def unasked(self) -> tuple[Any, ...]:
        """The values that are tried without being asked for, of a way that has a list of values."""
        return tuple(value for value in self.costs if value not in self.if_asked)

    def cost(self, value: Any) -> float:
        """Returns how late a value is tried."""
        return self.costs.get(value, value)

    def never_slower(self, value: Any) -> set[Any]:
        """Returns the values that are never slower than a value, itself among them."""
        return {value, self.fastest, *self.faster.get(value, ())}

    def setting(self, value: Any) -> str:
        """Returns a value as it is asked for."""
        return f"{self.choice}={self.number(value)}"

    @staticmethod
    def number(value: Any) -> str:
        """Returns a value without needless digits."""
        return f"{value:g}" if isinstance(value, float) else str(value)


def _offloads(source: CostSource, mesh: Plan) -> tuple[float, ...]:
    return (0.0, 1.0) if source.host else (0.0,)


def _contexts(source: CostSource, mesh: Plan) -> tuple[str, ...]:
    return ("device", "host") if source.host else ("device",)


def _shards(source: CostSource, mesh: Plan) -> tuple[str, ...]:
    return possible_shards(mesh.num_copies, divided_by(mesh.degrees))


SAVINGS = (
    Saving(
        choice="recompute",
        possible=lambda source, mesh: source.recomputations,
        fastest="none",
        faster={"full": ("selective",), "stage": ("selective",), "stage+full": ("selective", "full", "stage")},
        costs={"none": 0, "selective": 1, "full": 2, "stage": 3, "stage+full": 4},
        weight=1,
    ),
    Saving(choice="offload", possible=_offloads, fastest=0.0, weight=2, copies=bool),
    Saving(
        choice="context",
        possible=_contexts,
        fastest="device",
        costs={"device": 0, "host": 1},
        weight=3,
        allows=lambda value: not isinstance(value, str),
        copies=lambda place: host_share(place) > 0,
    ),
    # A run gathers sharded parameters once a step, which takes as long and holds as much as ZeRO-1 does at its fullest.
    Saving(
        choice="shard",
        possible=_shards,
        fastest="optimizer",
        costs={"optimizer": 0, "parameters": 0, "none": 1},
        if_asked=("parameters",),
        of_update=True,
    ),
    # Where a plan fits without, it is no slower, and each value more doubles what a search compares.
    Saving(
        choice="optimizer",
        possible=lambda source, mesh: ("device", "host") if source.host else ("device",),
        fastest="device",
        costs={"device": 0, "host": 1},
        weight=4,
        if_asked=("host",),
        copies=lambda place: place == "host",
        of_update=True,
    ),
)
"""Every way to save memory, in the order of the axes of their bounds."""

_BY_WEIGHT = sorted(SAVINGS, key=lambda saving: saving.weight, reverse=True)
_OF_UPDATE = tuple(saving.choice for saving in SAVINGS if saving.of_update)


@dataclass(frozen=True, eq=False)
class Savings:
    """The values of each way to save memory that the configurations of a mesh combine, each way an axis of bounds."""

    values: Mapping[str, tuple[Any, ...]]

    @classmethod
    def tried(cls, options: PlanOptions, source: CostSource, mesh: Plan) -> Savings:
        """Returns those that a search tries on a mesh."""
        return cls({saving.choice: saving.tried(options, source, mesh) for saving in SAVINGS})

    def _combined(self, choices: Iterable[str]) -> list[dict[str, Any]]:
        names = tuple(choices)
        return [dict(zip(names, values, strict=True)) for values in product(*map(self.values.__getitem__, names))]

    @cached_property
    def every(self) -> list[dict[str, Any]]:
        """All combinations, as choices of a plan, the last way's values next to each other."""
        return self._combined(self.values)

    @cached_property
    def costs(self) -> list[tuple[float, ...]]:
        """How late each combination is tried, of equally promising ones."""
        return [tuple(saving.cost(each[saving.choice]) for saving in _BY_WEIGHT) for each in self.every]

    @cached_property
    def updates(self) -> list[dict[str, Any]]:
        """All combinations of those that the update of a step knows; none where another way has no value."""
        return self._combined(_OF_UPDATE) if self.every else []

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The number of each way's values."""
        return tuple(map(len, self.values.values()))

    def along(self, choice: str, array: Floats) -> Floats:
        """Returns an array whose first axis are the values of one way with an axis of each."""
        return self._along((choice,), array)

    def along_updates(self, array: Floats) -> Floats:
        """Returns an array whose first axis are the `updates` with an axis of each way."""
        return self._along(_OF_UPDATE, array)

    def _along(self, choices: Collection[str], array: Floats) -> Floats:
        axes = (len(values) if choice in choices else 1 for choice, values in self.values.items())
        return array.reshape(*axes, *array.shape[1:])


def never_slower(plan: Plan) -> Iterator[Plan]:
    """Yields the plans that save less memory, or none, and are never slower."""
    values = [saving.never_slower(getattr(plan, saving.choice)) for saving in SAVINGS]
    for chosen in product(*values):
        choices = {saving.choice: value for saving, value in zip(SAVINGS, chosen, strict=True)}
        if (other := replace(plan, **choices)) != plan:
            yield other


def copies_of(plan: Plan) -> tuple[bool, ...]:
    """Returns of each way to save memory whether the plan copies to the host by it."""
    return tuple(saving.copies(getattr(plan, saving.choice)) for saving in SAVINGS)
