"""`slipstream timeline`: when each rank computes and why it waits, simulated or measured."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from slipstream.cli.options import Overwrite, amount, check_new_file, count, listed
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.cost import CostSource
    from slipstream.schedule import Op, Schedule
    from slipstream.simulator import TableCost
    from slipstream.timeline import Timeline

_SUFFIXES = (".png", ".svg", ".pdf", ".json")
_SIMULATED = "simulated"


def _schedules() -> list[str]:
    from slipstream.schedule import SCHEDULES

    return [*SCHEDULES]


def timeline(
    schedule: Annotated[
        str,
        Argument(help="A schedule's name or file, a run's folder, or its timeline.json.", autocompletion=_schedules),
    ],
    against: Annotated[
        str | None,
        Option(help="Another SCHEDULE to show below. 'simulated': the simulation of a measured run, above it."),
    ] = None,
    ranks: Annotated[int, count("Pipeline ranks.")] = 4,
    stages_per_rank: Annotated[int | None, count("Stages per rank; 2 if the schedule allows it, else 1.")] = None,
    microbatches: Annotated[int, count("Microbatches of a step.")] = 1,
    slices: Annotated[int, count("Token slices of a sequence.")] = 8,
    forward: Annotated[float, amount("Seconds of a slice's forward through all stages of a rank.")] = 1.0,
    backward: Annotated[float, amount("Seconds of a slice's backward.")] = 2.0,
    input_gradient: Annotated[
        float | None, amount("Seconds of the input gradient; half the backward by default.")
    ] = None,
    weight_gradient: Annotated[
        float | None, amount("Seconds of the weight gradient; half the backward by default.")
    ] = None,
    head: Annotated[float, amount("Work of the output head, in units of a rank's layers: 0.5 is half of them.")] = 0.0,
    link: Annotated[float, amount("Seconds of a message between ranks.")] = 0.0,
    profile: Annotated[
        Path | None, Option(help="Measured costs (slipstream profile) instead of the seconds above.")
    ] = None,
    model: Annotated[
        str | None,
        Option(
            help="The costs of a model's folder, hub name, config.json, or training configuration (.yaml), instead of "
            "the seconds above."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        Option(
            help="With a model: a cluster's name or file (.yaml). Default: what runs on this machine have measured, "
            "else its GPUs."
        ),
    ] = None,
    seq_len: Annotated[
        int | None, count("With a model: tokens per sequence. Default: the sum of the slices' lengths.")
    ] = None,
    num_nodes: Annotated[
        int | None, count("Nodes of the cluster. Default: one of a named cluster, of a file as many as it says.")
    ] = None,
    dtype: Annotated[
        str | None,
        Option(
            help="The dtype in which the model computes. Default: bfloat16, float16 where the cluster has none, or the "
            "measured one."
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None, count("With a model: devices that share every layer. Default: 1, or as measured.")
    ] = None,
    microbatch_size: Annotated[
        int | None, count("With a model: sequences per microbatch. Default: 1, or as measured.")
    ] = None,
    partition: Annotated[
        str | None,
        Option(help="With a profile or a model: layers of each stage, such as 0,4.5,3.5.", metavar="LIST"),
    ] = None,
    lengths: Annotated[
        str | None,
        Option(help="With a profile or a model: tokens of each slice. Default: equal ones.", metavar="LIST"),
    ] = None,
    output: Annotated[
        Path | None, Option(help="A .png, .svg or .pdf picture, or a .json trace for ui.perfetto.dev.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Show when each rank computes under SCHEDULE, and why it waits."""
    if output is not None and output.suffix not in _SUFFIXES:
        raise SlipstreamError(f"--output={output} must end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}")
    if output is not None:
        check_new_file(output, "--output", overwrite)
    from slipstream.schedule import Op

    gradients = {Op.I: input_gradient, Op.W: weight_gradient}
    seconds = {op: backward / 2 if given is None else given for op, given in gradients.items()}
    seconds |= {Op.F: forward, Op.B: backward, Op.R: forward, Op.OFFLOAD: 0, Op.RELOAD: 0}
    make = partial(_make, ranks, microbatches, slices, stages_per_rank)
    cost: Callable[[Schedule], TableCost] = partial(_cost, seconds, head, link)
    asked = {"cluster": cluster, "num_nodes": num_nodes, "dtype": dtype}
    of_stages = {"tensor_parallel": tensor_parallel, "microbatch_size": microbatch_size}
    cut = listed(float, partition=partition, lengths=lengths)
    if model is not None or profile is not None:
        cost = _costs_of(model, profile, seq_len, cut, asked, of_stages)
    else:
        _refuse_without_costs(partition=partition, lengths=lengths, seq_len=seq_len, **asked, **of_stages)
    shown = _find(schedule, make, cost)
    if against == _SIMULATED:
        shown = (_simulate_again(schedule, shown), *shown)
    elif against is not None:
        shown += _find(against, make, cost)
    _show(shown, output, in_bytes=model is not None or profile is not None)


