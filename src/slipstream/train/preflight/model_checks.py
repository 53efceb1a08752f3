"""Checks whether the model can be trained as the configuration splits it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.model import (
    TrainedWeights,
    adapted_model,
    check_carried_state,
    check_length,
    check_packed,
    check_quantisable,
    check_saved_model,
    check_saved_weights,
    check_trainable,
    check_unquantised,
    find_frozen,
    find_targets,
    freeze,
    longest_packed_sequence,
    meta_model,
    set_vocab_size,
    trained_text,
)
from slipstream.parallel import check_sharing
from slipstream.pipeline import PipelineOptions, check_options
from slipstream.train.config import Config
from slipstream.train.config.this_machine import count_launched
from slipstream.train.model_files import ModelFiles
from slipstream.train.recorded_plan import is_open


def check_new_rows(config: Config, model_config: Any, number: int) -> None:
    """Raises SlipstreamError where the rows of `number` new tokens, in padding or added to it, can't all be made, as
    there are others than those of the embedding and the head, or where they would stay as they are: frozen, or beneath
    an adapter."""
    grown = copy.deepcopy(model_config)
    set_vocab_size(grown, model_config.get_text_config().vocab_size + 1)
    before = meta_model(model_config)
    after = meta_model(grown)
    shapes = {name: tensor.shape for name, tensor in before.state_dict().items()}
    ends = {id(table) for table in (after.get_input_embeddings(), after.get_output_embeddings())}
    tables = {name for name, module in after.named_modules() if id(module) in ends}
    for name, tensor in after.state_dict().items():
        if tensor.shape != shapes.get(name) and name.rpartition(".")[0] not in tables:
            raise SlipstreamError(
                f"data.special_tokens: {number} of the tokens are new to {type(after).__name__}, which has rows "
                f"by token in {name} too, where they can't be added; use tokens that the tokenizer has"
            )
    frozen = {*find_frozen(before, config.model.freeze, "model.freeze")} if config.model.freeze else {}
    if stay := [name for name in tables if f"{name}.weight" in frozen]:
        raise SlipstreamError(
            f"data.special_tokens: {number} of the tokens are new to the model, and their rows would stay as they are, "
            f"as model.freeze={config.model.freeze} has {stay[0]}; leave it out there, or use tokens that the "
            "tokenizer has"
        )
    if config.lora is None:
        return
    copied = tuple(config.lora.peft_config(str(config.model.path)).modules_to_save or ())
    if copied and all(name.endswith(copied) for name in tables):
        return
    names = ", ".join(sorted(name.rpartition(".")[2] for name in tables))
    if after.all_tied_weights_keys:
        raise SlipstreamError(
            f"data.special_tokens: {number} of the tokens are new to the model, whose embedding is its head, and "
            "an adapter can't train such a weight. Use tokens that the tokenizer has, such as those of "
            "--data.chat_template=zephyr, or train all weights"
        )
    raise SlipstreamError(
        f"data.special_tokens: {number} of the tokens are new to the model, and an adapter leaves their rows as "
        f"they are. Train these along with it: --lora.modules_to_save=[{names}]"
    )


def check_model(config: Config, files: ModelFiles, progress: Progress) -> None:
    """Makes the checks that every rank would make when it builds its part of the model.

    Raises:
        SlipstreamError: with the given value, the allowed ones and the setting to type.
    """
    model_config = files.config
    check_unquantised(model_config)
    check_layers(config, model_config)
    if config.lora is not None:
        _check_lora(config, model_config, progress)
    if config.model.freeze:
        _check_frozen(config.model.freeze, model_config, progress)
    check_length(model_config, config.training.seq_len, "training.seq_len")
    if config.model.pretrained:
        _check_weights(Path(str(config.model.path)), files, progress)
    if config.runtime.self_check:
        with progress.waiting("checking that the model can be sliced"):
            check = check_trainable(model_config, is_cut=config.pipeline.slices != 1)
        if check.refusal and config.data.packing != "none":
            raise SlipstreamError(f"{check.refusal.removesuffix('.')}, and data.packing=none.")
        if not check.refusal:
            check_packed(model_config, check.longest_packed, config.training.seq_len)
    elif config.pipeline.slices != 1:
        check_carried_state(model_config)
        check_packed(model_config, longest_packed_sequence(model_config), config.training.seq_len)
    options = PipelineOptions(**config.pipeline_options())
    is_planned = is_open(config)
    check_options(model_config, options, config.pipeline.num_ranks, config.parallel.tensor, is_planned, "pipeline.")
    check_shares(config, model_config)


def check_shares(config: Config, model_config: Any) -> None:
    """Raises SlipstreamError where ranks can't share the model's layers, its experts or its slices."""
    adapter = None if config.lora is None else config.lora.adapter(str(config.model.path))
    check_sharing(model_config, config.parallel.degrees, config.parallel, adapter)


def check_layers(config: Config, model_config: Any) -> None:
    """Raises SlipstreamError where there are more stages than layers, or a partition of another number of layers."""
    num_layers = model_config.get_text_config().num_hidden_layers
    pipeline = config.pipeline
    partition = config.pipeline.partition
    num_stages = pipeline.num_ranks * pipeline.fewest_stages
    if num_stages > num_layers and partition == "auto":
        asked = f"pipeline.num_ranks={pipeline.num_ranks}"
        if pipeline.fewest_stages > 1:
            asked += f" with pipeline.stages_per_rank={pipeline.fewest_stages} makes {num_stages} stages, which"
        most = num_layers // pipeline.fewest_stages
        raise SlipstreamError(
            f"{asked} is more than the model's {num_layers} layers; choose 1 to {most}"
            + _launched_hint(pipeline.num_ranks, most)
        )
    if partition != "auto" and sum(partition) != num_layers:
        raise SlipstreamError(
            f"pipeline.partition={partition} adds up to {sum(partition)} layers, but the model has {num_layers}; make "
            "them equal, or leave it to --pipeline.partition=auto"
        )


def _launched_hint(num_ranks: int, most: int) -> str:
    """Returns how a launcher's processes could be used otherwise, where the pipeline has all of them."""
    if count_launched() != num_ranks:
        return ""
    stages = max((number for number in range(1, most + 1) if num_ranks % number == 0), default=1)
    return (
        f". The launcher started {num_ranks} processes: start {most} or fewer (torchrun --nproc-per-node={most}), or "
        f"give --pp={stages} --dp={num_ranks // stages} for replicas of the pipeline"
    )


