"""All checks of a run in their order, the cheapest first, and their results, which the ranks read in the run folder."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig

from slipstream.checkpoint import CheckpointFolder, DamagedError, Manifest, SavedCheckpoint, find_best, require_best
from slipstream.errors import SlipstreamError
from slipstream.launch import Progress, flat_settings, has_launcher
from slipstream.model import NewTokens, dropout_rates, meta_model
from slipstream.options import SHARED_WORK
from slipstream.own_files import link_advice
from slipstream.pipeline.saving import describe_model
from slipstream.pipeline.weights import copy_beside, read_generation, write_generation
from slipstream.train.config import Config, dump_config
from slipstream.train.config.run_config import meshes_of, parse_config
from slipstream.train.data import TrainingSequences, is_of_tokenizer, save_texts
from slipstream.train.elastic_mesh import mesh_of_processes, table_of_changes
from slipstream.train.folder_lock import FolderLock
from slipstream.train.metrics import check_trackers
from slipstream.train.optimizers import OptimizerTraits, check_arguments, check_schedule, try_optimizer
from slipstream.train.planned_start import is_open, plan_obstacle
from slipstream.train.preferences import check_reference
from slipstream.train.preflight.memory_check import check_memory, memory_account
from slipstream.train.preflight.model_checks import check_layers, check_model, check_shares, load_model_config
from slipstream.train.preflight.text_preparation import (
    PreparedText,
    add_vocabulary,
    check_amount,
    check_sample,
    prepare_text,
    stop_tokens,
)
from slipstream.train.run_folder import RunFolder
from slipstream.train.run_state import check_data, describe_data, differs
from slipstream.train.training_step import count_steps
from slipstream.train.validation import is_out_of_patience
from slipstream.units import bytes_text


@dataclass(frozen=True)
class RunInputs:
    """The inputs of every rank: written once, read by all."""

    config: Config
    model_config: Any  # transformers.PretrainedConfig
    text: PreparedText
    is_finished: bool  # the run was resumed after its last step, and its model is there
    new_tokens: NewTokens | None = None

    def write(self) -> None:
        """Makes the run folder with `inputs/` inside, and removes an earlier run's files unless it is resumed.

        Call it while the folder is locked.

        Raises:
            SlipstreamError: if the folder can't be written, or another run has written to it since the preflight.
        """
        check_run_folder(self.config)
        folder = self.config.folder
        try:
            if self.config.checkpoint.resume == "no":
                folder.listed.remove()
            self._write_files()
        except OSError as error:
            raise SlipstreamError(f"can't write to training.output={folder.path}: {error}") from error

    def write_again(self) -> None:
        """Writes what `write` has written where somebody has removed it since, while the run goes on. Raises OSError
        where it can't be written."""
        folder = self.config.folder
        if not (folder.config.exists() and folder.inputs.exists()):
            self._write_files()

    def _write_files(self) -> None:
        folder = self.config.folder
        folder.listed.add(folder.config, folder.log)
        folder.listed.add_folder(folder.inputs)
        with folder.replaced(folder.config) as part:
            part.write_text(dump_config(self.config), encoding="utf-8")
        with folder.replaced(folder.inputs) as part:
            part.mkdir()
            self.model_config.save_pretrained(part)
            model = self.config.model
            if model.pretrained:
                if (generation := read_generation(str(model.path))) is not None:
                    stops = [*dict.fromkeys(stop_tokens(self.config, self.model_config))]
                    generation.eos_token_id = stops if len(stops) > 1 else generation.eos_token_id
                    write_generation(part, generation)
                # Files of a tokenizer that isn't the run's would be read with the run's own.
                beside = part / folder.beside.name
                copy_beside(
                    Path(str(model.path)), beside, None if self.config.has_models_tokenizer else is_of_tokenizer
                )
            self.text.tokenizer.save_pretrained(part)
            if self.new_tokens is not None:
                file = part / folder.new_tokens.name
                file.write_text(json.dumps(self.new_tokens._asdict()), encoding="utf-8")
            save_texts(self.text.train, part, "train")
            save_texts(self.text.validation, part, "validation")
            if os.path.lexists(folder.inputs):
                folder.own.remove(folder.own.move(folder.inputs, folder.work / "inputs.before"))


