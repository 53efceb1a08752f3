"""What is said where nothing fits: by how much, what divides or is found, and the cheapest change that would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf
from typing import Any

from slipstream.cost import WAYS
from slipstream.errors import SlipstreamError
from slipstream.planner.plan import CHOICES, Plan
from slipstream.planner.search.cluster_problem import ClusterProblem
from slipstream.planner.search.evaluate import Evaluation
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.savings import SAVINGS
from slipstream.planner.search.smallest import MemorySearch, longest_that_fits
from slipstream.units import bytes_text, plural

NOTHING_SPREAD = (
    "vocabulary=spread: it is planned together with cuts, slices and order, for pipelines whose ranks share nothing "
    "else, and none was found that fits. Allow schedule=auto and slicing=auto, tensor, context and expert parallelism "
    "of 1, and any stages_per_rank and num_slices; or vocabulary=whole too."
)


def space_of(problem: ClusterProblem) -> PlanSpace:
    """Returns the configurations of a problem."""
    return PlanSpace(problem.source, problem.seq_len, problem.global_batch, problem.options)


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


_MOST_NODES = 64  # how many times the nodes may grow
_SHORTEST = 256  # tokens of a sequence that is advised
_PRECISION = 1 / 8  # share by which a longer one may be missed
_EFFORT = 20_000  # slices of stages that are accounted for, for each change


def least_state(space: PlanSpace) -> float:
    """Returns the least weights, gradients and optimizer state that a device must hold; infinite without meshes."""
    return min((space.mean_state(mesh, at_end=True) for mesh in space.meshes()), default=inf)


def explain_state(problem: ClusterProblem, space: PlanSpace) -> SlipstreamError:
    """Returns the error where state alone is too large for the devices."""
    state, num_meshes = least_state(space), sum(1 for _ in space.meshes())
    return SlipstreamError(
        f"nothing fits: weights, gradients and optimizer state alone take {bytes_text(state)} of a device at least, on "
        f"{plural(num_meshes, 'mesh')}, {bytes_text(state - space.memory)} more than the {bytes_text(space.memory)} "
        f"that may be used of a device. {_advice(problem, space, None)}"
    )


def explain_misfit(problem: ClusterProblem, space: PlanSpace, search: MemorySearch) -> SlipstreamError:
    """Returns the error for a search in which every configuration is too large."""
    smallest = search.smallest()
    if smallest is None:
        # No host has room for any.
        roomy = space_of(replace(problem, options=problem.options.changed(host_memory_limit=1e30)))
        smallest = MemorySearch(roomy).smallest()
    assert smallest is not None, "there are configurations"
    peaks, away, host = smallest.peaks(), max(smallest.host_peaks()), space.host
    peak, room, has = max(peaks), space.memory, f"{bytes_text(space.memory)} that may be used of a device"
    where = f"on rank {peaks.index(peak)}"
    if peak <= room and host is not None:
        has = "that may be used of a host for each device" if _limits_host(space) else "that a host has for each device"
        peak, room, has = away, host.capacity, f"{bytes_text(host.capacity)} {has}"
        where = "on a host"
    num_meshes = sum(1 for _ in space.meshes())
    return SlipstreamError(
        f"nothing fits: the smallest configuration on {plural(num_meshes, 'mesh')} needs {bytes_text(peak)} {where}, "
        f"{bytes_text(peak - room)} more than the {has} ({smallest.plan.describe()}). "
        f"{_advice(problem, space, smallest)}"
    )


def _advice(problem: ClusterProblem, space: PlanSpace, smallest: Evaluation | None) -> str:
    """Returns the cheapest change that would fit; where that is another training, or more devices, all of these."""
    if change := next(_free_changes(problem, space), ""):
        return f"The cheapest change that would fit: {change}."
    if changes := [*_dear_changes(problem)]:
        return f"{'Changes' if len(changes) > 1 else 'The cheapest change'} that would fit: {'; or '.join(changes)}."
    smallest = smallest or MemorySearch(space).smallest()
    if smallest is None:
        return "Choose a smaller model."
    away = max(smallest.host_peaks())
    larger = f"a device of which {bytes_text(_in_digits(max(smallest.peaks())))} may be used"
    if away and space.host is not None and away > space.host.capacity:
        larger += f", with {bytes_text(_in_digits(away))} on its host"
    return f"The cheapest change that would fit: {larger}."


def _in_digits(num_bytes: float) -> float:
    """Returns a size that is no less, with the digits that are shown."""
    power = 10.0 ** (len(f"{num_bytes:.0f}") - 3)
    return ceil(num_bytes / power) * power


def _free_changes(problem: ClusterProblem, space: PlanSpace) -> Iterator[str]:
    """Yields changes of what is allowed that would fit, the cheapest first."""
    options, source = problem.options, problem.source

    def with_options(**changed: Any) -> Plan | None:
        return _fitting(replace(problem, options=options.changed(**changed)))

    given = [choice for choice in CHOICES if choice in options.allowed and choice != "loss_tokens"]
    for choice in given:
        if best := with_options(**{choice: None}):
            yield f"allow {choice}={best.choice(choice)}"
    if len(given) > 1 and (best := with_options(**dict.fromkeys(given))):
        others = [choice for choice in given if not options.allows(choice, best.choice(choice))]
        yield "allow " + " and ".join(f"{choice}={best.choice(choice)}" for choice in others)
    if space.memory < source.memory and with_options(memory_limit=source.memory):
        yield f"memory_limit={source.memory:g}, all of a device's memory"
    if _limits_host(space) and with_options(host_memory_limit=None):
        assert source.host is not None
        yield f"host_memory_limit={source.host.capacity:g}, all of a host's memory"
    for saving in SAVINGS if source.host is not None else ():
        away = tuple(filter(saving.copies, saving.if_asked)) if saving.choice not in options.allowed else ()
        if away and (best := with_options(**{saving.choice: away})):
            yield f"allow {saving.choice}={best.choice(saving.choice)}"


def _dear_changes(problem: ClusterProblem) -> Iterator[str]:
    """Yields fewer trained weights, more devices and shorter sequences, each the least change that would fit."""
    for typed, source in problem.cheaper():
        if _fitting(replace(problem, source=source)):
            yield typed
            break
    if larger := _fewest_nodes(problem):
        yield larger
    length = longest_that_fits(
        lambda length: _fitting(replace(problem, seq_len=length)) is not None,
        _SHORTEST,
        problem.seq_len - 1,
        _PRECISION,
    )
    if length:
        yield f"seq_len={length}"


def _fewest_nodes(problem: ClusterProblem) -> str:
    """Returns the fewest nodes on which something fits: the nodes are doubled, then the last doubling is divided by
    four; "" where none were found."""

    def on_nodes(number: int) -> Plan | None:
        source = problem.source.with_nodes(number)
        return None if source is None else _fitting(replace(problem, source=source))

    have = problem.source.num_nodes
    doublings = (have * 2**power for power in range(1, _MOST_NODES.bit_length()))
    doubled = next(((number, best) for number in doublings if (best := on_nodes(number))), None)
    if doubled is None:
        return ""
    most = doubled[0]
    fewer = dict.fromkeys(most * quarters // 8 for quarters in (5, 6, 7) if most * quarters // 8 > most // 2)
    number, best = next(((number, best) for number in fewer if (best := on_nodes(number))), doubled)
    return (
        f"num_nodes={number} with devices={best.num_devices} instead of {problem.source.num_devices} "
        f"({best.describe()})"
    )


def _limits_host(space: PlanSpace) -> bool:
    """Returns whether a plan may use less of a host than there is."""
    has, may_use = space.source.host, space.host
    return has is not None and may_use is not None and may_use.capacity < has.capacity


def _fitting(problem: ClusterProblem) -> Plan | None:
    """Returns a configuration that fits; None where none was found."""
    found = MemorySearch(space_of(problem), _EFFORT).fitting()
    return None if found is None else found.plan
