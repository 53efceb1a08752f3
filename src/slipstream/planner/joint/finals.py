"""The last choice of the joint search: by better orders than the quick ones, the least lower bounds first."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush, nsmallest

from slipstream.planner.joint.candidates import Candidate
from slipstream.planner.joint.placement_search import PlacementSearch

_NEAR = 200  # candidates, of the shortest quick orders
_SHARE = 0.2  # of the search's effort, for all bounds and orders
_ORDER_SHARE = 0.01  # for one order
_BOUND = 100  # times an order's actions: the effort of a bound, of which little is compiled


class Finals:
    """The best candidate of each placement by orders that are searched for.

    Quick orders are some 2% longer than the best ones, and not all alike, while the best orders are close to their
    lower bounds. So the candidates with the least bounds get better orders, and where one is the best so far, what is
    one change from it takes part too.
    """

    def __init__(self, searches: list[PlacementSearch]) -> None:
        self._searches = searches
        self.best = {search: search.best for search in searches}
        self._least = {search: search.seconds for search in searches}
        self._left = _SHARE * searches[0].problem.effort
        self._waiting: list[tuple[float, int, PlacementSearch, Candidate]] = []
        self._seen: set[tuple[PlacementSearch, Candidate]] = set()

    def run(self) -> None:
        """Orders the candidates of the least bounds until none can be better, or the effort is used up."""
        known = [(seconds, search, each) for search in self._searches for each, seconds in search.known.items()]
        for _, search, candidate in nsmallest(_NEAR, known, key=lambda each: each[0]):
            self._add(search, [candidate])
        effort = _ORDER_SHARE * self._searches[0].problem.effort
        while self._waiting and self._left > 0:
            bound, _, search, candidate = heappop(self._waiting)
            if bound >= min(self._least.values()):
                return
            self._left -= effort
            seconds = search.seconds_in_order(candidate, effort)
            if seconds < self._least[search]:
                self._least[search], self.best[search] = seconds, candidate
                if seconds == min(self._least.values()):
                    self._add(search, search.changes(candidate))

    def _add(self, search: PlacementSearch, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            least = min(self._least.values())
            if (search, candidate) in self._seen or search.rough_bound(candidate) >= least or self._left <= 0:
                continue
            self._seen.add((search, candidate))
            if search.fits(candidate):
                self._left -= _BOUND * search.num_actions(candidate)
                heappush(self._waiting, (search.bound(candidate), len(self._seen), search, candidate))