def preflight(config: Config, progress: Progress) -> RunInputs:
    """Checks the run folder, the model and how it is split, and tokenises the text. Writes nothing.

    Raises:
        SlipstreamError: with the given value, the allowed ones and the setting to type.
    """
    check_trackers(config.tracking.to)
    try:
        _check_place(config.training.output)
        FolderLock(config.training.output, progress.warn).check_free()
        check_run_folder(config)
    except OSError as error:
        raise SlipstreamError(
            f"training.output={config.training.output} can't be read: {error.strerror}; name a folder of your own"
        ) from error
    model_config = load_model_config(config.model)
    new_tokens = add_vocabulary(config, model_config, progress)
    config = first_mesh(config, model_config)
    check_model(config, model_config, progress)
    check_optimizer(config, model_config)
    check_memory(config, model_config)
    check_smaller_meshes(config, model_config)
    text = prepare_text(config, model_config, progress)
    check_sample(config.sample, text.tokenizer, model_config)
    check_amount(config, text, progress)
    is_finished = check_resume(config, model_config, text.sequences, progress)
    has_reference = config.preference is not None and config.preference.has_reference
    if has_reference and not is_finished and find_saved(config) is not None:
        check_reference(config, {"train": text.train, "validation": text.validation})
    # Nothing is refused any more, so that these notes are read as such.
    if rates := _rates_without_effect(config, model_config):
        progress.say(f"dropout ({rates}) is off under preferences; --preference.dropout=true turns it on")
    if not is_finished and (reason := plan_obstacle(config)):
        progress.say(reason)
    return RunInputs(config, model_config, text, is_finished, new_tokens)


def _rates_without_effect(config: Config, model_config: Any) -> str:
    """Returns the rates of dropout that the model and its adapter have and the training hasn't; "" for none."""
    if not config.drops_nothing:
        return ""
    rates = dropout_rates(model_config.get_text_config())
    if config.lora is not None:
        rates |= dropout_rates(config.lora.peft_config(str(config.model.path)))
    return ", ".join(f"{name}={rate}" for name, rate in rates.items())


def _check_place(output: Path) -> None:
    """Raises SlipstreamError where no folder can be made or written here, and OSError where that can't be found out."""
    there = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.exists())
    if there != output.absolute() and not there.is_dir():
        raise SlipstreamError(f"training.output={output}: {there} is a file; name a folder")
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        raise SlipstreamError(f"training.output={output}: nothing can be written in {there}; name a folder of your own")


def check_run_folder(config: Config) -> None:
    """Raises SlipstreamError where the run would replace something that isn't its own, or that the configuration
    doesn't allow it to, and where it would resume from a checkpoint that isn't there."""
    folder, resume = config.folder, config.checkpoint.resume
    if folder.path.exists() and not folder.path.is_dir():
        raise SlipstreamError(f"training.output={folder.path} is a file; name a folder")
    if (link := folder.find_link()) is not None:
        raise SlipstreamError(f"training.output={folder.path}: {link_advice(link)}")
    steps = CheckpointFolder(folder.checkpoints).steps()
    if isinstance(resume, int) and resume not in steps:
        if not steps:
            raise SlipstreamError(
                f"checkpoint.resume={resume}: there is no checkpoint at all in {folder.checkpoints}; leave "
                "checkpoint.resume out to begin at step 1, or name the run's folder with --training.output=..."
            )
        raise SlipstreamError(
            f"there is no checkpoint {resume} in {folder.checkpoints}; give one of its steps "
            f"({', '.join(map(str, steps))}), latest or last-good"
        )
    if resume == "best" and steps:
        require_best(CheckpointFolder(folder.checkpoints))
    resumes = resume != "no"
    _check_unlisted(folder, steps, adopts_checkpoints=resumes and bool(steps))
    # A run that ended before its first checkpoint begins again in its folder, unless it has come to its end.
    begins_again = folder.finished_model() is None and folder.listed.has(folder.checkpoints)
    if not (resumes and (steps or begins_again or not folder.exports())):
        _check_results(config, folder, steps)


