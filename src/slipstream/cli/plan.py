"""`slipstream plan`: the degrees, schedule, slices and memory savings that train a model fastest on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from slipstream.cli.options import Overwrite, above_zero, check_new_file, count, listed, name_or_number
from slipstream.errors import SlipstreamError
from slipstream.terminal import make_console, print_table, spinner

if TYPE_CHECKING:
    from rich.table import Table

    from slipstream.planner import PlanReport
    from slipstream.planner.report import Column

_List = str | None


def _choices(what: str, *names: str) -> Any:
    return Option(*names, help=f"{what}; separate several with commas. Default: all possible values.", metavar="LIST")


def plan(
    model: Annotated[
        str, Argument(help="A model's folder, hub name, config.json, or a training configuration (.yaml).")
    ],
    cluster: Annotated[
        str | None,
        Argument(
            help="A cluster's name or file (.yaml), or a measured profile (.json). "
            "Default: what runs on this machine have measured, else its GPUs.",
            show_default=False,
        ),
    ] = None,
    *,
    seq_len: Annotated[int | None, count("Tokens per sequence.")] = None,
    longest: Annotated[
        bool, Option("--longest", help="Print the longest sequence that fits, for each way to save memory.")
    ] = False,
    global_batch: Annotated[int, count("Sequences per step, over all devices.")],
    num_nodes: Annotated[
        int | None,
        count(
            "Nodes of the cluster. Default: one of a named cluster or with --devices, else as many as its file says."
        ),
    ] = None,
    devices: Annotated[
        int | None, count("Devices in all, such as 1, equally many of each node. Default: all of the nodes.")
    ] = None,
    num_ranks: Annotated[int | None, count("With a profile: ranks of the pipeline. Default: the profile's.")] = None,
    dtype: Annotated[
        str | None,
        Option(
            help="The dtype in which the model computes. Default: bfloat16, float16 where the cluster has none, or the "
            "profiled one."
        ),
    ] = None,
    tensor_parallel: Annotated[_List, _choices("Tensor-parallel degrees: devices that share every layer")] = None,
    context_parallel: Annotated[
        _List, _choices("Context-parallel degrees: ranks that share every slice", "--context-parallel", "--cp")
    ] = None,
    expert_parallel: Annotated[
        _List, _choices("Ranks over which experts are spread, of those with equal weights", "--expert-parallel", "--ep")
    ] = None,
    pipeline_parallel: Annotated[_List, _choices("Ranks per pipeline")] = None,
    data_parallel: Annotated[_List, _choices("Data-parallel degrees: pipelines that share a batch")] = None,
    stages_per_rank: Annotated[_List, _choices("Stages per rank")] = None,
    schedule: Annotated[_List, _choices("Schedules; auto: searched together with the cut and the slices")] = None,
    microbatch_size: Annotated[_List, _choices("Sequences per microbatch")] = None,
    num_slices: Annotated[_List, _choices("Token slices per sequence")] = None,
    slicing: Annotated[_List, _choices("Where slices are cut: equal-time, exact, auto")] = None,
    recompute: Annotated[_List, _choices("Recomputation: none, selective, full, stage, stage+full")] = None,
    offload: Annotated[_List, _choices("Share of slices whose activations go to host memory, 0 to 1")] = None,
    context: Annotated[
        _List, _choices("Where keys and values lie: device, host, or a share on the host, 0 to 1")
    ] = None,
    optimizer: Annotated[_List, _choices("Where the optimizer runs, with its state: device (default), host")] = None,
    loss_tokens: Annotated[
        int | None, count("Tokens of a slice whose logits exist at a time (memory.loss_tokens). Default: all.")
    ] = None,
    vocabulary: Annotated[_List, _choices("The head's rows: whole, or spread over the ranks of a pipeline")] = None,
    shard: Annotated[_List, _choices("What is sharded over the pipelines: none, optimizer, parameters")] = None,
    fused: Annotated[
        bool, Option("--fused", help="Plan with fused norms, activations and rotary embeddings (runtime.fused).")
    ] = False,
    memory_limit: Annotated[
        float | None,
        above_zero("Memory of a device that may be used, in bytes, such as 70e9. Default: 95%.", "bytes", "70e9"),
    ] = None,
    host_memory_limit: Annotated[
        float | None,
        above_zero("Host memory that may be used for each device, in bytes. Default: all.", "bytes", "200e9"),
    ] = None,
    tokens: Annotated[
        float | None,
        above_zero("Tokens of the whole training, such as 15e9: shows how long it takes.", "tokens", "15e9"),
    ] = None,
    price_per_device_hour: Annotated[
        float | None, above_zero("What an hour of a device costs: shows what the training costs.", "dollars", "2.5")
    ] = None,
    output: Annotated[Path, Option(help="The plan file to write, for `slipstream train`.")] = Path("plan.yaml"),
    report: Annotated[Path | None, Option(help="An HTML report of the plan, its timeline and memory.")] = None,
    overwrite: Overwrite = False,
    top: Annotated[int, count("The number of plans to show.")] = 5,
) -> None:
    """Find the fastest configuration to train MODEL on CLUSTER that fits its memory, and say why it is the fastest."""
    settings: dict[str, Any] = {
        "global_batch": global_batch,
        "num_nodes": num_nodes,
        "devices": devices,
        "num_ranks": num_ranks,
        "dtype": dtype,
        "fused": fused,
        "memory_limit": memory_limit,
        "host_memory_limit": host_memory_limit,
        "loss_tokens": loss_tokens,
        "num_best": top,
        **listed(int, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel),
        **listed(int, data_parallel=data_parallel, stages_per_rank=stages_per_rank),
        **listed(int, context_parallel=context_parallel, expert_parallel=expert_parallel),
        **listed(int, microbatch_size=microbatch_size, num_slices=num_slices),
        **listed(str, schedule=schedule, slicing=slicing, recompute=recompute, shard=shard, vocabulary=vocabulary),
        **listed(str, optimizer=optimizer),
        **listed(name_or_number, context=context),
        **listed(float, offload=offload),
    }
    if longest and seq_len is not None:
        raise SlipstreamError(f"--longest with --seq-len={seq_len}: it finds the length. Leave one of them out.")
    if longest:
        _print_longest(model, cluster, **settings)
        return
    if seq_len is None:
        raise SlipstreamError("--seq-len is missing: give the tokens of a sequence, or --longest.")
    best_plan = _run(model, cluster, output, report, overwrite, seq_len=seq_len, **settings)
    for line in training_lines(best_plan, tokens, price_per_device_hour):
        print(line)
    print(f"wrote {output}" + (f" and {report}" if report is not None else ""))
    steps = 10 if tokens is None else num_steps(best_plan, tokens)
    typed = f"train {output} --data.files=[TEXT.txt] --training.output=runs/x --training.steps={steps}"
    print(f"to train{_launcher(best_plan, cluster, num_nodes, devices)} {typed}")


def _launcher(plan: PlanReport, cluster: str | None, num_nodes: int | None, devices: int | None) -> str:
    """Returns the words between "to train" and the command's arguments, for one machine or several."""
    # A profile's processes are on one machine, and so are the GPUs here.
    nodes = num_nodes or 1
    if cluster is not None and not _is_profile(cluster):
        from slipstream.cluster_plans.plan_model import choose_cluster

        nodes = choose_cluster(cluster, num_nodes, devices).num_nodes
    if nodes == 1:
        return ": slipstream"
    torchrun = f"torchrun --nnodes={nodes} --nproc-per-node={plan.num_devices // nodes} --rdzv-backend=c10d"
    return f" on each of {nodes} nodes: {torchrun} --rdzv-endpoint=NODE0:29400 -m slipstream"


