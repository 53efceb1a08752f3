"""The order of a search: meshes and configurations by lower bounds of their steps, bounded once they may be next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush, merge
from itertools import count
from math import inf
from operator import itemgetter

from slipstream.planner.plans import Configuration, Mesh
from slipstream.planner.search.bounds import ConfigurationGroup, Promise
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.slicing.equal_stage_slicing import search_compiled

ProgressReport = Callable[[str, int, int], None]  # the task, how many are done, out of how many (0: unknown)
BoundedConfiguration = tuple[float, Configuration]  # a lower bound of its step, in seconds

_EVERY = 5000  # configurations between two reports of progress
_Ordered = Iterator[tuple[Promise, Configuration]]
_Unopened = Mesh | ConfigurationGroup  # a mesh, or a group whose exact slicing hasn't been sought


class Frontier:
    """The configurations that may fit by lower bounds of their steps, as far as they have been asked for.

    A mesh has one bound for all of its configurations, and exact slicings have one before they are sought. Those of
    configurations are computed once one of them may be the next. Of equally promising ones, those that save memory at
    the least cost come first. Meshes that no configuration fits are left out.
    """

    def __init__(self, space: PlanSpace, report: ProgressReport) -> None:
        self._space, self._report, self._number = space, report, count()
        every = list(space.meshes())
        self.num_meshes, self.num_bounded, self.num_too_large = len(every), 0, 0
        self._groups: list[ConfigurationGroup] = []
        self._unopened: dict[_Unopened, float] = {}  # with the least seconds of all in it
        self._waiting: list[tuple[Promise | tuple[float], int, _Unopened | tuple[Configuration, _Ordered]]] = []
        self._ordered: list[BoundedConfiguration] = []
        for mesh in every:
            if space.mean_state(mesh) <= space.memory:
                self._add_unopened(mesh, space.least_seconds(mesh))

    @property
    def num_bounded_meshes(self) -> int:
        """The meshes whose configurations have been bounded, or all of which are too large."""
        return self.num_meshes - sum(isinstance(entry, Mesh) for entry in self._unopened)

    def starting(self, index: int) -> Iterator[BoundedConfiguration]:
        """Yields the configurations from this place on, the most promising first."""
        while index < len(self._ordered) or self._extend():
            yield self._ordered[index]
            index += 1

    def others(self, choice: str, value: object) -> Iterator[Configuration]:
        """Yields configurations with another value of a choice: others are bounded once the known ones are used up, and
        none where the choice allows no other."""
        values = getattr(self._space.options, choice)
        if (values is not None and {*values} <= {value}) or choice == "vocabulary":  # which the joint search spreads
            return
        yield from self._with_other(self._groups, choice, value)
        for entry in sorted(self._unopened, key=self._unopened.__getitem__):
            common = entry.first if isinstance(entry, ConfigurationGroup) else entry
            if getattr(common, choice, None) != value or choice in ConfigurationGroup.VARIED:
                yield from self._with_other(self._open(entry), choice, value)

    def _with_other(self, groups: Iterable[ConfigurationGroup], choice: str, value: object) -> Iterator[Configuration]:
        is_varied = choice in ConfigurationGroup.VARIED
        fitting = (group for group in groups if is_varied or getattr(group.first, choice) != value)
        every = merge(*(group.in_order(self._space.memory, choice, value) for group in fitting), key=itemgetter(0))
        yield from (configuration for _, configuration in every)

    def _extend(self) -> bool:
        """Puts the next configuration in its place; False where there is none."""
        while self._waiting:
            (seconds, *_), _, entry = heappop(self._waiting)
            if isinstance(entry, (Mesh, ConfigurationGroup)):
                self._open(entry)
                continue
            configuration, others = entry
            self._ordered.append((seconds, configuration))
            self._add_next(others)
            return True
        return False

    def _open(self, found: _Unopened) -> list[ConfigurationGroup]:
        """Returns its groups, which then wait for their turn; none where that was done."""
        if self._unopened.pop(found, None) is None:
            return []
        if isinstance(found, Mesh):
            groups = [*self._space.groups(found)]
            for group in groups:
                if group.least_seconds < inf:
                    self._add_unopened(group, group.least_seconds)
        else:
            exact = self._space.with_exact_slices(found)
            groups = [exact] if exact else []
        for group in groups:
            self._count(group)
            self._add_next(group.in_order(self._space.memory))
        self._groups += groups
        return groups

    def _count(self, group: ConfigurationGroup) -> None:
        before, num_names = self.num_bounded, len(group.names)
        self.num_bounded += num_names * group.sizes.size
        self.num_too_large += num_names * int((group.sizes > self._space.memory).sum())
        if self.num_bounded // _EVERY > before // _EVERY:
            search_compiled()  # which pays now
            self._report("bounds", self.num_bounded, 0)

    def _add_unopened(self, found: _Unopened, seconds: float) -> None:
        self._unopened[found] = seconds
        heappush(self._waiting, ((seconds,), next(self._number), found))

    def _add_next(self, ordered: _Ordered) -> None:
        following = next(ordered, None)
        if following is not None:
            heappush(self._waiting, (following[0], next(self._number), (following[1], ordered)))