def _check_unlisted(folder: RunFolder, steps: list[int], adopts_checkpoints: bool) -> None:
    """Raises SlipstreamError where there is something that no run has listed."""
    unlisted = folder.find_unlisted(adopts_checkpoints)
    if unlisted is None and not adopts_checkpoints:
        unlisted = CheckpointFolder(folder.checkpoints).find_other()
    if unlisted is None:
        return
    is_copy = bool(steps) and unlisted.is_relative_to(folder.checkpoints)
    instead = "go on from the checkpoints with --checkpoint.resume=latest, or " if is_copy else ""
    raise SlipstreamError(
        f"training.output={folder.path} already holds {unlisted.relative_to(folder.path)}, which isn't in its list of "
        f"what runs made, and so is never replaced; {instead}choose another folder, such as "
        f"--training.output={folder.path / 'run-1'}, or move it away"
    )


def _check_results(config: Config, folder: RunFolder, steps: list[int]) -> None:
    """Raises SlipstreamError where there are results of an earlier run that the configuration doesn't give up."""
    result = folder.find_result()
    if result is None or config.training.overwrite:
        return
    name, resume = result.relative_to(folder.path), ""
    if steps and config.checkpoint.resume == "no":
        resume = f"go on from its checkpoint of step {steps[0]} with --checkpoint.resume=latest, "
    no_checkpoint = ", and no checkpoint to go on from" if config.checkpoint.resume != "no" else ""
    raise SlipstreamError(
        f"training.output={folder.path} already holds {name}{no_checkpoint}; {resume}choose another folder, or replace "
        "it with --training.overwrite=true"
    )


def possible_meshes(config: Config, model_config: Any) -> Iterator[Config]:
    """Yields the configuration with each mesh that its batch, the model's layers and heads, and the optimizer allow.

    Raises SlipstreamError where there is none, or where the configuration gives some of a plan's choices.
    """
    axes = " and ".join(f"--{axis}=auto" for axis in config.plan.open if axis != "microbatches")
    if not is_open(config):
        reason = plan_obstacle(config).partition(", so the run")[0] or "schedule and slices are given"
        raise SlipstreamError(
            f"{axes}: meshes are compared by the best plan of each, but {reason}. Leave that out, or give the sizes of "
            "all axes but one"
        )
    problem, num_meshes = None, 0
    values = yaml.safe_load(dump_config(config))
    left = config.num_processes // config.num_ranks_without(config.plan.open)
    for filled in meshes_of(values, left):
        try:
            tried = parse_config(filled)
            check_layers(tried, model_config)
            check_shares(tried, model_config)
            check_optimizer(tried, model_config)
        except SlipstreamError as error:
            problem = problem or error
            continue
        num_meshes += 1
        yield tried
    if not num_meshes:
        raise SlipstreamError(f"{axes}: no mesh of {config.num_processes} ranks is possible: {problem}")


def first_mesh(config: Config, model_config: Any) -> Config:
    """Returns the configuration with the mesh of the checkpoint that it resumes from, if that is of as many ranks, and
    else, until one is chosen, with the first that is possible."""
    if not config.plan.open:
        return config
    saved = find_saved(config)
    if saved is not None and "settings" in saved.facts:
        sizes = {axis: saved.facts["mesh"].get(axis, 1) for axis in ("pp", "dp", "cp", "tp")}
        mesh = config.on_mesh(sizes, saved.facts["settings"]["pipeline"]["num_microbatches"])
        chosen = mesh.model_copy(update={"plan": config.plan.model_copy(update={"open": []})})
        candidate = parse_config(yaml.safe_load(dump_config(chosen)))
        if candidate.num_processes == config.num_processes:
            return candidate
    return next(possible_meshes(config, model_config))


_COUNTED = 2  # tensors of a parameter's size that memory.limit counts, as AdamW has them
_STEPS = 1000  # of a run whose epochs aren't counted yet


def check_optimizer(config: Config, model_config: Any) -> None:
    """Checks the optimizer and its schedule, on toys with the model's numbers of dimensions.

    Raises:
        SlipstreamError: with the given value, the allowed ones and the setting to type.
    """
    settings = config.optimizer
    check_arguments(settings)
    traits = try_optimizer(settings, _dims(config, model_config))
    check_schedule(settings, config.training.steps or _STEPS)
    if traits.reach != "element" and (cut := next(_cuts(config, traits), None)):
        setting, instead = cut
        sees = "the whole gradient of a parameter" if traits.reach == "parameter" else "all parameters together"
        raise SlipstreamError(
            f"optimizer.name={settings.name} needs {sees}, of which {setting} leaves each rank a part; give {instead}, "
            "or an optimizer that updates each element by itself, such as adamw"
        )
    if traits.group_states:
        raise SlipstreamError(
            f"optimizer.name={settings.name} changes {', '.join(traits.group_states)} of its parameter groups, which "
            "checkpoints don't hold; give an optimizer that keeps its state by parameter, such as adamw"
        )
    if config.memory.limit is not None and traits.size > _COUNTED:
        raise SlipstreamError(
            f"memory.limit with optimizer.name={settings.name}, which keeps {traits.size:.2g} tensors of each "
            f"parameter's size: the limit counts {_COUNTED}. Leave memory.limit out, or give adamw"
        )


