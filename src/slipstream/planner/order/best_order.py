"""schedule="auto": the order of all actions that makes the step shortest, and a lower bound of the step."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.planner.order.makespan_bounds import makespan_bound
from slipstream.planner.order.order_search import OrderSearch
from slipstream.planner.order.ordering_problem import OrderingProblem
from slipstream.schedule import Schedule, SliceCounts, validate
from slipstream.simulator import CostModel


def find_order(
    placement: Sequence[int],
    num_microbatches: int,
    num_slices: SliceCounts,
    cost: CostModel,
    *,
    memory_limit: Sequence[float] | None = None,
    reach: Sequence[Sequence[int]] | None = None,
    split: bool = True,
    effort: float = 2e7,
) -> Schedule:
    """Returns a compute-only schedule named "auto", as short in the simulator as the search can make it.

    It is never slower than any hand-written schedule, whole or with its backwards split, that has this placement and
    fits the memory. The same arguments give the same schedule on every rank.

    Args:
        placement: the rank that holds each stage.
        num_slices: token slices of every microbatch, or of each.
        cost: seconds of F, B, I and W (only F and B without `split`), of messages, and bytes of activations.
        memory_limit: bytes of activations of each rank, counted as in `simulate`: from the start of F to the end of B
            or W. None: no limit.
        reach: the first slice to which each slice of each microbatch attends, as in `Schedule`. None: slice 0.
        split: whether a backward may be split into I and W.
        effort: how many actions may be placed or simulated; 5 million take about a second.

    Raises:
        SlipstreamError: where no order fits the memory: on which rank, and the least limit that would do.
    """
    problem = OrderingProblem(placement, num_microbatches, num_slices, cost, memory_limit, reach, split)
    search = OrderSearch(problem, effort)
    search.compare_hand_written()
    search.compare_rules()
    search.vary()
    search.anneal()
    search.join()
    schedule = problem.schedule(search.best.order, search.best.split)
    validate(schedule)
    return schedule


def step_lower_bound(
    placement: Sequence[int],
    num_microbatches: int,
    num_slices: SliceCounts,
    cost: CostModel,
    *,
    memory_limit: Sequence[float] | None = None,
    reach: Sequence[Sequence[int]] | None = None,
    split: bool = True,
) -> float:
    """Returns a lower bound of the step, in seconds, for any order of these actions.

    The arguments are those of `find_order`.

    Every backward counts as a part d = min(B, I), after which the input gradient can leave, and a rest
    w = min(B, I+W) - d. A *chain* is a microbatch (with reach: slices of it that attend to each other); its
    *turn* is the start of the last stage's first backward. All its forwards precede its turn, all its
    backwards follow it, and at its turn every rank holds it whole. For an action, head is the longest path before
    it and tail the longest path after it, messages included. J(actions) is the makespan of the best preemptive
    schedule of one rank or channel under the heads and tails (Jackson 1955, Carlier 1982): for all sets of
    actions, the least head + the sum of times + the least tail. The bound is the largest of

    1. head(turn) + tail(turn), where a head is at least J of the chain's forwards, and a tail at least J of its
       backwards, on every rank and channel; heads and tails of all the chain's actions grow with its turn's;
    2. J of all actions of a rank, and of all messages of a channel, with these heads and tails;
    3. for a rank with limit L: least head + sum(bytes · time held)/L + least tail, a unit being held at
       least for the path from its forward by its chain's turn to the end of its w;
    4. for such a rank: least head(turn) + (chains-1)/k · gap(k) + least tail(turn), where gap(k) is the time from
       a turn to the k-th turn after it. What k+1 chains hold above L must be freed after the one turn and
       taken before the other: gap(1) is J of the backwards that must have freed and the forwards that wait
       for it, with heads from one turn and tails to the next.
    """
    return makespan_bound(OrderingProblem(placement, num_microbatches, num_slices, cost, memory_limit, reach, split))
