"""`slipstream timeline`: when each rank computes and why it waits, simulated or measured."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from slipstream.cli.number_options import amount, count, numbers
from slipstream.errors import SlipstreamError, did_you_mean

if TYPE_CHECKING:
    from slipstream.schedule import Op, Schedule
    from slipstream.simulator import TableCost
    from slipstream.timeline import Timeline

_SUFFIXES = (".png", ".svg", ".pdf", ".json")
_SIMULATED = "simulated"


def timeline(
    schedule: Annotated[str, Argument(help="A schedule's name or text file, or the timeline.json of a training run.")],
    against: Annotated[
        str | None, Option(help="Another SCHEDULE to show beneath. 'simulated': above a measured run, its simulation.")
    ] = None,
    ranks: Annotated[int, count("Pipeline ranks.")] = 4,
    stages_per_rank: Annotated[int | None, count("Stages per rank; 2 if the schedule allows it, else 1.")] = None,
    microbatches: Annotated[int, count("Microbatches of a step.")] = 1,
    slices: Annotated[int, count("Token slices of a sequence.")] = 8,
    forward: Annotated[float, amount("Seconds of a slice's forward through all stages of a rank.")] = 1.0,
    backward: Annotated[float, amount("Seconds of a slice's backward.")] = 2.0,
    input_gradient: Annotated[
        float | None, amount("Seconds of the input gradient alone; half the backward by default.")
    ] = None,
    weight_gradient: Annotated[
        float | None, amount("Seconds of the weight gradient alone; half the backward by default.")
    ] = None,
    head: Annotated[float, amount("Work of the output head, in units of a rank's layers: 0.5 is half of them.")] = 0.0,
    link: Annotated[float, amount("Seconds of a message between ranks.")] = 0.0,
    profile: Annotated[
        Path | None, Option(help="Measured costs (slipstream profile), in place of the seconds above.")
    ] = None,
    partition: Annotated[
        str | None, Option(help="With a profile: layers of each stage, such as 0,4.5,3.5.", metavar="LIST")
    ] = None,
    lengths: Annotated[
        str | None, Option(help="With a profile: tokens of each slice. Default: equal ones.", metavar="LIST")
    ] = None,
    output: Annotated[
        Path | None, Option(help="A .png, .svg or .pdf picture, or a .json trace for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Show when each rank computes under SCHEDULE, and why it waits."""
    if output is not None and output.suffix not in _SUFFIXES:
        raise SlipstreamError(f"--output={output} must end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}")
    from slipstream.schedule import Op

    gradients = {Op.I: input_gradient, Op.W: weight_gradient}
    seconds = {op: backward / 2 if each is None else each for op, each in gradients.items()}
    seconds |= {Op.F: forward, Op.B: backward, Op.R: forward, Op.OFFLOAD: 0, Op.RELOAD: 0}
    make = partial(_make, ranks, microbatches, slices, stages_per_rank)
    cost: Callable[[Schedule], TableCost] = partial(_cost, seconds, head, link)
    if profile is not None:
        cost = partial(_profiled_cost, profile, numbers(partition, "partition"), numbers(lengths, "lengths"))
    elif partition is not None or lengths is not None:
        raise SlipstreamError("--partition and --lengths are for measured costs: give --profile=profile.json too")
    shown = _find(schedule, make, cost)
    if against == _SIMULATED:
        shown = (_simulate_again(schedule, shown), *shown)
    elif against is not None:
        shown += _find(against, make, cost)
    _show(shown, output)


def _find(name: str, make: Callable[[str], Schedule], cost: Callable[[Schedule], TableCost]) -> tuple[Timeline, ...]:
    """Returns the simulation of a schedule given by name or file, or the timelines that a file holds."""
    from slipstream.schedule import GENERATORS
    from slipstream.simulator import simulate
    from slipstream.timeline import load_trace

    path = Path(name)
    if name in GENERATORS:
        plan = make(name)
    elif path.suffix == ".json":
        return load_trace(path)
    elif path.exists():
        plan = _read(path)
    else:
        raise SlipstreamError(
            f"there is no schedule or file {name!r}{did_you_mean(name, GENERATORS)} Choose one of "
            f"{', '.join(GENERATORS)}, or name a schedule's text file or the timeline.json of a run."
        )
    return (simulate(plan, cost(plan)),)


def _make(num_ranks: int, num_microbatches: int, num_slices: int, stages_per_rank: int | None, name: str) -> Schedule:
    from slipstream.schedule import STAGES_PER_RANK, make_schedule

    stages_per_rank = stages_per_rank or (2 if 2 in STAGES_PER_RANK[name] else 1)
    return make_schedule(name, num_ranks, num_microbatches, num_slices, stages_per_rank)


