"""The processes of a pipeline: who they are, and what they sum and gather."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slipstream.errors import SlipstreamError


class Ranks:
    """All processes of the default group, the `pp` axis of a mesh, or this process alone."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.group: dist.ProcessGroup | None = None
        self.global_ranks = [0]
        if mesh is not None:
            self.group = _pipeline_axis(mesh)
        elif dist.is_available() and dist.is_initialized():
            self.group = dist.group.WORLD
        if self.group is not None:
            self.global_ranks = dist.get_process_group_ranks(self.group)

    @property
    def size(self) -> int:
        return len(self.global_ranks)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def device(self) -> torch.device:
        """What these processes compute on unless told otherwise: NCCL's current GPU, else the CPU."""
        if self.group is not None and dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on every rank, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, error: SlipstreamError | None) -> None:
        """Raise rank 0's finding on every rank, so that none waits for one that has given up."""
        found = self.gather(None if error is None else str(error))[0]
        if found is not None:
            raise SlipstreamError(found) from error


def _pipeline_axis(mesh: DeviceMesh) -> dist.ProcessGroup:
    names = mesh.mesh_dim_names or ()
    if "pp" not in names:
        raise SlipstreamError(
            f"the mesh has the axes {list(names)}, none of them 'pp'. "
            'Make it by init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("pp",)).'
        )
    other = {name: size for name, size in zip(names, mesh.shape, strict=True) if name != "pp" and size > 1}
    if other:
        raise SlipstreamError(
            f"the mesh has {other} beside pp; this version pipelines only. Use a mesh whose other axes have size 1."
        )
    return mesh.get_group("pp")
