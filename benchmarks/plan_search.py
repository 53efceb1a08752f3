"""How fast whole plans are found: configurations whose bounds are computed in a second, and the whole search.

    python -m benchmarks.plan_search                  # prints a table, writes results/plan_search.json
    python -m benchmarks.plan_search --joint          # the joint search alone: results/joint_search.json
    python -m benchmarks.plan_search --steps          # a step's plan, with memory limits: results/step_search.json
    python -m benchmarks.plan_search --lengths        # large models, long sequences: results/plan_lengths.json
    python -m benchmarks.plan_search --lengths "Qwen3-30B-A3B 131072 8"   # some cases; a later run does the rest

On one core; all but whole plans by their process's time, which other programs lengthen little.
Calculon (Isaev et al., SC 2023) reports 148 configurations a second, each computed in closed form.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from typing import Any

import numpy as np
from transformers import AutoConfig, LlamaConfig

from benchmarks.harness import few, is_trial, record, restart_in_environment, setting, write
from benchmarks.joint_problems import RandomCosts, joint_problems
from slipstream import Memory, Pipeline, Runtime
from slipstream.cost import CountedSource, load_cluster
from slipstream.errors import SlipstreamError
from slipstream.pipeline.runtime import PipelineRuntime
from slipstream.planner.find_plan import find_plan
from slipstream.planner.joint import JointProblem
from slipstream.planner.search import ClusterProblem, PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.slicing.equal_stage_slicing import search_compiled
from slipstream.profile import count_model

REPEATS = 3  # of computing all bounds
_LONGEST = 8192  # tokens of a sequence in a step
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
_COMMON = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SHAPES = {
    "Llama-3-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Llama-3-70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
_QWEN3 = {"head_dim": 128, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
LONG: dict[str, tuple[str, dict[str, int]]] = {  # a model's type, and its sizes where they aren't the type's own
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        _QWEN3
        | {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "moe_intermediate_size": 768},
    ),
    "Qwen3-235B-A22B": (
        "qwen3_moe",
        _QWEN3
        | {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536},
    ),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "gpt-oss-120b": ("gpt_oss", {}),
    "Llama-3-405B": ("llama", _405B | _COMMON),
}
LENGTHS, DEVICES = (8192, 131072, 1048576), (8, 64, 512, 4096, 16384)
_TOKENS = {16384: 2**24}  # of a step on so many devices; on fewer, 4 million
CASES = [  # model, cluster, nodes, tokens, sequences
    ("Llama-3-8B", "h100-dgx", 2, 65536, 8),
    ("Llama-3-8B", "h200-hgx", 8, 131072, 32),
    ("Llama-3-70B", "a100-selene", 16, 8192, 256),
    ("Llama-3-70B", "h100-dgx", 64, 131072, 64),
]


def measure(name: str, cluster: str, num_nodes: int, seq_len: int, global_batch: int) -> dict[str, Any]:
    began = time.perf_counter()
    model = count_model(LlamaConfig(**SHAPES[name], **_COMMON), seq_len)
    counted = time.perf_counter() - began
    source = CountedSource(model, load_cluster(cluster).with_nodes(num_nodes), name)
    bounding = []
    for _ in range(REPEATS):
        space = PlanSpace(source, seq_len, global_batch, PlanOptions())
        began = time.perf_counter()
        num_bounded = sum(1 for _ in space.bounded())
        bounding.append(time.perf_counter() - began)
    plan = find_plan(ClusterProblem(source, seq_len, global_batch))
    best = plan.best
    return {
        "model": name,
        "cluster": cluster,
        "devices": plan.num_devices,
        "tokens": seq_len,
        "sequences": global_batch,
        "configurations": num_bounded,
        "configurations per second": num_bounded / statistics.median(bounding),
        "seconds to count the model": counted,
        "seconds of the search": plan.seconds,
        "too large": plan.num_too_large,
        "simulated": plan.num_simulated,
        "gap": plan.gap,
        "step seconds": best.step_seconds,
        "mfu": best.mfu,
        "peak memory": best.peak_memory,
        "best": best.plan.describe(),
    }


def measure_joint(name: str, problem: JointProblem) -> dict[str, Any]:
    """Returns the seconds of one joint search, and how far what it finds is from what can't be beaten."""
    began = time.process_time()
    plan = find_plan(problem)
    row: dict[str, Any] = {"problem": name, "seconds of the search": time.process_time() - began}
    row |= {"step seconds": plan.seconds, "over the bound": plan.seconds / plan.bound - 1}
    return row | {"over the ideal": plan.seconds / plan.ideal - 1, "table": plan.table().splitlines()}


def joint() -> None:
    find_plan(JointProblem(RandomCosts.of(0), 256, num_ranks=2, effort=1e5))  # loads what is compiled
    rows = []
    for name, problem in few([*joint_problems()]):
        rows.append(measure_joint(name, problem))
        row = rows[-1]
        print(
            f"{name}: {row['seconds of the search']:.1f} s; a step of {row['step seconds']:.4g} s, "
            f"{row['over the bound']:.2%} over its bound, {row['over the ideal']:.1%} over the ideal",
            flush=True,
        )
    print(f"wrote {write('joint_search', {'setting': setting(), 'rows': rows})}")


def lengths_of_a_step(seed: int) -> list[int]:
    """Returns 64 lengths, most of them short."""
    drawn = np.random.default_rng(seed).lognormal(6.2, 1.1, 64)
    return [int(length) for length in np.clip(drawn, 16, _LONGEST)]


