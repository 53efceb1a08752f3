"""How others train on H100, and the best plans for the same batch: `python -m benchmarks.papers.practice`.

Each practice gives the degrees of tensor, pipeline, data and context parallelism, and offloads nothing; all else of it
is searched, as for the best plan that offloads nothing, and for the best of all. It writes the record `practice`.
"""

from __future__ import annotations

import argparse
from typing import Any

from transformers import LlamaConfig

from benchmarks.harness import few, setting, write
from benchmarks.plan_search import SHAPES
from slipstream.cost import CountedSource, load_cluster
from slipstream.planner.find_plan import find_plan
from slipstream.planner.plan_report import Prediction
from slipstream.planner.search import ClusterProblem, PlanOptions
from slipstream.profile import count_model

LENGTH = 8192
DEVICES_OF_A_NODE = 8
WHICH = ("practice", "on devices", "best")
_COMMON = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": LENGTH}
_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
# model, devices, sequences of a batch, degrees of tensor, pipeline, data and context parallelism, and who trains so
PRACTICES = [
    ("Llama-3-8B", 8, 128, (1, 1, 8, 1), "Megatron-Bridge"),
    ("Llama-3-70B", 64, 128, (4, 8, 2, 1), "Megatron-Bridge"),
    ("Llama-3.1-405B", 1024, 512, (8, 8, 8, 2), "Megatron-Bridge"),
    ("Llama-3.1-405B", 16384, 2048, (8, 16, 128, 1), "Meta (arXiv 2407.21783)"),
]


def described(best: Prediction) -> dict[str, Any]:
    chosen = best.plan
    degrees = chosen.tensor_parallel, chosen.pipeline_parallel, chosen.data_parallel, chosen.context_parallel
    return {
        "degrees": degrees,
        "seconds": best.step_seconds,
        "bytes": best.peak_memory,
        "plan": chosen.describe(),
    }


def measure(
    name: str, num_devices: int, sequences: int, degrees: tuple[int, int, int, int], whose: str
) -> dict[str, Any]:
    """Returns the best plans with a practice's degrees, without offloading and of all, and how much longer the first
    two take than the last."""
    cluster = load_cluster("h100-dgx").with_nodes(num_devices // DEVICES_OF_A_NODE)
    model = count_model(LlamaConfig(**(SHAPES | {"Llama-3.1-405B": _405B})[name], **_COMMON), LENGTH, fused=True)
    tensor, pipeline, data, context = degrees
    on_devices = PlanOptions(offload=(0.0,))
    degrees_of = {"tensor": tensor, "pipeline": pipeline, "data": data, "context": context}
    same = on_devices.changed(**{f"{axis}_parallel": (degree,) for axis, degree in degrees_of.items()})
    source = CountedSource(model, cluster, name, sequence_parallel=True, fused=True, refusals={})
    found = {
        which: described(find_plan(ClusterProblem(source, LENGTH, sequences, options=options)).best)
        for which, options in zip(WHICH, (same, on_devices, PlanOptions()), strict=True)
    }
    row = {"model": name, "devices": num_devices, "sequences": sequences, "whose": whose}
    over = {f"{which} over best": found[which]["seconds"] / found["best"]["seconds"] for which in WHICH[:-1]}
    return row | found | over


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    rows = []
    for case in few(PRACTICES, 1):
        rows.append(measure(*case))
        row = rows[-1]
        print(f"{row['model']}, {row['devices']} H100: practice takes {row['practice over best']:.3f} of the best plan")
        for which in WHICH:
            found = row[which]
            print(f"  {which:10} {found['seconds']:.3f} s, {found['bytes'] / 1e9:.1f} GB: {found['plan']}", flush=True)
    print(f"wrote {write('practice', {'setting': setting(), 'rows': rows})}")


if __name__ == "__main__":
    main()
