"""The pipeline that a configuration describes, as one rank builds it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, PretrainedConfig

from slipstream.model import NewTokens, load_config, random_model, set_vocab_size, with_settings
from slipstream.parallel import make_mesh
from slipstream.pipeline import CausalLMFamily, Pipeline, WeightSource, pretrained_source, with_frozen, without_dropout
from slipstream.train.config import Config
from slipstream.train.preferences import preference_loss


def make_pipeline(
    config: Config, device: torch.device, model: WeightSource | CausalLMFamily, **changes: Any
) -> Pipeline:
    """Returns this rank's part of the pipeline. Collective.

    Args:
        config: the run's.
        device: the rank's.
        model: what `source_of` returns, or the family that was made of it.
        changes: arguments of the Pipeline in place of the configuration's.
    """
    # The preflight has compared slices already, but not tensor ranks.
    needs_check = config.parallel.tensor > 1 and config.runtime.self_check
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
    pipe = Pipeline(model, **settings)
    if config.training.neftune_alpha is not None:
        pipe.add_embedding_noise(config.training.neftune_alpha, config.training.seq_len)
    return pipe


class RunModel(NamedTuple):
    """The configuration of a run's model, with the vocabulary and the end of text that the run has."""

    config: PretrainedConfig
    num_saved: int | None = None  # tokens by the pretrained model's own config.json
    new_tokens: NewTokens | None = None  # tokens missing from the pretrained model's own tokenizer

    @classmethod
    def read(cls, config: Config) -> RunModel:
        """Reads the pretrained model's configuration, if there is one, and the run's inputs."""
        inputs = config.folder.inputs
        if not config.model.pretrained:
            return cls(AutoConfig.from_pretrained(inputs, trust_remote_code=False))
        of_run = load_config(str(inputs))
        # Whether the ends are tied was found out before the inputs were written.
        model_config = load_config(str(config.model.path), compares_ends=False)
        if not getattr(of_run.get_text_config(), "tie_word_embeddings", False):
            model_config = with_settings(model_config, {"tie_word_embeddings": False})
        num_saved = model_config.get_text_config().vocab_size
        set_vocab_size(model_config, of_run.get_text_config().vocab_size)
        model_config.eos_token_id = of_run.eos_token_id
        return cls(model_config, num_saved, _new_tokens(config.folder.new_tokens))


def _new_tokens(file: Path) -> NewTokens | None:
    if not file.exists():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    return NewTokens(tuple(found["ids"]), found["num_known"])


def source_of(config: Config, model: RunModel) -> WeightSource:
    """Returns the weights that the run begins with, read or drawn as far as a rank needs them."""
    source = _source_of(config, model)
    return without_dropout(source) if config.drops_nothing else source


def _source_of(config: Config, model: RunModel) -> WeightSource:
    training = config.training
    if config.model.pretrained:
        path = str(config.model.path)
        lora = config.lora
        return pretrained_source(
            path,
            config.model.freeze,
            None if lora is None else lora.source(path),
            training.seed,
            config.folder.beside,
            model.config,
            "full" if lora is None else lora.base_precision,
            model.new_tokens,
            model.num_saved,
        )
    return with_frozen(
        WeightSource(model.config, partial(random_model, model.config, training.seed)), config.model.freeze
    )


def make_mesh_of(config: Config, device: torch.device) -> DeviceMesh | None:
    """Returns the mesh of ranks; None where all of them are on the pipeline axis, or one process is measured alone."""
    if not dist.is_initialized() or dist.get_world_size() == config.pipeline.num_ranks:
        return None
    sizes: dict[str, Any] = config.mesh_sizes
    return make_mesh(**sizes, device_type=device.type)
