"""The processes of a run from a pipeline's point of view: who they are, and what they exchange and agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from slipstream.errors import SlipstreamError
from slipstream.parallel.device_mesh import MeshAxes
from slipstream.parallel.watched_group import NO_LIMIT
from slipstream.schedule import Schedule


class Ranks(MeshAxes):
    """The axes of a mesh; without one all processes are a pipeline's, and without a process group this one is alone."""

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides and speaks for all."""
        return self.world.rank == 0

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

    def follow(self, value: Any) -> Any:
        """Returns the leader's value on every rank. Collective."""
        return self.world.gather(value)[0]

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Returns on every rank what the leader's call returns, as `RankGroup.decided`. Collective."""
        return self.world.decided(decide)
