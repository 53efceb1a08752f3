"""Checks that a change of the sources leaves losses and gradients as they were, to the bit, in ten small trainings.

    python -m benchmarks.same_numbers           # compares with results/same_numbers.json; exit code 1 if any differs
    python -m benchmarks.same_numbers --record  # writes it

In float32 and with one thread a process, where another order of two additions shows. A record holds for the processor
and the versions that it names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from benchmarks.harness import RESULTS, restart_in_environment, setting, write
from slipstream import (
    CutTokens,
    Layers,
    Memory,
    Parallelism,
    Pipeline,
    Precision,
    Runtime,
    causal_attention,
    make_mesh,
)

NAME = "same_numbers"
NUM_STEPS, BATCH, LENGTH, VOCABULARY, WIDTH, CLASSES = 2, 4, 64, 61, 32, 5
NUM_PROCESSES, MESSAGE_SECONDS, MESH_SECONDS = 4, 60, 300
Numbers = dict[str, str]  # what was computed, by name: a loss as float.hex(), a gradient's sha256

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_COMMON),
    "llama, tied": LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_COMMON),
    "gpt2": GPT2Config(**_GPT2, **_NO_DROPOUT, bos_token_id=0, eos_token_id=0),  # tied, with biases
}


class Block(nn.Module):
    """A decoder's layer, of which every token sees itself and those before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.inward(self.norm(hidden)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return hidden + self.outward(causal_attention(query, key, value).transpose(1, 2).flatten(2))


