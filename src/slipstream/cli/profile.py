"""`slipstream profile`: measures a model's layers and ends and the link between ranks on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from slipstream.cli.options import above_zero, count
from slipstream.cli.train import allow_open_files
from slipstream.errors import SlipstreamError
from slipstream.terminal import make_console, print_table

if TYPE_CHECKING:
    from rich.table import Table

    from slipstream.cost import Profile

_LONG_MESSAGE = 2**20  # bytes


def profile(
    model: Annotated[str, Argument(help="A model folder, hub name or training configuration (.yaml).")],
    output: Annotated[Path, Option(help="The profile file to write.")] = Path("profile.json"),
    seq_len: Annotated[int | None, count("Tokens per sequence. Default: the training configuration's.")] = None,
    microbatch_size: Annotated[int, count("Number of sequences in a microbatch.")] = 1,
    dtype: Annotated[
        str, Option(help="float32, bfloat16, float16, float64, or bf16 as for training.precision.")
    ] = "float32",
    longest_slice: Annotated[
        int | None, count("Tokens of the longest slice. Default: the sequence, at most 8192.")
    ] = None,
    granularity: Annotated[int | None, count("Unit of slice lengths in tokens. Default: longest slice / 32.")] = None,
    ranks: Annotated[int, count("Ranks of the pipeline; they measure at the same time.")] = 2,
    tp: Annotated[
        int | None,
        count("Tensor-parallel processes of each rank. Default: the training configuration's, or 1."),
    ] = None,
    cp: Annotated[int | None, count("Processes that share every slice. Default: as --tp.")] = None,
    ep: Annotated[int | None, count("Processes over which experts are spread. Default: as --tp.")] = None,
    device: Annotated[str, Option(help="cpu, cuda or auto.")] = "auto",
    repeats: Annotated[int, count("Maximum number of times that a point is measured.", least=2)] = 15,
    budget: Annotated[
        float, above_zero("Seconds to spend measuring; more where a fit needs them.", "seconds", "60")
    ] = 120.0,
) -> None:
    """Measure MODEL's layers, embedding and head for many slice lengths and contexts, and fit their times."""
    allow_open_files()
    from slipstream.launch.profile_ranks import measure_profile
    from slipstream.profile import ProfileSettings
    from slipstream.train.config import ModelSection, ParallelSection, load_config
    from slipstream.train.model_files import load_model_config

    if device not in ("auto", "cpu", "cuda"):
        raise SlipstreamError(f"--device={device!r} isn't known; choose auto, cpu or cuda")
    if not output.parent.is_dir():
        raise SlipstreamError(f"--output={output}: there is no folder {output.parent}; make it first")
    section = ModelSection(path=model)
    shared = ParallelSection()
    if model.endswith((".yaml", ".yml")):
        config = load_config(Path(model))
        section = config.model
        seq_len = seq_len or config.training.seq_len
        shared = config.parallel
    sizes = {"tensor": tp, "context": cp, "experts": ep}
    shared = shared.model_copy(update={name: size for name, size in sizes.items() if size is not None})
    if seq_len is None:
        raise SlipstreamError("how long are the sequences? give --seq-len=4096, for example")
    settings = ProfileSettings(
        seq_len=seq_len,
        microbatch_size=microbatch_size,
        dtype=dtype,
        longest_slice=longest_slice,
        granularity=granularity,
        repeats=repeats,
        budget=budget,
        parallel=shared,
    )
    measured = measure_profile(load_model_config(section), settings, ranks, device, shared.degrees)
    measured.save(output)
    print_table(_table(measured))
    console = make_console()
    for line in _remarks(measured):
        console.print(line, markup=False)
    console.print(f"wrote {output}", markup=False)


def _table(profile: Profile) -> Table:
    """Returns the milliseconds of every part and op at a few slice lengths and contexts."""
    from rich.table import Table

    from slipstream.cost import OPS

    longest = profile.stages[0].activation_bytes[-1][0]
    lengths = sorted({max(1, longest // 16), max(1, longest // 4)})
    points = [(length, context) for length in lengths for context in (0, profile.seq_len // 2)]
    table = Table("milliseconds of", "op", *(f"{length} tokens after {context}" for length, context in points))
    for name in profile.part_names:
        for op in OPS:
            time = profile.part_time(name, op)
            cells = [f"{time(*point) * 1e3:.3f}" for point in points]
            table.add_row(name if op is OPS[0] else "", op, *cells)
    return table


def _remarks(profile: Profile) -> list[str]:
    from slipstream.profile import FIT_TOLERANCE
    from slipstream.units import bytes_text, seconds_text

    lines = [f"error at points not used in the fit: {profile.error:.2%} on average"]
    if profile.error > FIT_TOLERANCE:
        off = profile.points_off(FIT_TOLERANCE)
        worst = sorted(off, key=lambda point: -off[point])[:8]
        named = ", ".join(f"{length} after {context} ({off[length, context]:.1%})" for length, context in worst)
        lines.append(
            f"this exceeds {FIT_TOLERANCE:.0%}: {len(off)} points are off by more, first {named}. "
            "Close other programs and measure again, with more time (--budget)."
        )
    if link := profile.link:
        speed = f"latency {seconds_text(link.latency)}, bandwidth {bytes_text(link.bandwidth)}/s"
        lines.append(f"link ({link.backend}): {speed}")
        lines.append(f"sums of gradients: each rank passes on {bytes_text(link.ring_bandwidth)}/s")
        if handled := float(link.handling_seconds(_LONG_MESSAGE)):
            size = bytes_text(_LONG_MESSAGE)
            lines.append(f"a message of {size} keeps each of its ranks from computing for {seconds_text(handled)}")
    lines += [f"attention of {shape}: {kernel}" for shape, kernel in profile.attention_kernels.items()]
    lines.append(f"optimizer: {seconds_text(profile.optimizer_seconds)} per parameter")
    return lines