def _dims(config: Config, model_config: Any) -> set[int]:
    """Returns the numbers of dimensions of the trained parameters."""
    if config.lora is None:
        return {weight.ndim for weight in meta_model(model_config).parameters()}
    lora = config.lora.peft_config(str(config.model.path))
    dims = {1, 2} if lora.use_dora or lora.bias != "none" else {2}
    copies = tuple(lora.modules_to_save or ())
    whole = meta_model(model_config).named_modules() if copies else ()
    return dims | {weight.ndim for name, module in whole if name.endswith(copies) for weight in module.parameters()}


def _cuts(config: Config, traits: OptimizerTraits) -> Iterator[tuple[str, str]]:
    """Yields the settings that leave a rank only a part of the elements that the optimizer must see, and the remedy."""
    parallel, pipeline = config.parallel, config.pipeline
    for each in SHARED_WORK:
        if each.splits_weights and (size := getattr(parallel, each.degree)) > 1:
            yield f"parallel.{each.degree}={size}", f"parallel.{each.degree}=1"
    if parallel.num_copies > 1 and parallel.shard != "none":
        yield f"parallel.shard={parallel.shard}", "parallel.shard=none"
    if traits.reach == "model" and pipeline.num_ranks > 1:
        yield f"pipeline.num_ranks={pipeline.num_ranks}", "pipeline.num_ranks=1"
    may_spread = pipeline.vocabulary == "spread" or (pipeline.vocabulary == "auto" and is_open(config))
    if may_spread and pipeline.num_ranks > 1:
        yield f"pipeline.vocabulary={pipeline.vocabulary}", "pipeline.vocabulary=whole"


def check_smaller_meshes(config: Config, model_config: Any) -> None:
    """Checks that the run could go on with any number of processes down to `training.min_ranks`.

    Raises:
        SlipstreamError: with the smallest number that would do.
    """
    least, smallest = config.training.min_ranks, config.num_processes
    if least is None:
        return
    if least > config.num_processes and not has_launcher():
        raise SlipstreamError(
            f"training.min_ranks={least} is more than the {config.num_processes} processes of {config.mesh_text}; give "
            f"--training.min_ranks={config.num_processes} or less"
        )
    checked = {config.mesh_text}
    for count in range(config.num_processes - 1, least - 1, -1):
        try:
            mesh = mesh_of_processes(config, count)
            if mesh.mesh_text not in checked:
                checked.add(mesh.mesh_text)
                _check_as_smaller(mesh, config, model_config)
        except SlipstreamError as error:
            raise SlipstreamError(
                f"training.min_ranks={least}, but with {count} of {config.num_processes} processes the run couldn't "
                f"go on: {error}. The smallest number that would do is {smallest}: give --training.min_ranks={smallest}"
            ) from None
        smallest = count


def _check_as_smaller(mesh: Config, config: Config, model_config: Any) -> None:
    """Raises SlipstreamError where a run of the configuration couldn't go on with a smaller mesh."""
    check_memory(mesh, model_config)
    rows, replicas = config.training.batch_size, mesh.parallel.data
    divides = config.data.packing == "fixed" and rows % (replicas * mesh.pipeline.num_microbatches) == 0
    if config.pipeline.router_loss != "none" and not divides:
        raise SlipstreamError(
            f"pipeline.router_loss={config.pipeline.router_loss} depends on the microbatches, which would be others: a "
            f"batch doesn't divide into {mesh.pipeline.num_microbatches} equal ones for each of {replicas} replicas"
        )
    limit = config.memory.limit
    if limit is None or (account := memory_account(mesh, model_config)) is None or (held := account()) <= limit:
        return
    raise SlipstreamError(
        f"by the planner's account the fullest rank of {mesh.mesh_text} would hold {bytes_text(held)}, and "
        f"memory.limit={limit:.6g} ({bytes_text(limit)})"
    )


