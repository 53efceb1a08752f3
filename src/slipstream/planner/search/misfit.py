"""What is said where nothing fits: by how much, what divides or is found, and the cheapest change that would do."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from math import ceil
from operator import itemgetter
from typing import Any

from slipstream.cost import WAYS
from slipstream.errors import SlipstreamError
from slipstream.planner.plan import CHOICES, Plan
from slipstream.planner.search.cluster_problem import ClusterProblem
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.savings import SAVINGS
from slipstream.units import bytes_text, plural

NOTHING_SPREAD = (
    "vocabulary=spread: it is planned together with cuts, slices and order, for pipelines whose ranks share nothing "
    "else, and none was found that fits. Allow schedule=auto and slicing=auto, tensor, context and expert parallelism "
    "of 1, and any stages_per_rank and num_slices; or vocabulary=whole too."
)


def nothing_joint(fastest: Plan) -> SlipstreamError:
    """Returns the error where a named schedule fits, but isn't allowed, and the joint search finds nothing."""
    return SlipstreamError(
        "schedule=auto: no cut, slices and order were found together that fit, but "
        f"{fastest.describe()} does. Allow schedule={fastest.schedule_name} and slicing={fastest.slicing} too."
    )


def nothing_divides(space: PlanSpace) -> SlipstreamError:
    """Returns the error that names the degree that is impossible by itself, or beside the others that are given."""
    source, options, sequences = space.source, space.options, plural(space.global_batch, "sequence")
    devices, layers = plural(source.num_devices, "device"), plural(len(source.kinds), "layer")
    rules = {way.named.choice: way.rule.format(devices=devices, seq_len=space.seq_len) for way in WAYS.values()} | {
        "pipeline_parallel": f"must divide the {devices} and be at most the {layers}",
        "data_parallel": f"must divide the {devices} and the batch of {sequences}",
    }
    given = {name: options.allowed[name] for name in CHOICES if name in options.allowed}
    texts = {name: f"{name}={','.join(map(str, values))}" for name, values in given.items()}

    def meshes(allowed: dict[str, Any]) -> Iterator[Plan]:
        # Ranks that stay inside of a node may be on several where that was asked for.
        asked = {way.named.choice: source.degrees[name] for name, way in WAYS.items() if way.stays_inside}
        degrees: dict[str, Any] = dict.fromkeys(rules) | asked
        return PlanSpace(source, space.seq_len, space.global_batch, options.changed(**degrees | allowed)).meshes()

    alone = [name for name in rules if name in given and next(meshes({name: given[name]}), None) is None]
    for name in alone or (name for name in rules if name in given):
        others = [other for other in rules if other in given and other != name and not alone]
        possible = {getattr(mesh, name) for mesh in meshes({other: given[other] for other in others})}
        if allowed := sorted(possible - {*given[name]}):
            beside = " beside " + " and ".join(map(texts.__getitem__, others)) if others else ""
            return SlipstreamError(
                f"{texts[name]} fits nothing{beside}: it {rules[name]}. Choose from "
                f"{', '.join(map(str, allowed))}, or leave it out."
            )
    return SlipstreamError(
        f"no configuration fits these numbers: {devices}, {layers}, a global batch of {sequences}. Change the batch or "
        f"the number of nodes{', or allow more than ' + ', '.join(texts.values()) if texts else ''}."
    )


_SMALLEST = 8  # configurations whose memory is counted
_MOST_NODES = 64  # how many times the nodes may grow


def explain_misfit(space: PlanSpace, num_meshes: int) -> SlipstreamError:
    """Returns the error for a search in which every configuration is too large."""
    candidates = [space.evaluate(plan) for plan in smallest_plans(space)]
    smallest = min(candidates, key=lambda candidate: max(candidate.peaks()))
    peaks, away, host = smallest.peaks(), max(smallest.host_peaks()), space.host
    peak, room, has = max(peaks), space.memory, f"{bytes_text(space.memory)} that may be used of a device"
    where = f"on rank {peaks.index(peak)}"
    if peak <= room and host is not None:
        has = "that may be used of a host for each device" if _limits_host(space) else "that a host has for each device"
        peak, room, has = away, host.capacity, f"{bytes_text(host.capacity)} {has}"
        where = "on a host"
    larger = f"a device of which {bytes_text(_in_digits(max(peaks)))} may be used"
    if away and host is not None and away > host.capacity:
        larger += f", with {bytes_text(_in_digits(away))} on its host"
    return SlipstreamError(
        f"nothing fits: the smallest configuration on {plural(num_meshes, 'mesh')} needs {bytes_text(peak)} {where}, "
        f"{bytes_text(peak - room)} more than the {has} ({smallest.plan.describe()}). The cheapest "
        f"change that would fit: {next(_changes(space), larger)}."
    )


