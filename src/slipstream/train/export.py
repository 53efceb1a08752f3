"""Models out of runs: taken from a checkpoint, found by a run's folder, and asked to continue a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from slipstream.checkpoint import CheckpointFolder, Checkpoints, SavedCheckpoint, TensorShard, require_best, step_named
from slipstream.errors import SlipstreamError, is_surely_a_path, path_hint
from slipstream.launch import Progress, temporary_folder
from slipstream.model import (
    check_length,
    load_config,
    merged_with_base,
    meta_model,
    quiet_transformers,
    read_generation,
    state_misfits,
    tied_names,
    torch_dtype,
    trust_remote_code,
    whole_pretrained_model,
    write_model,
)
from slipstream.parallel import ParameterShare, RankGroup
from slipstream.pipeline import describe_model
from slipstream.train.config import LoraSection, ModelSection, precision_named
from slipstream.train.data import load_tokenizer, prompt_beginning_twice
from slipstream.train.data.chat_templates import ChatTemplate
from slipstream.train.run_folder import RunFolder
from slipstream.train.run_state import differs

_PREFIX = "model."  # the beginning of the parameters' keys


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
    path = saved.facts["settings"]["model"]["path"]
    if trusts_code and path is not None:
        trust_remote_code(str(path))
    config = load_config(str(run.inputs))
    if differences := saved.describe_other_model(describe_model(config)):
        raise SlipstreamError(
            f"{saved.folder} isn't a checkpoint of the model in {run.inputs}: {differences}. Put the checkpoint back "
            "into the folder of its own run"
        )
    return config


def _whole_state(run: RunFolder, saved: SavedCheckpoint, config: PretrainedConfig) -> dict[str, Tensor]:
    """Returns the model's `state_dict`, in the dtype in which the run computed.

    Raises SlipstreamError where the checkpoint's weights aren't the model's.
    """
    if saved.facts["settings"]["lora"] is not None:
        return _merged_state(run, saved, config)
    model = meta_model(config)
    state = _read_parameters(run, saved)
    if misfits := state_misfits(model, state):
        raise SlipstreamError(
            f"{saved.folder} isn't a checkpoint of {type(model).__name__} in {run.inputs}, which would load it with "
            f"random weights: it {misfits}"
        )
    state = _in_dtype(saved, state)
    for names in tied_names(model):
        state |= dict.fromkeys(names, next(state[name] for name in names if name in state))
    return state | _fixed_buffers(saved.facts["settings"]["model"], config, model.state_dict().keys() - state.keys())


def _merged_state(run: RunFolder, saved: SavedCheckpoint, config: PretrainedConfig) -> dict[str, Tensor]:
    """Returns the state of the model that the checkpoint's adapter belongs to, with the adapter merged into it."""
    path = str(saved.facts["settings"]["model"]["path"])
    if differs(saved.facts["base"], path):
        raise SlipstreamError(
            f"{saved.folder} holds an adapter of the model in {path}, whose weights are missing or have been changed "
            "since. Put back the model that it was trained on"
        )
    lora = LoraSection.model_validate(saved.facts["settings"]["lora"])
    trained = _in_dtype(saved, _read_parameters(run, saved))
    dtype = next(iter(trained.values())).dtype
    model = whole_pretrained_model(path, config, dtype)
    return merged_with_base(model, lora.adapter(path), trained)


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
    dtype = torch_dtype(precision_named(saved.facts["settings"]["training"]["precision"]).dtype)
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}


def _fixed_buffers(section: Mapping[str, Any], config: PretrainedConfig, names: Iterable[str]) -> dict[str, Tensor]:
    """Returns buffers that belong to the model's state but aren't trained, and so aren't in checkpoints."""
    wanted = list(names)
    if not wanted:
        return {}
    is_pretrained = ModelSection.model_validate(section).pretrained
    source: nn.Module = (
        whole_pretrained_model(section["path"]) if is_pretrained else AutoModelForCausalLM.from_config(config)
    )
    state = source.state_dict()
    return {name: state[name] for name in wanted}


Wanted = int | Literal["latest", "last-good", "best"]

