"""What the actions of a pipeline cost on slices of given lengths, for `slipstream.simulate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from slipstream.errors import SlipstreamError
from slipstream.schedule import COMMUNICATION, Op, Schedule
from slipstream.simulator import TableCost

ActionTime = Callable[[int, Op, int, int], float]  # (stage, op, slice_length, context_length) -> seconds


def schedule_costs(
    schedule: Schedule,
    slices: tuple[int, ...],
    time: ActionTime,
    *,
    bytes_per_token: float = 0,
    latency: float = 0,
    bandwidth: float | None = None,
) -> TableCost:
    """What the schedule's actions cost on slices of these lengths, plain causal attention.

    Args:
        schedule: with as many slices as there are lengths.
        slices: tokens, first to last.
        time: (stage, op, slice_length, context_length) -> seconds, asked for the ops F, B, I, W, R that occur.
        bytes_per_token: of a message from stage to stage.
        latency: of a message, in seconds.
        bandwidth: in bytes per second; None: messages take `latency` only.
    """
    contexts = list(accumulate(slices, initial=0))
    actions = (action for row in schedule.actions for action in row)
    wanted = {(a.stage, a.slice, a.op) for a in actions if a.op not in COMMUNICATION and a.op is not Op.REDUCE_GRAD}
    times: dict[tuple[int, int, Op], float] = {
        (stage, i, op): time(stage, op, slices[i], contexts[i]) for stage, i, op in wanted
    }
    return TableCost(times, [bytes_per_token * tokens for tokens in slices], latency, bandwidth)


def layer_sequence_costs(
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
