"""The training loop of both scripts: a Pipeline over any number of processes, and what it has learned before and after.

Every rank builds the same model and passes the same batches, as slipstream.Pipeline needs it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.schedule import SCHEDULES

Batch = tuple[Tensor | tuple[Tensor, ...], Tensor]  # (inputs, targets)


def add_arguments(parser: argparse.ArgumentParser, steps: int, batch: int, lr: float) -> None:
    """Parses the options of both scripts, with the script's defaults."""
    pipeline = parser.add_argument_group("pipeline")
    pipeline.add_argument("--microbatches", type=int, default=4, metavar="M")
    pipeline.add_argument("--schedule", default="gpipe", choices=sorted(SCHEDULES))
    pipeline.add_argument("--recompute", default="none", choices=["none", "selective", "full", "stage"])
    pipeline.add_argument("--ranks", type=int, metavar="K", help="ranks in one process, without torchrun")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=steps)
    training.add_argument("--batch", type=int, default=batch)
    training.add_argument("--lr", type=float, default=lr)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--timeline", metavar="FILE", help="draw the last step, such as timeline.png")


def run(
    build: Callable[[], nn.Sequential],
    next_batch: Callable[[], Batch],
    held_out: Callable[[nn.Sequential], str],
    loss_fn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
    arguments: argparse.Namespace,
    slices: int = 1,
) -> None:
    """Trains, and prints what `held_out` says of the model before and after. `slices` cut a decoder's tokens."""
    if "RANK" in os.environ:  # under torchrun; without it this process is the whole pipeline
        dist.init_process_group("gloo")
    torch.manual_seed(arguments.seed)
    model = build()
    pipe = slipstream.Pipeline(
        model,
        schedule=arguments.schedule,
        num_microbatches=arguments.microbatches,
        slices=slices,
        stages_per_rank=2 if 2 in SCHEDULES[arguments.schedule].stages_per_rank else 1,
        memory=slipstream.Memory(recompute=arguments.recompute),
        layers=slipstream.Layers(example=next_batch()[0]),
        num_ranks=None if dist.is_initialized() else arguments.ranks,
        loss_fn=loss_fn,
    )
    _say(pipe, f"{sum(len(stage) for stage in pipe.layout.layers)} layers on {pipe.num_ranks} ranks: {pipe.balance}")
    _say(pipe, f"before: {_answer(pipe, build, held_out)}")
    _train(pipe, next_batch, arguments)
    timeline = pipe.timeline()
    _say(pipe, f"last step: {timeline.makespan * 1e3:.0f} ms, {timeline.idle_fraction:.0%} idle")
    if arguments.timeline and pipe.leads:
        slipstream.draw_timelines(arguments.timeline, timeline)
    _say(pipe, f"after: {_answer(pipe, build, held_out)}")
    if dist.is_initialized():
        dist.destroy_process_group()


def _train(pipe: slipstream.Pipeline, next_batch: Callable[[], Batch], arguments: argparse.Namespace) -> None:
    """Trains with AdamW, whose learning rate rises and then falls; prints about twenty lines."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=arguments.lr)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, total_steps=arguments.steps, pct_start=0.1)
    began, every, losses = time.perf_counter(), max(1, arguments.steps // 20), []
    for step in range(1, arguments.steps + 1):
        optimizer.zero_grad()
        losses.append(float(pipe.step(*next_batch())))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        rate.step()
        if step % every == 0:
            mean, seconds = sum(losses) / len(losses), time.perf_counter() - began
            _say(pipe, f"step {step:4d} of {arguments.steps}: loss {mean:.3f}, {seconds:.0f} s")
            losses.clear()


def _answer(pipe: slipstream.Pipeline, build: Callable[[], nn.Sequential], held_out: Callable[..., str]) -> str:
    """Evaluates the plain nn.Sequential with the pipeline's weights, on rank 0, which gets them all."""
    weights = pipe.state_dict()
    if not pipe.leads:
        return ""
    model = build()
    model.load_state_dict(weights)
    model.eval()
    with torch.no_grad():
        return held_out(model)


def _say(pipe: slipstream.Pipeline, text: str) -> None:
    if pipe.leads:
        print(text, flush=True)
