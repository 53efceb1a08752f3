"""What each process of test_processes runs under torchrun: a step, compared with the unsplit model."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    labels_of,
    tokens,
    unsplit_step,
)
from slipstream import Pipeline
from slipstream.pipeline.transport import TransportError


def exact(name: str, schedule: str) -> None:
    """Two steps of AdamW with clipping follow the unsplit model; the loss is on every rank."""
    whole = build(ARCHITECTURES[name], seed=3)
    pipe = Pipeline.from_config(
        ARCHITECTURES[name],
        seed=3,
        dtype=torch.float64,
        schedule=schedule,
        slices=[5, 30, 17, 12],
        num_microbatches=2,
    )
    optimizers = [torch.optim.AdamW(parameters, lr=1e-3) for parameters in (pipe.parameters(), whole.parameters())]
    for step in range(2):
        inputs = tokens(seed=step)
        labels = labels_of(inputs)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = pipe.step(inputs, labels)
        assert abs(loss - unsplit_step(whole, inputs, labels)) < BOUND
        found, wanted = gradients(pipe.named_parameters()), gradients(whole.named_parameters())
        assert found
        assert gradient_error({key: wanted[key] for key in found}, found) < BOUND
        norms = pipe.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        assert abs(norms[0] - norms[1]) < 1e-9
        for optimizer in optimizers:
            optimizer.step()
    evaluated = pipe.evaluate(inputs, labels)
    with torch.no_grad():
        assert evaluated < loss
    timeline = pipe.timeline
    assert {span.rank for span in timeline.spans} == set(range(dist.get_world_size()))
    assert len(timeline.messages) == 8 * (dist.get_world_size() - 1)  # the forwards of the evaluation


def mismatch() -> None:
    """Ranks that pass batches of different shapes find out, instead of training on garbage."""
    pipe = Pipeline.from_config(ARCHITECTURES["llama"], slices=4, self_check=False)
    inputs = tokens(length=32 if pipe.rank == 0 else 64)
    reason = r"1SEND_B0.3 did not arrive" if pipe.rank == 0 else r"but 0SEND_F0.0 of \(2, 8, 32\) torch.float32 came"
    with pytest.raises(TransportError, match=reason):
        pipe.step(inputs, inputs)
    print(f"rank {pipe.rank} found the mismatch", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if sys.argv[1] == "exact":
        exact(*sys.argv[2:])
        dist.barrier()
    else:
        mismatch()
    dist.destroy_process_group()
