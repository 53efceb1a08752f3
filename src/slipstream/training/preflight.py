"""Everything that is checked before a rank starts or a byte is written, and what the checks prepared."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.training.config import Config, ModelSection, dump_config, named_schedule
from slipstream.training.data import (
    PackedSequences,
    TokenisedText,
    load_tokenizer,
    read_documents,
    tokenise,
    train_tokenizer,
)
from slipstream.training.metrics import check_trackers
from slipstream.training.run_folder import RunFolder


@dataclass(frozen=True)
class RunInputs:
    """What every rank needs: written once, read by all."""

    config: Config
    model_config: Any  # transformers.PretrainedConfig
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    train: TokenisedText
    validation: TokenisedText

    def write(self, output: RunFolder) -> None:
        """Makes the output folder and `inputs/` inside; what an earlier run left is removed."""
        try:
            self._write(output)
        except OSError as error:
            raise SlipstreamError(f"can't write to training.output={output.folder}: {error}") from error

    def _write(self, output: RunFolder) -> None:
        if can_resume(self.config):
            shutil.rmtree(output.inputs, ignore_errors=True)
        else:
            output.clear()
        output.inputs.mkdir(parents=True)
        output.config.write_text(dump_config(self.config), encoding="utf-8")
        self.model_config.save_pretrained(output.inputs)
        self.tokenizer.save_pretrained(output.inputs)
        self.train.save(output.inputs, "train")
        self.validation.save(output.inputs, "validation")


def preflight(config: Config, progress: Progress) -> RunInputs:
    """Checks the whole run, cheapest first, and prepares its text. Nothing is written.

    Raises SlipstreamError with the value, what is allowed and what to type.
    """
    check_world_size(config, os.environ)
    check_device(config, os.environ)
    check_trackers(config.tracking.to)
    check_fused(config)
    output = RunFolder(config.training.output)
    if not can_resume(config):
        check_output(output, config.training.overwrite)
    model_config = load_model_config(config.model)
    check_layers(config, model_config)
    check_positions(config.training.seq_len, model_config)
    if config.model.pretrained:
        check_weights(Path(str(config.model.path)))
    if config.pipeline.self_check:
        with progress.waiting("checking that the model can be sliced"):
            check_architecture(model_config)
    check_layout(config, model_config)
    check_shared_layers(config, model_config)
    check_sharded_parameters(config, model_config)
    tokenizer, text = prepare_text(config, model_config, progress)
    check_vocabulary(int(text.tokens.max()), model_config)
    train, validation = split_text(config, text)
    return RunInputs(config, model_config, tokenizer, train, validation)


def can_resume(config: Config) -> bool:
    """Whether the run goes on from what is in its folder."""
    return config.checkpoint.resume != "no" and RunFolder(config.training.output).checkpoints.is_dir()


def check_world_size(config: Config, environment: Any) -> None:
    """Under a launcher, as many processes as ranks."""
    world_size = environment.get("WORLD_SIZE")
    num_ranks = config.num_processes
    if world_size is None or int(world_size) == num_ranks:
        return
    if num_ranks == config.pipeline.num_ranks:
        raise SlipstreamError(
            f"the launcher started {world_size} processes, but pipeline.num_ranks={num_ranks} needs "
            f"{num_ranks}; use torchrun --nproc-per-node={num_ranks} or --pipeline.num_ranks={world_size}"
        )
    raise SlipstreamError(
        f"the launcher started {world_size} processes, but {config.mesh_text} need {num_ranks}; start as many, or "
        f"choose three numbers whose product is {world_size}"
    )


def check_device(config: Config, environment: Any) -> None:
    """CUDA is asked for only where each rank of this machine has a device."""
    import torch

    num_local = int(environment.get("LOCAL_WORLD_SIZE", config.num_processes))
    num_devices = torch.cuda.device_count()
    if config.training.device == "cuda" and num_devices < num_local:
        raise SlipstreamError(
            f"training.device=cuda needs {num_local} CUDA devices, one for each rank, but there are "
            f"{num_devices}; use --training.device=cpu or fewer ranks"
        )


def check_fused(config: Config) -> None:
    """Kernels can be made here for what the ranks compute on."""
    if config.pipeline.fused:
        import torch

        from slipstream.model import check_compiler

        on_cpu = config.training.device == "cpu" or not torch.cuda.is_available()
        check_compiler("cpu" if on_cpu else "cuda")


def check_output(output: RunFolder, overwrite: bool) -> None:
    """Nothing that a run has made is overwritten unasked."""
    if output.folder.exists() and not output.folder.is_dir():
        raise SlipstreamError(f"training.output={output.folder} is a file; name a folder")
    kept = output.find_earlier_run()
    if kept is not None and not overwrite:
        raise SlipstreamError(
            f"training.output={output.folder} already holds {kept.relative_to(output.folder)}; "
            f"choose another folder, or replace it with --training.overwrite=true"
        )


def load_model_config(model: ModelSection) -> Any:
    """The transformers configuration of a folder, a hub name or the settings themselves."""
    from slipstream.model import config_from_settings, load_config

    if model.path is not None:
        return load_config(model.path)
    return config_from_settings(model.config or {}, "model.config")


def check_layers(config: Config, model_config: Any) -> None:
    """A layer per stage, half a one where the partition says so; a partition has the model's number of layers."""
    num_layers = model_config.get_text_config().num_hidden_layers
    pipeline, partition = config.pipeline, config.pipeline.partition
    num_stages = pipeline.num_ranks * pipeline.stages_per_rank
    if num_stages > num_layers and partition == "auto":
        asked = f"pipeline.num_ranks={pipeline.num_ranks}"
        if pipeline.stages_per_rank > 1:
            asked += f" with pipeline.stages_per_rank={pipeline.stages_per_rank} makes {num_stages} stages, which"
        most = num_layers // pipeline.stages_per_rank
        raise SlipstreamError(f"{asked} is more than the model's {num_layers} layers; choose 1 to {most}")
    if partition != "auto" and sum(partition) != num_layers:
        raise SlipstreamError(
            f"pipeline.partition={partition} adds up to {sum(partition)} layers, but the model has "
            f"{num_layers}; make them equal, or leave it to --pipeline.partition=auto"
        )


