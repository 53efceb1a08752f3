"""The mesh of ranks: pipelines, replicas, ranks that share layers, and how they find and watch each other."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import count
from math import lcm, prod
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from slipstream.errors import SlipstreamError
from slipstream.network_interfaces import interface_problems, joining_hint
from slipstream.options import Degrees
from slipstream.parallel.gpus import TransportName, check_transport, choose_backend, gpu_of, share_gpus_by_nccl
from slipstream.parallel.rank_group import RankGroup
from slipstream.schedule import Schedule
from slipstream.watchdog import WatchSettings, end_watch, is_watched, loopback_address, open_hub, start_watch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh.

    Ranks along an axis that `shares_weights` hold the same parameters and see other tokens, by rows or by parts of
    rows: their gradients, losses and counts are summed, and their optimizer state may be sharded. Along one that
    `shares_batch` all are given the same rows.
    """

    name: str  # as `make_mesh` and a DeviceMesh call it
    shares_weights: bool
    shares_batch: bool
    part_of: Callable[[Any, int, int], Any] | None = None
    """Where ranks that share a batch work on parts of its tokens: returns a rank's part of a split batch, from that,
    the rank's number and their number. Neither the batch's number of targets nor its seed changes."""


PIPELINE = MeshAxis("pp", shares_weights=False, shares_batch=True)  # each rank has other layers
DATA = MeshAxis("dp", shares_weights=True, shares_batch=False)
CONTEXT = MeshAxis(  # each rank has some tokens of every slice
    "cp", shares_weights=True, shares_batch=True, part_of=lambda batch, rank, size: batch.part(rank, size)
)
TENSOR = MeshAxis("tp", shares_weights=False, shares_batch=True)  # each rank has a share of every layer

_EXPERTS = "_num_expert_ranks"  # an attribute of a mesh: ep is no axis, but folded from those that share weights

# By name, in the order of ranks: those along tp are neighbours. A mesh always has the first of these.
_ALWAYS = (PIPELINE, DATA, TENSOR)
_axes = {axis.name: axis for axis in (PIPELINE, DATA, CONTEXT, TENSOR)}


def add_axis(axis: MeshAxis) -> None:
    """Makes an axis known to meshes, between dp and tp: it exchanges less than tp and more than dp."""
    tensor = _axes.pop(TENSOR.name)
    _axes[axis.name] = axis
    _axes[TENSOR.name] = tensor


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
    if unknown := [name for name in others if name not in _axes]:
        raise TypeError(f"make_mesh() got an unexpected keyword argument {unknown[0]!r}")
    sizes = {
        name: given[name] for name, axis in _axes.items() if name in given and (axis in _ALWAYS or given[name] != 1)
    }
    world = dist.get_world_size()
    if min(sizes.values()) < 1 or prod(sizes.values()) != world:
        raise SlipstreamError(
            f"the mesh {' x '.join(f'{name}={size}' for name, size in sizes.items())} has {prod(sizes.values())} "
            f"ranks, but {world} "
            f"{'processes run' if world != 1 else 'process runs'}. {_what_fits(world, sizes)}"
        )
    num_copies = prod(size for name, size in sizes.items() if _axes[name].shares_weights)
    if ep < 1 or num_copies % ep:
        raise SlipstreamError(
            f"ep={ep}: experts are spread over replicas, of which there are {num_copies}. Choose ep from "
            f"{divisors_text(num_copies)}, or dp as a multiple of it."
        )
    _watch_everyone()
    backend = RankGroup(dist.group.WORLD).gpu_backend
    check_transport(transport, torch.device(device_type), backend, option)
    if backend != "nccl":
        device_type = "cpu"  # else torch might choose a GPU for the process, of which there may not be enough
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    setattr(mesh, _EXPERTS, ep)
    return mesh


def _watch_everyone() -> None:
    """Watches the processes of the default group for deaths, until a Pipeline says how else. Collective."""
    everyone = RankGroup(dist.group.WORLD)
    if everyone.uses_nccl:  # which can't be used before the mesh has chosen this process's GPU
        store = dist.distributed_c10d._get_default_store()
        watch_store(store, everyone.rank, everyone.size, limit=None, is_provisional=True)
    else:  # gloo sees by itself who dies meanwhile
        watch_group(everyone, None, is_provisional=True)


