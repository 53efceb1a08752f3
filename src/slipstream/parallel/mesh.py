"""The axes of the mesh of ranks: pipelines, replicas, ranks that share slices or layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slipstream.errors import SlipstreamError
from slipstream.parallel.gpus import TransportName, check_transport
from slipstream.parallel.launched_group import join_launched_group
from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.watched_group import watch_group, watch_store


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh.

    Ranks along an axis that `shares_weights` hold the same parameters and see other tokens, by rows or by parts of
    rows: their gradients, losses and counts are summed, and their optimizer state may be sharded. Along one that
    `shares_batch` all are given the same rows.
    """

    name: str  # name in `make_mesh` and in a DeviceMesh
    shares_weights: bool
    shares_batch: bool
    part_of: Callable[[Any, int, int], Any] | None = None
    """Where ranks that share a batch work on parts of its tokens: returns a rank's part of a split batch, from that,
    the rank's number and their number. Neither the batch's number of targets nor its seed changes."""


PIPELINE = MeshAxis("pp", shares_weights=False, shares_batch=True)  # different layers on each rank
DATA = MeshAxis("dp", shares_weights=True, shares_batch=False)
CONTEXT = MeshAxis(  # some tokens of every slice on each rank
    "cp", shares_weights=True, shares_batch=True, part_of=lambda batch, rank, size: batch.part(rank, size)
)
TENSOR = MeshAxis("tp", shares_weights=False, shares_batch=True)  # a share of every layer on each rank

# An attribute of a mesh: ep is no axis, but folded from the axes that share weights.
_EXPERTS = "_num_expert_ranks"


def num_expert_ranks(mesh: DeviceMesh) -> int:
    """Returns over how many ranks of a mesh the experts of a layer are spread."""
    return int(getattr(mesh, _EXPERTS, 1))


# By name, in the order of ranks: those along tp are neighbours. A mesh always has the first of these.
ALWAYS = (PIPELINE, DATA, TENSOR)
AXES = {axis.name: axis for axis in (PIPELINE, DATA, CONTEXT, TENSOR)}


def add_axis(axis: MeshAxis) -> None:
    """Makes an axis known to meshes, between dp and tp: it exchanges less than tp and more than dp."""
    tensor = AXES.pop(TENSOR.name)
    AXES[axis.name] = axis
    AXES[TENSOR.name] = tensor


def make_mesh(
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    device_type: str = "cpu",
    transport: TransportName = "auto",
    ep: int = 1,
    **others: int,
) -> DeviceMesh:
    """Returns the processes of the default process group as a mesh of pp x dp x cp x tp ranks; in processes that
    torchrun started it makes that group, where there is none. Collective.

    From here on these processes are watched for the death of one, for which the others would wait in new groups.

    Neighbouring ranks share layers, so that tensor parallelism, which exchanges most, stays inside a node; replicas
    come next, and the stages of a pipeline, which exchange least, may be on different nodes (Narayanan et al. 2021,
    PTD-P, takeaway 1):

        rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank

    Args:
        pp: the number of pipeline ranks.
        dp: the number of replicas of every pipeline.
        tp: the number of ranks that share every layer.
        device_type: "cpu" or "cuda"; with fewer GPUs than processes of a machine, they share them.
        transport: what connects the processes, as `Runtime(transport=...)` has it, in the group that this makes; where
            there is one it is only checked.
        ep: the number of ranks over which the experts of a layer are spread; it divides the number of ranks that hold
            the same weights, such as dp. They are neighbours among these.
        others: the sizes of further axes: `cp`, the number of ranks that share every slice, each with some of its
            tokens.

    Returns:
        The mesh, for `Pipeline(mesh=...)`.

    Raises:
        SlipstreamError: the product of the sizes isn't the number of processes, there is no process
            group, it isn't the one that `transport` asks for, or there is no such transport.
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
    if unknown := [name for name in others if name not in AXES]:
        raise TypeError(f"make_mesh() got an unexpected keyword argument {unknown[0]!r}")
    sizes = {name: given[name] for name, axis in AXES.items() if name in given and (axis in ALWAYS or given[name] != 1)}
    world = dist.get_world_size()
    if min(sizes.values()) < 1 or prod(sizes.values()) != world:
        raise SlipstreamError(
            f"the mesh {' x '.join(f'{name}={size}' for name, size in sizes.items())} has {prod(sizes.values())} "
            f"ranks, but {world} "
            f"{'processes run' if world != 1 else 'process runs'}. {_what_fits(world, sizes)}"
        )
    num_copies = prod(size for name, size in sizes.items() if AXES[name].shares_weights)
    if ep < 1 or num_copies % ep:
        raise SlipstreamError(
            f"ep={ep}: experts are spread over replicas, of which there are {num_copies}. Choose ep from "
            f"{divisors_text(num_copies)}, or dp as a multiple of it."
        )
    _watch_everyone()
    backend = RankGroup(dist.group.WORLD).gpu_backend
    check_transport(transport, torch.device(device_type), backend, option)
    if backend != "nccl":
        # On another device type torch might choose a GPU for the process, and there may not be enough of them.
        device_type = "cpu"
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    setattr(mesh, _EXPERTS, ep)
    return mesh


def _watch_everyone() -> None:
    """Watches the processes of the default group for deaths, until a Pipeline says how else. Collective."""
    everyone = RankGroup(dist.group.WORLD)
    # NCCL can't be used before the mesh has chosen this process's GPU.
    if everyone.uses_nccl:
        store = dist.distributed_c10d._get_default_store()
        watch_store(store, everyone.rank, everyone.size, limit=None, is_provisional=True)
    # Gloo itself notices processes that die meanwhile.
    else:
        watch_group(everyone, None, is_provisional=True)


def _what_fits(world: int, sizes: Mapping[str, int]) -> str:
    others = {name: size for name, size in sizes.items() if name != PIPELINE.name}
    product = prod(others.values())
    if min(others.values()) >= 1 and world % product == 0:
        given = [f"{name}={size}" for name, size in others.items()]
        together = f"{', '.join(given[:-1])} and {given[-1]}"
        return f"With {together} choose pp={world // product}, or start another number of processes."
    return f"Choose numbers whose product is {world}, or start another number of processes."


def divisors_text(number: int) -> str:
    """Returns the divisors of a number, such as "1, 2, 4"."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
