"""The groups of ranks that this rank is in: one for each axis of the mesh, and those of a role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from slipstream.errors import SlipstreamError
from slipstream.options import Degrees
from slipstream.parallel.mesh import ALWAYS, AXES, CONTEXT, DATA, PIPELINE, TENSOR, MeshAxis, num_expert_ranks
from slipstream.parallel.rank_group import NO_LIMIT, RankGroup
from slipstream.schedule import Schedule


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
    groups: Mapping[MeshAxis, RankGroup]  # axis -> its group, in the order of ranks

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
        if "pp" not in names or set(names) - set(AXES):
            raise SlipstreamError(
                f"the mesh has the axes {list(names)}; expected 'pp', and where they are used 'dp', 'cp' "
                "and 'tp'. Make it by slipstream.make_mesh(pp=..., dp=..., cp=..., tp=...)."
            )
        groups = {
            axis: RankGroup(mesh.get_group(name)) if name in names else RankGroup()
            for name, axis in AXES.items()
            if name in names or axis in ALWAYS
        }
        alike = [axis for axis in groups if axis.shares_weights]
        if all(groups[axis].size == 1 for axis in alike if axis is not DATA):
            copies = groups[DATA]
        else:
            copies = _joined(_lines(mesh, [axis.name for axis in alike]))
        experts = RankGroup()
        expert_copies = copies
        if (size := num_expert_ranks(mesh)) > 1:
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

    def count(self, num_ranks: int | None, schedule: str | Schedule | None) -> int:
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


def _whole(mesh: DeviceMesh) -> RankGroup:
    """Returns the group of all ranks of the mesh: the default group if it has them all, as for `make_mesh`."""
    ranks = mesh.mesh.flatten().tolist()
    if ranks == list(range(dist.get_world_size())):
        return RankGroup(dist.group.WORLD)
    return RankGroup(dist.new_group(ranks, use_local_synchronization=True))
