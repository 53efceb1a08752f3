"""One long sequence on a GPU: keys and values on the host and on the device, and transformers' checkpoints on the host.

    python -m benchmarks.gpu_context                      # one CUDA device; writes results/gpu_context.json
    python -m benchmarks.gpu_context --device cpu --toy   # tiny layers on a CPU: does it run?

Two layers of Llama-3-8B's shape with embedding and head, in bfloat16, take steps of one sequence of 131,072 tokens:
Slipstream in slices of 8,192 with `recompute: stage`, no graphs, its context on the host and on the device; and
transformers with gradient checkpointing, what it saves on the host by torch's save_on_cpu, and a loss in chunks of as
many tokens. The second step counts. Then Slipstream takes one step of 524,288 tokens with the context on the host.

A last step with the context on the host, of 524,288 tokens the only one, runs under the profiler, which says in how
much of the time in which copies between the GPU and the host are under way the GPU computes as well. Pinned bytes are
those of PyTorch's blocks, whose sizes are powers of two.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.contenders import shifted, tokens
from benchmarks.device_trace import communication, read_events
from benchmarks.gpu_layers import LLAMA_3_8B, TOY
from benchmarks.harness import is_trial, name_of, setting, wait_for, write
from benchmarks.peers import use_checkpoints
from slipstream import Memory, Pipeline, Runtime

NUM_LAYERS = 2
LENGTH, ALONE, SLICE = 131_072, 524_288, 8_192  # tokens
CONTENDERS = {
    "device": "Slipstream",
    "theirs": "transformers, checkpoints on the host",
    "host": "Slipstream, context on the host",
}
Step = Callable[[], Tensor]
Row = dict[str, Any]


class Case:
    """A model on a device, and its step of one sequence."""

    def __init__(self, config: LlamaConfig, device: torch.device, length: int, dtype: torch.dtype) -> None:
        self.device, self.length = device, length
        self.inputs = tokens(config, 1, length).to(device)
        torch.manual_seed(0)
        with torch.device(device):  # where random numbers are drawn in no time
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")

    def ours(self, slice_length: int, context: str) -> tuple[Step, nn.Module]:
        """Returns Slipstream's step, and what has the gradients."""
        pipe = Pipeline(
            self.model,
            "1f1b",
            slices=self.length // slice_length,
            device=self.device,
            memory=Memory(recompute="stage", check_recompute=False, context=context),
            runtime=Runtime(self_check=False),
        )
        return lambda: pipe.step(self.inputs, self.inputs), self.model

    def theirs(self, chunk: int) -> tuple[Step, nn.Module]:
        """Returns transformers' step, with a loss in chunks, and what has the gradients."""
        use_checkpoints(self.model)
        targets = shifted(self.inputs)

        def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
            logits = self.model.lm_head(hidden).float()
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

        def saving() -> AbstractContextManager[object]:
            return save_on_cpu(pin_memory=True) if self.device.type == "cuda" else nullcontext()

        def step() -> Tensor:
            with saving():
                hidden = self.model.model(input_ids=self.inputs, use_cache=False).last_hidden_state
            pieces = zip(hidden.split(chunk, 1), targets.split(chunk, 1), strict=True)
            parts = [checkpoint(loss_of, *piece, use_reentrant=False) for piece in pieces]
            loss = torch.stack(parts).sum() / (self.length - 1)
            loss.backward()
            return loss.detach()

        return step, self.model


def timed(step: Step, model: nn.Module, device: torch.device) -> Row:
    """Returns a step's seconds, loss, and most bytes on the device and pinned on the host."""
    is_gpu = device.type == "cuda"
    for parameter in model.parameters():
        parameter.grad = None
    wait_for(device)
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_peak_host_memory_stats()
    began = time.perf_counter()
    loss = float(step())
    wait_for(device)
    return {
        "seconds": round(time.perf_counter() - began, 3),
        "loss": round(loss, 4),
        "peak bytes": torch.cuda.max_memory_allocated(device) if is_gpu else None,
        "reserved bytes": torch.cuda.max_memory_reserved(device) if is_gpu else None,
        "pinned bytes": torch.cuda.host_memory_stats().get("active_bytes.peak") if is_gpu else None,
    }


def profiled(run: Callable[[], Row], device: torch.device) -> tuple[Row, float | None]:
    """Returns what a step returns, and the part of the time of its copies between a GPU and its host in which the GPU
    computes; None on a CPU."""
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as recorded:
        row = run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = read_events(path)
    return row, round(communication(events).share, 4) if is_gpu else None


def measure(name: str, step: Step, model: nn.Module, case: Case, warms_up: bool, is_profiled: bool) -> Row:
    """Returns the row of a contender: of its second step, or of its first one under the profiler."""
    row: Row = {"contender": name, "tokens": case.length}
    run = partial(timed, step, model, case.device)
    try:
        if warms_up:
            run()
            row |= run()
        if is_profiled:
            found, row["share of copies hidden"] = profiled(run, case.device)
            row = found | row
    except torch.OutOfMemoryError as error:
        row["not run"] = str(error).splitlines()[0]
    return row


def measure_all(config: LlamaConfig, device: torch.device, length: int, alone: int, slice_length: int) -> list[Row]:
    """Measures all contenders, one after the other, the longest sequence last."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    for tokens_here, place in ((length, "device"), (length, "theirs"), (length, "host"), (alone, "host")):
        case = Case(config, device, tokens_here, dtype)
        step, model = case.theirs(slice_length) if place == "theirs" else case.ours(slice_length, place)
        warms_up = tokens_here == length
        rows.append(measure(CONTENDERS[place], step, model, case, warms_up, is_profiled=place == "host"))
        print(rows[-1], flush=True)
        del case, step, model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true", help="tiny layers, no record: does it run?")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --toy shows that it runs")
    sizes, lengths = (TOY, (128, 256, 32)) if options.toy else (LLAMA_3_8B, (LENGTH, ALONE, SLICE))
    config = LlamaConfig(**sizes, num_hidden_layers=NUM_LAYERS, max_position_embeddings=max(lengths))
    rows = measure_all(config, device, *lengths)
    losses = [row["loss"] for row in rows if row["tokens"] == lengths[0] and "loss" in row]
    print({"losses of the same sequence differ by at most": max(losses, default=0.0) - min(losses, default=0.0)})
    if is_trial() or not options.toy:
        more = setting(device=name_of(device), layers=NUM_LAYERS, slice=lengths[-1])
        print(f"wrote {write('gpu_context', {'setting': more, 'rows': rows})}")


if __name__ == "__main__":
    main()
