"""The problem of planning a training on a cluster, the mesh included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from slipstream.cost import CostSource
from slipstream.planner.search.plan_options import PlanOptions


@dataclass(frozen=True)
class ClusterProblem:
    """A training on `global_batch` sequences of `seq_len` tokens per step, over all devices.

    Args:
        source: the model on its hardware, with its costs there.
        seq_len: tokens per sequence.
        global_batch: sequences per step.
        options: the choices that are allowed.
        cheaper: yields what to type to train fewer weights, or to keep them in fewer bytes, and the model's costs then.
    """

    source: CostSource
    seq_len: int
    global_batch: int
    options: PlanOptions = field(default_factory=PlanOptions)
    cheaper: Callable[[], Iterator[tuple[str, CostSource]]] = lambda: iter(())
