"""Explains that nothing fits the memory: by how much, on which rank, and the cheapest change that would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.planner.plans import Configuration
from slipstream.planner.report import configuration_text
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.simulated_configuration import SimulatedConfiguration, may_fit
from slipstream.units import bytes_text

_SMALLEST = 8  # configurations whose memory is counted in full
_MOST_NODES = 64  # how many times the nodes may grow


def explain_misfit(space: PlanSpace, num_configurations: int) -> SlipstreamError:
    """Returns the error for a search in which every configuration is too large."""
    candidates = [SimulatedConfiguration.of(space, each) for each in _smallest(space)]
    smallest = min(candidates, key=lambda candidate: max(candidate.peaks()))
    peaks = smallest.peaks()
    peak = max(peaks)
    change = next(_changes(space), "use a device with more memory, or a smaller model")
    return SlipstreamError(
        f"nothing fits: the smallest of {num_configurations} configurations needs {bytes_text(peak)} on rank "
        f"{peaks.index(peak)}, {bytes_text(peak - space.memory)} more than the {bytes_text(space.memory)} that a "
        f"device has ({configuration_text(smallest.configuration)}). The cheapest change that would fit: {change}."
    )


def _smallest(space: PlanSpace) -> list[Configuration]:
    """Returns the configurations of least memory by their bounds, with all ways to save memory that are allowed."""
    sizes = space.source.microbatch_sizes or (1,)
    saving: dict[str, Any] = {
        "recompute": space.source.recomputations[-1:],
        "offload": (0.0, 1.0) if space.source.host else None,
        "microbatch_size": (min(sizes),),
        "num_slices": (1, 8)
        if space.longest >= space.seq_len and space.options.allows("slicing", "equal-time")
        else None,
        "slicing": ("equal-time",),
    }
    unsaid = {choice: values for choice, values in saving.items() if getattr(space.options, choice) is None}
    saving_space = PlanSpace(space.source, space.seq_len, space.global_batch, replace(space.options, **unsaid))
    found = sorted((size, number, c) for number, (_, size, c) in enumerate(saving_space.bounded()))
    return [configuration for _, _, configuration in found[:_SMALLEST]]


def _changes(space: PlanSpace) -> Iterator[str]:
    """Yields changes that would fit, the cheapest first: more choices, more memory, more nodes, fewer tokens."""
    options, source = space.options, space.source
    for choice in (each.name for each in fields(Configuration)):
        anything: dict[str, Any] = {choice: None}
        if getattr(options, choice) is not None and (found := _fitting(replace(options, **anything), space)):
            yield f"allow {choice}={getattr(found, choice)}"
    if options.memory_limit is not None and _fitting(replace(options, memory_limit=None), space):
        yield f"allow all {bytes_text(source.memory)} of a device's memory"
    for more in source.larger(_MOST_NODES):
        found = _fitting(options, PlanSpace(more, space.seq_len, space.global_batch, options))
        if found is not None:
            yield f"{more.num_devices} devices instead of {source.num_devices} ({configuration_text(found)})"
    length = space.seq_len // 2
    while length >= 256:
        if _fitting(options, PlanSpace(source, length, space.global_batch, options)):
            yield f"sequences of {length} tokens"
        length //= 2


def _fitting(options: PlanOptions, space: PlanSpace) -> Configuration | None:
    """Returns one of the smallest configurations that fits, if any."""
    other = PlanSpace(space.source, space.seq_len, space.global_batch, options)
    return next((c for c in _smallest(other) if may_fit(other, c) and SimulatedConfiguration.of(other, c).fits()), None)