def _cost(seconds: Mapping[Op, float], head: float, link: float, plan: Schedule) -> TableCost:
    """Returns costs that spread a rank's seconds over its stages, with activations in microbatches."""
    from slipstream.simulator import TableCost

    share = [1 / plan.placement.count(rank) for rank in plan.placement]
    work = [*share[:-1], share[-1] + head]
    units = [(g, i) for g in range(plan.num_stages) for i in range(plan.num_slices)]
    times = {(g, i, op): each * work[g] for g, i in units for op, each in seconds.items()}
    held = {(g, i): share[g] / plan.num_slices for g, i in units}
    # Messages queue for a TableCost's bandwidth but share its latency; these are to queue.
    return TableCost(times, [link] * plan.num_slices, bandwidth=1.0, activations=held)


def _profiled_cost(path: Path, partition: list[float] | None, lengths: list[float] | None, plan: Schedule) -> TableCost:
    """Returns a profile's costs of the schedule's stages, by default of nearly equal numbers of layers, and slices."""
    from slipstream.planner.costs import load_profile

    profile = load_profile(path)
    layers = partition or _nearly_equal(len(profile.kinds), plan.num_stages)
    tokens = [int(each) for each in lengths or _nearly_equal(profile.seq_len, plan.num_slices)]
    for name, given, wanted in (("partition", layers, plan.num_stages), ("lengths", tokens, plan.num_slices)):
        if len(given) != wanted:
            raise SlipstreamError(f"--{name} has {len(given)} numbers, but the schedule {plan.name!r} needs {wanted}")
    return profile.cost(layers, tokens)


def _nearly_equal(total: int, count: int) -> list[float]:
    return [total // count + (i < total % count) for i in range(count)]


def _read(path: Path) -> Schedule:
    from slipstream.schedule import Schedule, validate

    try:
        plan = Schedule.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SlipstreamError(f"can't read the schedule {path}: {error}") from None
    validate(plan)
    return plan


def _simulate_again(name: str, measured: tuple[Timeline, ...]) -> Timeline:
    """Returns the simulation of a run with its measured times: the run without what the executor added."""
    from slipstream.simulator import MeasuredCost, simulate

    if len(measured) != 1 or not measured[0].measured:
        raise SlipstreamError(
            f"--against={_SIMULATED} needs a run to simulate again, but {name} is not one measured timeline. Give "
            "the timeline.json of a training run, or the name of another schedule to --against."
        )
    return simulate(measured[0].schedule, MeasuredCost(measured[0]))


def _show(shown: tuple[Timeline, ...], output: Path | None) -> None:
    from slipstream.timeline import draw_timelines, save_trace
    from slipstream.units import duration_unit

    if output is not None and output.suffix == ".json":
        save_trace(output, *shown)
    elif output is not None:
        counted = not any(timeline.measured for timeline in shown)
        draw_timelines(output, *shown, memory_unit="microbatches" if counted else "B")
    columns = shutil.get_terminal_size((160, 24)).columns
    longest = max(timeline.makespan for timeline in shown)
    for index, timeline in enumerate(shown):
        print("\n" * (index > 0), end="")
        if output is None:
            print(_text(timeline, longest if len(shown) > 1 else 0, columns))
        per_second, unit = duration_unit(timeline.makespan)
        print(f"{timeline.title}: {timeline.makespan * per_second:.4g} {unit}, {timeline.idle_fraction:.1%} idle")
        print(_table(timeline))


def _text(timeline: Timeline, longest: float, columns: int) -> str:
    """Returns the timeline as text, on a common scale if `longest` is given, else as wide as it needs and fits."""
    width = columns - len(f"rank {timeline.num_ranks} ") - 1
    if longest:
        return timeline.to_text(max(1, round(width * timeline.makespan / longest)))
    text = timeline.to_text()
    return text if max(map(len, text.splitlines())) <= columns else timeline.to_text(width)


def _table(timeline: Timeline) -> str:
    """Returns a table with a row per rank: busy, idle by cause, and peak memory if it is known."""
    from slipstream.timeline import Cause, idle_by_cause
    from slipstream.units import duration_unit

    per_second, unit = duration_unit(timeline.makespan)
    waited = idle_by_cause(timeline)
    causes = [cause for cause in Cause if any(cause in idle for idle in waited)]
    peaks = timeline.peak_memory if any(timeline.peak_memory) else ()
    rows = [[f"({unit})", "busy", *causes, "idle", *(["peak"] if peaks else [])]]
    for rank, idle in enumerate(waited):
        seconds = [timeline.busy(rank), *(idle.get(cause, 0) for cause in causes), sum(idle.values())]
        numbers = [f"{float(each) * per_second:.4g}" for each in seconds]
        rows.append([f"rank {rank}", *numbers, *(f"{float(peak):.4g}" for peak in peaks[rank : rank + 1])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join("  ".join(cells) for cells in aligned)
