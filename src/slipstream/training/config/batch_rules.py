"""What a step takes of the data: whether rows or tokens suffice for all replicas, and what a kind of data rules out."""

from __future__ import annotations

from slipstream.options import Memory
from slipstream.training.config.data_section import DataSection
from slipstream.training.config.sections import (
    ModelSection,
    ParallelSection,
    PipelineSection,
    PlanSection,
    TrainingSection,
)


def check_batch(
    training: TrainingSection, data: DataSection, pipeline: PipelineSection, parallel: ParallelSection, are_pairs: bool
) -> None:
    """Raises ValueError where the rows or the tokens of a step can't be divided into those of all replicas."""
    if training.batch_tokens is None:
        _check_rows(training.batch_size, parallel.data, pipeline.num_microbatches)
    else:
        _check_batch_tokens(training.batch_tokens, training.seq_len, parallel.data, data.packing, are_pairs)


def _check_rows(batch_size: int, replicas: int, num_microbatches: int) -> None:
    if batch_size % replicas:
        below = batch_size - batch_size % replicas
        raise ValueError(
            f"training.batch_size={batch_size} doesn't divide into parallel.data={replicas} equal parts; choose "
            + (f"{below} or {below + replicas}" if below else f"{replicas}")
        )
    each = batch_size // replicas
    if each < num_microbatches:
        of_each = "" if replicas == 1 else f" of {each} for each of parallel.data={replicas} replicas"
        raise ValueError(
            f"training.batch_size={batch_size}{of_each} can't be cut into "
            f"pipeline.num_microbatches={num_microbatches} parts; choose 1 to {each}, or a larger batch"
        )


def _check_batch_tokens(batch_tokens: int, seq_len: int, replicas: int, packing: str, are_pairs: bool) -> None:
    """Raises ValueError where a step takes no documents of any length, or may have none for a replica."""
    least = seq_len * replicas * (2 if are_pairs else 1)
    if packing != "none":
        raise ValueError(
            f"training.batch_tokens={batch_tokens} with data.packing={packing}: it counts the tokens of documents that "
            f"differ in length. Choose data.packing=none, or training.batch_size={max(1, batch_tokens // seq_len)} "
            f"sequences of training.seq_len={seq_len}"
        )
    if batch_tokens < least:
        of_each = "" if replicas == 1 else f" for each of parallel.data={replicas} replicas"
        raise ValueError(
            f"training.batch_tokens={batch_tokens} has no room for {'two answers' if are_pairs else 'a document'} of "
            f"training.seq_len={seq_len} tokens{of_each}; choose {least} or more, or a smaller "
            "training.seq_len, at which longer documents are cut"
        )


def check_stream(training: TrainingSection, data: DataSection, model: ModelSection) -> None:
    """Raises ValueError for settings that need the whole data set before the first step."""
    needs_all = {
        f"training.epochs={training.epochs}": (training.epochs is not None, "give training.steps"),
        f"training.eval_every={training.eval_every}": (
            training.eval_every > 0 and data.validation is None,
            "name a file or a split in data.validation",
        ),
        f"training.single_process_steps={training.single_process_steps}": (
            training.single_process_steps > 0,
            "leave it out",
        ),
        "a model without a tokenizer": (
            data.vocab_size is not None or (data.tokenizer or model.path) is None,
            "name one in data.tokenizer",
        ),
    }
    for setting, (is_given, instead) in needs_all.items():
        if is_given:
            raise ValueError(f"{setting} with data.streaming=true, which reads while it trains: {instead}")


def check_unpacked(pipeline: PipelineSection, memory: Memory, training: TrainingSection, plan: PlanSection) -> None:
    """Raises ValueError for settings of sequences that have one length."""
    flushes, compared = memory.num_flushes, training.single_process_steps
    is_for_one_length = {
        f"pipeline.schedule={pipeline.schedule}": pipeline.schedule.endswith(".txt") and plan.rates is None,
        f"pipeline.slices={pipeline.slices}": isinstance(pipeline.slices, list),
        "pipeline.microbatches": pipeline.microbatches is not None,
        f"memory.num_flushes={flushes}": flushes != 1,
        f"training.single_process_steps={compared}": compared > 0,
    }
    for setting in filter(is_for_one_length.get, is_for_one_length):
        raise ValueError(
            f"{setting} with data.packing=none: it is for sequences of one length. Leave it out, or choose "
            "data.packing=fixed"
        )
