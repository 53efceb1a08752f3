"""The mesh of ranks: pipelines (pp), their replicas (dp), and the ranks that share every layer (tp)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Self, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slipstream.errors import SlipstreamError
from slipstream.parallel.gpu_sharing import TransportName, check_transport
from slipstream.parallel.launched_group import join_launched_group
from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.watched_group import watch_group, watch_store

AXES = ("pp", "dp", "tp")


def make_mesh(
    pp: int = 1, dp: int = 1, tp: int = 1, device_type: str = "cpu", transport: TransportName = "auto"
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
    sizes = dict(zip(AXES, (pp, dp, tp), strict=True))
    world = dist.get_world_size()
    if min(sizes.values()) < 1 or prod(sizes.values()) != world:
        raise SlipstreamError(
            f"the mesh pp={pp} x dp={dp} x tp={tp} has {prod(sizes.values())} ranks, but {world} "
            f"{'processes run' if world != 1 else 'process runs'}. {_what_fits(world, dp, tp)}"
        )
    _watch_everyone()
    backend = RankGroup(dist.group.WORLD).gpu_backend
    check_transport(transport, torch.device(device_type), backend, option)
    if backend != "nccl":
        device_type = "cpu"  # else torch might choose a GPU for the process, of which there may not be enough
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES)


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
    """The groups this rank is in, one for each axis, and the group of all ranks of the mesh."""

    pipeline: RankGroup
    data: RankGroup
    tensor: RankGroup
    world: RankGroup
    pipelines: tuple[tuple[int, ...], ...]  # the global ranks of every pipeline of the mesh, including this one

    @classmethod
    def of(cls, mesh: DeviceMesh | None = None) -> Self:
        """Returns a mesh's axes; without a mesh all processes are on pp, and without a process group this one is
        alone."""
        if mesh is None:
            everyone = RankGroup(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
            return cls(everyone, RankGroup(), RankGroup(), everyone, (tuple(everyone.global_ranks),))
        names = mesh.mesh_dim_names or ()
        if "pp" not in names or set(names) - set(AXES):
            raise SlipstreamError(
                f"the mesh has the axes {list(names)}; expected 'pp', and where they are used 'dp' and 'tp'. "
                "Make it by slipstream.make_mesh(pp=..., dp=..., tp=...)."
            )
        pipeline, data, tensor = (RankGroup(mesh.get_group(name)) if name in names else RankGroup() for name in AXES)
        return cls(pipeline, data, tensor, _whole(mesh), _pipelines(mesh, names))

    @property
    def device(self) -> torch.device:
        """The device these processes compute on by default: NCCL's current GPU, else the CPU."""
        return torch.device("cuda", torch.cuda.current_device()) if self.world.uses_nccl else torch.device("cpu")


def _pipelines(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    stages_last = mesh.mesh.movedim(names.index("pp"), -1)
    return tuple(map(tuple, stages_last.reshape(-1, stages_last.shape[-1]).tolist()))


def _whole(mesh: DeviceMesh) -> RankGroup:
    """Returns the group of all ranks of the mesh: the default group if it has them all, as for `make_mesh`."""
    ranks = mesh.mesh.flatten().tolist()
    if ranks == list(range(dist.get_world_size())):
        return RankGroup(dist.group.WORLD)
    return RankGroup(dist.new_group(ranks, use_local_synchronization=True))