def num_steps(plan: PlanReport, tokens: float) -> int:
    """Returns the number of steps in which a plan trains on these tokens, the last step being whole."""
    return ceil(tokens / (plan.global_batch * plan.seq_len))


def training_lines(plan: PlanReport, tokens: float | None, price: float | None) -> list[str]:
    """Returns the time of training by a plan on some tokens, and its price at some dollars for a device and hour."""
    from slipstream.units import long_duration_text, plural

    hours = plan.best.step_seconds * plan.num_devices / 3600  # device hours of a step
    lines = []
    if tokens is not None:
        steps = num_steps(plan, tokens)
        lines.append(
            f"{tokens:,.0f} tokens: {plural(steps, 'step')}, {long_duration_text(steps * plan.best.step_seconds)}, "
            f"{steps * hours:,.1f} device hours" + ("" if price is None else f", ${steps * hours * price:,.2f}")
        )
    elif price is not None:
        device_hours = hours / (plan.global_batch * plan.seq_len) * 1e9
        lines.append(f"a billion tokens: {device_hours:,.1f} device hours, ${device_hours * price:,.2f}")
    return lines


def _run(
    model: str, cluster: str | None, output: Path, report: Path | None, overwrite: bool, **settings: Any
) -> PlanReport:
    from slipstream.cluster_plans.plan_file import schedule_file, write_plan_file

    check_new_file(output, "--output", overwrite)
    check_new_file(schedule_file(output), "--output", overwrite)
    if report is not None:
        check_new_file(report, "--report", overwrite)
    with spinner("counting the model's operations") as change:
        from slipstream.cluster_plans.described_model import DescribedModel
        from slipstream.cluster_plans.plan_model import plan as find_plan
        from slipstream.planner.report import fused_advice

        def show(what: str, done: int, total: int) -> None:
            change(f"{what}: {done:,}" + (f" of at most {total:,}" if total else ""))

        described = DescribedModel(model)
        if described.lora is not None:
            settings |= _adapter_settings(described.lora, described.section)
        best_plan = find_plan(described, cluster, progress=show, **settings)
        change("counting fused operations")
        fused = fused_advice(best_plan.fused_gain, "--fused")
    _print(best_plan, _dtype_lines(best_plan, cluster, settings["dtype"]), fused, report)
    write_plan_file(best_plan, described.section, output, described.lora)
    if report is not None:
        from slipstream.planner.report import write_report

        write_report(best_plan, report)
    return best_plan


