"""A layer with fused norms and activations against the same layer without: where fusing pays.

    python -m benchmarks.fused                      # prints a table, writes results/fused_cpu.json, or fused_cuda.json

A layer's forward and backward on one slice, the first of its sequence, as a stage runs them. Both layers take
turns, so that what else the machine does meets both. What compiling takes is not in the times: it is its own column.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from benchmarks.harness import interleaved, medians, name_of, restart_in_environment, setting, write
from slipstream.model import CausalLMStage, LayerRange, check_compiler, find_anatomy, fuse_kernels, model_for_timing
from slipstream.profile.stage_bench import StageBench
from slipstream.schedule import Op

VOCABULARY = 1024  # no part of a layer


@dataclass(frozen=True)
class Case:
    """Sizes of a layer, its dtype, and the slice lengths."""

    kind: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    dtype: str
    lengths: tuple[int, ...]

    def config(self) -> PretrainedConfig:
        """Returns a model of three layers, of which the middle one is measured: it neither embeds nor has the head."""
        longest = max(self.lengths)
        if self.kind == "gpt2":
            return GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=self.hidden_size,
                n_inner=self.intermediate_size,
                n_layer=3,
                n_head=self.num_heads,
                n_positions=longest,
                bos_token_id=0,
                eos_token_id=0,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=3,
            num_attention_heads=self.num_heads,
            num_key_value_heads=max(1, self.num_heads // 4),
            max_position_embeddings=longest,
        )


CASES = {
    "cpu": [
        Case("llama", 512, 1408, 8, "float32", (64, 256, 1024)),
        Case("llama", 512, 1408, 8, "bfloat16", (64, 256, 1024)),
        Case("gpt2", 512, 2048, 8, "float32", (64, 256, 1024)),
    ],
    "cuda": [
        Case("llama", 4096, 14336, 32, "bfloat16", (512, 1024, 4096, 8192)),
        Case("gpt2", 4096, 16384, 32, "bfloat16", (512, 1024, 4096, 8192)),
    ],
}
TOY = [Case("llama", 32, 48, 4, "float32", (16, 64)), Case("gpt2", 32, 48, 4, "float32", (64,))]


def layer(case: Case, device: torch.device, fused: bool) -> StageBench:
    config, middle = case.config(), LayerRange(1, 2)
    anatomy = find_anatomy(config)
    model = model_for_timing(config, anatomy, middle, device, getattr(torch, case.dtype))
    if fused:
        fuse_kernels(model)
    stage = CausalLMStage(model, anatomy, middle, device)
    return StageBench(stage, 1, max(case.lengths))


def forward_backward(bench: StageBench, length: int) -> float:
    seconds = bench.run(length, 0)
    return seconds[Op.F] + seconds[Op.B]


def measure(case: Case, device: torch.device, repeats: int) -> list[dict[str, object]]:
    benches, first = {}, {}
    for name in ("eager", "fused"):
        began = time.perf_counter()
        benches[name] = layer(case, device, fused=name == "fused")
        forward_backward(benches[name], case.lengths[0])
        first[name] = time.perf_counter() - began
    compiling = first["fused"] - first["eager"]
    rows: list[dict[str, object]] = []
    for length in case.lengths:
        contenders: dict[str, Callable[[], float]] = {
            name: partial(forward_backward, bench, length) for name, bench in benches.items()
        }
        seconds = medians(interleaved(contenders, repeats))
        rows.append(
            {
                "layer": case.kind,
                "hidden_size": case.hidden_size,
                "dtype": case.dtype,
                "tokens": length,
                "milliseconds": {name: round(1e3 * value, 2) for name, value in seconds.items()},
                "eager over fused": round(seconds["eager"] / seconds["fused"], 3),
                "seconds of compiling": round(compiling, 1),
            }
        )
    return rows


def verdict(rows: list[dict[str, object]]) -> str:
    """Says in a sentence where fusing pays: where it saves a twentieth of the time."""
    gains = {f"{row['layer']} {row['dtype']} {row['tokens']}": float(str(row["eager over fused"])) for row in rows}
    pays = [name for name, gain in gains.items() if gain >= 1.05]
    slower = [name for name, gain in gains.items() if gain < 1]
    return f"pays with {', '.join(pays) or 'none'}; is slower with {', '.join(slower) or 'none'} (dtype, tokens)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--toy", action="store_true", help="tiny layers, nothing is written: does it run?")
    options = parser.parse_args()
    restart_in_environment()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    check_compiler(device.type)
    rows = []
    for case in TOY if options.toy else CASES[device.type]:
        for row in measure(case, device, options.repeats):
            rows.append(row)
            print(row, flush=True)
    print(verdict(rows))
    if not options.toy:
        more = setting(repeats=options.repeats, device=name_of(device))
        report = {"setting": more, "verdict": verdict(rows), "rows": rows}
        print(f"wrote {write(f'fused_{device.type}', report)}")


if __name__ == "__main__":
    main()