def _find(name: str, make: Callable[[str], Schedule], cost: Callable[[Schedule], TableCost]) -> tuple[Timeline, ...]:
    """Returns the simulation of a schedule given by name or file, or the timelines in a file or a run's folder."""
    from slipstream.schedule import SCHEDULES, schedule_hint
    from slipstream.simulator import simulate
    from slipstream.timeline import load_trace

    path = Path(name)
    if name in SCHEDULES:
        plan = make(name)
    elif path.is_dir():
        return load_trace(_of_run(path))
    elif path.suffix == ".json":
        return load_trace(path)
    elif path.exists():
        plan = _read(path)
    else:
        raise SlipstreamError(
            f"there is no schedule or file {name!r}{schedule_hint(name, [*SCHEDULES])} Choose one of "
            f"{', '.join(SCHEDULES)}, or name a schedule's text file, a run's output folder or its timeline.json."
        )
    return (simulate(plan, cost(plan)),)


def _of_run(folder: Path) -> Path:
    """Returns the timeline of the run whose output folder this is. Raises SlipstreamError where there is none."""
    from slipstream.train.run_folder import RunFolder

    run = RunFolder(folder)
    if run.perfetto.is_file():
        return run.perfetto
    if run.metrics.exists():
        raise SlipstreamError(
            f"the run in {folder} has no {run.perfetto.name}, which is written after its last step: wait until then"
        )
    inside = sorted(path.parent for path in folder.glob(f"*/{run.perfetto.name}"))
    raise SlipstreamError(
        f"{folder} isn't a run's folder: it has no {run.perfetto.name}. Give what training.output was"
        + (f", such as {inside[0]}" if inside else "")
    )


def _make(num_ranks: int, num_microbatches: int, num_slices: int, stages_per_rank: int | None, name: str) -> Schedule:
    from slipstream.schedule import SCHEDULES, make_schedule

    stages_per_rank = stages_per_rank or (2 if 2 in SCHEDULES[name].stages_per_rank else 1)
    return make_schedule(name, num_ranks, num_microbatches, num_slices, stages_per_rank)


def _cost(seconds: Mapping[Op, float], head: float, link: float, plan: Schedule) -> TableCost:
    """Returns costs that spread a rank's seconds over its stages, with activations in microbatches."""
    from slipstream.simulator import TableCost

    share = [1 / plan.placement.count(rank) for rank in plan.placement]
    work = [*share[:-1], share[-1] + head]
    units = [(g, i) for g in range(plan.num_stages) for i in range(plan.num_slices)]
    times = {(g, i, op): whole * work[g] for g, i in units for op, whole in seconds.items()}
    held = {(g, i): share[g] / plan.num_slices for g, i in units}
    # Messages queue for a TableCost's bandwidth but share its latency; these are to queue.
    return TableCost(times, [link] * plan.num_slices, bandwidth=1.0, activations=held)


def _refuse_without_costs(**given: object) -> None:
    """Raises SlipstreamError for options that describe costs of which there are none."""
    names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if names:
        raise SlipstreamError(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} for the costs of a model: give --model and "
            "--cluster, or --profile=profile.json, too"
        )


