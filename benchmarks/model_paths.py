"""What other paths than the context store cost: attention by a model's own code, and states that layers carry.

    python -m benchmarks.model_paths             # prints both tables, writes results/model_paths.json

The first case runs the benchmarks' Llama in one process, with the fused attention and as a model that attends by code
of its own, to keys and values that the cache returns. The second one runs a hybrid, Qwen3.5's layers of attention and
of the gated delta rule, on two processes, next to the same layers under GPipe of torch.distributed.pipelining.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from transformers import PretrainedConfig, Qwen3_5TextConfig

from benchmarks.contenders import Ours, Peer, Unsliced
from benchmarks.harness import interleaved, is_trial, medians, restart_in_environment, setting, write
from benchmarks.isolated import Contender, build_all
from benchmarks.peers import NUM_LAYERS, VOCABULARY, model_config
from slipstream.model import ModelAnatomy, find_anatomy

NAME = "model_paths"
SLICES = 8
FUSED, OWN = "context store", "the model's own attention"
GPIPE, AUTO = "torch gpipe", "slipstream, auto"


class OwnAttention(Ours):
    """A model on the path of those whose layers attend by code of their own."""

    def __init__(self, config: PretrainedConfig, batch: int, length: int, settings: Mapping[str, Any]) -> None:
        with patch("slipstream.pipeline.families.causal_lm.find_anatomy", _attending_itself):
            super().__init__(config, batch, length, settings)


def _attending_itself(config: PretrainedConfig) -> ModelAnatomy:
    return replace(find_anatomy(config), attends_itself=True)


def hybrid_config(max_length: int) -> Qwen3_5TextConfig:
    """Returns Qwen3.5's layers at the sizes of the benchmarks' Llama: three of the delta rule to one of attention."""
    return Qwen3_5TextConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
    )


def paths(length: int) -> list[Contender]:
    model, settings = (model_config(length), 1, length), {"slices": SLICES, "schedule": "gpipe"}
    return [
        Contender(FUSED, Ours, *model, settings, num_processes=1),
        Contender(OWN, OwnAttention, *model, settings, num_processes=1),
    ]


def hybrids(length: int) -> list[Contender]:
    model = hybrid_config(length), 1, length
    return [
        Contender(GPIPE, Peer, "gpipe", 1, 1, length, hybrid_config(length)),
        Contender("one process, unsliced", Unsliced, *model, num_processes=1),
        Contender("slipstream, zb-h1, 8 slices", Ours, *model, {"slices": SLICES, "schedule": "zb-h1"}),
        Contender(AUTO, Ours, *model, {"slices": "auto", "schedule": "auto"}),
    ]


def compare(contenders: Sequence[Contender], rounds: Mapping[str, int]) -> dict[str, Any]:
    """Returns the seconds of contenders that take turns."""
    build_all(contenders)
    rests = {each.name: each.rest for each in contenders}
    seconds = interleaved({each.name: each.run for each in contenders}, **rounds, rests=rests)
    losses = [loss for each in contenders for loss in each.losses]
    assert max(losses) - min(losses) < 1e-3, losses
    for contender in contenders:
        contender.close()
    return {"medians": medians(seconds), "seconds": seconds}


def show(title: str, row: Mapping[str, Any], ratio: str) -> None:
    print(f"\n{title}")
    for name, seconds in sorted(row["medians"].items(), key=lambda item: item[1]):
        print(f"  {seconds:7.3f} s  {name}")
    print(f"  {row[ratio]:7.3f}  {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=256 if is_trial() else 4096, help="tokens of the sequence")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    restart_in_environment()
    rounds = {"repeats": 1 if is_trial() else options.repeats, "warmups": 1, "steps": 2}
    path, hybrid = compare(paths(options.length), rounds), compare(hybrids(options.length), rounds)
    path["own attention over the store"] = path["medians"][OWN] / path["medians"][FUSED]
    hybrid["gpipe over auto"] = hybrid["medians"][GPIPE] / hybrid["medians"][AUTO]
    show("Llama, one process, 8 slices", path, "own attention over the store")
    show("Qwen3.5's layers, two processes", hybrid, "gpipe over auto")
    report = {"setting": setting(length=options.length, **rounds), "paths": path, "hybrid": hybrid}
    print(f"wrote {write(NAME, report)}", flush=True)


if __name__ == "__main__":
    main()
