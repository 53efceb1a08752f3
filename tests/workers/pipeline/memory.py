"""What each process of test_memory runs: steps, their peaks measured and simulated."""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
import torch.distributed as dist

from slipstream import Schedule
from slipstream.profile.stage_bench import memory_meter, tensors_alive
from slipstream.simulator import MemoryKind, rank_memory
from support.architectures import VOCABULARY, llama
from support.live_memory import LiveMemory
from support.pipelines import make_pipe

Vocabulary = Literal["whole", "spread"]


def compare(
    schedule: str,
    stages_per_rank: int,
    recompute: str,
    offload: float,
    vocabulary: Vocabulary = "whole",
    tied: bool = False,
) -> None:
    """The peaks are equal but for the tokens and the like, which the model leaves out."""
    pipe = make_pipe(
        llama(hidden_size=64, max_position_embeddings=128, tie_word_embeddings=tied),
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        slices=[50, 44, 34],
        num_microbatches=2,
        recompute=recompute,
        offload=offload,
        vocabulary=vocabulary,
    )
    inputs = torch.randint(0, VOCABULARY, (2, 128), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(pipe.parameters())
    for _ in range(2):
        pipe.step(inputs, inputs)
        optimizer.step()
        optimizer.zero_grad()
    found = rank_memory(pipe.layout.training, pipe.rank, pipe.memory_table(inputs, inputs))
    static = sum(
        found.moments[0].during[kind] for kind in (MemoryKind.PARAMETERS, MemoryKind.OPTIMIZER, MemoryKind.MESSAGES)
    )
    with memory_meter(pipe.device, tensors_alive()) as memory:
        others = memory.num_bytes - static
        pipe.step(inputs, inputs)
        measured = memory.peak - others
    case = f"{schedule} {recompute} {offload} {vocabulary}{', tied' * tied}, rank {pipe.rank}"
    assert abs(found.peak - measured) < 1024, f"{case}: simulated {found.peak:.0f}, measured {measured:.0f}"
    assert 0 <= others < 0.01 * measured, f"{case}: {others} bytes that the model leaves out"


class PeakMemory(LiveMemory):
    """The most bytes that were alive after an operation: another meter than the one that rehearses."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, torch.Tensor) and result.nbytes >= 4096:
            self.peak = max(self.peak, self.num_bytes)
        return result


def held(limit: float | None) -> tuple[float, Schedule]:
    """The most that any rank holds from the first step on, rehearsing included, and the order that auto settles on."""
    pipe = make_pipe(
        llama(hidden_size=64, max_position_embeddings=128),
        schedule="auto",
        slices=[30, 40, 34, 24],
        num_microbatches=4,
        memory_limit=limit,
    )
    inputs = torch.randint(0, VOCABULARY, (4, 128), generator=torch.Generator().manual_seed(0))
    optimizer, steps_left = torch.optim.AdamW(pipe.parameters(), foreach=False), 2
    with PeakMemory(besides=pipe.parameters()) as memory:
        while steps_left > 0:
            steps_left -= not pipe.is_tuning
            optimizer.zero_grad()
            pipe.step(inputs, inputs)
            optimizer.step()
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, memory.peak + sum(parameter.nbytes for parameter in pipe.parameters()))
    return max(peaks), pipe.layout.training


def keep_to_a_limit() -> None:
    free, order = held(None)
    limited, other = held(0.6 * free)
    assert limited < 0.6 * free, f"of {free:.0f} bytes, {limited:.0f} with a limit of 0.6 of them"
    assert other.actions != order.actions


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if sys.argv[1:] == ["limit"]:
        keep_to_a_limit()
        sys.exit()
    compare("1f1b", 1, "none", 0.0)
    compare("zb-v", 2, "full", 0.0)
    compare("interleaved-1f1b", 2, "full", 0.0, "spread", tied=True)
    compare("gpipe", 1, "selective", 0.7, "spread")
    dist.destroy_process_group()