def _costs_of(
    model: str | None,
    profile: Path | None,
    seq_len: int | None,
    cut: Mapping[str, list[float]],
    asked: Mapping[str, Any],
    of_stages: Mapping[str, int | None],
) -> Callable[[Schedule], TableCost]:
    """Returns the costs of a schedule: those of a model on a cluster, those kept of it here, or a profile's."""
    tokens = [int(length) for length in cut.get("lengths", ())]
    source: CostSource
    if profile is not None:
        from slipstream.cost import ProfileSource, load_profile

        if model is not None or any(value is not None for value in asked.values()):
            raise SlipstreamError(
                "--profile has the costs of one model here: leave out --model, --cluster, --num-nodes and --dtype"
            )
        measured = load_profile(profile)
        source = ProfileSource(measured, measured.hardware.processes)
        total = seq_len or sum(tokens) or measured.seq_len
    else:
        from slipstream.cluster_plans.plan_model import choose_costs

        total = seq_len or sum(tokens)
        if not total:
            raise SlipstreamError("how long are the sequences? give --seq-len=4096, for example")
        degree = of_stages["tensor_parallel"]
        degrees = None if degree is None else (degree,)
        source = choose_costs(model, seq_len=total, tensor_parallel=degrees, **asked)
    return lambda plan: _schedule_costs(source, plan, cut.get("partition"), tokens, total, **of_stages)


def _schedule_costs(
    source: CostSource,
    schedule: Schedule,
    partition: Sequence[float] | None,
    slices: Sequence[int],
    seq_len: int,
    tensor_parallel: int | None,
    microbatch_size: int | None,
) -> TableCost:
    """Returns the simulator's costs of a schedule's stages and slices: nearly equal numbers of layers and tokens, the
    fewest ranks that share layers, and one sequence, where nothing else is given or measured."""
    from slipstream.cost import Degrees
    from slipstream.planner.joint import JointProblem, spread_costs

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
    return spread_costs(JointProblem(costs, seq_len, schedule.num_ranks), tuple(layers), tuple(tokens))


def _known(source: CostSource, tensor_parallel: int | None, microbatch_size: int | None) -> tuple[int, int]:
    """Returns the degree and the number of sequences, both of which the source has costs of."""
    degrees = source.degrees["tensor"]
    sizes = source.microbatch_sizes
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


def _nearly_equal(total: int, count: int) -> list[int]:
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
    """Returns the simulation of a run with its measured times: the run without the executor's delays."""
    from slipstream.simulator import MeasuredCost, simulate

    if len(measured) != 1 or not measured[0].measured:
        raise SlipstreamError(
            f"--against={_SIMULATED} needs a run to simulate again, but {name} is not one measured timeline. Give "
            "the output folder of a training run, or the name of another schedule to --against."
        )
    return simulate(measured[0].schedule, MeasuredCost(measured[0]))


def _show(shown: tuple[Timeline, ...], output: Path | None, in_bytes: bool) -> None:
    from slipstream.timeline import draw_timelines, save_trace
    from slipstream.units import duration_unit

    if output is not None and output.suffix == ".json":
        save_trace(output, *shown)
    elif output is not None:
        counted = not (in_bytes or any(timeline.measured for timeline in shown))
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
    if output is not None:
        print(f"wrote {output}")


def _text(timeline: Timeline, longest: float, columns: int) -> str:
    """Returns the timeline as text, on a common scale if `longest` is given, else as wide as it needs and fits."""
    width = columns - len(f"rank {timeline.num_ranks} ") - 1
    if longest:
        return timeline.to_text(max(1, round(width * timeline.makespan / longest)))
    text = timeline.to_text()
    return text if max(map(len, text.splitlines())) <= columns else timeline.to_text(width)


def _table(timeline: Timeline) -> str:
    """Returns a table with a row per rank: busy, idle by cause, and peak memory if it is known, also of the host where
    something is there."""
    from slipstream.timeline import Cause, idle_by_cause
    from slipstream.units import duration_unit, table_text

    per_second, unit = duration_unit(timeline.makespan)
    waited = idle_by_cause(timeline)
    causes = [cause for cause in Cause if any(cause in idle for idle in waited)]
    peaks = {"peak": timeline.peak_memory, "host": timeline.peak_host_memory}
    peaks = {name: sizes for name, sizes in peaks.items() if any(sizes)}
    rows = [[f"({unit})", "busy", *causes, "idle", *peaks]]
    for rank, idle in enumerate(waited):
        seconds = [timeline.busy(rank), *(idle.get(cause, 0) for cause in causes), sum(idle.values())]
        numbers = [f"{float(value) * per_second:.4g}" for value in seconds]
        rows.append([f"rank {rank}", *numbers, *(f"{float(sizes[rank]):.4g}" for sizes in peaks.values())])
    return table_text(rows, str.rjust)
