"""The processes of a run from a pipeline's point of view: who they are, and what they sum, gather and agree on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slipstream.errors import SlipstreamError
from slipstream.parallel import MeshAxes
from slipstream.schedule import Schedule


class Ranks:
    """The axes of a mesh; without one all processes are a pipeline's, and without a process group this one is alone.

    `size`, `rank` and `global_ranks` are those of this rank's pipeline.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        axes = MeshAxes.of(mesh)
        self.pipeline, self.data, self.tensor, self.world = axes.pipeline, axes.data, axes.tensor, axes.world
        self.device, self._pipelines = axes.device, axes.pipelines

    @property
    def size(self) -> int:
        return self.pipeline.size

    @property
    def rank(self) -> int:
        return self.pipeline.rank

    @property
    def global_ranks(self) -> list[int]:
        return self.pipeline.global_ranks

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides and speaks for all."""
        return self.world.rank == 0

    def count(self, num_ranks: int | None, schedule: str | Schedule) -> int:
        """Returns the number of the pipeline's ranks: its processes, or as many as are wanted in this one."""
        if self.size == 1:
            return num_ranks or (schedule.num_ranks if isinstance(schedule, Schedule) else 1)
        if num_ranks not in (None, self.size):
            raise SlipstreamError(
                f"num_ranks={num_ranks}, but {self.size} processes run: leave it out, each is a rank."
            )
        return self.size

    def here(self, num_ranks: int) -> list[int]:
        """The pipeline's ranks that this process is: one, or all."""
        return [self.rank] if self.size > 1 else list(range(num_ranks))

    def connect(self, ends: Sequence[int], timeout: timedelta | None = None) -> dist.ProcessGroup | None:
        """Returns a group of these ranks of the pipeline; each other pipeline makes one too. Collective over all ranks.

        Every rank makes all of them, in one order: torch numbers groups, and ranks that made only the groups they are
        in would give one group several names. None where this rank isn't in one.
        """
        mine = None
        for pipeline in self._pipelines:
            members = [pipeline[rank] for rank in ends]
            group = dist.new_group(members, timeout=timeout)
            if dist.get_rank() in members:
                mine = group
        return mine

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the pipeline's ranks and the replicas, in place; tensor-parallel ranks have it all alike."""
        return self.data.sum(self.pipeline.sum(tensor))

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank of this pipeline, on each of them, in order."""
        return self.pipeline.gather(value)

    def follow(self, value: Any) -> Any:
        """The leader's value, on every rank."""
        return self.world.gather(value)[0]

    def agree(self, error: SlipstreamError | None) -> None:
        """Raises the leader's error on every rank, so that none waits for a rank that has given up."""
        found = self.follow(None if error is None else str(error))
        if found is not None:
            raise SlipstreamError(found) from error