_EXAMPLE = "runs/a, or runs/a/checkpoints/step-00000012"


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A run that has checkpoints, and which of them is wanted."""

    run: RunFolder
    wanted: Wanted

    def read(self, say: Callable[[str], None]) -> SavedCheckpoint:
        """Returns the checkpoint, every byte of it verified; `say` gets a line about damaged ones that are passed over.

        Raises SlipstreamError where it isn't there, with the steps that are, or is damaged.
        """
        checkpoint = Checkpoints(self.run.checkpoints, RankGroup(), say=say).find(self.wanted)
        if checkpoint is None:
            raise SlipstreamError(f"the checkpoints in {self.run.checkpoints} have just been removed; try again")
        return checkpoint


def choose_checkpoint(place: Path, step: str | None = None, best: bool = False) -> ChosenCheckpoint:
    """Returns the checkpoint at `place`, or, where a run is there, that of a step, "latest" (the default), "last-good",
    or the `best`, that of the run's lowest validation loss.

    Raises:
        SlipstreamError: where there are no checkpoints, or the step isn't one.
    """
    if best and step is not None:
        raise SlipstreamError(f"--step={step} and --best both choose a checkpoint; give one of the two")
    if not place.is_dir():
        raise SlipstreamError(
            f"there is no folder {place}{path_hint(place)}; give a run's output folder or a checkpoint: {_EXAMPLE}"
        )
    one = step_named(place.resolve().name)
    run = RunFolder(place) if one is None else _run_of(place)
    option = "--best" if best else f"--step={step}" if step is not None else None
    wanted = ("best" if best else _parse(step)) if one is None else _only(place, one, option)
    if not CheckpointFolder(run.checkpoints).steps():
        raise SlipstreamError(
            f"there are no checkpoints in {run.path}: runs leave them in {run.checkpoints}, unless "
            f"checkpoint.every is 0. Give a run's output folder or a checkpoint: {_EXAMPLE}"
        )
    if best:
        require_best(CheckpointFolder(run.checkpoints))
    return ChosenCheckpoint(run, wanted)


def _run_of(checkpoint: Path) -> RunFolder:
    """Returns the run in whose folder a checkpoint is."""
    run = RunFolder(checkpoint.resolve().parent.parent)
    if run.checkpoints != checkpoint.resolve().parent:
        raise SlipstreamError(
            f"{checkpoint} isn't in the folder checkpoints/ of a run, next to whose inputs/ the model's configuration "
            f"and tokenizer are; give a run's output folder or a checkpoint in it: {_EXAMPLE}"
        )
    return run


def _only(checkpoint: Path, step: int, option: str | None) -> int:
    """Returns the step of a checkpoint that was given itself."""
    if option is not None:
        raise SlipstreamError(
            f"{option} chooses among the checkpoints of a run, but {checkpoint} is one of them: leave "
            f"{option.partition('=')[0]} out, or give the run's folder"
        )
    return step


def _parse(step: str | None) -> Wanted:
    if step is None or step == "latest":
        return "latest"
    if step == "last-good":
        return "last-good"
    if not step.isdecimal():
        raise SlipstreamError(f"--step={step} isn't a step; give that of a checkpoint, latest or last-good")
    return int(step)


@dataclass(frozen=True)
class OpenedModel:
    """A model that is about to be loaded: its folder or hub name, and its tokenizer."""

    path: str
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    trusts_code: bool
    run: RunFolder | None = None  # the run that exported the model


@contextmanager
def opened_model(place: str, trusts_code: bool, progress: Progress, best: bool = False) -> Iterator[OpenedModel]:
    """Yields the model at `place`, or where that is a run its export, else its newest checkpoint, which is exported to
    a folder that is removed at the end; with `best` the run's best checkpoint.

    Raises:
        SlipstreamError: where there is no model, or it has no tokenizer.
    """
    path = Path(place)
    if not path.exists() and is_surely_a_path(place):
        raise SlipstreamError(
            f"there is no folder {place}{path_hint(place)}; give a model's folder or hub name, a run's output folder, "
            "or a checkpoint"
        )
    if not path.exists() or (path / "config.json").is_file():
        if best:
            raise SlipstreamError(f"--best chooses a checkpoint of a run, and {place} is a model: leave it out")
        exported: str | None = place
    else:
        exported = None if best else _exported_by(RunFolder(path))
    if exported is not None:
        yield _open(exported, trusts_code, None if exported == place else RunFolder(path))
        return
    chosen = choose_checkpoint(path, best=best)
    with temporary_folder() as folder:
        with progress.waiting("reading the checkpoint"):
            saved = chosen.read(progress.warn)
            export_checkpoint(chosen.run, saved, folder / "model", trusts_code)
        yield _open(str(folder / "model"), trusts_code, chosen.run)


def _exported_by(run: RunFolder) -> str | None:
    """Returns the model that a run has exported at its end; None where there is none, or where it isn't complete."""
    is_being_written = run.listed.has(run.model)
    return str(run.model) if (run.model / "config.json").is_file() and not is_being_written else None