def images() -> nn.Sequential:
    """A plain network of GPipe, with a batch norm: (b, 2, 8, 8) -> (b, classes)."""
    convolutions = [nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Tanh()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(8 * 36, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def decoder() -> nn.Sequential:
    """Layers whose tokens are cut: (b, T) -> (b, T, vocabulary)."""
    before = [nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*before, CutTokens(), *[Block() for _ in range(4)], nn.Linear(WIDTH, VOCABULARY))


NETWORKS = {"images": images, "decoder": decoder}


@dataclass(frozen=True)
class Case:
    """One configuration; without a mesh it is two ranks in one process."""

    name: str
    model: str  # of CONFIGS or NETWORKS
    settings: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)  # whose product is NUM_PROCESSES
    documents: bool = False
    optimizer: str = "AdamW"


CUT = {"schedule": "1f1b", "slices": [5, 30, 17, 12], "num_microbatches": 2}
CASES = [
    Case("gpipe, unequal slices", "llama", CUT | {"schedule": "gpipe"}),
    Case("1f1b, packed documents", "qwen3", {"schedule": "1f1b", "slices": 4, "num_microbatches": 4}, documents=True),
    Case("interleaved-1f1b, tied", "gpt2", CUT | {"schedule": "interleaved-1f1b", "stages_per_rank": 2}),
    Case("zb-v, split backwards, tied", "llama, tied", CUT | {"schedule": "zb-v", "stages_per_rank": 2}),
    Case("half layers, recompute", "llama", CUT | {"partition": [2.5, 1.5], "recompute": "selective"}, optimizer="SGD"),
    Case("recompute full, documents", "gpt2", CUT | {"recompute": "full"}, documents=True),
    Case("nn.Sequential", "images", {"schedule": "gpipe", "num_microbatches": 4, "partition": [4, 5]}, optimizer="SGD"),
    Case("nn.Sequential, CutTokens", "decoder", CUT | {"partition": [5, 3]}),
    Case("pp=2 x dp=2", "llama, tied", CUT | {"shard": "optimizer"}, {"pp": 2, "dp": 2}),
    Case("pp=2 x tp=2", "llama", CUT | {"schedule": "zb-h1", "sequence_parallel": True}, {"pp": 2, "tp": 2}),
]


def build(case: Case) -> Pipeline:
    """Builds a case's pipeline, in the one place that knows how."""
    options = case.settings | ({"mesh": make_mesh(**case.mesh)} if case.mesh else {"num_ranks": 2})
    records = {
        "memory": Memory(recompute=options.pop("recompute", "none")),
        "parallel": Parallelism(
            shard=options.pop("shard", "none"),
            sequence_parallel=options.pop("sequence_parallel", False),
        ),
        "runtime": Runtime(self_check=False),
    }
    if case.model in CONFIGS:
        precision = Precision(dtype=torch.float32)
        return Pipeline.from_config(CONFIGS[case.model], seed=3, precision=precision, **records, **options)
    torch.manual_seed(3)
    if case.model == "decoder":
        options |= {"loss_fn": token_loss, "layers": Layers(example=batch(case, 0)[0])}
    return Pipeline(NETWORKS[case.model](), **records, **options)


def token_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def batch(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets, of which some don't count."""
    generator = torch.Generator().manual_seed(seed)
    if case.model == "images":
        inputs = torch.randn(2 * BATCH, 2, 8, 8, generator=generator)
        return inputs, torch.randint(0, CLASSES, (2 * BATCH,), generator=generator)
    inputs = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    targets = inputs.clone()
    targets[0, :11] = targets[-1, 20::7] = -100
    return inputs, targets


def document_ids() -> Tensor:
    """Returns document ids that differ from row to row; some cuts fall inside a document, some between two."""
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    for row, starts in enumerate([(3, 17, 18, 52), (30, 41), (5, 35), ()]):
        for start in starts:
            ids[row, start:] += 1
    return ids


def train(case: Case) -> Numbers:
    """Trains; returns this process's losses and gradients, step by step."""
    pipe = build(case)
    learning_rate = {"AdamW": 1e-2, "SGD": 0.1}[case.optimizer]
    optimizer = getattr(torch.optim, case.optimizer)(pipe.parameters(), lr=learning_rate)
    numbers: Numbers = {}
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = take_step(pipe, case, step)
        numbers[f"step {step}: loss"] = float(loss).hex()
        numbers |= {f"step {step}: {name}": fingerprint(each.grad) for name, each in pipe.named_parameters()}
        optimizer.step()
    return numbers


def take_step(pipe: Pipeline, case: Case, step: int) -> Tensor:
    """Takes a step, in which each replica has different rows, and returns the loss."""
    inputs, targets = (tensor.chunk(pipe.num_replicas)[pipe.replica] for tensor in batch(case, seed=step))
    more = {"document_ids": document_ids()} if case.documents else {}
    return pipe.step(inputs, targets, **more)


def fingerprint(gradient: Tensor | None) -> str:
    if gradient is None:
        return "none"
    described = f"{gradient.dtype} {tuple(gradient.shape)}".encode()
    return hashlib.sha256(described + gradient.detach().contiguous().numpy().tobytes()).hexdigest()


def prepare() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def rank_of_meshes(rank: int, store: str) -> tuple[int, dict[str, Numbers]]:
    """Runs as one process of all meshes, one after the other; returns its rank, and what it computed."""
    prepare()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place = {"rank": rank, "world_size": NUM_PROCESSES, "init_method": f"file://{store}"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=MESSAGE_SECONDS), **place)
    found = {case.name: train(case) for case in CASES if case.mesh}
    dist.barrier()
    dist.destroy_process_group()
    return rank, found


def run_meshes() -> dict[str, Numbers]:
    """Runs all meshes; ranks connect through a file, so that no port is open. One that fails, or the time, ends all."""
    deadline = time.monotonic() + MESH_SECONDS
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        run_rank = partial(rank_of_meshes, store=str(Path(folder, "store")))
        ending = pool.imap_unordered(run_rank, range(NUM_PROCESSES))
        ranks = dict(ending.next(deadline - time.monotonic()) for _ in range(NUM_PROCESSES))
    return {
        name: {f"rank {rank}, {key}": value for rank in sorted(ranks) for key, value in ranks[rank][name].items()}
        for name in ranks[0]
    }


def run() -> dict[str, Numbers]:
    """Returns what every configuration computes, in the order of CASES."""
    prepare()
    found = {case.name: train(case) for case in CASES if not case.mesh}
    return found | run_meshes()


def difference(expected: Numbers, found: Numbers) -> str:
    """Describes how two results differ, by the first name that differs or is in one of them only."""
    differing = [name for name in expected | found if expected.get(name) != found.get(name)]
    if not differing:
        return "equal"
    return f"differs: {differing[0]} (and {len(differing) - 1} more of {len(expected | found)})"


def compare(found: dict[str, Numbers]) -> bool:
    """Prints the table; returns whether everything equals the record."""
    record = json.loads((RESULTS / f"{NAME}.json").read_text())
    now = setting()
    for key in ("cpu", "python", "torch", "transformers", "environment"):
        if record["setting"][key] != now[key]:
            print(f"recorded with another {key}: {record['setting'][key]}, now {now[key]}")
    names = list(record["numbers"] | found)
    verdicts = {name: difference(record["numbers"].get(name, {}), found.get(name, {})) for name in names}
    for name, verdict in verdicts.items():
        print(f"{name:{max(map(len, names))}} | {verdict}")
    return all(verdict == "equal" for verdict in verdicts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write what is computed now as the record")
    options = parser.parse_args()
    restart_in_environment()
    found = run()
    if options.record:
        print(write(NAME, {"setting": setting(), "numbers": found}))
    elif not compare(found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
