"""What the actions of a given schedule cost with a model on some devices, for `slipstream timeline`."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from slipstream.cost import AnalyticCosts, CostSource, Degrees, StageCosts
from slipstream.errors import SlipstreamError
from slipstream.planner.joint import AnalyticUnits, JointProblem, ProfileUnits, UnitCosts, spread_costs
from slipstream.schedule import Schedule
from slipstream.simulator import TableCost


def schedule_costs(
    source: CostSource,
    schedule: Schedule,
    partition: Sequence[float] | None = None,
    slices: Sequence[int] | None = None,
    *,
    seq_len: int,
    tensor_parallel: int | None = None,
    microbatch_size: int | None = None,
) -> TableCost:
    """Returns the simulator's costs of a schedule's stages and slices.

    Args:
        source: the costs that `choose_costs` returns.
        schedule: compute actions only.
        partition: layers of each stage; with halves where layers can be cut, 0 for an end of the model alone. Default:
            nearly equal numbers.
        slices: tokens of each slice. Default: nearly equal ones.
        seq_len: tokens of a sequence.
        tensor_parallel: ranks that share every layer. Default: the fewest that the source has costs of.
        microbatch_size: sequences of a microbatch. Default: as they were measured, else 1.

    Raises:
        SlipstreamError: where the numbers don't fit the schedule, the sequence or the model, or costs are unknown.
    """
    layers = partition or _nearly_equal(len(source.kinds), schedule.num_stages)
    tokens = [int(each) for each in slices or _nearly_equal(seq_len, schedule.num_slices)]
    for name, given, wanted in (
        ("partition", layers, schedule.num_stages),
        ("lengths", tokens, schedule.num_slices),
    ):
        if len(given) != wanted:
            raise SlipstreamError(
                f"--{name} has {len(given)} numbers, but the schedule {schedule.name!r} needs {wanted}"
            )
    if sum(tokens) != seq_len:
        raise SlipstreamError(
            f"--lengths={','.join(map(str, tokens))} add up to {sum(tokens)}, but --seq-len={seq_len}"
        )
    tensor, size = _known(source, tensor_parallel, microbatch_size)
    costs = source.costs(Degrees(tensor), size)
    table: TableCost = costs.cost(layers, tokens)
    if not schedule.spreads_vocabulary:
        return table
    units = _units(source, costs, tokens, schedule.num_ranks)
    return spread_costs(JointProblem(units, seq_len, schedule.num_ranks), tuple(layers), tuple(tokens))


def _known(source: CostSource, tensor_parallel: int | None, microbatch_size: int | None) -> tuple[int, int]:
    """Returns the degree and the number of sequences, both of which the source has costs of."""
    degrees, sizes = source.tensor_parallel_degrees, source.microbatch_sizes
    if tensor_parallel is not None and tensor_parallel not in degrees:
        raise SlipstreamError(
            f"tensor_parallel={tensor_parallel} can't be predicted for {source.hardware}: choose one of "
            f"{', '.join(map(str, degrees))}."
        )
    if sizes is not None and microbatch_size is not None and microbatch_size not in sizes:
        raise SlipstreamError(
            f"microbatch_size={microbatch_size} can't be predicted for {source.hardware}: its times were not measured. "
            f"Use {sizes[0]}."
        )
    return tensor_parallel or degrees[0], microbatch_size or (sizes or (1,))[0]


def _units(source: CostSource, costs: StageCosts, slices: Sequence[int], num_ranks: int) -> UnitCosts:
    if isinstance(costs, AnalyticCosts):
        return AnalyticUnits(costs, sum(slices), gcd(*slices), num_ranks)
    return ProfileUnits(costs, source.state)


def _nearly_equal(total: int, count: int) -> list[int]:
    return [total // count + (i < total % count) for i in range(count)]
