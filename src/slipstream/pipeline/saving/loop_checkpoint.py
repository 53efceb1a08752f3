"""A checkpoint of a loop of one's own: `Pipeline.save` and `Pipeline.load`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Never

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from slipstream.checkpoint import (
    CheckpointFolder,
    Checkpoints,
    SavedCheckpoint,
    TensorShard,
    kept_parts,
    load_training,
    training_shards,
)
from slipstream.errors import SlipstreamError
from slipstream.model import storage_id
from slipstream.parallel import ParameterShard, ParameterShare, Ranks
from slipstream.pipeline.engine import Engine
from slipstream.pipeline.families import CausalLMFamily
from slipstream.pipeline.saving.model_description import describe_model
from slipstream.pipeline.saving.plain_values import decode, encode
from slipstream.pipeline.saving.update_rule import (
    Scheduler,
    check_parameters,
    check_rule,
    describe_rule,
    restore_rule,
)
from slipstream.watchdog import counted_off


def save_loop(
    engine: Engine,
    place: tuple[str | Path, int],
    optimizer: Optimizer | None,
    scheduler: Scheduler | None,
    facts: Mapping[str, Any],
    keep: int,
    replace: bool,
) -> None:
    """Saves a checkpoint of a folder and a step, and returns when it is complete. Collective; see `Pipeline.save`."""
    folder, step, ranks = Path(place[0]), place[1], engine.ranks
    engine.calls.begin("save")

    def prepared() -> tuple[list[TensorShard], dict[str, Any], Any]:
        if type(step) is not int or step < 0:
            raise SlipstreamError(f"{step=}: give the number of steps so far, 0 or more")
        if optimizer is not None:
            check_parameters(optimizer, (parameter for _, parameter in engine.parameters.named()))
        rule = describe_rule(optimizer, scheduler)
        return list(training_shards(_kept(engine), optimizer)), rule, encode(dict(facts), "facts")

    shards, rule, kept = ranks.world.done_by_all(prepared)
    _check_alike(ranks, {"step": step, **rule})
    shards += _buffers(engine, writes=True)
    with counted_off("saving", uses_disk=True):
        checkpoints = Checkpoints(folder, ranks.world, keep, say=_refuse, saving_group=ranks.world)
        checkpoints.prepare()
        ranks.decided(lambda: _check_step(folder, step, replace))
        described = {"loop": {**rule, "facts": kept, "random_state": list(engine.random_state)}}
        checkpoints.save(step, shards, described | {"model": _described(engine)})
        checkpoints.close()


def load_loop(
    engine: Engine,
    place: tuple[str | Path, int | Literal["latest", "last-good"]],
    optimizer: Optimizer | None,
    scheduler: Scheduler | None,
) -> tuple[int, dict[str, Any]]:
    """Loads a checkpoint of a folder; returns its step and facts. Collective; see `Pipeline.load`."""
    folder, ranks = Path(place[0]), engine.ranks
    engine.calls.begin("load")
    with counted_off("loading a checkpoint", uses_disk=True):
        checkpoints = Checkpoints(folder, ranks.world, saving_group=ranks.world)
        saved = checkpoints.find(place[1])
        if saved is None:
            raise SlipstreamError(
                f"there is no checkpoint in {folder}; pipe.save(folder, step, optimizer=optimizer) makes one. To load "
                "only where there is one, ask slipstream.checkpoint.CheckpointFolder(folder).steps()."
            )
        parts, buffers = list(_kept(engine)), _buffers(engine)
        mine = {f"model.{part.name}" for part in parts} | {shard.key for shard in buffers}
        everywhere = {name for names in ranks.world.gather(mine) for name in names}

        def checked() -> None:
            if optimizer is not None:
                check_parameters(optimizer, (parameter for _, parameter in engine.parameters.named()))
            if problem := _problem(saved, engine, everywhere) or check_rule(saved.facts["loop"], optimizer, scheduler):
                raise SlipstreamError(f"{saved.folder} {problem}.")

        ranks.world.done_by_all(checked)
        load_training(checkpoints, saved, parts, optimizer, buffers)
    loop = saved.facts["loop"]
    restore_rule(loop, optimizer, scheduler)
    seed, num_steps = loop["random_state"]
    engine.random_state = seed, num_steps
    engine.parameters.refresh()
    return saved.step, decode(loop["facts"])


def _problem(saved: SavedCheckpoint, engine: Engine, everywhere: set[str]) -> str:
    """Returns why the checkpoint isn't of this model, or not of a loop; "" where it is.

    `everywhere` are the keys of the tensors that any rank can load.
    """
    if "loop" not in saved.facts:
        return "was saved by `slipstream train`, which goes on from it with --checkpoint.resume=latest"
    if differences := saved.describe_other_model(_described(engine)):
        return f"is a checkpoint of another model: {differences}"
    names = (name for name in saved.manifest.tensors if name.startswith("model."))
    lost = [name.removeprefix("model.") for name in names if name not in everywhere]
    if lost:
        more = f" and {len(lost) - 1} more tensors" if len(lost) > 1 else ""
        return f"has {lost[0]}{more}, which this model doesn't have: make the Pipeline of the model that was saved"
    return ""


def _kept(engine: Engine) -> Iterator[ParameterShard]:
    return kept_parts(engine.parameters.shards(), _adapter(engine) is not None)


def _buffers(engine: Engine, writes: bool = False) -> list[TensorShard]:
    """Returns the model's state that isn't parameters, such as the statistics of batch norms. Collective if it is to be
    written: each by the first rank of those that have it."""
    if _adapter(engine) is not None:
        return []
    stages = engine.stages.values()
    weights = {storage_id(each) for stage in stages for _, each in stage.named_parameters()}
    own = {
        name: tensor
        for stage in stages
        for name, tensor in stage.state().items()
        if name not in engine.parameters.shares
        and not isinstance(tensor, DTensor)
        and storage_id(tensor) not in weights  # a tied weight has a second name
    }
    world = engine.ranks.world
    holders = world.gather(list(own)) if writes else []
    first = {name: rank for rank, names in reversed([*enumerate(holders)]) for name in names}
    return [
        TensorShard(
            f"model.{name}", ParameterShare.whole(tuple(tensor.shape)), tensor, writes=first.get(name) == world.rank
        )
        for name, tensor in own.items()
    ]


def _adapter(engine: Engine) -> object:
    return engine.family.adapter if isinstance(engine.family, CausalLMFamily) else None


def _described(engine: Engine) -> dict[str, Any]:
    return describe_model(engine.family.config) if isinstance(engine.family, CausalLMFamily) else {}


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