def _what_fits(world: int, sizes: Mapping[str, int]) -> str:
    others = {name: size for name, size in sizes.items() if name != PIPELINE.name}
    product = prod(others.values())
    if min(others.values()) >= 1 and world % product == 0:
        given = [f"{name}={size}" for name, size in others.items()]
        together = f"{', '.join(given[:-1])} and {given[-1]}"
        return f"With {together} choose pp={world // product}, or start another number of processes."
    return f"Choose numbers whose product is {world}, or start another number of processes."


@dataclass(frozen=True)
class Ranks:
    """The groups this rank is in: one for each axis of the mesh, those of a role, and all ranks.

    Without a mesh all processes are a pipeline's, and without a process group this one is alone.
    """

    pipeline: RankGroup
    data: RankGroup
    tensor: RankGroup
    copies: RankGroup
    """The ranks that hold the same weights and see other tokens, by rows or parts of rows: over them gradients and
    losses are summed, and optimizer state is sharded."""
    experts: RankGroup
    """The ranks over which the experts of a layer are spread, a part of `copies`."""
    expert_copies: RankGroup
    """Those of `copies` that hold the same experts."""
    team: RankGroup
    """The ranks that run an action together, as they exchange something in it: those that share layers, slices or
    experts."""
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
            mine = everyone, data, groups[TENSOR], data, RankGroup(), data, groups[TENSOR]
            return cls(*mine, everyone, (tuple(everyone.global_ranks),), groups)
        names = mesh.mesh_dim_names or ()
        if "pp" not in names or set(names) - set(_axes):
            raise SlipstreamError(
                f"the mesh has the axes {list(names)}; expected 'pp', and where they are used 'dp', 'cp' "
                "and 'tp'. Make it by slipstream.make_mesh(pp=..., dp=..., cp=..., tp=...)."
            )
        groups = {
            axis: RankGroup(mesh.get_group(name)) if name in names else RankGroup()
            for name, axis in _axes.items()
            if name in names or axis in _ALWAYS
        }
        alike = [axis for axis in groups if axis.shares_weights]
        if all(groups[axis].size == 1 for axis in alike if axis is not DATA):
            copies = groups[DATA]
        else:
            copies = _joined(_lines(mesh, [axis.name for axis in alike]))
        experts, expert_copies = RankGroup(), copies
        if (size := getattr(mesh, _EXPERTS, 1)) > 1:
            every = _lines(mesh, [axis.name for axis in alike])
            experts = _joined([line[a : a + size] for line in every for a in range(0, len(line), size)])
            expert_copies = _joined([line[place::size] for line in every for place in range(size)])
        together = [group for axis, group in groups.items() if axis is TENSOR or axis.part_of is not None]
        team = max(*together, experts, key=lambda group: group.size)
        num_tokens = prod(group.size for axis, group in groups.items() if axis.part_of is not None)
        if (size := lcm(num_tokens, experts.size) * groups[TENSOR].size) > team.size:
            every = _lines(mesh, [axis.name for axis in (*alike, TENSOR)])
            team = _joined([line[a : a + size] for line in every for a in range(0, len(line), size)])
        mine = groups[PIPELINE], groups[DATA], groups[TENSOR], copies, experts, expert_copies, team
        return cls(*mine, _whole(mesh), _lines(mesh, ["pp"]), groups)

    @cached_property
    def token_axes(self) -> list[tuple[MeshAxis, RankGroup]]:
        """The axes whose ranks work on parts of the tokens of a batch that they share."""
        return [(axis, group) for axis, group in self.groups.items() if axis.part_of is not None and group.size > 1]

    @property
    def sharing(self) -> RankGroup:
        """The ranks that each have some tokens of every slice."""
        return self.groups.get(CONTEXT) or RankGroup()

    @property
    def degrees(self) -> Degrees:
        """By how many ranks a stage's work is shared."""
        return Degrees(self.tensor.size, self.sharing.size, self.experts.size)

    @property
    def replicas_act_together(self) -> bool:
        """Whether ranks that are given other rows exchange tokens within an action, and so run the same ones."""
        return self.experts.size > 1

    @property
    def by_name(self) -> dict[str, RankGroup]:
        """The groups of the axes by name, and of ep where experts are spread."""
        spread = {"ep": self.experts} if self.experts.size > 1 else {}
        return {axis.name: group for axis, group in self.groups.items()} | spread

    @property
    def device(self) -> torch.device:
        """The device these processes compute on by default: NCCL's current GPU, else the CPU."""
        return torch.device("cuda", torch.cuda.current_device()) if self.world.uses_nccl else torch.device("cpu")

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides and speaks for all."""
        return self.world.rank == 0

    @property
    def leads_replica(self) -> bool:
        """Whether this is the first of the ranks that are given the same rows."""
        return all(group.rank == 0 for axis, group in self.groups.items() if axis.shares_batch)

    @property
    def share_gradients(self) -> bool:
        """Whether gradients are summed over replicas, or over ranks that share layers."""
        return self.world.size > self.pipeline.size

    def count(self, num_ranks: int | None, schedule: str | Schedule) -> int:
        """Returns the number of the pipeline's ranks: its processes, or as many as are wanted in this one."""
        size = self.pipeline.size
        if size == 1:
            return num_ranks or (schedule.num_ranks if isinstance(schedule, Schedule) else 1)
        if num_ranks not in (None, size):
            raise SlipstreamError(f"num_ranks={num_ranks}, but {size} processes run: leave it out, each is a rank.")
        return size

    def here(self, num_ranks: int) -> list[int]:
        """Returns the pipeline's ranks that this process is: one, or all."""
        return [self.pipeline.rank] if self.pipeline.size > 1 else list(range(num_ranks))

    def connect(self, ends: Sequence[int]) -> dist.ProcessGroup | None:
        """Returns a group of these ranks of the pipeline; each other pipeline makes one too. Collective over all ranks.

        Every rank makes all of them, in one order: torch numbers groups, and ranks that made only the groups they are
        in would give one group several names. None where this rank isn't in one.
        """
        mine = None
        for pipeline in self.pipelines:
            members = [pipeline[rank] for rank in ends]
            group = dist.new_group(members, timeout=NO_LIMIT)
            if dist.get_rank() in members:
                mine = group
        return mine

    def broadcast(self, value: Any) -> Any:
        """Returns the leader's value on every rank. Collective."""
        return self.world.gather(value)[0]

    def run_on_leader(self, decide: Callable[[], Any]) -> Any:
        """Returns on every rank the result of the leader's call, as `RankGroup.run_on_leader`. Collective."""
        return self.world.run_on_leader(decide)