def measure_step(runtime: PipelineRuntime, share: float | None, seed: int, limit: float | None) -> dict[str, Any]:
    """Returns the seconds of a step's plan, and of its schedule's lowering, which ends in the thread that plans."""
    runtime.memory_limit.limit = limit
    began = time.process_time()
    plan = runtime.plans.find(lengths_of_a_step(seed))
    planned = time.process_time()
    runtime.plans.check_and_lay_out(plan.schedule)
    row = {"limit over what is held without": share, "batch": seed, "actions": sum(map(len, plan.schedule.actions))}
    seconds = {"seconds of the plan": planned - began, "seconds of lowering": time.process_time() - planned}
    return row | seconds | {"step seconds": plan.seconds}


def steps() -> None:
    """Of 64 sequences on 8 ranks: without a limit, and with limits that are less and less than what is held then."""
    config = LlamaConfig(**_SMALL, max_position_embeddings=_LONGEST)
    options: dict[str, Any] = {"schedule": "auto", "slices": "auto", "num_ranks": 8, "memory": Memory(limit=1e15)}
    pipe = Pipeline.from_config(config, runtime=Runtime(self_check=False), **options)
    runtime = pipe._runtime
    runtime.memory_limit.prepare_rows(runtime.plans.settings.splits)
    runtime.plans.find(lengths_of_a_step(0))  # loads what is compiled
    rows = []
    for share in few([None, 1.5, 0.9, 0.7, 0.5]):
        for seed in range(1, 6):
            held = max(runtime.memory_limit._held_with(runtime.plans.find(lengths_of_a_step(seed))))
            rows.append(measure_step(runtime, share, seed, 1e15 if share is None else share * held))
            runtime.memory_limit.limit = 1e15
        own = [row["seconds of the plan"] for row in rows[-5:]]
        print(
            f"limit {share or 'none'}: a plan takes {statistics.median(own) * 1e3:.0f} ms, {max(own) * 1e3:.0f} at most"
        )
    print(f"wrote {write('step_search', {'setting': setting(), 'rows': rows})}")


def measure_length(name: str, seq_len: int, num_devices: int) -> dict[str, Any]:
    """Returns the time and memory of one search in this process, and the plan, or why there is none."""
    kind, sizes = LONG[name]
    model = count_model(AutoConfig.for_model(kind, **sizes), seq_len)
    source = CountedSource(model, load_cluster("h100-dgx").with_nodes(num_devices // 8), name)
    sequences = _TOKENS.get(num_devices, 2**22) // seq_len
    row: dict[str, Any] = {"model": name, "tokens": seq_len, "devices": num_devices, "sequences": sequences}
    import_compiled()
    began = time.process_time()
    try:
        plan = find_plan(ClusterProblem(source, seq_len, sequences))
    except SlipstreamError as error:
        row["refused"] = str(error)
    else:
        row |= {"step seconds": plan.best.step_seconds, "mfu": plan.best.mfu, "gap": plan.gap}
        row["best"] = plan.best.plan.describe()
    row["seconds"] = time.process_time() - began
    return row | {"bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def import_compiled() -> None:
    """Loads what is compiled, so that it isn't in the time of a search."""
    search_compiled()
    import_module("slipstream.schedule.compiled_sweep")


def lengths(cases: Sequence[str]) -> None:
    """Each in a process of its own, so that its memory is that of one search."""
    every = few([*map(" ".join, product(LONG, map(str, LENGTHS), map(str, DEVICES)))])
    for case in cases or every:
        rows = [] if is_trial() else (record("plan_lengths") or {}).get("rows", [])
        name, seq_len, num_devices = case.split()
        if [name, int(seq_len), int(num_devices)] in [[row["model"], row["tokens"], row["devices"]] for row in rows]:
            continue
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            row = process.submit(measure_length, name, int(seq_len), int(num_devices)).result()
        found = row.get("refused") or f"a step of {row['step seconds']:.4g} s, {row['best']}"
        print(f"{case}: {row['seconds']:.0f} s, {row['bytes'] / 1e9:.2f} GB; {found}", flush=True)
        write("plan_lengths", {"setting": setting(), "rows": [*rows, row]})


def whole_plans() -> None:
    measure(*CASES[0])  # loads and warms everything up
    rows = []
    for case in few(CASES):
        rows.append(measure(*case))
        row = rows[-1]
        print(
            f"{row['model']} on {row['devices']} of {row['cluster']}, {row['sequences']} x {row['tokens']}: "
            f"{row['configurations']} configurations, {row['configurations per second']:.0f} a second; search "
            f"{row['seconds of the search']:.1f} s, {row['simulated']} simulated, gap {row['gap']:.1%}\n"
            f"  step {row['step seconds']:.2f} s, MFU {row['mfu']:.1%}, {row['peak memory'] / 1e9:.1f} GB\n"
            f"  {row['best']}",
            flush=True,
        )
    print(f"wrote {write('plan_search', {'setting': setting(), 'rows': rows})}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--joint", action="store_true", help="measure the joint search alone")
    parser.add_argument("--steps", action="store_true", help="measure the plans of steps alone")
    parser.add_argument("--lengths", nargs="*", help="measure the plans of large models and long sequences alone")
    options = parser.parse_args()
    restart_in_environment()
    if options.lengths is not None:
        lengths(options.lengths)
    else:
        joint() if options.joint else steps() if options.steps else whole_plans()


if __name__ == "__main__":
    main()
