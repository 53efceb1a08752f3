"""The planner's choice for a new configuration: ranks, order, slices and cut on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.planner import Plan
from slipstream.planner.costs import Cluster
from slipstream.planning.plan_file import plan_settings
from slipstream.planning.plan_model import plan

# A search of seconds: replicas and shared layers are compared by `slipstream plan`
_QUICK = {"data_parallel": 1, "tensor_parallel": 1, "offload": 0.0, "slicing": "equal-time", "num_simulated": 10}
_ANEW = "With num_ranks alone, the run measures what the model costs before its first step, and plans by that"
_PLANNED = ("stages_per_rank", "schedule", "num_microbatches", "slices", "partition")


@dataclass(frozen=True)
class PipelineChoice:
    """Settings of the sections `pipeline` and `memory`, and a line on where they come from."""

    pipeline: dict[str, Any]
    memory: dict[str, Any]
    reason: str


def choose_pipeline(
    model_config: Any, machine: Cluster, dtype: str, is_packed: bool, training: Mapping[str, int]
) -> PipelineChoice:
    """Returns the fastest pipeline that fits this machine, by the costs kept of the model here or counted operations.

    `training` has `seq_len` and `global_batch`. Where documents aren't packed, and where no plan can be made, ranks
    alone are chosen: the run plans the rest from measured costs before its first step.
    """
    most = min(machine.devices_per_node, model_config.get_text_config().num_hidden_layers)
    found, problem = _fastest(model_config, machine, most, dtype, training)
    if found is None:
        return PipelineChoice(
            {"num_ranks": most}, {}, f"the run plans itself, as here no plan could be made ({problem})"
        )
    best, num_ranks = found.best, found.best.configuration.pipeline_parallel
    if not is_packed:
        return PipelineChoice(
            {"num_ranks": num_ranks}, {}, "each step is planned, from costs that the run measures first"
        )
    settings = plan_settings(found, {}, best.configuration.schedule)
    pipeline = {"num_ranks": num_ranks} | {name: settings["pipeline"][name] for name in _PLANNED}
    recompute = best.configuration.recompute
    memory = {} if recompute == "none" else {"recompute": recompute}
    return PipelineChoice(pipeline, memory, f"planned for {found.cluster}, {best.idle_fraction:.0%} idle.\n{_ANEW}")


def _fastest(
    model_config: Any, machine: Cluster, most: int, dtype: str, training: Mapping[str, int]
) -> tuple[Plan | None, str]:
    """Returns the fastest plan of any number of ranks, and why there is none."""
    options: dict[str, Any] = {**_QUICK, **training, "dtype": dtype}
    with suppress(SlipstreamError):
        return plan(model_config, None, **options), ""  # by what a run has measured here
    found, problems = [], []
    for num_ranks in _halves(most):
        here = replace(machine, devices_per_node=num_ranks, name=f"{num_ranks} x {machine.device.name}")
        try:
            found.append(plan(model_config, here, **options))
        except SlipstreamError as error:
            problems.append(str(error).partition("\n")[0])
    best = min(found, key=lambda each: each.best.step_seconds, default=None)
    return best, "" if best else problems[0]


def _halves(number: int) -> Iterator[int]:
    """Yields a number, its half, and so on to 1."""
    while number:
        yield number
        number //= 2
