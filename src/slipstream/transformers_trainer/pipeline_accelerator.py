"""The Accelerator of a Trainer whose model is a Pipeline: data goes to replicas, of which each is several processes."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from slipstream.pipeline import Pipeline


class PipelineAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator that divides data among replicas, and leaves gradients and their norm to the Pipeline."""

    pipe: Pipeline

    @classmethod
    def take_over(cls, accelerator: Accelerator, pipe: Pipeline) -> None:
        """Makes an accelerator one of this class, so that its methods that a Trainer has kept are these too."""
        accelerator.__class__, accelerator.pipe = cls, pipe
        if accelerator.dataloader_config.dispatch_batches is None:  # else rank 0 would deal out a batch's rows
            accelerator.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        """The number of processes among which data is divided: the replicas."""
        return self.pipe.num_replicas

    @property
    def process_index(self) -> int:
        """This process's place among those that share the data: its replica."""
        return self.pipe.replica

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Returns the model as it is: DistributedDataParallel isn't put around it."""
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scales the gradients of all ranks, not of `parameters` alone; returns their norm before. Collective."""
        return self.pipe.clip_grad_norm_(max_norm)

    def gather(self, tensor: Any) -> Any:
        """Returns the tensors of all replicas, one after another along the first dimension. Collective."""
        replicas = self.pipe.axes["dp"]
        if replicas.size == 1:
            return tensor
        return recursively_apply(lambda each: replicas.all_gather(each).flatten(0, min(1, each.dim())), tensor)