def _lines(mesh: DeviceMesh, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the global ranks of every group along some axes together."""
    every = mesh.mesh_dim_names or ()
    along = [every.index(name) for name in names if name in every]
    last = mesh.mesh.movedim(along, list(range(-len(along), 0)))
    return tuple(map(tuple, last.reshape(-1, prod(last.shape[-len(along) :])).tolist()))


def _joined(lines: Sequence[tuple[int, ...]]) -> RankGroup:
    """Returns this rank's group of some that have every rank once. Collective: all ranks make all, in one order."""
    made = {members: dist.new_group(list(members), timeout=NO_LIMIT) for members in lines}
    return RankGroup(next(group for members, group in made.items() if dist.get_rank() in members))


def divisors_text(number: int) -> str:
    """Returns the divisors of a number, such as "1, 2, 4"."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def _whole(mesh: DeviceMesh) -> RankGroup:
    """Returns the group of all ranks of the mesh: the default group if it has them all, as for `make_mesh`."""
    ranks = mesh.mesh.flatten().tolist()
    if ranks == list(range(dist.get_world_size())):
        return RankGroup(dist.group.WORLD)
    return RankGroup(dist.new_group(ranks, use_local_synchronization=True))


# The variables by which other launchers say how many processes they have started
_COUNTS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}
_PROCESS = {"srun": "SLURM_PROCID", "mpirun": "OMPI_COMM_WORLD_RANK"}
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_launched_group(
    device: torch.device | str | None = None,
    stall_limit: float | Literal["off"] | None = None,
    is_provisional: bool = False,
    transport: TransportName = "auto",
    option: str = "runtime.transport",
) -> None:
    """Makes the default process group of the processes that torchrun started, unless there is one: by NCCL where each
    process of this machine has a GPU of its own and neither `device` nor `transport` says otherwise, else by gloo.
    Where `device` is CUDA and there are fewer GPUs, processes share them. Nothing for a process that is alone. Its
    ranks are watched before they make it, as `watch_group` does. Collective.

    Without it, every process would train a whole copy of the model by itself. The group is destroyed when the program
    ends.

    Raises:
        SlipstreamError: if another launcher has started several processes, which only it can connect; or if
            `transport`, which was given as the `option`, can't connect these.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    environment = os.environ
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        if int(environment["WORLD_SIZE"]) > 1:
            backend = _take_gpu(environment, device, transport, option)
            _make_group(environment, backend, stall_limit, is_provisional)
        return
    for launcher, size in _COUNTS.items():
        if _PROCESS[launcher] in environment and int(environment.get(size, 1)) > 1:
            raise SlipstreamError(
                f"{launcher} started {environment[size]} processes ({size}), but they have no process group, so each "
                "would train a copy of its own. Start the program with torchrun, or call "
                "torch.distributed.init_process_group(...) before the Pipeline is made."
            )


def _take_gpu(
    environment: Mapping[str, str], device: torch.device | str | None, transport: TransportName, option: str
) -> str:
    """Makes this process's GPU, if it is to use one, the current one; returns the backend of the group."""
    num_local = int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]))
    device_type = "cuda" if device is None else torch.device(device).type
    backend = choose_backend(transport, device_type, num_local, option)
    if backend == "nccl":
        share_gpus_by_nccl(int(environment["RANK"]), num_local)
    if backend == "nccl" or (device is not None and device_type == "cuda"):
        torch.cuda.set_device(gpu_of(int(environment.get("LOCAL_RANK", environment["RANK"]))))
    return backend


