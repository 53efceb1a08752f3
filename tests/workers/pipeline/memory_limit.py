"""What each process of test_memory_limit runs: a run under a limit, its tensors counted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from slipstream import Schedule
from support.architectures import VOCABULARY, llama
from support.live_memory import LiveMemory
from support.pipelines import make_pipe


class PeakMemory(LiveMemory):
    """The most bytes that were alive after any operation with a result of some size."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, torch.Tensor) and result.nbytes >= 4096:
            self.peak = max(self.peak, self.num_bytes)
        return result


def run(limit: float | None) -> tuple[float, Schedule]:
    """The most that any rank holds from the first step on, rehearsing included, and what auto settled on."""
    pipe = make_pipe(
        llama(hidden_size=64, max_position_embeddings=128),
        schedule="auto",
        slices=[30, 40, 34, 24],
        num_microbatches=4,
        memory_limit=limit,
    )
    inputs = torch.randint(0, VOCABULARY, (4, 128), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(pipe.parameters(), foreach=False)
    parameters = [*pipe.parameters()]
    with PeakMemory(besides=parameters) as memory:
        while pipe.is_tuning:
            optimizer.zero_grad()
            pipe.step(inputs, inputs)
            optimizer.step()
        for _ in range(2):
            optimizer.zero_grad()
            pipe.step(inputs, inputs)
            optimizer.step()
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, memory.peak + sum(parameter.nbytes for parameter in parameters))
    return max(peaks), pipe.layout.training


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    free, order = run(None)
    limit = 0.6 * free
    held, limited = run(limit)
    assert held < limit, f"limit {limit:.0f}, held {held:.0f}"
    assert limited.actions != order.actions
    if dist.get_rank() == 0:
        print(f"free {free:.0f}, limit {limit:.0f}, held {held:.0f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
