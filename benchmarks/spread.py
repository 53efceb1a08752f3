"""Slices and experts spread over two processes, beside the plain way to do so: seconds, tokens per second, memory.

    python -m benchmarks.spread              # prints tables, writes results/spread.json; --case adds one to it

One sequence of the benchmarks' Llama runs on ranks that share it (cp=2), on a peer that does the same by torch alone,
and on the pipeline that plans itself. A mixture of 8 experts runs with its experts spread (ep=2) and as two replicas.
"""

from __future__ import annotations

import argparse

from transformers import PretrainedConfig, Qwen3MoeConfig

from benchmarks.all_peers import compare, long_contenders, table
from benchmarks.contenders import Ours
from benchmarks.harness import costs_kept_in, is_trial, record, restart_in_environment, setting, write
from benchmarks.isolated import Contender
from benchmarks.peers import model_config

NAME = "spread"
CASES = {"2048": (1, 2048), "4096": (1, 4096), "experts": (2, 1024)}  # sequences, tokens of each


def mixture(length: int) -> PretrainedConfig:
    """Returns the benchmarks' Llama with 8 experts of half its width in each layer, of which a token uses two."""
    llama = model_config(length)
    shared = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return Qwen3MoeConfig(
        **{name: getattr(llama, name) for name in shared},
        head_dim=llama.hidden_size // llama.num_attention_heads,
        intermediate_size=llama.intermediate_size,
        moe_intermediate_size=llama.intermediate_size // 2,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=length,
    )


def contenders_of(name: str, sequences: int, length: int) -> list[Contender]:
    if name != "experts":
        return long_contenders(sequences, length)
    case = mixture(length), sequences, length
    return [
        Contender(f"Slipstream, {label}", Ours, *case, {"mesh": axes, "slices": 1, "num_microbatches": 1})
        for label, axes in {"ep=2": {"dp": 2, "ep": 2}, "dp=2": {"dp": 2}}.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", nargs="*", default=[*CASES], choices=CASES)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    restart_in_environment()
    rounds = {"repeats": options.repeats, "warmups": 1, "steps": 2}
    found = (record(NAME) or {}).get("cases", {})
    with costs_kept_in(None):
        for name in options.case:
            sequences, length = CASES[name] if not is_trial() else (2, 64)
            row = compare(contenders_of(name, sequences, length), sequences, length, rounds)
            row["tokens per second"] = {each: sequences * length / took for each, took in row["medians"].items()}
            found[name] = {"setting": setting(**rounds), **row}
            print(table([row]), flush=True)
            print(f"wrote {write(NAME, {'setting': found[name]['setting'], 'cases': found})}", flush=True)


if __name__ == "__main__":
    main()
