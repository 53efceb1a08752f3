"""Checks whether the sections of a configuration fit together, and knows their names in other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.number_format import PRECISIONS
from slipstream.options import ALLOWED_LAYER_COUNTS, SHARED_WORK, Memory, are_allowed_layer_counts
from slipstream.schedule import (
    AUTOMATIC,
    SCHEDULES,
    USUAL_SLICES,
    Schedule,
    ScheduleError,
    check_microbatches,
    check_name,
    given_microbatches,
    make_schedule,
    placed_as,
    slice_lengths,
    validate,
)
from slipstream.train.config.data_section import DataSection
from slipstream.train.config.sections import (
    CheckpointSection,
    ModelSection,
    ParallelSection,
    PipelineSection,
    PlanSection,
    TrainingSection,
)


def named_schedule(pipeline: PipelineSection) -> str | Schedule | None:
    """Returns the schedule in the text file that `pipeline.schedule` names, or the name itself, if any."""
    if pipeline.schedule is None or not pipeline.names_file:
        return pipeline.schedule
    path = Path(pipeline.schedule)
    try:
        schedule = Schedule.parse(path.read_text(encoding="utf-8"))
        validate(schedule)
    except (OSError, UnicodeDecodeError, ScheduleError) as error:
        raise ScheduleError(f"schedule={path} can't be used: {error}") from None
    return schedule


def check_lengths(pipeline: PipelineSection, num_rows: int, seq_len: int) -> None:
    """Raises ValueError where slices don't add up to the sequence, or microbatches to a replica's rows."""
    microbatches = pipeline.microbatches
    tokens_of = "training.seq_len"
    try:
        if microbatches is not None:
            check_microbatches(given_microbatches(microbatches), num_rows, seq_len, "a replica's batch", tokens_of)
        elif pipeline.slices != "auto" and (pipeline.slices is not None or pipeline.num_ranks == 1):
            slice_lengths(pipeline.slices or USUAL_SLICES, seq_len, f"{tokens_of}=", "pipeline.slices")
    except SlipstreamError as error:
        raise ValueError(str(error) if microbatches is None else f"pipeline.{error}") from None


def check_partition(pipeline: PipelineSection) -> None:
    """Raises ValueError where the layers given for each stage aren't those of as many stages."""
    partition = pipeline.partition
    if partition == "auto":
        return
    num_stages = pipeline.num_ranks * pipeline.fewest_stages
    if pipeline.stages_per_rank is None and _may_have_stages(pipeline, len(partition)):
        num_stages = len(partition)
    # The error is reported where the schedule is checked.
    with suppress(ScheduleError):
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


def _may_have_stages(pipeline: PipelineSection, number: int) -> bool:
    """Returns whether the ranks can have so many stages, equally many on each, in the order that is given, if any."""
    each, rest = divmod(number, pipeline.num_ranks)
    kind = None if pipeline.schedule is None else SCHEDULES.get(pipeline.schedule)
    may_be_any = pipeline.schedule is None and pipeline.num_ranks > 1
    return not rest and (may_be_any or (kind is not None and each in kind.stages_per_rank))


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
        elif schedule is not None:
            check_name(schedule, besides=AUTOMATIC)
            stages = pipeline.fewest_stages
            make_schedule(placed_as(schedule, stages), pipeline.num_ranks, 1, 1, stages)
    except ScheduleError as error:
        raise ValueError(f"pipeline.{error}") from None


def _check_counts(schedule: Schedule, pipeline: PipelineSection, num_flushes: int, places_only: bool) -> None:
    slices = schedule.num_slices if pipeline.slices is None else pipeline.slices
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
    for name, (wanted, actual) in counts.items():
        if wanted != actual:
            raise ValueError(
                f"pipeline.schedule={pipeline.schedule} has {name.split('.')[1]} {wanted}, but {name}={actual}; "
                f"set --{name}={wanted}"
            )


