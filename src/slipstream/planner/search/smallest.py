"""Which configurations fit the memory, and which needs least: a search by lower bounds of their bytes, best first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, cached_property, partial
from math import inf, nextafter, prod
from typing import TypeAlias

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost import BY_LAYER, Degrees, Stage, backward_bytes
from slipstream.options import host_share
from slipstream.planner.best_first import BestFirst
from slipstream.planner.plan import Plan
from slipstream.planner.search.bounds import NOT_AWAY
from slipstream.planner.search.evaluate import GROUPS, Evaluation, state_on_host
from slipstream.planner.search.plan_space import AlikeInCut, PlanSpace
from slipstream.schedule import SCHEDULES

_CLOSE = 0.005  # share by which a smaller configuration may be missed
# Slices of stages that are accounted for, a few seconds' worth, and those that bounds take as long as.
_EFFORT, _OF_BOUNDS = 60_000, 80

# Configurations that are bounded together. Called, they give those that they consist of, each with its least bytes.
_Together: TypeAlias = Callable[[], Iterator[tuple[float, "_Together | Plan"]]]


def longest_that_fits(fits: Callable[[int], bool], step: int, most: int, precision: float) -> int:
    """Returns the most tokens that fit, in multiples of a step; 0 where none do.

    The length is doubled until it doesn't fit, then the interval is halved.

    Args:
        fits: returns whether a length does.
        step: tokens; of short sequences how close the answer is.
        most: tokens that may be tried.
        precision: the largest share by which a longer one may be missed.
    """
    fitting, too_long = 0, min(step, most)
    while too_long <= most and fits(too_long):
        fitting, too_long = too_long, 2 * too_long
    too_long = min(too_long, most + 1)
    while fitting and too_long - fitting > max(step, precision * fitting):
        middle = (fitting + too_long) // 2 // step * step
        fitting, too_long = (middle, too_long) if fits(middle) else (fitting, middle)
    return fitting


class MemorySearch:
    """A search of the configuration that needs least, or of one that fits.

    Meshes are opened by the state of their ranks, then configurations with the same cut and slices, then how they save
    memory, then single ones: their bytes are accounted for. Finer slices need no more, so they are opened before
    coarser ones.

    Args:
        space: of the configurations.
        effort: slices of stages that are accounted for, at most.
    """

    def __init__(self, space: PlanSpace, effort: int = _EFFORT) -> None:
        self._space, self._left = space, effort
        self._waiting = BestFirst[_Together | Plan]()
        self._later: list[tuple[float, _Together]] = []
        self._best: Evaluation | None = None
        self._least = inf
        self.has_any = False
        """Whether there are configurations, as far as meshes were opened."""
        self.is_complete = True
        """Whether nothing was left out for lack of effort."""
        self._backward = cache(self._backward_bytes)
        for mesh in space.meshes():
            self._waiting.add(space.mean_state(mesh, at_end=True), partial(self._on_mesh, mesh))

    def fitting(self) -> Evaluation | None:
        """Returns a configuration that fits, with the account of its bytes; None where none was found."""
        memory = self._space.memory
        self._open_below(nextafter(memory, inf), memory)
        if self._least > memory:
            self._wait_for_later(memory)
            self._open_below(nextafter(memory, inf), memory)
        return self._best if self._best is not None and self._space.fits(self._best) else None

    def smallest(self) -> Evaluation | None:
        """Returns the configuration whose fullest rank needs least, of those whose hosts have room; None where none was
        found."""
        self._open_below(inf)
        self._wait_for_later(inf)
        self._open_below(inf)
        return self._best

    def _open_below(self, limit: float, enough: float = 0.0) -> None:
        """Looks for less than the least so far, until that is enough, or nothing that waits may need less than the
        limit."""
        while self._least > enough and (found := self._waiting.next_below(min(limit, (1 - _CLOSE) * self._least))):
            bound, entry = found
            if self._left <= 0:
                self.is_complete = False
                self._waiting.add(bound, entry)
                return
            if isinstance(entry, Plan):
                self._account(entry)
                continue
            for least, part in entry():
                self._waiting.add(max(bound, least), part)

    def _wait_for_later(self, limit: float) -> None:
        """Lets configurations wait whose bounds are loose, or whose slices take long to find."""
        self._later, now = ([each for each in self._later if (each[0] <= limit) is is_now] for is_now in (False, True))
        for bound, together in now:
            self._waiting.add(bound, together)

    def _account(self, plan: Plan) -> None:
        self._left -= prod(self._space.shape(plan).with_groups(GROUPS).counts)
        evaluation = self._space.evaluate_bytes(plan)
        needed = max(evaluation.peaks_within_hosts())
        if needed < self._least:
            self._best, self._least = evaluation, needed

    def floors(self, mesh: Plan) -> Iterator[MemoryFloor]:
        """Yields the bounds of the configurations on a mesh, those with the same cut together."""
        for alike in self._space.alike_in_cut(mesh):
            yield MemoryFloor(self._space, alike, self._backward)

    def _on_mesh(self, mesh: Plan) -> Iterator[tuple[float, _Together]]:
        for floor in self.floors(mesh):
            alike, counts = floor.alike, [count for count, _ in floor.alike.slicings]
            self.has_any |= bool(counts)
            finest_first = sorted(range(len(counts)), key=counts.__getitem__, reverse=True)
            several = [index for index in finest_first if counts[index] > 1]
            # A layer of a lone slice makes its keys and values again, which several slices keep.
            for order in (several, [index for index in finest_first if counts[index] == 1]):
                # What waits for weight gradients isn't in the bounds.
                if order and SCHEDULES[alike.first.schedule_name].splits:
                    self._later += self._in_order(floor, order)
                elif order:
                    yield from self._in_order(floor, order)
            if floor.with_any_slices <= self._space.memory or not counts:
                self._later.append((floor.with_any_slices, partial(self._exactly_sliced, alike)))

    def _in_order(self, floor: MemoryFloor, order: list[int]) -> Iterator[tuple[float, _Together]]:
        if order:
            yield floor.with_any_slices, partial(self._with_slices, floor, order)

    def _with_slices(self, floor: MemoryFloor, order: list[int]) -> Iterator[tuple[float, _Together]]:
        index, *coarser = order
        self._left -= _OF_BOUNDS
        held = floor.device_bytes(index)
        for saving in np.flatnonzero(held < self._least):
            yield float(held[saving]), partial(self._scheduled, floor, index, int(saving))
        for least, together in self._in_order(floor, coarser):
            yield max(least, float(held.min())), together

    @staticmethod
    def _scheduled(floor: MemoryFloor, index: int, saving: int) -> Iterator[tuple[float, Plan]]:
        if floor.has_room_on_host(index, saving):
            yield from ((0.0, plan) for plan in floor.scheduled(index, saving))

    def _exactly_sliced(self, alike: AlikeInCut) -> Iterator[tuple[float, _Together]]:
        if exact := self._space.exactly_sliced(alike):
            self.has_any = True
            yield from self._in_order(MemoryFloor(self._space, exact, self._backward), [0])

    def _backward_bytes(
        self, degrees: Degrees, size: int, stage: Stage, by_layer: bool, length: int, splits: bool
    ) -> float:
        return backward_bytes(self._space.costs(degrees, size), stage, by_layer, length, splits)


class MemoryFloor:
    """The least bytes of configurations with the same cut.

    Args:
        space: of the configurations.
        alike: the configurations.
        backward: returns what a stage's backward of a slice takes.
    """

    def __init__(self, space: PlanSpace, alike: AlikeInCut, backward: Callable[..., float]) -> None:
        self.alike, self._backward = alike, backward
        self._space, self._bounds = space, space.bounds_of(alike)
        self._savings = alike.savings

    @cached_property
    def _between(self) -> Floats:
        """The fullest rank's least bytes between forwards and backwards, (slicing, saving)."""
        return self._bounds.least_bytes()

    @property
    def with_any_slices(self) -> float:
        """The least bytes of the fullest rank, whatever the slices."""
        return float(self._between[-1].min())

    def scheduled(self, index: int, saving: int) -> Iterator[Plan]:
        """Yields the configurations with some slices and one way to save memory, which differ in their schedules."""
        num_slices, slicing = self.alike.slicings[index]
        chosen = {"num_slices": num_slices, "slicing": slicing, **self._savings.every[saving]}
        for name in self.alike.names:
            yield replace(self.alike.first, schedule=name, **chosen)

    def device_bytes(self, index: int) -> Floats:
        """Returns the least bytes of the fullest rank with some slices, (saving,)."""
        longest, last = max(self._bounds.slicings[index]), self._bounds.slicings[index][-1]
        is_lone = len(self._bounds.slicings[index]) == 1
        along, along_updates, cut = self._savings.along, self._savings.along_updates, self._bounds.cut
        # 1. A rank's state, its gradients and its context.
        by_layer = np.array([[float(what in BY_LAYER)] for what in self._savings.values["recompute"]])
        is_here = np.array([not host_share(place) for place in self._savings.values["context"]])[:, None]
        context, gradients = self._context
        keeps = along("recompute", 1 - by_layer * is_lone)
        # 2. While a stage's backward of the longest slice runs, there are all of its keys, values and gradients.
        of_stage = along("recompute", self._backwards(longest)) + along_updates(self._state_of_stages)
        of_stage = of_stage + keeps * along("context", is_here * (context + gradients))
        # 3. When a rank's first backward of a microbatch runs, there is what all of its forwards have kept.
        lasts = self._last_stages
        first = self._backwards(last)[:, lasts]
        others = np.maximum(0.0, self._kept - self._kept_of_stages[:, lasts] * (last / self._space.seq_len))
        stays = along("offload", np.array(self._savings.values["offload"])[:, None] == 0)
        of_rank = along("recompute", first) + stays * along("recompute", others)
        of_rank = of_rank + along_updates(self._state_before)
        of_rank = of_rank + keeps * along("context", is_here * (cut.per_rank(context) + gradients[lasts]))
        # 4. A rank's last backward is that of its first stage; all of its gradients are there then, unless they are
        # made apart, as they are at the end of the step.
        firsts, of_first = self._first_stages, self._bounds.slicings[index][0]
        at_end = along_updates(self._state_at_end)
        if not is_lone and not self._bounds.splits_all:
            ends = by_layer * (self._backwards(of_first)[:, firsts])
            at_end = at_end + along("recompute", ends)
            at_end = at_end + along("recompute", by_layer) * along("context", is_here * (context + gradients)[firsts])
        held = np.maximum(of_stage.max(axis=-1), np.maximum(of_rank, at_end).max(axis=-1))
        every: Floats = np.broadcast_to(held, self._savings.shape).reshape(-1)
        least: Floats = np.maximum(every, self._between[index])
        return least

    def has_room_on_host(self, index: int, saving: int) -> bool:
        """Returns False only if what must be on a host is more than it has."""
        host, chosen = self._space.host, self._savings.every[saving]
        if host is None:
            return True
        bounds, cut, lengths = self._bounds, self._bounds.cut, self._bounds.slicings[index]
        update = self._space.update(replace(self.alike.first, **chosen))
        away = state_on_host(cut, update)
        if chosen["offload"] == 1:
            kept = bounds.sizes.kept[chosen["recompute"]]
            away = away + np.maximum(0.0, cut.per_rank(kept) - NOT_AWAY * kept.max() * max(lengths) / sum(lengths))
        if host_share(chosen["context"]) == 1 and not (len(lengths) == 1 and chosen["recompute"] in BY_LAYER):
            away = away + cut.per_rank(self._context[0])
        return float(away.max()) <= host.capacity

    def _backwards(self, length: int) -> Floats:
        """Returns what the backwards of a slice take, (recomputation, stage)."""
        first, bounds = self.alike.first, self._bounds

        def of_stage(by_layer: bool, stage: Stage) -> float:
            like = self._space.alike(stage)
            return self._backward(first.degrees, first.microbatch_size, like, by_layer, length, bounds.splits_all)

        by_layer = [what in BY_LAYER for what in self._savings.values["recompute"]]
        taken = {each: bounds.cut.per_stage(partial(of_stage, each)) for each in dict.fromkeys(by_layer)}
        return np.stack([taken[each] for each in by_layer])

    @cached_property
    def _last_stages(self) -> list[int]:
        placement = self._bounds.cut.placement
        return [len(placement) - 1 - placement[::-1].index(rank) for rank in range(self._bounds.cut.num_ranks)]

    @cached_property
    def _first_stages(self) -> list[int]:
        return list(map(self._bounds.cut.placement.index, range(self._bounds.cut.num_ranks)))

    @cached_property
    def _context(self) -> tuple[Floats, Floats]:
        """The bytes of a microbatch's keys and values, and of their gradients, (stage,) each."""
        cut = self._bounds.cut
        gradients = cut.per_stage(partial(cut.costs.context_gradient_bytes, length=self._space.seq_len))
        return self._bounds.sizes.context * cut.trains, gradients * cut.trains

    @cached_property
    def _kept_of_stages(self) -> Floats:
        """The bytes that a microbatch's forwards keep, (recomputation, stage)."""
        return np.stack([self._bounds.sizes.kept[what] for what in self._savings.values["recompute"]])

    @cached_property
    def _kept(self) -> Floats:
        return self._bounds.cut.per_rank(self._kept_of_stages)

    @cached_property
    def _state(self) -> Floats:
        """The bytes of weights and optimizer, (update, rank)."""
        sizes, per_rank = self._bounds.sizes, self._bounds.cut.per_rank
        held = [sizes.weights + each.held.optimizer * sizes.optimized(each) for each in self._bounds.updates]
        return per_rank(np.stack(held))

    @cached_property
    def _gradients(self) -> Floats:
        """The bytes of the gradients that are there before a later microbatch's backward, (update, stage)."""
        bounds, has_several = self._bounds, len(self._last_stages) < len(self._bounds.cut.placement)
        each = self._space.source.state.gradients * (bounds.num_microbatches > 1) * bounds.sizes.trained
        return np.stack([each * (update.place == "device" or not has_several) for update in bounds.updates])

    @cached_property
    def _state_at_end(self) -> Floats:
        """The state of each rank with all gradients that stay on the device until they are all made, (update, rank)."""
        bounds, has_several = self._bounds, len(self._last_stages) < len(self._bounds.cut.placement)
        made = self._space.source.state.gradients * bounds.cut.per_rank(bounds.sizes.trained)
        stays = [update.place == "device" or not has_several for update in bounds.updates]
        return self._state + np.outer(stays, made)

    @cached_property
    def _state_of_stages(self) -> Floats:
        """The state of each stage's rank with the stage's gradients, (update, stage)."""
        return self._state[:, list(self._bounds.cut.placement)] + self._gradients

    @cached_property
    def _state_before(self) -> Floats:
        """The state of each rank at its first backward of the last microbatch, (update, rank)."""
        return self._state + self._gradients[:, self._last_stages]
