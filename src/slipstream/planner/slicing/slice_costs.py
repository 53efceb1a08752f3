"""The costs of a pipeline's actions on slices of given lengths, for `slipstream.simulate`."""

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
    """Returns the costs of a schedule's actions on slices of these lengths under plain causal attention.

    Args:
        schedule: a schedule with as many slices as there are lengths.
        slices: tokens, first to last.
        time: (stage, op, slice_length, context_length) -> seconds, called for each of F, B, I, W, R in the schedule.
        bytes_per_token: bytes of a message between stages, per token.
        latency: seconds of a message, however short.
        bandwidth: bytes per second; None: messages take only `latency`.
    """
    contexts = list(accumulate(slices, initial=0))
    timed = schedule.ops - COMMUNICATION - {Op.REDUCE_GRAD}
    wanted = {(action.stage, action.slice, action.op) for action in schedule.positions if action.op in timed}
    times = {(stage, i, op): time(stage, op, slices[i], contexts[i]) for stage, i, op in wanted}
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
    """Returns the costs of a sequence of layers whose tokens are sliced at the layer CutTokens.

    A layer after `cut` takes its time in proportion to the slice's tokens; the layers before run with slice 0 alone:

        slice 0   |  encoder  | decoder |        slice 1, 2, ...   | decoder |

    Args:
        costs: seconds of every layer's forward of a microbatch.
        stages: the number of layers of each stage.
        cut: the number of the layer CutTokens.
        slices: the tokens of each slice.
        overhead: additional seconds of a stage's forward of a slice, if it computes anything.
        backward: the time of a backward in forwards; half of it is the input gradient.

    Raises:
        SlipstreamError: where the stages have another number of layers, or there is no layer `cut`.
    """
    if sum(stages) != len(costs) or not 0 <= cut < len(costs):
        raise SlipstreamError(
            f"stages={list(stages)} are {sum(stages)} layers, cut={cut}, but costs has {len(costs)}: give as many "
            "layers, and as cut the number of the layer CutTokens."
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
