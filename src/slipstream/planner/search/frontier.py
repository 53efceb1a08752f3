"""The order of a search: meshes and configurations by lower bounds of their steps, bounded once they may be next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from slipstream.planner.best_first import BestFirst
from slipstream.planner.plan import Plan
from slipstream.planner.progress import ProgressReport
from slipstream.planner.search.bounds import PlanGroup, Promise
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.savings import SAVINGS
from slipstream.planner.slicing.equal_stage_slicing import search_compiled

BoundedPlan = tuple[float, Plan]  # a lower bound of its step, in seconds

_EVERY = 5000  # configurations between two reports of progress
_Ordered = Iterator[tuple[Promise, Plan]]
_Unopened = Plan | PlanGroup  # a mesh, or a group whose exact slicing hasn't been sought
_Following = tuple[Plan | None, _Ordered]  # a group's next, and those after it; None: it isn't in order yet


class _Waiting:
    """What waits for its turn, the most promising first. Groups are put in order once one of theirs may be the next:
    there are thousands, and few are asked for any."""

    def __init__(self) -> None:
        self._entries = BestFirst[_Unopened | _Following]()

    def add(self, least: float, entry: _Unopened) -> None:
        self._entries.add(least, entry)

    def add_group(self, group: PlanGroup, choice: str = "", value: object = None) -> None:
        """Adds a group's configurations; of a varied `choice` those with another value alone."""
        self._entries.add(float(group.seconds.min(initial=inf)), (None, group.in_order(choice, value)))

    def next(self) -> BoundedPlan | _Unopened | None:
        """Removes and returns the most promising configuration, mesh or group; None where nothing is left."""
        while found := self._entries.next_below(inf):
            seconds, entry = found
            if isinstance(entry, (Plan, PlanGroup)):
                return entry
            plan, others = entry
            if following := next(others, None):
                (least, *then), after = following
                self._entries.add(least, (after, others), tuple(then))
            if plan is not None:
                return seconds, plan
        return None


class Frontier:
    """The configurations that may fit by lower bounds of their steps, as far as they have been asked for.

    A mesh has one bound for all of its configurations, and exact slicings have one before they are sought. Those of
    configurations are computed once one of them may be the next. Of equally promising ones, those that save memory at
    the least cost come first. Meshes that no configuration fits are left out.
    """

    def __init__(self, space: PlanSpace, report: ProgressReport) -> None:
        self._space, self._report = space, report
        every = list(space.meshes())
        self.num_meshes, self.num_bounded, self.num_too_large = len(every), 0, 0
        self._groups: list[PlanGroup] = []
        self._unopened: dict[_Unopened, float] = {}  # with the least seconds of all in it
        self._waiting = _Waiting()
        self._ordered: list[BoundedPlan] = []
        for mesh in every:
            if space.mean_state(mesh) <= space.memory:
                self._add_unopened(mesh, space.least_seconds(mesh))

    @property
    def num_bounded_meshes(self) -> int:
        """The meshes whose configurations have been bounded, or all of which are too large."""
        return self.num_meshes - sum(isinstance(entry, Plan) for entry in self._unopened)

    def starting(self, index: int) -> Iterator[BoundedPlan]:
        """Yields the configurations from this place on, the most promising first."""
        while index < len(self._ordered) or self._extend():
            yield self._ordered[index]
            index += 1

    def others(self, choice: str, value: object) -> Iterator[Plan]:
        """Yields configurations with another value of a choice: others are bounded once the known ones are used up, and
        none where the choice allows no other."""
        of_savings = {saving.choice: saving.unasked for saving in SAVINGS if saving.costs}
        values = self._space.options.allowed.get(choice, of_savings.get(choice))
        # The joint search spreads a vocabulary, and one number of the loss's tokens is given.
        if (values is not None and {*values} <= {value}) or choice in ("vocabulary", "loss_tokens"):
            return
        yield from self._with_other(self._groups, choice, value)
        for entry in sorted(self._unopened, key=self._unopened.__getitem__):
            common = entry.first if isinstance(entry, PlanGroup) else entry
            if getattr(common, choice, None) != value or choice in PlanGroup.VARIED:
                yield from self._with_other(self._open(entry), choice, value)

    def _with_other(self, groups: Iterable[PlanGroup], choice: str, value: object) -> Iterator[Plan]:
        waiting = _Waiting()
        for group in groups:
            if choice in PlanGroup.VARIED or getattr(group.first, choice) != value:
                waiting.add_group(group, choice, value)
        while found := waiting.next():
            assert not isinstance(found, (Plan, PlanGroup)), "only what is in groups was added"
            yield found[1]

    def _extend(self) -> bool:
        """Puts the next configuration in its place; False where there is none."""
        while found := self._waiting.next():
            if not isinstance(found, (Plan, PlanGroup)):
                self._ordered.append(found)
                return True
            self._open(found)
        return False

    def _open(self, found: _Unopened) -> list[PlanGroup]:
        """Returns its groups, which then wait for their turn; none where that was done."""
        if self._unopened.pop(found, None) is None:
            return []
        if isinstance(found, Plan):
            groups = [*self._space.groups(found)]
            for group in groups:
                if group.least_seconds < inf:
                    self._add_unopened(group, group.least_seconds)
        else:
            exact = self._space.with_exact_slices(found)
            groups = [exact] if exact else []
        for group in groups:
            self._count(group)
            self._waiting.add_group(group)
        self._groups += groups
        return groups

    def _count(self, group: PlanGroup) -> None:
        before, num_names = self.num_bounded, len(group.names)
        self.num_bounded += num_names * group.sizes.size
        self.num_too_large += num_names * int((group.sizes > self._space.memory).sum())
        if self.num_bounded // _EVERY > before // _EVERY:
            search_compiled()  # which pays now
            self._report("bounds", self.num_bounded, 0)

    def _add_unopened(self, found: _Unopened, seconds: float) -> None:
        self._unopened[found] = seconds
        self._waiting.add(seconds, found)
