"""How a step is cut and in which order it runs: whether slices, stages and schedule fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.model import ALLOWED_LAYER_COUNTS, are_allowed_layer_counts
from slipstream.pipeline.microbatches import check_microbatches, given_microbatches
from slipstream.schedule import AUTOMATIC, Schedule, ScheduleError, check_name, make_schedule, placed_as, validate
from slipstream.training.config.sections import PipelineSection


def named_schedule(pipeline: PipelineSection) -> str | Schedule:
    """Returns the schedule in the text file that `pipeline.schedule` names, or the name itself."""
    path = Path(pipeline.schedule)
    if path.suffix != ".txt":
        return pipeline.schedule
    try:
        schedule = Schedule.parse(path.read_text(encoding="utf-8"))
        validate(schedule)
    except (OSError, UnicodeDecodeError, ScheduleError) as error:
        raise ScheduleError(f"schedule={path} can't be used: {error}") from None
    return schedule


def check_lengths(pipeline: PipelineSection, num_rows: int, seq_len: int) -> None:
    """Raises ValueError where slices don't add up to the sequence, or microbatches to a replica's rows."""
    if pipeline.microbatches is None:
        _check_slices(pipeline.slices, seq_len)
    else:
        _check_microbatches(pipeline.microbatches, num_rows, seq_len)


def check_partition(pipeline: PipelineSection) -> None:
    """Raises ValueError where the layers given for each stage aren't those of as many stages."""
    partition, num_stages = pipeline.partition, pipeline.num_ranks * pipeline.stages_per_rank
    if partition == "auto":
        return
    with suppress(ScheduleError):  # which is reported where the schedule is checked
        schedule = named_schedule(pipeline)
        num_stages = schedule.num_stages if isinstance(schedule, Schedule) else num_stages
    if not are_allowed_layer_counts(partition):
        raise ValueError(
            f"pipeline.partition={partition} must give stages of {ALLOWED_LAYER_COUNTS}; such as [4.5, 3.5]"
        )
    if len(partition) != num_stages:
        raise ValueError(
            f"pipeline.partition={partition} names {len(partition)} stages, but pipeline.num_ranks * stages_per_rank = "
            f"{num_stages}; give one number of layers per stage"
        )


def check_schedule(pipeline: PipelineSection, num_flushes: int, places_only: bool) -> None:
    """Raises the schedule's own error: the nearest name, the stages per rank it can have, a file's impossible order.

    Of a plan for documents of any length the schedule only says where stages are: it has its own microbatches.
    """
    if pipeline.num_microbatches % num_flushes:
        raise ValueError(
            f"pipeline.num_microbatches={pipeline.num_microbatches} don't divide into memory.num_flushes={num_flushes}"
        )
    try:
        schedule = named_schedule(pipeline)
        if isinstance(schedule, Schedule):
            _check_counts(schedule, pipeline, num_flushes, places_only)
        else:
            check_name(schedule, besides=AUTOMATIC)
            stages = pipeline.stages_per_rank
            make_schedule(placed_as(schedule, stages), pipeline.num_ranks, 1, 1, stages)
    except ScheduleError as error:
        raise ValueError(f"pipeline.{error}") from None


def _check_slices(slices: int | Sequence[int] | str, seq_len: int) -> None:
    if isinstance(slices, int) and slices > seq_len:
        raise ValueError(
            f"pipeline.slices={slices} is more than the {seq_len} tokens of training.seq_len; choose 1 to {seq_len}"
        )
    if not isinstance(slices, (int, str)) and sum(slices) != seq_len:
        raise ValueError(
            f"pipeline.slices={list(slices)} add up to {sum(slices)} tokens, but training.seq_len={seq_len}; "
            f"make them add up, or give a count such as pipeline.slices={len(slices)}"
        )


def _check_microbatches(microbatches: object, num_rows: int, seq_len: int) -> None:
    """Raises ValueError where microbatches don't add up to a replica's rows, or their slices to the sequence."""
    try:
        check_microbatches(given_microbatches(microbatches), num_rows, seq_len, "a replica's batch", "training.seq_len")
    except SlipstreamError as error:
        raise ValueError(f"pipeline.{error}") from None


def _check_counts(schedule: Schedule, pipeline: PipelineSection, num_flushes: int, places_only: bool) -> None:
    slices = pipeline.slices
    counts: dict[str, tuple[int | str, int | str]]
    counts = {"pipeline.num_ranks": (schedule.num_ranks, pipeline.num_ranks), "memory.num_flushes": (1, num_flushes)}
    if pipeline.microbatches is None and not schedule.is_ragged and not places_only:
        counts |= {
            "pipeline.num_microbatches": (schedule.num_microbatches, pipeline.num_microbatches),
            "pipeline.slices": (schedule.num_slices, slices if isinstance(slices, (int, str)) else len(slices)),
        }
    elif not places_only and [len(lengths) for _, lengths in pipeline.microbatches or ()] != [*schedule.slice_counts]:
        raise ValueError(
            f"pipeline.schedule={pipeline.schedule} has microbatches of {[*schedule.slice_counts]} slices; give "
            "pipeline.microbatches with as many slices"
        )
    for name, (wanted, given) in counts.items():
        if wanted != given:
            raise ValueError(
                f"pipeline.schedule={pipeline.schedule} has {name.split('.')[1]} {wanted}, but {name}={given}; "
                f"set --{name}={wanted}"
            )
