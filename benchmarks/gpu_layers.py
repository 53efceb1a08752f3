"""Llama-3-8B's layers on one GPU, in slices against unsliced: what slicing costs, and how near the hardware comes.

    python -m benchmarks.gpu_layers                 # one CUDA device; prints a table, writes results/gpu_layers.json
    python -m benchmarks.gpu_layers --device cpu --toy    # tiny layers on a CPU: does it run?

Some layers in bfloat16 run forward and backward over one sequence of random hidden states, as a stage of a pipeline
does: slice by slice, then backward in reverse. Embedding and head are left out, as most stages have none. Unsliced is
one slice. Operations are those of the matrix products and of attention under its mask, three times over for forward and
backward; none are counted twice that are computed twice. The peak is that of a product of two large matrices, measured
on the same device before.

Targets: 8 slices reach 0.95 of the unsliced throughput, and half of the peak.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.harness import interleaved, medians, setting, write
from slipstream.attention import ContextStore
from slipstream.model import CausalLMStage, LayerRange, check_compiler, find_anatomy, fuse_kernels, model_for_timing
from slipstream.model.hooks import TokenSlice
from slipstream.pipeline.batch import slice_lengths
from slipstream.training.metrics.device_peak import measure_peak

LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
TOY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LENGTHS = (8192, 32768)  # tokens
SLICES = (1, 2, 4, 8, 16, 32)
COMPARED = 8  # slices
LEAST_RATIO = 0.95  # of sliced to unsliced throughput
LEAST_SHARE = 0.5  # of the peak


def training_flops(config: LlamaConfig, num_layers: int, length: int) -> float:
    """Counts forward and backward of a sequence: 6 per weight and token; in attention 12 per head dim and pair."""
    query, key = (config.head_dim * heads for heads in (config.num_attention_heads, config.num_key_value_heads))
    weights = 2 * config.hidden_size * (query + key) + 3 * config.hidden_size * config.intermediate_size
    pairs = length * (length + 1) / 2
    return num_layers * (6.0 * weights * length + 12 * query * pairs)


class Layers:
    """Layers between a first and a last one, on random hidden states of one sequence."""

    def __init__(
        self, config: LlamaConfig, num_layers: int, length: int, device: torch.device, dtype: torch.dtype, fused: bool
    ) -> None:
        owned, anatomy = LayerRange(1, 1 + num_layers), find_anatomy(config)
        model = model_for_timing(config, anatomy, owned, device, dtype)
        if fused:
            fuse_kernels(model)
        self.stage = CausalLMStage(model, anatomy, owned, device)
        self.device, self.length = device, length
        generator = torch.Generator().manual_seed(0)
        self.hidden, self.gradient = (
            torch.randn(1, length, config.hidden_size, generator=generator).to(device, dtype) for _ in range(2)
        )
        self.positions = torch.arange(length, device=device)[None]

    def run(self, lengths: Sequence[int]) -> float:
        """Returns the seconds of forward and backward in slices of these lengths; gradients of parameters add up."""
        bounds = list(pairwise(accumulate(lengths, initial=0)))
        self._wait()
        began = time.perf_counter()
        store = ContextStore(self.length)
        outputs = [self._forward(begin, end, store) for begin, end in bounds]
        while outputs:
            begin, end = bounds[len(outputs) - 1]
            torch.autograd.backward(outputs.pop(), self.gradient[:, begin:end])
        self._wait()
        return time.perf_counter() - began

    def _forward(self, begin: int, end: int, store: ContextStore) -> Tensor:
        positions = self.positions[:, begin:end]
        piece = TokenSlice(positions * 0, positions, None, begin, self.length, max_position=self.length - 1)
        return self.stage.forward(piece, self.hidden[:, begin:end].detach().requires_grad_(), store)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(layers: Layers, flops: float, peak: float, slices: Sequence[int], repeats: int) -> list[dict[str, object]]:
    """Measures each number of slices; returns a row for each."""
    cuts = {str(count): slice_lengths(count, layers.length) for count in slices}
    contenders: dict[str, Callable[[], float]] = {name: partial(layers.run, cut) for name, cut in cuts.items()}
    seconds = medians(interleaved(contenders, repeats))
    return [
        {
            "tokens": layers.length,
            "slices": len(cut),
            "slice_length": max(cut),
            "tokens_per_second": round(layers.length / seconds[name]),
            "sliced over unsliced throughput": round(seconds["1"] / seconds[name], 3),
            "share of the peak": round(flops / seconds[name] / peak, 3),
        }
        for name, cut in cuts.items()
    ]


def verdicts(rows: Sequence[dict[str, object]]) -> dict[str, bool]:
    """Returns whether the targets are reached, at every sequence length."""
    compared = [row for row in rows if row["slices"] == COMPARED]
    return {
        f"{COMPARED} slices reach {LEAST_RATIO} of the unsliced throughput": all(
            float(str(row["sliced over unsliced throughput"])) >= LEAST_RATIO for row in compared
        ),
        f"{COMPARED} slices reach {LEAST_SHARE} of the measured peak": all(
            float(str(row["share of the peak"])) >= LEAST_SHARE for row in compared
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=2, help="32768 tokens take about 8 GB for each")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--fused", action="store_true", help="with fused norms and activations, in a file of its own")
    parser.add_argument("--toy", action="store_true", help="tiny layers, nothing is written: does it run?")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --toy shows that it runs")
    if options.fused:
        check_compiler(device.type)
    sizes, lengths, slices = (TOY, (64, 96), (1, COMPARED)) if options.toy else (LLAMA_3_8B, LENGTHS, SLICES)
    dtype = torch.float32 if options.toy else torch.bfloat16
    config = LlamaConfig(**sizes, num_hidden_layers=options.layers + 2, max_position_embeddings=max(lengths))
    peak = measure_peak(device, dtype)
    rows: list[dict[str, object]] = []
    for length in lengths:
        layers = Layers(config, options.layers, length, device, dtype, options.fused)
        flops = training_flops(config, options.layers, length)
        for row in measure(layers, flops, peak.flops, slices, options.repeats):
            rows.append(row)
            print(row, flush=True)
    found = verdicts(rows)
    print(found)
    if not options.toy:
        more = setting(
            repeats=options.repeats,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            layers=options.layers,
            fused=options.fused,
            dtype=str(dtype),
            peak={"tflops": round(peak.flops / 1e12, 1), "source": peak.source},
        )
        name = "gpu_layers_fused" if options.fused else "gpu_layers"
        print(f"wrote {write(name, {'setting': more, 'targets': found, 'rows': rows})}")


if __name__ == "__main__":
    main()
