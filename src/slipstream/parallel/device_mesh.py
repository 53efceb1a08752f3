"""The mesh of ranks, and the groups that follow from the roles of its axes: pipelines (pp), their replicas (dp), the
ranks that share every layer (tp)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slipstream.errors import SlipstreamError
from slipstream.parallel.gpu_sharing import TransportName, check_transport
from slipstream.parallel.launched_group import join_launched_group
from slipstream.parallel.mesh_axis import DATA, PIPELINE, TENSOR, MeshAxis, known_axes
from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.watched_group import NO_LIMIT, watch_group, watch_store


def make_mesh(
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    device_type: str = "cpu",
    transport: TransportName = "auto",
    **others: int,
) -> DeviceMesh:
    """Returns the processes of the default process group as a mesh of pp x dp x tp ranks; in processes that torchrun
    started it makes that group, where there is none. Collective.

    From here on these processes are watched for the death of one, for which the others would wait in new groups.

    Neighbouring ranks share layers, so that tensor parallelism, which exchanges most, stays inside a node; replicas
    come next, and the stages of a pipeline, which exchange least, may be on different nodes (Narayanan et al. 2021,
    PTD-P, takeaway 1):

        rank = (pp_rank * dp + dp_rank) * tp + tp_rank

    Args:
        pp: the number of pipeline ranks.
        dp: the number of replicas of every pipeline.
        tp: the number of ranks that share every layer.
        device_type: "cpu" or "cuda"; with fewer GPUs than processes of a machine, they share them.
        transport: what connects the processes, as `Runtime(transport=...)` has it, of the group that this makes; of one
            that is there it is only checked.
        others: the sizes of further axes, by name.

    Returns:
        The mesh, for `Pipeline(mesh=...)`.

    Raises:
        SlipstreamError: the product of the sizes isn't the number of processes, there is no process group, it isn't
            what `transport` asks for, or there is no such transport.
    """
    option = "make_mesh: transport"
    if transport not in get_args(TransportName):
        raise SlipstreamError(f"{option}={transport!r}: give {', '.join(map(repr, get_args(TransportName)))}.")
    join_launched_group(device_type, is_provisional=True, transport=transport, option=option)
    if not dist.is_initialized():
        raise SlipstreamError(
            "a mesh is made of the processes of a process group: start the program with torchrun, or call "
            "torch.distributed.init_process_group first. One process alone needs no mesh."
        )
    given = {"pp": pp, "dp": dp, "tp": tp} | others
    names = [axis.name for axis in known_axes()]
    if unknown := [name for name in others if name not in names]:
        raise TypeError(f"make_mesh() got an unexpected keyword argument {unknown[0]!r}")
    sizes = {name: given[name] for name in names if name in given}
    world = dist.get_world_size()
    if min(sizes.values()) < 1 or prod(sizes.values()) != world:
        raise SlipstreamError(
            f"the mesh {' x '.join(f'{name}={size}' for name, size in sizes.items())} has {prod(sizes.values())} "
            f"ranks, but {world} "
            f"{'processes run' if world != 1 else 'process runs'}. {_what_fits(world, dp, tp)}"
        )
    _watch_everyone()
    backend = RankGroup(dist.group.WORLD).gpu_backend
    check_transport(transport, torch.device(device_type), backend, option)
    if backend != "nccl":
        device_type = "cpu"  # else torch might choose a GPU for the process, of which there may not be enough
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _watch_everyone() -> None:
    """Watches the processes of the default group for deaths, until a Pipeline says how else. Collective."""
    everyone = RankGroup(dist.group.WORLD)
    if everyone.uses_nccl:  # which can't be used before the mesh has chosen this process's GPU
        store = dist.distributed_c10d._get_default_store()
        watch_store(store, everyone.rank, everyone.size, limit=None, is_provisional=True)
    else:  # gloo sees by itself who dies meanwhile
        watch_group(everyone, None, is_provisional=True)


def _what_fits(world: int, dp: int, tp: int) -> str:
    if dp >= 1 and tp >= 1 and world % (dp * tp) == 0:
        return f"With dp={dp} and tp={tp} choose pp={world // (dp * tp)}, or start another number of processes."
    return f"Choose three numbers whose product is {world}, or start another number of processes."


@dataclass(frozen=True)
class MeshAxes:
    """The groups this rank is in: one for each axis, those of a role, and all ranks of the mesh."""

    pipeline: RankGroup
    data: RankGroup
    tensor: RankGroup
    copies: RankGroup
    """The ranks that hold the same weights and see other tokens, by rows or parts of rows: over them gradients and
    losses are summed, and optimizer state is sharded."""
    world: RankGroup
    pipelines: tuple[tuple[int, ...], ...]  # the global ranks of every pipeline of the mesh, including this one
    groups: Mapping[MeshAxis, RankGroup]  # of each axis of the mesh, in the order of ranks

    @classmethod
    def of(cls, mesh: DeviceMesh | None = None) -> Self:
        """Returns a mesh's axes; without a mesh all processes are on pp, and without a process group this one is
        alone."""
        if mesh is None:
            everyone = RankGroup(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
            data = RankGroup()
            groups = {PIPELINE: everyone, DATA: data, TENSOR: RankGroup()}
            return cls(everyone, data, groups[TENSOR], data, everyone, (tuple(everyone.global_ranks),), groups)
        names = mesh.mesh_dim_names or ()
        axes = {axis.name: axis for axis in known_axes()}
        if "pp" not in names or set(names) - set(axes):
            raise SlipstreamError(
                f"the mesh has the axes {list(names)}; expected 'pp', and where they are used 'dp' and 'tp'. "
                "Make it by slipstream.make_mesh(pp=..., dp=..., tp=...)."
            )
        groups = {
            axis: RankGroup(mesh.get_group(name)) if name in names else RankGroup()
            for name, axis in axes.items()
            if name in names or axis in (PIPELINE, DATA, TENSOR)
        }
        alike = [axis for axis in groups if axis.shares_weights]
        if all(groups[axis].size == 1 for axis in alike if axis is not DATA):
            copies = groups[DATA]
        else:
            copies = _joined(mesh, [axis.name for axis in alike])
        own = groups[PIPELINE], groups[DATA], groups[TENSOR], copies
        return cls(*own, _whole(mesh), _lines(mesh, ["pp"]), groups)

    def part_of(self, batch: Any) -> Any:
        """Returns what this rank works on of a split batch that its pipeline's ranks share."""
        for axis, group in self.groups.items():
            if axis.part_of is not None and group.size > 1:
                batch = axis.part_of(batch, group.rank, group.size)
        return batch

    @property
    def device(self) -> torch.device:
        """The device these processes compute on by default: NCCL's current GPU, else the CPU."""
        return torch.device("cuda", torch.cuda.current_device()) if self.world.uses_nccl else torch.device("cpu")


def _lines(mesh: DeviceMesh, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the global ranks of every group along some axes together."""
    every = mesh.mesh_dim_names or ()
    along = [every.index(name) for name in names]
    last = mesh.mesh.movedim(along, list(range(-len(along), 0)))
    return tuple(map(tuple, last.reshape(-1, prod(last.shape[-len(along) :])).tolist()))


def _joined(mesh: DeviceMesh, names: Sequence[str]) -> RankGroup:
    """Returns this rank's group along some axes together. Collective: all ranks make all groups, in one order."""
    here = [name for name in names if name in (mesh.mesh_dim_names or ())]
    made = {members: dist.new_group(list(members), timeout=NO_LIMIT) for members in _lines(mesh, here)}
    return RankGroup(next(group for members, group in made.items() if dist.get_rank() in members))


def _whole(mesh: DeviceMesh) -> RankGroup:
    """Returns the group of all ranks of the mesh: the default group if it has them all, as for `make_mesh`."""
    ranks = mesh.mesh.flatten().tolist()
    if ranks == list(range(dist.get_world_size())):
        return RankGroup(dist.group.WORLD)
    return RankGroup(dist.new_group(ranks, use_local_synchronization=True))
