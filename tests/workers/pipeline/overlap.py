"""What each process of test_overlap runs: a step of two ranks in a profile, in which nothing waits for a GPU.

overlap.py cuda|cpu nccl|gloo FOLDER   # writes FOLDER/rank-0.json and FOLDER/rank-1.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig

from slipstream import Pipeline, Precision, Runtime
from slipstream.comm import StagedTransport
from slipstream.parallel import rank_group
from slipstream.pipeline import runtime as pipeline_runtime

DEVICE, TRANSPORT, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
ON_GPU = DEVICE == "cuda"
LENGTH, HIDDEN = (16_384, 2048) if ON_GPU else (64, 32)
WARM_UP = 3  # steps: kernels are chosen, buffers pinned, and NCCL has connected the ranks

Run = Callable[..., None]
num_guarded = 0


def guarded(run: Run) -> Run:
    """Makes every call that waits for the GPU an error while the ranks' actions are posted. After them a step does
    wait, for its loss and to check what it received."""

    def run_guarded(*args: Any) -> None:
        global num_guarded
        num_guarded += 1
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("error")
        try:
            run(*args)
        finally:
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("default")

    return run_guarded


def main() -> None:
    torch.set_num_threads(1)
    if not ON_GPU:
        pipeline_runtime.connect_transport = StagedTransport
        rank_group._is_staged = lambda *_: True
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=512,
        max_position_embeddings=LENGTH,
    )
    precision = Precision(dtype=torch.bfloat16 if ON_GPU else torch.float32)
    runtime = Runtime(self_check=False, transport=TRANSPORT)  # type: ignore[arg-type]
    pipe = Pipeline.from_config(config, schedule="1f1b", slices=8, precision=precision, runtime=runtime, device=DEVICE)
    assert isinstance(pipe._runtime.transport, StagedTransport) == (TRANSPORT == "gloo")
    inputs = torch.randint(0, 512, (1, LENGTH), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        pipe.step(inputs, inputs)
        for parameter in pipe.parameters():
            parameter.grad = None

    for _ in range(WARM_UP):
        step()
    pipeline_runtime.run_together = guarded(pipeline_runtime.run_together)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with profile(activities=activities) as recorded:
        step()
    assert num_guarded == 1
    recorded.export_chrome_trace(str(FOLDER / f"rank-{pipe.rank}.json"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
