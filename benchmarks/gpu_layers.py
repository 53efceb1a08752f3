"""Llama-3-8B's layers on one GPU, in slices against unsliced: what slicing costs, and how near the hardware comes.

    python -m benchmarks.gpu_layers                 # one CUDA device; prints a table, writes results/gpu_layers.json
    python -m benchmarks.gpu_layers --device cpu --toy    # tiny layers on a CPU: does it run?

Some layers in bfloat16 run forward and backward over one sequence of random hidden states, as a stage of a pipeline
does: slice by slice, then backward in reverse. Embedding and head are left out, as most stages have none. Slices run by
themselves, and as CUDA graphs, one for each slice's forward and backward. Unsliced are the same layers as transformers
has them, with the faster of PyTorch's attention kernels. Operations are those of the matrix products and of attention
under its mask, three times over for forward and backward; none are counted twice that are computed twice. The peak is
that of a product of two large matrices, measured on the same device before.

The host's time is what a layer and slice take where slices are so short, 8 tokens, that the GPU has next to nothing to
do: it still reads the weights and adds to their gradients, which is counted as the host's.

Targets, of 8 slices as graphs: 0.98 of the unsliced throughput and 0.57 of the peak at 32,768 tokens, 0.90 of the
unsliced throughput at 8,192; 1.0 ms of the host for each layer and slice, and 2.5 ms without graphs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig

from benchmarks.harness import as_graphs, interleaved, is_trial, kernels_of, medians, name_of, setting, wait_for, write
from slipstream.attention import ContextStore
from slipstream.model import CausalLMStage, LayerRange, check_compiler, find_anatomy, fuse_kernels, model_for_timing
from slipstream.model.hooks import TokenSlice
from slipstream.schedule import slice_lengths
from slipstream.train.metrics.flops import measure_peak

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
SLICES = (1, 8)
COMPARED = 8  # slices
LEAST_RATIO = {8192: 0.90, 32768: 0.98}  # of sliced to unsliced throughput
LEAST_SHARE = 0.57  # of the peak, at the longest
MOST_HOST = {"graphs": 1.0, "eager": 2.5}  # milliseconds of a layer and slice


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
        return self._timed([partial(compute) for compute in self._computations(lengths)])

    def recorded(self, lengths: Sequence[int]) -> Callable[[], float]:
        """Returns the same as CUDA graphs, one for each forward and backward of a slice."""
        self.run(lengths)
        repeat = as_graphs(partial(self._computations, lengths), self.device)
        return lambda: self._timed([repeat])

    def unsliced(self, kernel: SDPBackend) -> float:
        """Returns the seconds of the layers as transformers has them."""
        self.stage.model.set_attn_implementation("sdpa")
        hidden = self.hidden.detach().requires_grad_()
        rotary = self.stage.model.get_submodule("model.rotary_emb")(hidden, self.positions)

        def compute() -> None:
            output = hidden
            for layer in self.stage.layers:
                output = layer.forward(output, position_embeddings=rotary, position_ids=self.positions)
            torch.autograd.backward(output, self.gradient)

        with sdpa_kernel(kernel), self.without_our_linear_layers():
            seconds = self._timed([compute])
        self.stage.model.set_attn_implementation("slipstream")
        return seconds

    @contextmanager
    def without_our_linear_layers(self) -> Iterator[None]:
        """Calls linear layers as they are, which leave their gradients to autograd."""
        linear = [module for module in self.stage.model.modules() if isinstance(module, nn.Linear)]
        ours = [module.__dict__.pop("forward", None) for module in linear]
        yield
        for module, forward in zip(linear, ours, strict=True):
            if forward is not None:
                module.__dict__["forward"] = forward

    def _computations(self, lengths: Sequence[int]) -> Iterator[Callable[[], None]]:
        """Yields each slice's forward, then its backward."""
        bounds = list(pairwise(accumulate(lengths, initial=0)))
        store, outputs = ContextStore(self.length), []

        def forward(begin: int, end: int) -> None:
            outputs.append(self._forward(begin, end, store))

        def backward(begin: int, end: int) -> None:
            torch.autograd.backward(outputs.pop(), self.gradient[:, begin:end])

        yield from (partial(forward, begin, end) for begin, end in bounds)
        yield from (partial(backward, begin, end) for begin, end in reversed(bounds))

    def _forward(self, begin: int, end: int, store: ContextStore) -> Tensor:
        positions = self.positions[:, begin:end]
        piece = TokenSlice(positions * 0, positions, None, begin, self.length, max_position=self.length - 1)
        output: Tensor = self.stage.compute(piece, (self.hidden[:, begin:end].detach().requires_grad_(),), store)[0]
        return output

    def _timed(self, computations: Iterable[Callable[[], None]]) -> float:
        wait_for(self.device)
        began = time.perf_counter()
        for compute in computations:
            compute()
        wait_for(self.device)
        return time.perf_counter() - began