def _open(path: str, trusts_code: bool, run: RunFolder | None) -> OpenedModel:
    if trusts_code:
        trust_remote_code(path)
    # Raises an error that says whether there is a model.
    load_config(path)
    instead = (
        "Copy the files of its tokenizer there (tokenizer.json, tokenizer_config.json), which runs and `slipstream "
        "export` write with a model."
    )
    return OpenedModel(path, load_tokenizer(path, trusts_code, instead), trusts_code, run)


@dataclass(frozen=True)
class TextWriter:
    """A model and its tokenizer, on one device."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    chat_template: str | None = None  # a file or a name; None: the tokenizer's own

    @classmethod
    def load(cls, opened: OpenedModel, device: str = "cpu", chat_template: str | None = None) -> TextWriter:
        """Loads the weights. Raises SlipstreamError where they can't be loaded."""
        try:
            with quiet_transformers():
                model = AutoModelForCausalLM.from_pretrained(opened.path, trust_remote_code=opened.trusts_code)
        except (OSError, ValueError, SafetensorError) as error:
            raise SlipstreamError(f"can't load the model {opened.path}: {error}") from error
        return cls(model.to(device), opened.tokenizer, chat_template)

    def check(self, prompt: str, max_new_tokens: int, is_chat: bool = False) -> None:
        """Raises SlipstreamError where the prompt has no tokens, or the text may become longer than the model takes."""
        num_tokens = len(self._tokens(prompt, is_chat))
        if num_tokens == 0:
            raise SlipstreamError(f"the prompt {prompt!r} has no tokens; give a text to continue")
        check_length(self.model.config, num_tokens + max_new_tokens, "the prompt's tokens and --max-new-tokens")

    def warning(self, prompt: str, is_chat: bool = False) -> str:
        """Returns what to say of a prompt that begins with two begin tokens; "" where it doesn't."""
        return prompt_beginning_twice(prompt, self._tokens(prompt, is_chat), self.tokenizer)

    def write(self, prompt: str, max_new_tokens: int, temperature: float, seed: int, is_chat: bool = False) -> str:
        """Returns the prompt and its continuation, or the assistant's answer to it in a chat: of the likeliest tokens
        with `temperature` 0, else drawn."""
        prompt_tokens = self._tokens(prompt, is_chat)
        inputs = torch.tensor([prompt_tokens], device=self.model.device)
        torch.manual_seed(seed)
        how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        how |= {"attention_mask": torch.ones_like(inputs), "pad_token_id": self.tokenizer.eos_token_id}
        tokens = self.model.generate(inputs, max_new_tokens=max_new_tokens, **how)[0]
        return str(self.tokenizer.decode(tokens[len(prompt_tokens) if is_chat else 0 :], skip_special_tokens=True))

    def _tokens(self, prompt: str, is_chat: bool) -> list[int]:
        """Returns the tokens of a prompt, or of a chat in which a user says it and the assistant is to answer.

        Raises SlipstreamError where there is no chat template.
        """
        if is_chat:
            template = ChatTemplate(self.tokenizer, self.chat_template, "--chat-template")
            return template.tokens([{"role": "user", "content": prompt}], prompt=True)
        return list(self.tokenizer(prompt)["input_ids"])