def _make_group(
    environment: Mapping[str, str], backend: str, stall_limit: float | Literal["off"] | None, is_provisional: bool
) -> None:
    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise SlipstreamError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} says that several processes run, but {', '.join(missing)} is "
            "missing, so they can't be connected. Start them with torchrun, call "
            "torch.distributed.init_process_group(...) before the Pipeline is made, or, for a process by itself, "
            f"remove WORLD_SIZE{joining_hint(environment)}."
        )
    store, rank, size = _launched_store(environment)
    watch_store(store, rank, size, stall_limit, is_provisional)
    for problem in interface_problems(environment, "nccl" in backend).values():  # now the others hear of it
        raise SlipstreamError(f"rank {rank} on {socket.gethostname()}: {problem}")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=NO_LIMIT)
    end_group_at_exit()


def _launched_store(environment: Mapping[str, str]) -> tuple[Store, int, int]:
    """Returns the store at MASTER_ADDR, this rank and how many there are. Raises SlipstreamError where it can't listen
    there, or another program does."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's own, which is there before its ranks
        found: tuple[Store, int, int] = next(rendezvous("env://", timeout=NO_LIMIT))
        return found
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    address, port, seconds = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), time_limit(environment)

    def connect() -> Store:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, size, is_master=rank == 0, timeout=NO_LIMIT, wait_for_workers=False, multi_tenant=True
        )

    # As long as nobody listens there, rank 0 may still start.
    store = connected_store(connect, seconds, lambda: accepts(address, port, seconds))
    if not isinstance(store, Exception):
        return store, rank, size
    place, reason = f"MASTER_ADDR={address}, MASTER_PORT={port}", str(store).partition("\n")[0]
    raise SlipstreamError(describe_held_port(rank, place, reason) + joining_hint(environment)) from store


def describe_held_port(rank: int, place: str, reason: str) -> str:
    """Returns why a rank can't use the store at a place where somebody listens."""
    here = f"rank {rank} on {socket.gethostname()}"
    if rank == 0 and "already in use" in reason.lower():
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        return (
            f"{here} can't listen at {place} (address already in use): another program, or another run, holds that "
            f"port; choose a free port, such as MASTER_PORT={port}, and give it to all ranks (torchrun: --master-port)"
        )
    if rank == 0:
        return (
            f"{here} can't listen at {place} ({reason}); choose a free port with MASTER_PORT, and start rank 0 on the "
            "machine that MASTER_ADDR names"
        )
    return (
        f"{here} reached {place}, but what listens there doesn't answer as the store of rank 0 does ({reason}): "
        "another program holds that port on the master, or rank 0 is stopped. See rank 0's output, and choose a free "
        "port there with MASTER_PORT"
    )


RENDEZVOUS_SECONDS = "SLIPSTREAM_RENDEZVOUS_SECONDS"
"""The environment's variable with the seconds that a rank waits for the others."""
_DEFAULT_SECONDS, _CONNECT_SECONDS = 120.0, 10.0
_SECONDS_FOR_AN_ANSWER = 2.0  # after the store's own limit, which it mostly keeps


def time_limit(environment: Mapping[str, str]) -> float:
    """Returns the seconds that a rank waits for the master's answer, and for the other ranks."""
    setting = environment.get(RENDEZVOUS_SECONDS, str(_DEFAULT_SECONDS))
    try:
        seconds = float(setting)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SlipstreamError(
            f"{RENDEZVOUS_SECONDS}={setting} is not a number of seconds above 0; remove it, or set it to 300"
        )
    return seconds