def _print_longest(model: str, cluster: str | None, num_ranks: int | None, num_best: int, **settings: Any) -> None:
    """Prints the longest sequence that fits a cluster, with one way after another to save memory."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from slipstream.cluster_plans.described_model import DescribedModel
    from slipstream.cluster_plans.gpus_here import gpus_here
    from slipstream.cluster_plans.longest import longest_sequences
    from slipstream.units import bytes_text, seconds_text

    hardware = gpus_here() if cluster is None else cluster
    if hardware is None or _is_profile(cluster) or num_ranks is not None:
        raise SlipstreamError("--longest needs a cluster, whose memory is known: give its name, such as h100-dgx.")
    columns = "saved by", "longest sequence", "step", "memory", "host memory", "plan"
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    described = DescribedModel(model)
    if described.lora is not None:
        settings |= _adapter_settings(described.lora, described.section)
    with spinner("counting the model's operations") as change:

        def show(what: str, done: int, total: int) -> None:
            change(f"{what}: {done:,}" + (f" of at most {total:,}" if total else ""))

        notes: list[str] = []
        for found in longest_sequences(described, hardware, progress=show, **settings):
            cells = [found.savings or "nothing", f"{found.tokens:,} tokens" if found.tokens else "nothing fits"]
            if found.report is not None:
                best = found.report.best
                cells += [seconds_text(best.step_seconds), bytes_text(best.peak_memory)]
                cells += [bytes_text(best.peak_host_memory), best.plan.describe()]
                notes = _dtype_lines(found.report, cluster, settings["dtype"])
            table.add_row(*cells)
    print_table(table)
    for note in notes:
        print(note)
    print("Computed, not measured. The next row may also use what the rows above save.")


def _adapter_settings(section: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Returns the adapter of a training configuration as arguments of `slipstream.plan`."""
    from pydantic import ValidationError

    from slipstream.option_errors import describe_problems
    from slipstream.train.config import LoraSection

    try:
        lora = LoraSection.model_validate(section)
        return {"lora": lora.peft_config(str(model.get("path"))), "lora_base_precision": lora.base_precision}
    except ValidationError as error:
        raise SlipstreamError("\n".join(f"lora: {line}" for line in describe_problems(error, LoraSection))) from None