def check_batch(
    training: TrainingSection, data: DataSection, pipeline: PipelineSection, parallel: ParallelSection, are_pairs: bool
) -> None:
    """Raises ValueError where the rows or the tokens of a step can't be divided into those of all replicas."""
    if training.batch_tokens is None:
        _check_rows(training.batch_size, parallel.data, pipeline.num_microbatches, training.min_ranks is not None)
    else:
        _check_batch_tokens(training.batch_tokens, training.seq_len, parallel.data, data.packing, are_pairs)


def _check_rows(batch_size: int, replicas: int, num_microbatches: int, may_differ: bool) -> None:
    """Raises ValueError where replicas don't have rows for each microbatch; `may_differ` where their number changes."""
    if batch_size % replicas and not may_differ:
        below = batch_size - batch_size % replicas
        sizes = f"{below} or {below + replicas}" if below else f"{replicas}"
        fewer = max(number for number in range(1, replicas) if batch_size % number == 0)
        raise ValueError(
            f"training.batch_size={batch_size} doesn't divide into parallel.data={replicas} equal parts; choose "
            f"training.batch_size={sizes}, or parallel.data={fewer}"
        )
    rows = batch_size // replicas
    if rows < num_microbatches:
        of_each = "" if replicas == 1 else f" of {rows} for each of parallel.data={replicas} replicas"
        parts = f"pipeline.num_microbatches={f'1 to {rows}' if rows > 1 else rows}, or " if rows else ""
        raise ValueError(
            f"training.batch_size={batch_size}{of_each} can't be cut into "
            f"pipeline.num_microbatches={num_microbatches} parts; choose {parts}training.batch_size="
            f"{replicas * num_microbatches}"
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
    is_for_one_length = {
        f"pipeline.schedule={pipeline.schedule}": pipeline.names_file and plan.rates is None,
        f"pipeline.slices={pipeline.slices}": isinstance(pipeline.slices, list),
        **_of_one_length(pipeline, memory),
        f"training.single_process_steps={training.single_process_steps}": training.single_process_steps > 0,
    }
    for setting in filter(is_for_one_length.get, is_for_one_length):
        raise ValueError(
            f"{setting} with data.packing=none: it is for sequences of one length. Leave it out, or choose "
            "data.packing=fixed"
        )


def _of_one_length(pipeline: PipelineSection, memory: Memory) -> dict[str, bool]:
    """Returns the settings that are for sequences of one length, and whether they are given."""
    return {
        "pipeline.microbatches": pipeline.microbatches is not None,
        f"memory.num_flushes={memory.num_flushes}": memory.num_flushes != 1,
    }


def check_samples(every: int, pipeline: PipelineSection, memory: Memory) -> None:
    """Raises ValueError for settings by which a model can't continue a text between steps.

    The slices of a schedule from a file are those of the steps alone: other texts are planned anew.
    """
    is_list = isinstance(pipeline.slices, list) and not pipeline.names_file
    prevents = {
        "pipeline.vocabulary=spread": pipeline.vocabulary == "spread",
        f"pipeline.slices={pipeline.slices}": is_list,
        **_of_one_length(pipeline, memory),
    }
    for setting in filter(prevents.get, prevents):
        raise ValueError(
            f"sample.every={every} with {setting}: a sample needs all logits of a text that grows. Leave one of them "
            "out; sample.every=0 writes a sample at the end"
        )


def check_noise(pipeline: PipelineSection, parallel: ParallelSection, training: TrainingSection) -> None:
    """Raises ValueError where ranks share the embedding, to which noise is to be added."""
    shared = {
        f"parallel.tensor={parallel.tensor}": parallel.tensor > 1,
        "pipeline.vocabulary=spread": pipeline.vocabulary == "spread",
        f"training.single_process_steps={training.single_process_steps}": training.single_process_steps > 0,
    }
    for setting in filter(shared.get, shared):
        raise ValueError(f"training.neftune_alpha with {setting}, which hasn't been shown to be exact; leave one out")


def check_validations(training: TrainingSection, checkpoint: CheckpointSection, data: DataSection) -> None:
    """Raises ValueError for settings that go by the best validation where there are none, or it isn't kept."""
    by_validation = {
        "checkpoint.keep_best=true": checkpoint.keep_best,
        f"training.patience={training.patience}": training.patience is not None,
    }
    for setting in filter(by_validation.get, by_validation):
        if not training.eval_every:
            raise ValueError(f"{setting} needs validations; give --training.eval_every=100, or leave it out")
        if data.validation is None and not data.validation_fraction:
            raise ValueError(
                f"{setting} needs validations, and data.validation_fraction=0 holds no text out; give a larger "
                "share, such as --data.validation_fraction=0.05, or name a text in data.validation"
            )
    if training.export == "best" and not checkpoint.keep_best:
        raise ValueError("training.export=best exports the checkpoint that checkpoint.keep_best=true keeps; give that")


OTHER_NAMES: Mapping[str, tuple[str, str]] = {
    "base_model": ("model.path", ""),
    "model_name_or_path": ("model.path", ""),
    "datasets": ("data.sources", "a list of {dataset: NAME, weight: 1}; data.dataset for one"),
    "dataset_name": ("data.dataset", "a name on the hub, a folder or a table"),
    **dict.fromkeys(
        ("data.path", "data_path", "train_file", "train_files", "train_data"),
        ("data.files", "a list of texts, tables and folders; data.dataset for one table or a name on the hub"),
    ),
    "dataset_text_field": ("data.text_column", ""),
    "max_samples": ("data.max_samples", "the first rows of a source"),
    "max_train_samples": ("data.max_samples", "the first rows of a source"),
    "val_set_size": ("data.validation_fraction", "a share of the documents, not a number of rows"),
    "sample_packing": ("data.packing", "fixed packs samples into sequences of training.seq_len tokens; none doesn't"),
    "template": ("data.chat_template", "chatml, gemma, llama3, zephyr or a file; by default the tokenizer's own"),
    "max_seq_length": ("training.seq_len", ""),
    "sequence_length": ("training.seq_len", ""),
    "sequence_len": ("training.seq_len", ""),
    "context_length": ("training.seq_len", ""),
    "cutoff_len": ("training.seq_len", ""),
    "learning_rate": ("optimizer.lr", ""),
    "warmup": ("optimizer.warmup_steps", ""),
    "warmup_ratio": ("optimizer.warmup_steps", "a number of steps: the ratio times training.steps"),
    "lr_scheduler": ("optimizer.schedule", ""),
    "lr_scheduler_type": ("optimizer.schedule", ""),
    "max_grad_norm": ("optimizer.clip_norm", ""),
    "grad_clip": ("optimizer.clip_norm", ""),
    "max_steps": ("training.steps", ""),
    "num_steps": ("training.steps", ""),
    "num_epochs": ("training.epochs", ""),
    "num_train_epochs": ("training.epochs", ""),
    "global_batch_size": ("training.batch_size", ""),
    "train_batch_size": ("training.batch_size", "sequences of a step on all devices together"),
    "per_device_train_batch_size": (
        "training.batch_size",
        "sequences of a step on all devices together: that number times the devices times gradient_accumulation_steps",
    ),
    "micro_batch_size": (
        "training.batch_size",
        "sequences of a step on all devices together: that number times the devices times gradient_accumulation_steps",
    ),
    "local_batch_size": (
        "training.batch_size",
        "sequences of a step on all devices together: that number times the replicas",
    ),
    "gradient_accumulation_steps": (
        "training.batch_size",
        "multiply it by that number; pipeline.num_microbatches cuts the same batch into more parts",
    ),
    "per_device_eval_batch_size": ("", "there is no such setting: validations take as much as a step does"),
    "output_dir": ("training.output", ""),
    "dtype": ("training.precision", ""),
    "bf16": ("training.precision", ""),
    "fp16": ("training.precision", ""),
    "logging_steps": ("", "there is no such setting: every step is in metrics.jsonl"),
    "eval_steps": ("training.eval_every", ""),
    "save_steps": ("checkpoint.every", ""),
    "save_total_limit": ("checkpoint.keep", ""),
    "save_best": ("checkpoint.keep_best", ""),
    "load_best_model_at_end": ("training.export", ""),
    "resume_from_checkpoint": ("checkpoint.resume", ""),
    "train_on_inputs": (
        "data.loss",
        "all counts what is asked, too; assistant or completion counts answers alone, and is the default of such rows",
    ),
    "train_on_prompt": ("data.loss", "all counts what is asked, too; by default answers alone count"),
    "completion_only_loss": ("data.loss", "completion, which is the default of rows with prompt and completion"),
    "assistant_only_loss": ("data.loss", "assistant, which is the default of conversations"),
    **dict.fromkeys(
        ("deepspeed", "zero_stage", "zero_optimization", "fsdp", "fsdp_config", "use_fsdp", "use_deepspeed"),
        (
            "parallel.shard",
            "optimizer shares its state among parallel.data replicas, as ZeRO's stage 1; parameters shares weights and "
            "gradients too, as ZeRO's stage 3 and FSDP. It takes no file of theirs",
        ),
    ),
    "neftune_noise_alpha": ("training.neftune_alpha", ""),
    "noisy_embedding_alpha": ("training.neftune_alpha", ""),
    "early_stopping_patience": ("training.patience", ""),
    "report_to": ("tracking.to", ""),
    "num_stages": ("pipeline.num_ranks", ""),
    **dict.fromkeys(
        ("world_size", "nproc_per_node", "num_processes", "num_gpus", "gpus", "n_gpu"),
        ("pipeline.num_ranks", "processes over which the layers are spread; times parallel.data and parallel.tensor"),
    ),
    "pipeline_parallel_degree": ("pipeline.num_ranks", ""),
    **{
        f"{each.choice}{suffix}": (f"parallel.{each.degree}", "")
        for each in SHARED_WORK
        for suffix in ("", "_size", "_degree")
    },
    "tensor_model_parallel_size": ("parallel.tensor", ""),
    "expert_model_parallel_size": ("parallel.experts", ""),
    "pipeline_model_parallel_size": ("pipeline.num_ranks", ""),
    **dict.fromkeys(
        ("capacity_factor", "expert_capacity_factor", "moe_expert_capacity_factor"),
        ("", "there is no such setting: no token is dropped, however many choose an expert"),
    ),
    "data_parallel": ("parallel.data", ""),
    "data_parallel_replicate_degree": ("parallel.data", ""),
    "gradient_checkpointing": ("memory.recompute", ""),
    "activation_checkpoint": ("memory.recompute", "none, selective, full or a number of layers"),
    "adapter": ("lora", "a section: lora: {r: 16, alpha: 32}"),
    "finetuning_type": ("lora", "a section, without which all weights train"),
    "use_peft": ("lora", "a section, without which all weights train"),
    "rank": ("lora.r", ""),
    "lora_r": ("lora.r", ""),
    "lora_rank": ("lora.r", ""),
    "lora_alpha": ("lora.alpha", ""),
    "lora_dropout": ("lora.dropout", ""),
    "disable_dropout": ("preference.dropout", "false, which is the default, for none"),
    "lora_target": ("lora.target_modules", "a list such as [q_proj, v_proj], or all-linear"),
    "lora_target_modules": ("lora.target_modules", "a list such as [q_proj, v_proj], or all-linear"),
    **dict.fromkeys(
        ("load_in_4bit", "quantization_bit", "bnb_4bit_quant_type"),
        ("lora.base_precision", "nf4: 4 bits by bitsandbytes, with double quantisation; full for none"),
    ),
    **dict.fromkeys(
        ("load_in_8bit", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype"),
        (
            "",
            "there is no such setting: lora.base_precision=nf4 keeps weights in 4 bits, with double quantisation, and "
            "computes in training.precision",
        ),
    ),
}
"""The setting that is meant by a name of another tool, "" for none, and what it takes where that differs: found by the
name's last part, whatever section was typed. The page docs/coming-from.md is made of it."""

# Keys of other tools' configurations, or of their sections, that none of the tools before has; two tell the tool.
OTHER_TOOLS: Mapping[str, tuple[str, ...]] = {
    "axolotl": (
        "base_model", "sequence_len", "micro_batch_size", "datasets", "val_set_size", "adapter", "sample_packing",
        "dataset_prepared_path", "load_in_4bit", "flash_attention",
    ),
    "LLaMA-Factory": (
        "stage", "finetuning_type", "template", "cutoff_len", "do_train", "lora_target", "lora_rank", "dataset",
        "dataset_dir", "overwrite_cache", "preprocessing_num_workers",
    ),
    "torchtitan": (
        "job", "metrics", "profiling", "lr_scheduler", "parallelism", "activation_checkpoint", "float8", "comm",
        "model.flavor", "model.hf_assets_path", "model.tokenizer_path", "training.local_batch_size",
        "training.dataset", "training.max_norm", "checkpoint.enable", "checkpoint.enable_checkpoint", "compile",
    ),
    "DeepSpeed": (
        "train_micro_batch_size_per_gpu", "train_batch_size", "zero_optimization", "gradient_clipping",
        "gradient_accumulation_steps", "steps_per_print", "wall_clock_breakdown",
    ),
    "accelerate": (
        "compute_environment", "distributed_type", "machine_rank", "main_training_function", "num_machines",
        "num_processes", "mixed_precision", "deepspeed_config", "fsdp_config",
    ),
    "TRL": (
        "model_name_or_path", "dataset_name", "output_dir", "learning_rate", "per_device_train_batch_size",
        "gradient_accumulation_steps", "num_train_epochs", "max_length", "use_peft", "lora_r", "report_to",
    ),
}  # fmt: skip


def check_is_ours(path: Path, values: Mapping[str, Any]) -> None:
    """Raises SlipstreamError where the keys of a file are those of another tool's configuration, or of a model's."""
    if "model_type" in values and "model" not in values:
        raise SlipstreamError(
            f"{path} is a model's configuration, and not that of a run; `slipstream init {path.parent} DATA` writes "
            "one that trains the model on the file, folder or data set DATA"
        )
    sections = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    there = {*values, *(f"{name}.{key}" for name, section in sections.items() for key in section)}
    for tool, keys in OTHER_TOOLS.items():
        if len(foreign := [key for key in keys if key in there]) > 1:
            raise SlipstreamError(
                f"{path} is a configuration of {tool} ({', '.join(foreign[:3])}); `slipstream init MODEL DATA` writes "
                "one of Slipstream's, and the page 'Coming from other tools' says what each setting is called here"
            )


_NEEDS_DRAWN_ANSWERS = (
    "it trains on answers that the model writes and a reward judges while it trains, which isn't there. dpo, simpo and "
    "orpo take pairs of answers, kto answers of which each is wanted or not"
)

ABSENT_VALUES: Mapping[str, Mapping[str, str]] = {
    "preference.loss": {
        **{
            name: f"{name.upper()} isn't among them: {_NEEDS_DRAWN_ANSWERS}"
            for name in ("grpo", "ppo", "rloo", "dapo", "gspo", "reinforce", "online-dpo")
        },
        **{
            name: f"{name.upper()} isn't among them; of pairs, dpo's reward is relative to the model before, and simpo "
            "and orpo need no such reference"
            for name in ("ipo", "cpo", "rso", "sppo")
        },
        "sft": "training on texts and answers that aren't compared has no section preference: leave it out",
    },
}
"""Why there is no such value of a setting, and what there is instead; values are in lower case."""

OTHER_VALUES: Mapping[str, Mapping[Any, str]] = {
    "training.precision": {alias: name for name, precision in PRECISIONS.items() for alias in precision.aliases},
    "training.device": {"gpu": "cuda", "cuda:0": "cuda"},
    "memory.recompute": {True: "full", False: "none"},
    "checkpoint.resume": {True: "latest", False: "no", "auto": "latest"},
    "training.export": {True: "best", False: "last"},
    "data.packing": {True: "fixed", False: "none"},
    "data.corpus": {"python": "python-stdlib"},
    "preference.loss": {"sigmoid": "dpo"},
    "pipeline.vocabulary": {True: "spread", False: "whole"},
}
"""The value of a setting that is meant by another one, which is in lower case."""
