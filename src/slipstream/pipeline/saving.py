"""Saves a pipeline's model, a loop's optimizer and scheduler, and goes on from there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Never

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PretrainedConfig

from slipstream.checkpoint import (
    CheckpointFolder,
    Checkpoints,
    SavedCheckpoint,
    Scheduler,
    TensorShard,
    check_rule,
    decode,
    describe_rule,
    encode,
    kept_parts,
    load_training,
    loop_facts,
    restore_rule,
    training_shards,
)
from slipstream.errors import SlipstreamError
from slipstream.model import merged_state, storage_id, write_adapter, write_model
from slipstream.parallel import ParameterShard, ParameterShare, Ranks
from slipstream.pipeline.introspection import PipelineFacts
from slipstream.pipeline.runtime import PipelineRuntime
from slipstream.profile import without_origin
from slipstream.watchdog import watchdog_paused


class PipelineSaving(PipelineFacts):
    """The part of a Pipeline that saves and loads."""

    def save(
        self,
        folder: str | Path,
        step: int,
        *,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
        facts: Mapping[str, Any] = MappingProxyType({}),
        keep: int = 2,
        replace: bool = False,
    ) -> None:
        """Saves a checkpoint of this step in the folder and returns when it is complete; `load` goes on from it on any
        mesh. Collective. Of a model with an adapter it has the adapter alone.

        Args:
            folder: of checkpoints, on a disk that all ranks share.
            step: the number of steps so far; the checkpoint's name has it.
            optimizer: of any class, over `parameters()`.
            scheduler: of the learning rate.
            facts: anything else that the loop needs to go on: numbers, text, and lists and dicts of them; rank 0's.
            keep: how many of the newest checkpoints stay.
            replace: whether checkpoints of this step and later ones are set aside; else they are an error.

        Raises:
            SlipstreamError: on every rank, where it wasn't saved; earlier checkpoints stay as they are.
            NonFiniteError: on every rank, where something that is to be saved isn't finite.
        """
        folder = Path(folder)
        runtime = self._runtime
        ranks = runtime.ranks
        runtime.calls.begin("save")

        def prepared() -> tuple[list[TensorShard], dict[str, Any], Any]:
            if type(step) is not int or step < 0:
                raise SlipstreamError(f"{step=}: give the number of steps so far, 0 or more")
            if optimizer is not None:
                check_parameters(optimizer, (parameter for _, parameter in runtime.parameters.named()))
            rule = describe_rule(optimizer, scheduler)
            return list(training_shards(_kept(runtime), optimizer)), rule, encode(dict(facts), "facts")

        shards, rule, loop_state = ranks.world.all_or_none(prepared)
        _check_alike(ranks, {"step": step, **rule})
        shards += _buffers(runtime, writes=True)
        with watchdog_paused("saving", uses_disk=True):
            checkpoints = Checkpoints(folder, ranks.world, keep, say=_refuse, saving_group=ranks.world)
            checkpoints.prepare()
            ranks.run_on_leader(lambda: _check_step(folder, step, replace))
            described = loop_facts(rule, loop_state, runtime.random_state)
            checkpoints.save(step, shards, described | {"model": _described(runtime)})
            checkpoints.close()

    def load(
        self,
        folder: str | Path,
        step: int | Literal["latest", "last-good"] = "latest",
        *,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Loads a checkpoint of `save`: this rank's part of the model, the optimizer's state and options, the scheduler
        and the state of dropout; returns the step and the facts. Collective.

        Args:
            folder: of checkpoints.
            step: which one; "last-good": the newest that isn't damaged.
            optimizer: of the class that was saved, with as many parameter groups. None loads weights alone.
            scheduler: of the class that was saved.

        Raises:
            SlipstreamError: on every rank and before anything changes, where there is no checkpoint, it is damaged, or
                it is of another model.
        """
        folder = Path(folder)
        runtime = self._runtime
        ranks = runtime.ranks
        runtime.calls.begin("load")
        with watchdog_paused("loading a checkpoint", uses_disk=True):
            checkpoints = Checkpoints(folder, ranks.world, saving_group=ranks.world)
            saved = checkpoints.find(step)
            if saved is None:
                raise SlipstreamError(
                    f"there is no checkpoint in {folder}; pipe.save(folder, step, optimizer=optimizer) makes one. To "
                    "load only where there is one, ask slipstream.checkpoint.CheckpointFolder(folder).steps()."
                )
            parts = list(_kept(runtime))
            buffers = _buffers(runtime)
            mine = {f"model.{part.name}" for part in parts} | {shard.key for shard in buffers}
            everywhere = {name for names in ranks.world.gather(mine) for name in names}

            def checked() -> None:
                if optimizer is not None:
                    check_parameters(optimizer, (parameter for _, parameter in runtime.parameters.named()))
                if problem := _problem(saved, runtime, everywhere) or check_rule(
                    saved.facts["loop"], optimizer, scheduler
                ):
                    raise SlipstreamError(f"{saved.folder} {problem}.")

            ranks.world.all_or_none(checked)
            load_training(checkpoints, saved, parts, optimizer, buffers)
        loop = saved.facts["loop"]
        restore_rule(loop, optimizer, scheduler)
        seed, num_steps = loop["random_state"]
        runtime.random_state = seed, num_steps
        runtime.parameters.refresh()
        return saved.step, decode(loop["facts"])

    def save_pretrained(self, folder: str | Path, merged: bool = False) -> None:
        """Writes the whole model as `AutoModelForCausalLM.from_pretrained` reads it; rank 0 writes. Collective.

        Of a `from_pretrained` folder it has the files beside the weights, too, such as tokenizer and chat template. Of
        a model with an adapter it writes the adapter alone, as `PeftModel.from_pretrained` reads it, or with `merged`
        the model with the adapter added to its weights. Raises SlipstreamError for an nn.Sequential.
        """
        family = self._runtime.family
        family.check_has("save_pretrained")
        state = self._runtime.state_dict("save_pretrained")
        config = family.config
        adapter = family.adapter
        stage = next(iter(self._runtime.stages.values()))
        # The generation config comes from the given model, or from its folder.
        generation = getattr(stage.model, "generation_config", None)
        beside = family.beside
        ranks = self._runtime.ranks

        def write() -> None:
            in_the_way = (path for path in (Path(folder), *Path(folder).parents) if path.exists() and not path.is_dir())
            if file := next(in_the_way, None):
                raise SlipstreamError(f"the model can't be written to {folder}: {file} is a file. Give another folder.")
            if adapter is not None and not merged:
                write_adapter(folder, config, adapter, state)
            else:
                whole = state if adapter is None else merged_state(config, adapter, state)
                write_model(folder, config, whole, generation, beside)

        # No rank continues before the folder is complete.
        ranks.run_on_leader(write)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the whole model's state by the unsplit model's names, in host memory, on rank 0; an empty dict on the
        others. Tied weights are one tensor under each of their names. Collective."""
        return self._runtime.family.with_every_name(self._runtime.state_dict())


def _problem(saved: SavedCheckpoint, runtime: PipelineRuntime, everywhere: set[str]) -> str:
    """Returns why the checkpoint isn't of this model; "" where it is.

    `everywhere` are the keys of the tensors that any rank can load.
    """
    if differences := saved.describe_other_model(_described(runtime)):
        return f"is a checkpoint of another model: {differences}"
    names = (name for name in saved.manifest.tensors if name.startswith("model."))
    lost = [name.removeprefix("model.") for name in names if name not in everywhere]
    if lost:
        more = f" and {len(lost) - 1} more tensors" if len(lost) > 1 else ""
        return f"has {lost[0]}{more}, which this model doesn't have: make the Pipeline of the model that was saved"
    return ""


def _kept(runtime: PipelineRuntime) -> Iterator[ParameterShard]:
    return kept_parts(runtime.parameters.shards(), runtime.family.adapter is not None)


def _buffers(runtime: PipelineRuntime, writes: bool = False) -> list[TensorShard]:
    """Returns the model's state that isn't parameters, such as the statistics of batch norms. Collective if it is to be
    written: each by the first rank of those that have it."""
    if runtime.family.adapter is not None:
        return []
    stages = runtime.stages.values()
    weights = {storage_id(tensor) for stage in stages for _, tensor in stage.named_parameters()}
    buffers = {
        name: tensor
        for stage in stages
        for name, tensor in stage.state().items()
        if name not in runtime.parameters.shares
        and not isinstance(tensor, DTensor)
        and storage_id(tensor) not in weights  # a first name, not a tied weight's second
    }
    world = runtime.ranks.world
    holders = world.gather(list(buffers)) if writes else []
    first = {name: rank for rank, names in reversed([*enumerate(holders)]) for name in names}
    return [
        TensorShard(
            f"model.{name}", ParameterShare.whole(tuple(tensor.shape)), tensor, writes=first.get(name) == world.rank
        )
        for name, tensor in buffers.items()
    ]


def _described(runtime: PipelineRuntime) -> dict[str, Any]:
    config = runtime.family.config
    return {} if config is None else describe_model(config)


def _check_step(folder: Path, step: int, replace: bool) -> None:
    newest = next(iter(CheckpointFolder(folder).steps()), None)
    if newest is not None and newest >= step and not replace:
        raise SlipstreamError(
            f"{folder} has a checkpoint of step {newest} already, and step {step} is to be saved. Load it with "
            "pipe.load and go on from there, give another folder, or replace=True to set it aside."
        )


def _check_alike(ranks: Ranks, mine: Mapping[str, Any]) -> None:
    """Raises SlipstreamError where ranks have different ones. Collective."""
    first, *others = ranks.world.gather(dict(mine))
    for rank, other in enumerate(others, start=1):
        for what, value in first.items():
            if other[what] != value:
                raise SlipstreamError(
                    f"the {what} of rank {rank} differs from that of rank 0: {other[what]} and {value}. Every rank "
                    "saves the same step, with an optimizer of equal options and a scheduler of equal progress."
                )


def _refuse(problem: str) -> Never:
    raise SlipstreamError(problem)


def check_parameters(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Raises SlipstreamError where the optimizer updates something that isn't among a Pipeline's parameters."""
    own = {id(parameter) for parameter in parameters}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if others:
        raise SlipstreamError(
            f"the optimizer updates a tensor of shape {tuple(others[0].shape)} that isn't of pipe.parameters(): no "
            "checkpoint would hold it. Make the optimizer of pipe.parameters(), after the Pipeline."
        )


def describe_model(config: PretrainedConfig) -> dict[str, Any]:
    """Returns the facts that tell models apart: the settings that differ from the defaults of the model's class."""
    return {"model_type": config.model_type, **without_origin(config.to_diff_dict())}
