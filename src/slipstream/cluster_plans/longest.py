"""The longest sequence that fits the memory of a cluster, for each way to save memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.cluster_plans.described_model import DescribedModel
from slipstream.cluster_plans.plan_model import Model, choose_costs
from slipstream.cost import Cluster, CostSource, ModelCount
from slipstream.model import longest_sequence
from slipstream.number_format import BasePrecision
from slipstream.planner import PlanReport
from slipstream.planner.find_plan import find_plan
from slipstream.planner.progress import ProgressReport, untold
from slipstream.planner.search import (
    ClusterProblem,
    MemorySearch,
    PlanOptions,
    PlanSpace,
    check_count,
    longest_that_fits,
)
from slipstream.planner.search.savings import SAVINGS
from slipstream.planner.search.schedule_shape import working_memory

_STEP = 1024  # tokens of which lengths are multiples
_MOST = 2**24  # tokens of a sequence, for models that take any
_PRECISION = 0.02  # largest share that a longer fitting sequence may be missed by
_SIMULATED = 40  # configurations for the seconds of a step


@dataclass(frozen=True)
class LongestSequence:
    """The longest sequence that fits with some ways to save memory.

    Args:
        savings: what a plan may choose to save memory, such as "recompute, offload"; "" for nothing.
        tokens: of the sequence; 0 where none fits.
        report: the best plan for it. None where none fits.
    """

    savings: str
    tokens: int
    report: PlanReport | None


def longest_sequences(
    model: Model,
    cluster: str | Cluster,
    *,
    global_batch: int = 1,
    progress: ProgressReport | None = None,
    num_nodes: int | None = None,
    devices: int | None = None,
    dtype: str | None = None,
    lora: Any = None,
    lora_base_precision: BasePrecision = "full",
    fused: bool = False,
    **options: Any,
) -> Iterator[LongestSequence]:
    """Yields the longest sequence that fits without saving memory, then with one way after another to save it.

    It is found by halving, to 2%, with the account of memory by which plans are searched. A model with rotary positions
    is taken to have as many as it needs: `max_position_embeddings` is for a training to give.

    Args:
        model: as for `slipstream.plan`.
        cluster: the name of a shipped cluster, a file that describes one, or a Cluster.
        global_batch: sequences of a step, on all devices together.
        progress: called with the current task, how many are done, and out of how many (0 where that is unknown).
        num_nodes, devices, dtype, lora, lora_base_precision, fused, **options: as for `slipstream.plan`.

    Raises:
        SlipstreamError: for input that can't be used.
    """
    allowed = PlanOptions(**options)
    check_count("global_batch", global_batch)
    most = _MOST
    freeze: list[str] = []
    if not isinstance(model, ModelCount):
        described = model if isinstance(model, DescribedModel) else DescribedModel(model)
        freeze = described.freeze
        model, most = _with_positions(described)
    source = choose_costs(
        model,
        cluster,
        seq_len=most,
        dtype=dtype,
        num_nodes=num_nodes,
        devices=devices,
        tensor_parallel=allowed.allowed.get("tensor_parallel"),
        freeze=freeze,
        lora=lora,
        lora_base_precision=lora_base_precision,
        fused=fused,
    )
    # Those that take time; of these the ones that nobody has decided.
    ways = sorted((saving for saving in SAVINGS if saving.weight), key=lambda saving: saving.weight)
    ways = [saving for saving in ways if saving.choice not in allowed.allowed]
    for number in range(len(ways) + 1):
        choices = {saving.choice: saving.fastest for saving in ways[number:]}
        choices |= {saving.choice: [*saving.costs] for saving in ways[:number] if saving.if_asked}
        savings = ", ".join(saving.choice for saving in ways[:number])
        yield _longest(source, global_batch, allowed.changed(**choices), most, savings, progress or untold)


def _with_positions(model: DescribedModel) -> tuple[Model, int]:
    """Returns a model with as many positions as may be asked for, and their number."""
    config = model.config
    limit = longest_sequence(config)
    if limit is None:
        return model, _MOST
    if not getattr(config.get_text_config(), "rope_parameters", None):
        return model, limit
    more = copy.deepcopy(config)
    more.get_text_config().max_position_embeddings = _MOST
    return DescribedModel(more), _MOST


def _longest(
    source: CostSource,
    global_batch: int,
    options: PlanOptions,
    most: int,
    savings: str,
    progress: ProgressReport,
) -> LongestSequence:
    def fits(length: int) -> bool:
        progress(f"tokens with {savings or 'nothing saved'}", length, 0)
        with working_memory():
            return MemorySearch(PlanSpace(source, length, global_batch, options)).fitting() is not None

    fitting = longest_that_fits(fits, _STEP, most, _PRECISION)
    if not fitting:
        return LongestSequence(savings, 0, None)
    few = options.changed(num_simulated=_SIMULATED, num_best=1)
    report = find_plan(ClusterProblem(source, fitting, global_batch, few), progress)
    return LongestSequence(savings, fitting, report)
