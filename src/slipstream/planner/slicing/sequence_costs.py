"""What the token slices of a sequence of layers cost, of which the layers before CutTokens can't be sliced."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from slipstream.errors import SlipstreamError
from slipstream.schedule import Op
from slipstream.simulator import TableCost


def slice_costs(
    costs: Sequence[float],
    stages: Sequence[int],
    cut: int,
    slices: Sequence[int],
    *,
    overhead: float = 0.0,
    backward: float = 2.0,
) -> TableCost:
    """For `simulate`, from what each layer's forward of a microbatch costs.

    A layer after `cut` takes of it each slice's share of the tokens; those before run with slice 0 alone:

        slice 0   |  encoder  | decoder |        slice 1, 2, ...   | decoder |

    Args:
        costs: of every layer, in seconds.
        stages: the number of layers of each stage.
        cut: the number of the layer CutTokens.
        slices: the tokens of each slice.
        overhead: seconds that a stage's forward of a slice takes besides, where it has anything to do.
        backward: how many forwards a backward takes; half of it is the input's gradient.

    Raises:
        SlipstreamError: where the stages are of another number of layers, or there is no layer `cut`.
    """
    if sum(stages) != len(costs) or not 0 <= cut < len(costs):
        raise SlipstreamError(
            f"stages={list(stages)} are {sum(stages)} layers, cut={cut}, but costs has {len(costs)}: give as many, and "
            "as cut the number of the layer CutTokens."
        )
    length, times = sum(slices), dict[tuple[int, int, Op], float]()
    ranges = [range(a, b) for a, b in pairwise(accumulate(stages, initial=0))]
    for stage, layers in enumerate(ranges):
        before = sum(costs[index] for index in layers if index < cut)
        after = sum(costs[index] for index in layers if index > cut)
        for number, tokens in enumerate(slices):
            works = number == 0 or layers.stop > cut
            forward = works * (overhead + (before if number == 0 else 0) + after * tokens / length)
            shares = {Op.F: 1.0, Op.R: 1.0, Op.B: backward, Op.I: backward / 2, Op.W: backward / 2}
            times |= {(stage, number, op): forward * share for op, share in shares.items()}
    return TableCost(times)