def measure(
    layers: Layers, plain: Layers, flops: float, peak: float, slices: Sequence[int], repeats: int
) -> list[dict[str, object]]:
    """Measures each number of slices, and the `plain` layers unsliced; returns a row for each."""
    cuts = {count: slice_lengths(count, layers.length) for count in slices}
    contenders: dict[str, Callable[[], float]] = {f"{n} slices": partial(layers.run, cut) for n, cut in cuts.items()}
    kernels = kernels_of(layers.device)
    contenders |= {name: partial(plain.unsliced, kernel) for name, kernel in kernels.items()}
    contenders[f"{COMPARED} slices as graphs"] = layers.recorded(cuts[COMPARED])
    seconds = medians(interleaved(contenders, repeats, 1, steps=3))
    best = min(seconds[name] for name in kernels)
    return [
        {
            "tokens": layers.length,
            "contender": name,
            "milliseconds": round(1e3 * value, 2),
            "tokens_per_second": round(layers.length / value),
            "throughput over the best unsliced": round(best / value, 3),
            "share of the peak": round(flops / value / peak, 3),
        }
        for name, value in seconds.items()
    ]


def host_milliseconds(config: LlamaConfig, num_layers: int, device: torch.device, fused: bool) -> dict[str, float]:
    """Returns what a layer and slice cost the host, forward and backward."""
    layers = Layers(config, num_layers, 8 * COMPARED, device, torch.bfloat16, fused)
    cut = [8] * COMPARED
    contenders = {"eager": partial(layers.run, cut), "graphs": layers.recorded(cut)}
    seconds = medians(interleaved(contenders, 15))
    return {name: round(1e3 * value / num_layers / COMPARED, 3) for name, value in seconds.items()}


def verdicts(rows: Sequence[dict[str, object]], host: Mapping[str, float]) -> dict[str, bool]:
    """Returns whether the targets are reached."""
    compared = {int(str(row["tokens"])): row for row in rows if row["contender"] == f"{COMPARED} slices as graphs"}
    found = {
        f"{COMPARED} slices reach {least} of the unsliced throughput at {length} tokens": float(
            str(compared[length]["throughput over the best unsliced"])
        )
        >= least
        for length, least in LEAST_RATIO.items()
        if length in compared
    }
    if (longest := max(LEAST_RATIO)) in compared:
        reached = float(str(compared[longest]["share of the peak"])) >= LEAST_SHARE
        found[f"{COMPARED} slices reach {LEAST_SHARE} of the measured peak at {longest} tokens"] = reached
    for way, most in MOST_HOST.items():
        if way in host:
            found[f"a layer and slice cost the host at most {most} ms ({way})"] = host[way] <= most
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=2, help="32768 tokens take about 8 GB for each")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--fused", action="store_true", help="with fused norms and activations, in a file of its own")
    parser.add_argument("--toy", action="store_true", help="tiny layers, no record: does it run?")
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
        layers = plain = Layers(config, options.layers, length, device, dtype, options.fused)
        if options.fused:
            plain = Layers(config, options.layers, length, device, dtype, fused=False)
        flops = training_flops(config, options.layers, length)
        for row in measure(layers, plain, flops, peak.flops, slices, options.repeats):
            rows.append(row)
            print(row, flush=True)
        del layers, plain
    host = host_milliseconds(config, options.layers, device, options.fused)
    found = verdicts(rows, host)
    print(host, found)
    if is_trial() or not options.toy:
        more = setting(
            repeats=options.repeats,
            device=name_of(device),
            layers=options.layers,
            fused=options.fused,
            dtype=str(dtype),
            peak={"tflops": round(peak.flops / 1e12, 1), "source": peak.source},
        )
        name = "gpu_layers_fused" if options.fused else "gpu_layers"
        print(f"wrote {write(name, {'setting': more, 'targets': found, 'host milliseconds': host, 'rows': rows})}")


if __name__ == "__main__":
    main()