def _in_digits(num_bytes: float) -> float:
    """Returns a size that is no less, with the digits that are shown."""
    power = 10.0 ** (len(f"{num_bytes:.0f}") - 3)
    return ceil(num_bytes / power) * power


def smallest_plans(space: PlanSpace) -> list[Plan]:
    """Returns the configurations of least memory by their bounds, with all ways to save memory that are allowed."""
    slices = space.longest >= space.seq_len and space.options.allows("slicing", "equal-time")
    saving: dict[str, Any] = {
        "recompute": space.source.recomputations[-1:],
        "microbatch_size": (min(space.source.microbatch_sizes or (1,)),),
        "num_slices": tuple(dict.fromkeys((1, 8, space.choices.finest))) if slices else None,
        "slicing": ("equal-time",),
    }
    unsaid = {choice: values for choice, values in saving.items() if choice not in space.options.allowed}
    saving_space = PlanSpace(space.source, space.seq_len, space.global_batch, space.options.changed(**unsaid))
    smallest: list[tuple[float, Plan]] = []
    for mesh in sorted(saving_space.meshes(), key=saving_space.mean_state):
        if len(smallest) == _SMALLEST and smallest[-1][0] <= saving_space.mean_state(mesh):
            break
        more = ((size, c) for _, size, c in saving_space.of_mesh(mesh))
        smallest = nsmallest(_SMALLEST, [*smallest, *more], key=itemgetter(0))
    return [plan for _, plan in smallest]


def _changes(space: PlanSpace) -> Iterator[str]:
    """Yields changes that would fit, the cheapest first: more choices, more memory, more nodes, fewer tokens."""
    options, source = space.options, space.source
    for choice in CHOICES:
        anything: dict[str, Any] = {choice: None}
        if choice in options.allowed and (best := _fitting(options.changed(**anything), space)):
            yield f"allow {choice}={best.choice(choice)}"
    if space.memory < source.memory and _fitting(options.changed(memory_limit=source.memory), space):
        yield f"allow all {bytes_text(source.memory)} of a device's memory"
    if _limits_host(space) and _fitting(options.changed(host_memory_limit=None), space):
        assert source.host is not None
        yield f"allow all {bytes_text(source.host.capacity)} of a host's memory"
    for saving in SAVINGS if source.host is not None else ():
        away = tuple(filter(saving.copies, saving.if_asked)) if saving.choice not in options.allowed else ()
        if away and (best := _fitting(options.changed(**{saving.choice: away}), space)):
            yield f"allow {saving.choice}={best.choice(saving.choice)}"
    for more in source.larger(_MOST_NODES):
        best = _fitting(options, PlanSpace(more, space.seq_len, space.global_batch, options))
        if best is not None:
            yield f"{plural(more.num_devices, 'device')} instead of {source.num_devices} ({best.describe()})"
    length = space.seq_len // 2
    while length >= 256:
        if _fitting(options, PlanSpace(source, length, space.global_batch, options)):
            yield f"sequences of {length} tokens"
        length //= 2


def _limits_host(space: PlanSpace) -> bool:
    """Returns whether a plan may use less of a host than there is."""
    has, may_use = space.source.host, space.host
    return has is not None and may_use is not None and may_use.capacity < has.capacity


def _fitting(options: PlanOptions, space: PlanSpace) -> Plan | None:
    return find_fitting(ClusterProblem(space.source, space.seq_len, space.global_batch, options))


def find_fitting(problem: ClusterProblem) -> Plan | None:
    """Returns one of the smallest configurations that fits the memory; None where none of them does."""
    space = PlanSpace(problem.source, problem.seq_len, problem.global_batch, problem.options)
    fitting = (c for c in smallest_plans(space) if space.may_fit(c) and space.fits(space.evaluate_in_part(c)))
    return next(fitting, None)