def connected_store(
    connect: Callable[[], Store], seconds: float, gives_up: Callable[[], bool] = lambda: True
) -> Store | Exception:
    """Returns the store, the error of connecting to it, or a TimeoutError after some seconds, unless it `gives_up`
    later only."""
    results: list[Store | Exception] = []

    def try_to() -> None:
        try:
            results.append(connect())
        except (RuntimeError, OSError) as error:
            results.append(error)

    # In a thread, as no limit of the store holds once its connection is made: it waits for ever for the first answer.
    thread = threading.Thread(target=try_to, name="connecting to the store", daemon=True)
    thread.start()
    thread.join(seconds)
    while not results and not gives_up():
        thread.join(seconds)
    thread.join(_SECONDS_FOR_AN_ANSWER)
    return results[0] if results else TimeoutError("no answer")


def accepts(address: str, port: int, seconds: float) -> bool:
    """Returns whether somebody listens there."""
    with suppress(OSError):
        socket.create_connection((address, port), timeout=min(_CONNECT_SECONDS, seconds)).close()
        return True
    return False


def end_group_at_exit() -> None:
    """Has the default process group destroyed when the program ends; for one that another library has made."""
    atexit.unregister(_end_group)
    atexit.register(_end_group)


def _end_group() -> None:
    """Destroys the group at the end of a program that hasn't failed: else others may wait, and it would with them."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


NO_LIMIT = timedelta(days=1)
"""The limit of a process group itself: its watchers end a run far sooner, and know more."""
_VARIABLE = "SLIPSTREAM_STALL_LIMIT"
_meetings = count()  # of this program's ranks at a store, each of which needs keys of its own


def watch_group(world: RankGroup, limit: float | Literal["off"] | None, is_provisional: bool = False) -> None:
    """Starts a watcher for each rank, unless there is one, or `limit` is "off". Where it is None, the environment's
    SLIPSTREAM_STALL_LIMIT counts. A provisional one notices only deaths, until the next call. Collective over
    `world`."""
    _watch(world.gather, world.rank, world.global_ranks, limit, is_provisional)


def watch_store(
    store: Store, rank: int, size: int, limit: float | Literal["off"] | None, is_provisional: bool = False
) -> None:
    """Starts a watcher for each of `size` ranks, as `watch_group`; they meet at a store, and needn't have a group yet.
    Collective."""
    meeting = next(_meetings)

    def gather(value: Any) -> list[Any]:
        keys = [f"slipstream/watch/{meeting}/{next(rounds)}/{member}" for member in range(size)]
        store.set(keys[rank], json.dumps(value))
        return [json.loads(store.get(key)) for key in keys]

    rounds = count()
    _watch(gather, rank, range(size), limit, is_provisional)


def _watch(
    gather: Callable[[Any], list[Any]],
    rank: int,
    names: Sequence[int],
    limit: float | Literal["off"] | None,
    is_provisional: bool = False,
) -> None:
    """Starts a watcher for each rank; `names` has the numbers by which errors name them."""
    limit = limit_of_the_environment() if limit is None else limit
    if len(names) == 1 or not all(gather(not is_watched(is_provisional) and limit != "off")):
        if not is_provisional and not is_watched():
            end_watch()  # a provisional one
        return
    assert limit != "off"
    hosts = gather(socket.gethostname())
    hub, settings = None, None
    if rank == 0:
        hub, settings = open_hub(loopback_address() if len(set(hosts)) == 1 else _address_on_the_network(hosts))
    shared = gather(None if settings is None else vars(settings))[0]
    start_watch(WatchSettings(**shared), rank, len(names), limit, hub, is_provisional=is_provisional, names=names)


def limit_of_the_environment() -> float | Literal["off"] | None:
    """Returns how long a rank may wait where nobody else says so."""
    setting = os.environ.get(_VARIABLE)
    if setting is None or setting == "off":
        return setting  # type: ignore[return-value]
    try:
        return float(setting)
    except ValueError:
        raise SlipstreamError(f"{_VARIABLE}={setting} is neither a number of seconds nor off") from None


def _address_on_the_network(hosts: list[str]) -> str:
    """Returns this machine's address on the route to another one. Nothing is sent."""
    other = next(host for host in hosts if host != socket.gethostname())
    for target in (os.environ.get("MASTER_ADDR", other), other):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            break
    return address