def check_layout(config: Config, model_config: Any) -> None:
    """The stages, the schedule, and what it is to recompute and to offload go together, as every rank will find."""
    from slipstream.model import find_anatomy
    from slipstream.pipeline.families.stage_layout import plan_layout
    from slipstream.pipeline.tuning import Tuner

    pipeline = config.pipeline
    tuner = Tuner(
        named_schedule(pipeline),
        pipeline.num_ranks,
        pipeline.num_microbatches,
        pipeline.stages_per_rank,
        pipeline.slices,
        pipeline.num_flushes,
    )
    plan_layout(
        model_config,
        find_anatomy(model_config),
        tuner.schedule,
        tuner.slices,
        pipeline.partition,
        pipeline.recompute,
        pipeline.offload,
        config.training.seq_len,
    )


def check_shared_layers(config: Config, model_config: Any) -> None:
    """Where ranks share layers, how each layer is cut is known, and its heads and features divide."""
    if config.parallel.tensor == 1:
        return
    from slipstream.model import find_anatomy
    from slipstream.pipeline.families.causal_lm_stages import plan_shares

    plan_shares(model_config, find_anatomy(model_config), config.parallel.tensor, config.parallel.tensor_plan)


def check_sharded_parameters(config: Config, model_config: Any) -> None:
    """Where replicas spread the parameters, nothing excludes it."""
    if not config.parallel.shard_parameters:
        return
    from slipstream.model import find_anatomy
    from slipstream.pipeline.families.causal_lm_stages import check_sharding

    precision = config.training.precision
    excluded = {
        "parallel.shard_optimizer": config.parallel.shard_optimizer,
        "training.precision": precision if precision == "bf16-weights" else None,
    }
    check_sharding(find_anatomy(model_config), config.parallel.tensor, excluded)


def check_positions(seq_len: int, model_config: Any) -> None:
    """A sequence isn't longer than the positions the model knows."""
    from slipstream.model import check_length

    check_length(model_config, seq_len, "training.seq_len")


def check_weights(folder: Path) -> None:
    """Every safetensors file of a local model is there and whole (what comes from a hub is checked there)."""
    from safetensors import SafetensorError, safe_open

    if not folder.is_dir():
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SlipstreamError(
            f"model.path={folder} holds no .safetensors file; save the model in that format, "
            f"or train its architecture from random weights with --model.init=random"
        )
    for file in files:
        try:
            with safe_open(file, framework="np"):  # compares the header's sizes with the file's
                pass
        except (SafetensorError, OSError) as error:
            raise SlipstreamError(f"{file} is corrupt or truncated ({error}); copy or download it again") from error


def check_architecture(model_config: Any) -> None:
    """A toy of the same architecture gives the same numbers sliced and unsliced; else the layer is named."""
    from slipstream.model import check_sliceable

    check_sliceable(model_config)


def prepare_text(config: Config, model_config: Any, progress: Progress) -> tuple[Any, TokenisedText]:
    """The tokenizer and the tokenised documents. A tokenizer trained here sets the model's special tokens."""
    with progress.waiting("reading text"):
        documents = read_documents(config.data)
    progress.say(f"text: {_count(len(documents), 'document')}, {sum(map(len, documents)):,} characters")
    vocab_size = model_config.get_text_config().vocab_size
    name = config.data.tokenizer or config.model.path
    if name is not None and config.data.vocab_size is None:
        tokenizer = load_tokenizer(name)
    else:
        tokenizer = _train_tokenizer(documents, config.data.vocab_size or vocab_size, model_config, progress)
    text = tokenise(tokenizer, documents, progress)
    progress.say(f"tokens: {len(text.tokens):,}, vocabulary {len(tokenizer):,}")
    return tokenizer, text


def _train_tokenizer(documents: Sequence[str], size: int, model_config: Any, progress: Progress) -> Any:
    check_vocabulary(size - 1, model_config)
    tokenizer = train_tokenizer(documents, size, progress)
    model_config.eos_token_id = tokenizer.eos_token_id
    model_config.bos_token_id = model_config.pad_token_id = None
    return tokenizer


def check_vocabulary(largest: int, model_config: Any) -> None:
    """Every token id has a row in the embedding."""
    vocab_size = model_config.get_text_config().vocab_size
    if largest >= vocab_size:
        raise SlipstreamError(
            f"the model's vocabulary has {vocab_size} tokens (0 to {vocab_size - 1}), but the text needs "
            f"token id {largest}; use the model's own tokenizer, a smaller data.vocab_size, or a larger "
            f"vocab_size in model.config"
        )


def split_text(config: Config, text: TokenisedText) -> tuple[TokenisedText, TokenisedText]:
    """Training and held-out text, each enough for what is asked of it."""
    training = config.training
    train, validation = text.split(config.data.validation_fraction, training.seed)
    PackedSequences(train, training.seq_len, training.seed)  # raises where there is less than one sequence
    needed = training.seq_len * training.batch_size
    if training.eval_every and len(validation.tokens) < needed:
        raise SlipstreamError(
            f"the held-out text has {len(validation.tokens)} tokens, less than one batch of {needed}; give "
            f"more text, a larger data.validation_fraction (now {config.data.validation_fraction}), or "
            f"--training.eval_every=0"
        )
    return train, validation


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
