"""Trains in a plain loop around a Pipeline: torchrun --nproc-per-node=2 examples/own_loop.py"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig

import slipstream


def main(num_steps: int = 20) -> None:
    """Learns to count: every sequence continues by one from a random start."""
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
    generator = torch.Generator().manual_seed(0)  # the same on every rank: all pass the same batch
    for step in range(1, num_steps + 1):
        start = torch.randint(config.vocab_size, (4, 1), generator=generator)
        tokens = (start + torch.arange(256)) % config.vocab_size  # (batch, sequence) int64
        optimizer.zero_grad()
        loss = pipe.step(tokens, tokens)  # labels unshifted, as in transformers
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        if pipe.rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {float(loss):.3f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
