"""The state of an optimizer of any class, as shards of a checkpoint that any mesh can load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.checkpoint.checkpoints import Checkpoints
from slipstream.checkpoint.manifest import Manifest, StoredTensor, TensorShard
from slipstream.checkpoint.saved_checkpoint import SavedCheckpoint
from slipstream.errors import SlipstreamError
from slipstream.parallel import ParameterShard, ParameterShare

# Numbers of Python are tensors of one element in a checkpoint, as `optimizer.step:int.lm_head.weight`.
_NUMBERS: dict[str, tuple[type[Any], torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}
# Classes, and those derived from them, whose update of a matrix depends on all of it.
_OF_WHOLE_MATRICES = {"Adafactor", "Muon"}


def training_shards(parts: Iterable[ParameterShard], optimizer: Optimizer | None) -> Iterator[TensorShard]:
    """Yields the shards `model.NAME` of this rank's parameters, and `optimizer.KIND.NAME` of its optimizer's state of
    each; without an optimizer, the parameters' alone.

    State of a parameter's shape is cut as the parameter is. State of one element belongs to all of the parameter, and
    has to be the same wherever rows of it are. State of another shape belongs to a whole parameter.

    Raises:
        SlipstreamError: for state that another mesh couldn't load, and where `describe_cut` finds a problem.
    """
    parts = list(parts)
    if optimizer is not None and (problem := describe_cut(parts, optimizer)):
        raise SlipstreamError(problem)
    for part in parts:
        yield TensorShard(f"model.{part.name}", part.share, part.parameter, part.first_row, part.leads)
        # Of a parameter without elements nothing is saved; the next step makes its state.
        if optimizer is not None and part.parameter.numel():
            for kind, value in optimizer.state.get(part.parameter, {}).items():
                yield _shard_of(part, kind, value, optimizer)


def kept_parts(parts: Iterable[ParameterShard], has_adapter: bool) -> Iterator[ParameterShard]:
    """Yields the parts that a checkpoint keeps: all, or of a model with an adapter the trained ones: its base stays."""
    return (part for part in parts if not has_adapter or part.parameter.requires_grad)


def describe_cut(parts: Iterable[ParameterShard], optimizer: Optimizer) -> str:
    """Returns which parameter is cut though the optimizer's update of a part isn't that part of its update, and the
    remedy; "" where none is."""
    names = {ancestor.__name__ for ancestor in type(optimizer).__mro__} & _OF_WHOLE_MATRICES
    cut = next((part.name for part in parts if part.parameter.requires_grad and not part.is_whole), None)
    if not names or cut is None:
        return ""
    return (
        f"{type(optimizer).__name__} updates a matrix by all of its elements, and this rank has only a part of {cut}. "
        "Split the model only by pp and dp, without tp, parallel.shard and a spread vocabulary, or "
        "use an optimizer that updates each element by itself, such as torch.optim.AdamW."
    )


def load_training(
    checkpoints: Checkpoints,
    saved: SavedCheckpoint,
    parts: Iterable[ParameterShard],
    optimizer: Optimizer | None,
    others: Sequence[TensorShard] = (),
) -> None:
    """Fills the parameters and other shards, and gives the optimizer, if any, the checkpoint's state of each parameter,
    and no other. Collective.

    Raises:
        SlipstreamError: on all ranks and before anything is changed, if the checkpoint doesn't fit.
    """
    parts = list(parts)
    targets = [] if optimizer is None else list(_targets(saved.manifest, parts, optimizer))
    cut = "" if optimizer is None else describe_cut(parts, optimizer)
    problem = next(filter(None, [cut, *(target.problem for target in targets)]), "")
    shards = [TensorShard(f"model.{part.name}", part.share, part.parameter, part.first_row) for part in parts]
    checkpoints.load(saved, [*shards, *others, *(target.shard for target in targets)], problem)
    if optimizer is not None:
        for part in parts:
            optimizer.state.pop(part.parameter, None)
        for part, kind, shard, _ in targets:
            name, _, number = kind.partition(":")
            value = _NUMBERS[number][0](shard.tensor.item()) if number in _NUMBERS else shard.tensor
            optimizer.state[part.parameter][name] = value


class _Target(NamedTuple):
    """State that is to be loaded, or the problem with it."""

    part: ParameterShard
    kind: str
    shard: TensorShard
    problem: str = ""


def _shard_of(part: ParameterShard, kind: Any, value: Any, optimizer: Optimizer) -> TensorShard:
    if type(value).__name__ in _NUMBERS:
        kind = f"{kind}:{type(value).__name__}"
        value = torch.tensor(value, dtype=_NUMBERS[type(value).__name__][1])
    what = f"{type(optimizer).__name__} keeps {kind!r} of {part.name}"
    if not isinstance(kind, str) or "." in kind or not isinstance(value, Tensor):
        raise SlipstreamError(
            f"{what}, a {type(value).__name__}, which a checkpoint can't hold: it holds tensors and numbers, under "
            "names without a dot. Keep such state in the optimizer's parameter groups or outside of it."
        )
    key = f"optimizer.{kind}.{part.name}"
    if value.shape == part.parameter.shape:
        return TensorShard(key, part.share, value, part.first_row, part.leads)
    if value.numel() != 1 and not part.is_whole:
        raise SlipstreamError(
            f"{what}, of shape {tuple(value.shape)}, and this rank has only a part of the parameter, of shape "
            f"{tuple(part.parameter.shape)}: no other mesh could load that. {_WHOLE}."
        )
    whole = ParameterShare.whole(tuple(value.shape))
    return TensorShard(key, whole, value, writes=part.leads and part.begins)


def _targets(manifest: Manifest, parts: Sequence[ParameterShard], optimizer: Optimizer) -> Iterator[_Target]:
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    states = _kept_state(manifest)
    for part in parts:
        if id(part.parameter) in groups and part.parameter.numel():
            for kind, stored in states.get(part.name, {}).items():
                yield _target(part, kind, stored, optimizer, groups[id(part.parameter)])


def _target(
    part: ParameterShard, kind: str, stored: StoredTensor, optimizer: Optimizer, group: Mapping[str, Any]
) -> _Target:
    """Returns where state is loaded to: the tensor that the optimizer has, where it fits, or a new one."""
    key = f"optimizer.{kind}.{part.name}"
    dtype = getattr(torch, stored.dtype)
    parameter = part.parameter
    is_like = stored.shape == part.share.shape
    shape = tuple(parameter.shape) if is_like else stored.shape
    tensor = optimizer.state.get(parameter, {}).get(kind)
    if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != dtype:
        # A step counter has the shape of a scalar parameter, but isn't like one.
        is_own = not is_like or kind == "step"
        tensor = _new(shape, dtype, parameter, group) if is_own else torch.empty_like(parameter, dtype=dtype)
    if is_like:
        return _Target(part, kind, TensorShard(key, part.share, tensor, part.first_row))
    shard = TensorShard(key, ParameterShare.whole(shape), tensor)
    is_loadable = prod(shape) == 1 or part.is_whole
    problem = f"{key} has shape {shape} in it, of a whole parameter, which is cut here. {_WHOLE}"
    return _Target(part, kind, shard, "" if is_loadable else problem)


def _new(shape: tuple[int, ...], dtype: torch.dtype, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Returns an empty tensor where PyTorch's optimizers have theirs: counts of steps are read on the CPU, unless all
    of the update runs on the GPU."""
    is_read = not shape and not group.get("capturable") and not group.get("fused")
    return torch.empty(shape, dtype=dtype, device="cpu" if is_read else parameter.device)


def _kept_state(manifest: Manifest) -> dict[str, dict[str, StoredTensor]]:
    """Returns the checkpoint's state of each parameter by kind."""
    states: dict[str, dict[str, StoredTensor]] = {}
    for key, stored in manifest.tensors.items():
        place, _, rest = key.partition(".")
        if place == "optimizer":
            kind, _, name = rest.partition(".")
            states.setdefault(name, {})[kind] = stored
    return states


_WHOLE = "Use only pp and dp, without tp, parallel.shard and a spread vocabulary"
