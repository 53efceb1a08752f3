"""Recomputation beside transformers' gradient checkpointing on one process: bytes held, and steps in turns.

    python -m benchmarks.checkpointing                # prints a table, writes results/checkpointing.json

One sequence, and two models that differ in how many heads keys and values have. Bytes are those of tensors that a step
holds beyond the parameters, gradients included, counted as they are made and freed; of a Pipeline also what its account
says. Steps of all contenders take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.harness import few, interleaved, restart_in_environment, setting, write
from benchmarks.peers import VOCABULARY, model_config, use_checkpoints, whole_model
from slipstream import Memory, Pipeline, Runtime
from slipstream.profile import memory_meter
from slipstream.profile.stage_bench import tensors_alive
from slipstream.simulator import memory_of

KEY_HEADS = (8, 1)  # of 8 heads of queries
OURS = [("none", 1), ("full", 1), ("none", 8), ("full", 8), ("stage", 8), ("stage+full", 8)]  # recomputation, slices
Step = Callable[[], object]


def theirs(config: PretrainedConfig, ids: Tensor, checkpoints: bool) -> tuple[nn.Module, Step]:
    """Returns the model as transformers runs it, and its step."""
    model = whole_model(config).train()
    if checkpoints:
        use_checkpoints(model)
    return model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def ours(config: PretrainedConfig, ids: Tensor, recompute: str, slices: int) -> tuple[Pipeline, Step]:
    """Returns a pipeline of one rank with the same weights, and its step."""
    torch.manual_seed(0)
    memory = Memory(recompute=recompute, check_recompute=False)  # transformers compares nothing
    model = AutoModelForCausalLM.from_config(config)
    pipe = Pipeline(model, "1f1b", slices=slices, memory=memory, runtime=Runtime(self_check=False))
    return pipe, lambda: pipe.step(ids, ids)


def peak_bytes(step: Step, parameters: Iterable[nn.Parameter]) -> int:
    """Returns the most that a step holds beyond what was there before, gradients included."""
    for parameter in parameters:
        parameter.grad = None
    with memory_meter(torch.device("cpu"), tensors_alive()) as memory:
        before = memory.num_bytes
        step()
        return memory.peak - before


def counted_bytes(pipe: Pipeline, ids: Tensor) -> int:
    """Returns the same by the account of memory, made without the step."""
    table = pipe.memory_table(ids, ids)
    (rank,) = memory_of(pipe.layout.training, table)
    return round(rank.peak - sum(table.parameters.values()) - sum(table.optimizer.values()))


def measure(key_heads: int, length: int, repeats: int) -> list[dict[str, Any]]:
    """Returns a row for each contender."""
    config = model_config(length)
    config.num_key_value_heads = key_heads
    ids = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    made: dict[str, tuple[Any, Step]] = {
        "transformers": theirs(config, ids, False),
        "transformers, checkpointing": theirs(config, ids, True),
        **{f"{what}, slices: {slices}": ours(config, ids, what, slices) for what, slices in few(OURS, 2)},
    }
    rows = []
    for name, (model, step) in made.items():
        step()
        row = {
            "key_heads": key_heads,
            "tokens": length,
            "contender": name,
            "bytes": peak_bytes(step, model.parameters()),
        }
        if isinstance(model, Pipeline):
            row["counted"] = counted_bytes(model, ids)
        rows.append(row)

    def timed(model: Any, step: Step) -> float:
        for parameter in model.parameters():
            parameter.grad = None
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    runs = {name: lambda each=each: timed(*each) for name, each in made.items()}  # type: ignore[misc]
    seconds = interleaved(runs, repeats)
    for row in rows:
        row["seconds"] = round(statistics.median(seconds[row["contender"]]), 4)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    restart_in_environment()
    torch.set_num_threads(1)
    rows = [row for key_heads in few(KEY_HEADS) for row in measure(key_heads, options.length, options.repeats)]
    for row in rows:
        print(row, flush=True)
    print(f"wrote {write('checkpointing', {'setting': setting(**vars(options)), 'rows': rows})}")


if __name__ == "__main__":
    main()