def _dtype_lines(plan: PlanReport, cluster: str | None, dtype: str | None) -> list[str]:
    """Returns a line about float16 that nobody has asked for; none elsewhere."""
    from slipstream.number_format import FLOAT16

    if dtype is not None or plan.dtype != FLOAT16.name or _is_profile(cluster):
        return []
    return [
        f"{plan.cluster} has no bfloat16, so this is planned in float16. The plan file trains with "
        "training.precision=fp16: float32 weights, computed under float16 autocast."
    ]


def _is_profile(cluster: str | None) -> bool:
    return cluster is not None and cluster.endswith(".json")


def _print(plan: PlanReport, about_dtype: Sequence[str], fused: str, report: Path | None) -> None:
    from slipstream.planner.report import (
        MOST_REASONS,
        cut_lines,
        legend,
        reasons,
        refusals,
        search_text,
        shared_choices,
        shared_text,
        shown_columns,
    )
    from slipstream.units import plural

    console = make_console()

    def say(text: str = "") -> None:
        console.print(text, markup=False)

    shared = shared_choices(plan.predictions)
    columns = shown_columns(plan.predictions)
    plans, memory = _tables(plan, columns)
    say(f"{plan.model} on {plan.cluster}, {plural(plan.num_devices, 'device')}, in {plan.dtype}")
    for note in (*about_dtype, *plan.trained):
        say(note)
    print_table(plans)
    if shared:
        say(shared_text(shared))
    say("Computed, not measured: each step was simulated.")
    for line in legend(columns):
        say(f"  {line}")
    if plan.simpler:
        say(plan.simpler)
    for line in cut_lines(plan.best):
        say(line)
    say()
    print_table(memory)
    say()
    found = reasons(plan)
    for line in [*map(str, found[:MOST_REASONS]), *refusals(plan)]:
        say(line)
    if len(found) > MOST_REASONS:
        place = f"in {report}" if report is not None else "in a report: add --report plan.html"
        say(f"{plural(len(found) - MOST_REASONS, 'more reason')} {place}")
    if fused:
        say(fused)
    say(search_text(plan))


def _tables(plan: PlanReport, columns: Mapping[str, Column]) -> tuple[Table, Table]:
    """Returns the best plans by columns, and the memory of the best one's fullest rank."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from slipstream.planner.report import memory_text
    from slipstream.simulator import MemoryKind
    from slipstream.units import bytes_text

    plans = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for prediction in plan.predictions:
        plans.add_row(*(column.text(prediction) for column in columns.values()))
    best = plan.best
    held, on_host = (ranks[best.fullest_rank] if ranks else {} for ranks in (best.memory, best.host_memory))
    sizes = (held, on_host) if on_host else (held,)
    titles = memory_text(best), f"on its host: {bytes_text(sum(on_host.values()))}"
    memory = Table(f"memory of rank {best.fullest_rank}", *titles[: len(sizes)], box=SIMPLE_HEAD, pad_edge=False)
    for kind in MemoryKind:
        if any(each.get(kind) for each in sizes):
            memory.add_row(kind, *(bytes_text(each[kind]) if each.get(kind) else "" for each in sizes))
    return plans, memory
