"""The requests: what to plan, for which model and hardware, within which limits, as plain data."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]

SEED = 64
_COUNTS = {"counted": 90, "joint": 20, "measured": 20, "start": 25, "ragged": 30, "rows": 15}

_LLAMA = {"model_type": "llama", "vocab_size": 32000, "num_attention_heads": 16, "num_key_value_heads": 4}
_MIXTURE = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 50000,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "intermediate_size": 2048,
}
_POSITIONS = {"max_position_embeddings": 262144}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | _POSITIONS | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8},
    "llama, wide": _LLAMA | _POSITIONS | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 12},
    "llama, tied": _LLAMA
    | _POSITIONS
    | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "tie_word_embeddings": True},
    "heavy head": _LLAMA
    | _POSITIONS
    | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 256000},
    "gpt2": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 8, "n_head": 16, "n_positions": 262144},
    "windows": _LLAMA
    | _POSITIONS
    | {
        "model_type": "gemma2",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "head_dim": 64,
        "sliding_window": 4096,
    },
    "mixture": _MIXTURE | _POSITIONS | {"hidden_size": 1024, "num_hidden_layers": 6},
}
_CLUSTERS = ("h100-dgx", "a100-dgx", "v100-p3.16xlarge", "rtx4090-pcie", "h100-pcie", "mi300x-oam")
_SEVERAL_NODES = ("h100-dgx", "a100-dgx", "v100-p3.16xlarge")
_SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "v-min")
_SMALL = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096}
PROFILES: dict[str, dict[str, Any]] = {  # the models whose times are in `profiles`
    "llama": _SMALL
    | {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "vocab_size": 4096,
    },
    "gemma": _SMALL
    | {
        "model_type": "gemma2",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "head_dim": 32,
        "vocab_size": 4096,
        "sliding_window": 512,
    },
    "qwen3_moe": _SMALL
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "vocab_size": 2048,
    },
}


def all_requests(seed: int = SEED) -> list[Request]:
    """Returns all requests; the same seed gives the same ones."""
    draw = random.Random(seed)
    makers: dict[str, Callable[[random.Random], Request]] = {
        "counted": _counted,
        "joint": _joint,
        "measured": _measured,
        "start": _start,
        "ragged": _ragged,
        "rows": _rows,
    }
    return [{"kind": kind} | makers[kind](draw) for kind, count in _COUNTS.items() for _ in range(count)]


def _counted(draw: random.Random) -> Request:
    """A model by its counted operations on a described cluster, with orders that have names."""
    model = draw.choice([*MODELS])
    num_nodes = draw.choice([1, 1, 1, 2, 4])
    cluster = draw.choice(_SEVERAL_NODES if num_nodes > 1 else _CLUSTERS)
    options: dict[str, Any] = {"num_simulated": 12, "schedule": draw.sample(_SCHEDULES, draw.choice([1, 2, 3]))}
    options |= _pinned(draw, model, 8 * num_nodes)
    if draw.random() < 0.3:
        options["memory_limit"] = draw.choice([6e9, 12e9, 30e9])
    request: Request = {"model": model, "cluster": cluster, "num_nodes": num_nodes, "options": options}
    request |= {"seq_len": 2 ** draw.randint(11, 16), "global_batch": draw.choice([1, 2, 4, 8, 16, 12])}
    if cluster == "v100-p3.16xlarge":
        request["dtype"] = "float16"
    elif draw.random() < 0.1:
        request["dtype"] = "float32"
    return request | _trained(draw)


def _joint(draw: random.Random) -> Request:
    """A model whose cut, slices and order are searched for together, with its head whole or spread."""
    request = _counted(draw)
    ranks = draw.choice([2, 4, 8])
    options: dict[str, Any] = {
        "num_simulated": 12,
        "schedule": "auto",
        "pipeline_parallel": ranks,
        "tensor_parallel": 1,
        "context_parallel": 1,
        "data_parallel": 8 // ranks,
    }
    if draw.random() < 0.5:
        options["vocabulary"] = draw.choice(["whole", "spread"])
    if draw.random() < 0.3:
        options["memory_limit"] = draw.choice([6e9, 12e9, 30e9])
    request |= {"model": draw.choice(["llama", "llama, tied", "heavy head", "gpt2", "mixture"]), "num_nodes": 1}
    request |= {"seq_len": 2 ** draw.randint(11, 14), "global_batch": 8 // ranks * draw.choice([1, 2])}
    return request | {"options": options}


def _trained(draw: random.Random) -> Request:
    chance = draw.random()
    if chance < 0.12:
        return {"freeze": ["model.layers.0.*", "model.layers.1.*", "*embed*"]}
    if chance < 0.24:
        return {"lora": {"r": 16, "target_modules": "all-linear"}}
    if chance < 0.3:
        return {"lora": {"r": 16, "target_modules": "all-linear"}, "lora_base_precision": "nf4"}
    return {"fused": True} if chance < 0.4 else {}


def _pinned(draw: random.Random, model: str, num_devices: int) -> dict[str, Any]:
    """Draws values for a few of the choices; some can't be had together, and are refused."""
    choices: dict[str, list[Any]] = {
        "tensor_parallel": [1, 2, 4],
        "context_parallel": [1, 2, 4],
        "expert_parallel": [1, 2, 4] if model == "mixture" else [1],
        "pipeline_parallel": [1, 2, num_devices // 4, num_devices],
        "data_parallel": [1, 2],
        "stages_per_rank": [1, 2],
        "num_slices": [1, 4, 8],
        "recompute": ["none", "full", "stage", "stage+full", "selective"],
        "offload": [0.0, 0.5, 1.0],
        "shard": ["none", "optimizer", "parameters"],
        "slicing": ["equal-time", "exact"],
        "context_exchange": ["heads", "keys"],
        "microbatch_size": [1, 2],
    }
    names = draw.sample([*choices], draw.choice([0, 1, 1, 2, 3]))
    if model == "mixture" and draw.random() < 0.5:
        names.append("expert_parallel")
    return {name: draw.choice(choices[name]) for name in names}


def _measured(draw: random.Random) -> Request:
    """A model by its measured times."""
    profile = draw.choice([*PROFILES])
    ranks = draw.choice([2, 2, 4])
    options: dict[str, Any] = {"num_simulated": 12}
    options["schedule"] = draw.choice(["auto", *_SCHEDULES]) if draw.random() < 0.6 else [*_SCHEDULES]
    if draw.random() < 0.5:
        options["pipeline_parallel"] = ranks
    if draw.random() < 0.4:
        options |= {"num_slices": draw.choice([1, 4, 8]), "schedule": draw.choice(["1f1b", "gpipe"])}
    if draw.random() < 0.3:
        options["memory_limit"] = draw.choice([60e6, 150e6, 400e6])
    sizes = {"seq_len": draw.choice([512, 1024, 2048]), "global_batch": draw.choice([1, 2, 4])}
    return {"profile": profile, "num_ranks": ranks, "options": options} | sizes


def _start(draw: random.Random) -> Request:
    """The plan that a run makes before its first step, from measured times."""
    profile = draw.choice([*PROFILES])
    request: Request = {"profile": profile, "num_ranks": draw.choice([2, 2, 3]), "seq_len": draw.choice([1024, 2048])}
    request |= {"num_microbatches": draw.choice([1, 1, 2, 4]), "vocabulary": draw.choice(["auto", "whole", "spread"])}
    if profile == "qwen3_moe":
        request |= {"num_ranks": 2, "vocabulary": "whole"}
    if draw.random() < 0.4:
        request["memory_limit"] = draw.choice([30e6, 60e6, 120e6, 250e6])
    if draw.random() < 0.3:
        request |= draw.choice([{"freeze": ["model.layers.0.*", "*embed*"]}, {"lora": {"r": 8}}])
        request["vocabulary"] = "whole"
    return request | {"longest": draw.choice([None, None, 2048])}


def _ragged(draw: random.Random) -> Request:
    """A step of sequences of different lengths, on stages whose times are measured."""
    placement = draw.choice([[0, 1], [0, 1], [0, 1, 0, 1], [0, 1, 1, 0]])
    request: Request = {"profile": draw.choice(["llama", "gemma"]), "placement": placement}
    lengths = [min(2048, max(8, int(draw.lognormvariate(5.5, 1.0)))) for _ in range(draw.choice([1, 2, 5, 12, 24]))]
    request |= {"lengths": lengths, "packs": draw.random() < 0.8, "split": draw.random() < 0.7}
    if draw.random() < 0.3:
        request |= {"schedule": "zb-v" if placement == [0, 1, 1, 0] else "1f1b"}
        if placement == [0, 1, 0, 1]:
            request["schedule"] = "interleaved-1f1b"
    if draw.random() < 0.3:
        request["num_microbatches"] = draw.randint(1, len(lengths))
    if draw.random() < 0.3:
        request["num_slices"] = draw.choice([1, 2, 4])
    if draw.random() < 0.3:
        request["room"] = draw.choice([1.0, 1.5, 3.0])
    if draw.random() < 0.15:
        request["frozen"] = 1
    return request


def _rows(draw: random.Random) -> Request:
    """Order and slices of rows of one length, on stages that stay where they are."""
    request: Request = {"profile": draw.choice(["llama", "gemma"]), "placement": draw.choice([[0, 1], [0, 1, 1, 0]])}
    request |= {"length": draw.choice([512, 1024, 2048]), "num_microbatches": draw.choice([1, 2, 4])}
    request |= {"slices": draw.choice([None, None, 4]), "reorders": draw.random() < 0.7, "splits": draw.random() < 0.7}
    request["schedule"] = "zb-v" if len(request["placement"]) == 4 else draw.choice(["1f1b", "gpipe"])
    if draw.random() < 0.3:
        request["room"] = draw.choice([1.0, 2.0])
    return request
