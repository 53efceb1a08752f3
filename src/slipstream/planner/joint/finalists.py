"""The last round of the joint search: the best candidates of all placements, in orders that are searched for."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from math import inf
from typing import TYPE_CHECKING

from slipstream.planner.best_first import BestFirst
from slipstream.planner.joint.candidate import Candidate

if TYPE_CHECKING:
    from slipstream.planner.joint.placement_search import PlacementSearch

_FIRST = 12  # candidates per placement, until one fits the memory limit
_NEAR = 200  # candidates with the shortest quick orders
_SHARE = 0.2  # share of the search's effort for all bounds and orders
_ORDER_SHARE = 0.01  # share for one order
_ACCOUNT = 200  # effort of an account of memory, in actions of the order
_BOUND = 100  # effort of a bound, in actions of the order; high, as little of it is compiled


class FinalistSearch:
    """The best candidate of each placement by orders that are searched for.

    Quick orders are some 2% longer than the best ones, and not all alike, while the best orders are close to their
    lower bounds. So the candidates with the least bounds get better orders, and where one is the best so far, what is
    one change from it takes part too.
    """

    def __init__(self, searches: list[PlacementSearch]) -> None:
        self._searches = searches
        # under a memory limit only an order that was accounted for is known to fit
        self.best = {search: search.best if search.memory is None else None for search in searches}
        self._least = {search: search.seconds if search.memory is None else inf for search in searches}
        self._left = _SHARE * searches[0].problem.effort if searches else 0.0
        self._waiting = BestFirst[tuple["PlacementSearch", Candidate]]()
        self._seen: set[tuple[PlacementSearch, Candidate]] = set()

    def run(self) -> None:
        """Orders the candidates of the least bounds until none can be better, or the effort is used up."""
        for search in self._searches:
            if search.memory is not None:
                self._begin_within_limit(search)
        known = [(seconds, search, each) for search in self._searches for each, seconds in search.known.items()]
        for _, search, candidate in nsmallest(_NEAR, known, key=lambda each: each[0]):
            self._add(search, [candidate])
        while self._left > 0 and (found := self._waiting.next_below(min(self._least.values()))):
            _, (search, candidate) = found
            effort = _ORDER_SHARE * search.problem.effort
            self._left -= effort if search.memory is None else effort + _ACCOUNT * search.num_actions(candidate)
            seconds = search.seconds_in_order(candidate, effort)
            if seconds < self._least[search]:
                self._least[search], self.best[search] = seconds, candidate
                if seconds == min(self._least.values()):
                    self._add(search, search.changes(candidate))

    def _begin_within_limit(self, search: PlacementSearch) -> None:
        """Takes the first of the candidates with the shortest quick orders that has an order within the limit."""
        for candidate in nsmallest(_FIRST, search.known, key=search.known.__getitem__):
            seconds = search.seconds_in_order(candidate, _ORDER_SHARE * search.problem.effort)
            if seconds < inf:
                self._least[search], self.best[search] = seconds, candidate
                return

    def _add(self, search: PlacementSearch, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            least = min(self._least.values())
            if (search, candidate) in self._seen or search.rough_bound(candidate) >= least or self._left <= 0:
                continue
            self._seen.add((search, candidate))
            if search.fits(candidate):
                self._left -= _BOUND * search.num_actions(candidate)
                self._waiting.add(search.bound(candidate), (search, candidate))