_UNTOLD = ("training.output", "training.overwrite", "checkpoint.resume")  # they change no number of a run


def check_resume(config: Config, model_config: Any, sequences: TrainingSequences, progress: Progress) -> bool:
    """Prints the settings that differ from those of the checkpoint that the run resumes from, if it does; returns
    whether its last step is done and its model exported.

    Raises:
        SlipstreamError: where the text, the order of its samples, or the model is another one.
    """
    saved = find_saved(config)
    if saved is None:
        return False
    if "settings" not in saved.facts:
        raise saved.unfit("was saved by pipe.save, and doesn't say on what it was trained: pipe.load goes on from it")
    _check_adapter(saved, config)
    if changes := list(_changes(saved.facts["settings"], config)):
        progress.say(
            f"resuming after step {saved.step} with other settings than before:{table_of_changes('setting', changes)}"
        )
    training = config.training
    check_data(saved.facts["data"], describe_data(sequences))
    saved.check_model(describe_model(_as_ranks_load_it(config, model_config)))
    has_stopped = is_out_of_patience(saved.facts["validation"], training.patience)
    if not ((has_stopped or saved.step >= count_steps(training, sequences)) and _is_exported(saved, config)):
        return False
    progress.say_result(
        f"the run has reached its last step, {saved.step}, and its model is in {config.folder.model}: "
        f"nothing is left to do. To train further, give a larger --training.{'patience' if has_stopped else 'steps'}"
    )
    return True


def _check_adapter(saved: SavedCheckpoint, config: Config) -> None:
    """Raises SlipstreamError where the checkpoint is of an adapter and the run isn't, or of other weights."""
    had = saved.facts["settings"]["lora"] is not None
    if had != (config.lora is not None):
        was, now = ("an adapter", "all weights") if had else ("all weights", "an adapter (lora)")
        raise saved.unfit(f"holds {was}, but the run trains {now}")
    if config.lora is None:
        return
    was, now = saved.facts["settings"]["lora"]["base_precision"], config.lora.base_precision
    if was != now:
        raise saved.unfit(f"holds an adapter of weights with lora.base_precision={was}, but the run has {now}")
    if differs(saved.facts["base"], str(config.model.path)):
        raise saved.unfit(
            f"holds an adapter of other weights than those in model.path={config.model.path}, which have been changed "
            "or replaced since"
        )


def _is_exported(saved: SavedCheckpoint, config: Config) -> bool:
    """Returns whether the exported model is there, of this checkpoint and not of a later one."""
    folder = config.folder
    newest = CheckpointFolder(folder.checkpoints).steps()[0]
    if saved.facts["settings"]["training"]["export"] != config.training.export:
        return False
    return saved.step == newest and all(map(folder.listed.is_itemised, config.exports(folder.model)))


def find_saved(config: Config) -> SavedCheckpoint | None:
    """Returns the checkpoint by its manifest; None where there is none, or it is damaged or another version's: the
    ranks, which verify every byte, then say which one is taken."""
    resume, folder = config.checkpoint.resume, CheckpointFolder(config.folder.checkpoints)
    steps = [] if resume == "no" else folder.steps()
    if not steps:
        return None
    best = find_best(folder) if resume == "best" else None
    place = folder.complete(resume if isinstance(resume, int) else steps[0] if best is None else best.step)
    try:
        return SavedCheckpoint(place, Manifest.read(place))
    except DamagedError:
        return None


def _as_ranks_load_it(config: Config, model_config: Any) -> Any:
    if config.model.pretrained:
        return model_config
    with tempfile.TemporaryDirectory() as folder:  # saving and loading may change it
        model_config.save_pretrained(folder)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _changes(before: Mapping[str, Any], config: Config) -> Iterator[tuple[str, str, str]]:
    """Yields name, old and new value of each setting that differs."""
    old, new = dict(flat_settings(before)), dict(flat_settings(json.loads(config.model_dump_json())))
    for name in dict.fromkeys(chain(old, new)):
        values = old.get(name, "absent"), new.get(name, "absent")
        if values[0] != values[1] and name not in _UNTOLD:
            yield name, *values
