"""Writes the whole model of a checkpoint as transformers loads it: in one process, whichever mesh saved it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from slipstream.checkpoint import Checkpoints, SavedCheckpoint, TensorShard
from slipstream.errors import SlipstreamError
from slipstream.model import load_config, meta_model, trust_remote_code
from slipstream.model.adapters import Adapter
from slipstream.parallel import ParameterShare, RankGroup
from slipstream.pipeline.pipeline_options import torch_dtype
from slipstream.pipeline.saving import describe_model
from slipstream.pipeline.weights import read_generation, state_misfits, tied_names, write_model
from slipstream.pipeline.weights.adapter_export import merged_with_base
from slipstream.training.config import LoraSection, ModelSection, precision_named
from slipstream.training.data import load_tokenizer
from slipstream.training.resuming import differs
from slipstream.training.run_folder import RunFolder

_PREFIX = "model."  # of the parameters' keys; the optimizer's begin with another


def check_export_folder(output: Path, run: RunFolder) -> None:
    """Raises SlipstreamError unless `output` is a place outside of the run's folder where there is nothing yet."""
    if output.resolve().is_relative_to(run.path.resolve()):
        raise SlipstreamError(
            f"--output={output} is in the run's own folder {run.path}, where a run that goes on would find a model "
            f"that isn't its own; choose another place, such as --output={run.path}-model"
        )
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise SlipstreamError(f"--output={output} is a file, which isn't replaced; name a new folder")
    if output.is_dir() and (inside := sorted(output.iterdir())):
        raise SlipstreamError(
            f"--output={output} already holds {inside[0].name}, and nothing is replaced; name a new folder, or move "
            "this one away"
        )


def export_checkpoint(run: RunFolder, saved: SavedCheckpoint, output: Path, trusts_code: bool) -> None:
    """Writes the model and its tokenizer to `output`, which appears complete or not at all.

    Raises:
        SlipstreamError: where the run's configuration or tokenizer is missing, the weights aren't those of the
            architecture, or the folder can't be written.
    """
    config = _load_config(run, saved, trusts_code)
    tokenizer = load_tokenizer(str(run.inputs), trusts_code)
    state = _whole_state(run, saved, config)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as part:
            written = Path(part, "model")
            write_model(written, config, state, read_generation(run.inputs), run.beside)
            tokenizer.save_pretrained(written)
            written.rename(output)
    except OSError as error:
        raise SlipstreamError(f"can't write to {output}: {error.strerror or error}; choose another folder") from error


def _load_config(run: RunFolder, saved: SavedCheckpoint, trusts_code: bool) -> PretrainedConfig:
    """Returns the model's configuration, of which it is sure that the checkpoint is."""
    for file in ("config.json", "tokenizer_config.json"):
        if not (run.inputs / file).is_file():
            raise SlipstreamError(
                f"there is no {run.inputs / file}: the folder inputs/ of a run has its model's configuration and "
                "tokenizer. Copy it there from where the run trained"
            )
    section = _section(saved)
    if trusts_code and section.get("path") is not None:
        trust_remote_code(str(section["path"]))
    config = load_config(str(run.inputs))
    if differences := saved.describe_other_model(describe_model(config)):
        raise SlipstreamError(
            f"{saved.folder} isn't a checkpoint of the model in {run.inputs}: {differences}. Put the checkpoint back "
            "into the folder of its own run"
        )
    return config


def _section(saved: SavedCheckpoint) -> dict[str, Any]:
    """Returns the run's settings of the model; checkpoints of earlier versions don't have them."""
    return dict(saved.facts.get("settings", {}).get("model", {}))


def _whole_state(run: RunFolder, saved: SavedCheckpoint, config: PretrainedConfig) -> dict[str, Tensor]:
    """Returns what the model's `state_dict` returns, in the dtype in which the run computed.

    Raises SlipstreamError where the checkpoint's weights aren't the model's.
    """
    if saved.facts.get("settings", {}).get("lora"):
        return _merged_state(run, saved, config)
    model, state = meta_model(config), _read_parameters(run, saved)
    if misfits := state_misfits(model, state):
        raise SlipstreamError(
            f"{saved.folder} isn't a checkpoint of {type(model).__name__} in {run.inputs}, which would load it with "
            f"random weights: it {misfits}"
        )
    state = _in_dtype(saved, state)
    for names in tied_names(model):
        state |= dict.fromkeys(names, next(state[name] for name in names if name in state))
    return state | _fixed_buffers(_section(saved), config, model.state_dict().keys() - state.keys())


def _merged_state(run: RunFolder, saved: SavedCheckpoint, config: PretrainedConfig) -> dict[str, Tensor]:
    """Returns the state of the model that the checkpoint's adapter belongs to, with the adapter merged into it."""
    path = str(_section(saved)["path"])
    if differs(saved.facts.get("base"), path):
        raise SlipstreamError(
            f"{saved.folder} holds an adapter of the model in {path}, whose weights are missing or have been changed "
            "since. Put back the model that it was trained on"
        )
    lora = LoraSection.model_validate(saved.facts["settings"]["lora"])
    trained = _in_dtype(saved, _read_parameters(run, saved))
    dtype = next(iter(trained.values())).dtype
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, trust_remote_code=False)
    return merged_with_base(model, Adapter("default", lora.peft_config(path)), trained)


def _read_parameters(run: RunFolder, saved: SavedCheckpoint) -> dict[str, Tensor]:
    """Returns the parameters by the model's names, put together from the files of all ranks."""
    shards = [
        TensorShard(
            key, ParameterShare.whole(stored.shape), torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        )
        for key, stored in saved.manifest.tensors.items()
        if key.startswith(_PREFIX)
    ]
    Checkpoints(run.checkpoints, RankGroup()).load(saved, shards)
    return {shard.key.removeprefix(_PREFIX): shard.tensor for shard in shards}


def _in_dtype(saved: SavedCheckpoint, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights as the run computes with them, where the checkpoint has the optimizer's copies in float32."""
    name = saved.facts.get("settings", {}).get("training", {}).get("precision")
    dtype = None if name is None else torch_dtype(precision_named(name).dtype)
    if dtype is None:
        return dict(state)
    return {key: each.to(dtype) if each.is_floating_point() else each for key, each in state.items()}


def _fixed_buffers(section: Mapping[str, Any], config: PretrainedConfig, names: Iterable[str]) -> dict[str, Tensor]:
    """Returns buffers that belong to the model's state but aren't trained, and so aren't in checkpoints."""
    wanted = list(names)
    if not wanted:
        return {}
    is_pretrained = bool(section) and ModelSection.model_validate(section).pretrained
    source: nn.Module = (
        AutoModelForCausalLM.from_pretrained(section["path"], trust_remote_code=False)
        if is_pretrained
        else AutoModelForCausalLM.from_config(config)
    )
    state = source.state_dict()
    return {name: state[name] for name in wanted}