def _check_lora(config: Config, model_config: Any, progress: Progress) -> None:
    """Reports how many parameters train.

    Raises SlipstreamError where PEFT isn't installed, or no module can have the adapter.
    """
    if find_spec("peft") is None:
        raise SlipstreamError("lora needs PEFT, an extra: pip install 'slipstream[peft]'")
    assert config.lora is not None
    whole = meta_model(model_config)
    adapter = config.lora.adapter(str(config.model.path))
    if adapter.on_4_bits:
        check_quantisable(whole, adapter.config)
    find_targets(whole, adapter.config)
    if config.lora.path is not None:
        _check_saved_adapter(config.lora.path, config.training.output)
        check_saved_weights(config.lora.path, adapted_model(meta_model(model_config), adapter), adapter)
    progress.say(f"lora: {trained_text(whole)}")


def trained_weights(config: Config, model_config: Any) -> TrainedWeights:
    """Returns the weights that the run trains of a model with this configuration."""
    if config.lora is not None:
        return TrainedWeights(adapter=config.lora.adapter(str(config.model.path)))
    return TrainedWeights(find_frozen(meta_model(model_config), config.model.freeze, "model.freeze"))


def _check_saved_adapter(path: str, output: Path) -> None:
    """Raises SlipstreamError for an adapter in the folder whose adapter the run replaces."""
    if Path(path).resolve().is_relative_to(output.resolve()):
        raise SlipstreamError(
            f"lora.path={path} is in training.output={output}, where the run writes its own adapter; give another "
            "--training.output, or go on with the run itself by --checkpoint.resume=latest"
        )


def _check_frozen(patterns: Sequence[str], model_config: Any, progress: Progress) -> None:
    """Reports how many parameters are trained. Raises SlipstreamError for a pattern of nothing, or where nothing is
    left to train."""
    whole = meta_model(model_config)
    freeze(whole, find_frozen(whole, patterns, "model.freeze"))
    progress.say(f"model.freeze: {trained_text(whole)}")


def _check_weights(folder: Path, files: ModelFiles, progress: Progress) -> None:
    """Checks that a local model's files are whole and have the weights of its configuration; a hub checks its own
    files. Warns of weights that aren't read."""
    if not folder.is_dir():
        return
    if not any(folder.glob("*.safetensors")):
        raise SlipstreamError(
            f"model.path={folder} holds no .safetensors file; save the model in that format, "
            "or train its architecture from random weights with --model.init=random"
        )
    if warning := check_saved_model(folder, files.config, files.num_saved):
        progress.warn(warning)
