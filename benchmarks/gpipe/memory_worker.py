"""One process of the memory benchmarks: bytes that a pipeline's step holds on this rank, counted."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.gpipe.layer_times import trace_of
from benchmarks.gpipe.models import Case
from slipstream import Memory, Pipeline, partition_layers
from slipstream.profile.stage_bench import memory_meter, tensors_alive

BYTES_PER_PARAMETER = 12  # a weight, its gradient, and RMSProp's mean square, in float32


@dataclass(frozen=True)
class Held:
    """Bytes on the ranks of a pipeline."""

    lasting: list[int]  # before a step: parameters, buffers, optimizer state, the batch
    peak: list[int]  # at most during the step and the optimizer's
    gradients: list[int]
    parameters: list[int]  # numbers of them

    @property
    def activations(self) -> list[int]:
        """The bytes that are neither lasting nor gradients."""
        return [p - b - g for p, b, g in zip(self.peak, self.lasting, self.gradients, strict=True)]


def held(case: Case, rows: int, num_microbatches: int, recompute: str) -> Held:
    """Counts one step with RMSProp, whose state already exists. Collective; every rank gets the same."""
    model, (inputs, targets) = case.model(), case.batch(rows)
    counts = partition_layers(memory_costs(case, rows, num_microbatches), dist.get_world_size())
    pipe = Pipeline(
        model, "gpipe", num_microbatches, partition=counts, memory=Memory(recompute=recompute), loss_fn=case.loss
    )
    del model
    parameters = list(pipe.parameters())
    optimizer = torch.optim.RMSprop(parameters, lr=1e-4, foreach=False)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with memory_meter(pipe.device, tensors_alive()) as memory:
        lasting = memory.num_bytes
        pipe.step(inputs, targets)
        gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        optimizer.step()
        peak = memory.peak
    mine = lasting, peak, gradients, sum(parameter.numel() for parameter in parameters)
    del pipe, optimizer, parameters
    gc.collect()
    ranks: list[tuple[int, int, int, int]] = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return Held(*map(list, zip(*ranks, strict=True)))


def memory_costs(case: Case, rows: int, num_microbatches: int) -> list[float]:
    """Returns what each layer holds during a backward, so that ranks are balanced by memory, not by time."""
    with torch.device("meta"):
        model = case.model()
    layers, trace, _ = trace_of(model, case.batch(-(-rows // num_microbatches))[0])
    return [
        1.0 + work.saved_bytes + BYTES_PER_PARAMETER * sum(p.numel() for p in layer.module.parameters())
        for layer, work in zip(layers, trace.work, strict=True)
    ]
