"""The pipeline that a configuration describes, as one rank builds it."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, PretrainedConfig

from slipstream.model import NewTokens, load_config, random_model, set_vocab_size
from slipstream.parallel import make_mesh
from slipstream.pipeline import Pipeline
from slipstream.pipeline.weights import WeightSource, pretrained_source, with_frozen, without_dropout
from slipstream.train.config import Config
from slipstream.train.preferences import preference_loss


def make_pipeline(config: Config, device: torch.device, **changes: Any) -> Pipeline:
    """Returns this rank's part of the pipeline; `changes` replace arguments of it. Collective."""
    needs_check = config.parallel.tensor > 1 and config.runtime.self_check  # the preflight has compared slices
    settings: dict[str, Any] = {
        **config.pipeline_options(),
        "device": device,
        "mesh": make_mesh_of(config, device),
        "runtime": config.runtime.model_copy(
            update={"self_check": needs_check, "stall_limit": config.training.stall_limit}
        ),
        **changes,
    }
    if config.preference is not None:
        settings["loss_fn"] = preference_loss(config.preference)
    pipe = Pipeline(source_of(config), **settings)
    if config.training.neftune_alpha is not None:
        pipe.add_embedding_noise(config.training.neftune_alpha, config.training.seq_len)
    return pipe


def source_of(config: Config) -> WeightSource:
    """Returns the weights that the run begins with, read or drawn as far as a rank needs them."""
    source = _source_of(config)
    return without_dropout(source) if config.drops_nothing else source


def _source_of(config: Config) -> WeightSource:
    training = config.training
    if config.model.pretrained:
        path, lora = str(config.model.path), config.lora
        return pretrained_source(
            path,
            config.model.freeze,
            None if lora is None else lora.source(path),
            training.seed,
            config.folder.beside,
            config_of_run(config),
            "full" if lora is None else lora.base_precision,
            new_tokens_of_run(config),
        )
    model_config = AutoConfig.from_pretrained(config.folder.inputs, trust_remote_code=False)
    return with_frozen(
        WeightSource(model_config, partial(random_model, model_config, training.seed)), config.model.freeze
    )


def config_of_run(config: Config) -> PretrainedConfig:
    """Returns the configuration of the pretrained model, with the vocabulary and the end of text that the run has."""
    model_config, inputs = load_config(str(config.model.path)), load_config(str(config.folder.inputs))
    set_vocab_size(model_config, inputs.get_text_config().vocab_size)
    model_config.eos_token_id = inputs.eos_token_id
    return model_config


def new_tokens_of_run(config: Config) -> NewTokens | None:
    """Returns the tokens of the run that the pretrained model's own tokenizer hasn't; None where there are none."""
    file = config.folder.new_tokens
    if not file.exists():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    return NewTokens(tuple(found["ids"]), found["num_known"])


def make_mesh_of(config: Config, device: torch.device) -> DeviceMesh | None:
    """Returns the mesh of ranks; None where all of them are on the pipeline axis, or one process is measured alone."""
    if not dist.is_initialized() or dist.get_world_size() == config.pipeline.num_ranks:
        return None
    sizes: dict[str, Any] = config.mesh_sizes
    return make_mesh(**sizes, device_type=device.type)
