"""Trains in a plain loop around a Pipeline, and goes on after an interruption:

torchrun --nproc-per-node=2 examples/own_loop.py checkpoints
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig

import slipstream
from slipstream.checkpoint import CheckpointFolder


def main(folder: Path | None = None, num_steps: int = 20) -> None:
    """Learns to count: every sequence continues by one from a random start. With a folder, saves there every five
    steps, and goes on from the newest checkpoint."""
    if "RANK" in os.environ:  # under torchrun; without it this process is a pipeline of one rank
        dist.init_process_group("gloo")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=128,
        max_position_embeddings=256,
    )
    pipe = slipstream.Pipeline.from_config(config, seed=0, schedule="1f1b", num_microbatches=2, slices=4)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    last = 0
    if folder is not None and CheckpointFolder(folder).steps():
        last, _ = pipe.load(folder, optimizer=optimizer, scheduler=scheduler)
    for step in range(last + 1, num_steps + 1):
        generator = torch.Generator().manual_seed(step)  # the same on every rank: all pass the same batch
        start = torch.randint(config.vocab_size, (4, 1), generator=generator)
        tokens = (start + torch.arange(256)) % config.vocab_size  # (batch, sequence) int64
        optimizer.zero_grad()
        loss = pipe.step(tokens, tokens)  # labels unshifted, as in transformers
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        if step % 5 == 0:
            if folder is not None:
                pipe.save(folder, step, optimizer=optimizer, scheduler=scheduler)
            if pipe.rank == 0:
                print(f"step {step}: loss {float(loss):.3f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
