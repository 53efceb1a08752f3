"""Ten requests to `slipstream plan`: what it answers, what slices gain, and the CPU seconds of each search.

    python -m benchmarks.plan_requests          # writes results/plan_requests.json and docs/where-slices-win.md
    python -m benchmarks.plan_requests --page   # the page alone, from the record

Each request is also planned with one slice, and without a pipeline, so that the page can say what these would take.
Each is planned in a process of its own, two at a time; CPU seconds are a process's from its start to its answer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

from benchmarks.harness import destination, few, is_trial, restart_in_environment, setting, write
from benchmarks.papers.page import table
from benchmarks.records import RESULTS, ROOT, with_parts
from slipstream.cost import load_cluster
from slipstream.units import bytes_text, seconds_text

NAME = "plan_requests"
PAGE = ROOT / "docs" / "where-slices-win.md"
# Larger than any length here; with rotary positions, nothing that is counted depends on it.
_POSITIONS = 2**20
_LLAMA_3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": _LLAMA_3
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-3-70b": _LLAMA_3
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}


class Request(NamedTuple):
    """A request, and the situation that it is an example of."""

    situation: str
    slices_win: bool  # what the page says of the situation, which a test compares with the record
    model: str
    cluster: str
    settings: Mapping[str, Any]  # arguments of `slipstream.plan`, each of which is an option too

    @property
    def what(self) -> str:
        """The model, the GPUs, and the sequences of a step."""
        sizes = {"num_nodes": 1} | dict(self.settings)
        gpus = load_cluster(self.cluster).with_nodes(sizes["num_nodes"]).num_devices
        tokens = sizes["seq_len"] // 1024
        return f"{self.model} on {gpus} of `{self.cluster}`, {sizes['global_batch']} of {tokens}K tokens"

    @property
    def command(self) -> str:
        """The request as it is typed."""
        options = (f"--{name.replace('_', '-')} {value}" for name, value in self.settings.items())
        return " ".join(["slipstream plan", self.model, self.cluster, *options])


def _on(model: str, cluster: str, seq_len: int, global_batch: int, **settings: Any) -> tuple[str, str, dict[str, Any]]:
    return model, cluster, {**settings, "seq_len": seq_len, "global_batch": global_batch}


REQUESTS = [
    Request("fast links, heads divide", False, *_on("llama-3-8b", "h100-dgx", 32768, 1)),
    Request("the same, eight sequences", False, *_on("llama-3-8b", "h100-dgx", 32768, 8)),
    Request("heads don't divide", True, *_on("qwen2.5-7b", "h100-dgx", 32768, 1)),
    Request("over PCIe", True, *_on("llama-3-8b", "h100-pcie", 32768, 1)),
    Request("over PCIe, weights and activations hardly fit", True, *_on("llama-3-8b", "rtx4090-pcie", 32768, 1)),
    Request("between nodes", True, *_on("llama-3-8b", "h100-dgx", 32768, 1, num_nodes=2)),
    Request("between nodes, longer", True, *_on("llama-3-8b", "h100-dgx", 131072, 1, num_nodes=4)),
    Request("weights don't fit a node", True, *_on("llama-3-70b", "h100-dgx", 32768, 1, num_nodes=4)),
    Request("a sequence that doesn't fit a node whole", True, *_on("llama-3-8b", "h100-dgx", 1048576, 1)),
    Request("experts", True, *_on("qwen3-30b-a3b", "h100-dgx", 32768, 1, num_nodes=2)),
]
# What each request is compared with
COMPARED = {"one slice": {"num_slices": 1}, "no pipeline": {"pipeline_parallel": 1}}


def plan(request: Request, more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the best plan of a request with `more` settings, or why nothing fits. For a process of its own."""
    from transformers import AutoConfig

    import slipstream
    from slipstream.planner.report import reasons

    sizes = {**MODELS[request.model], "max_position_embeddings": _POSITIONS}
    try:
        found = slipstream.plan(AutoConfig.for_model(**sizes), request.cluster, **request.settings, **more)
    except slipstream.SlipstreamError as error:
        return {"refused": str(error), "CPU seconds": time.process_time()}
    best = found.best
    return {
        "plan": best.plan.describe(),
        "shared by": f"tp {best.plan.tensor_parallel} x cp {best.plan.context_parallel}",
        "slices": best.plan.num_slices,
        "pipeline": best.plan.pipeline_parallel,
        "step seconds": best.step_seconds,
        "peak memory": best.peak_memory,
        "reason": str(next(iter(reasons(found)), "")),
        # The command says it too, so that its seconds are among the answer's.
        "fused gain": found.fused_gain,
        "CPU seconds": time.process_time(),
    }


def measure(requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
    """Yields what each request is answered, alone and with each of `COMPARED`; two at a time are planned."""
    # A process plans once, as a command does, so that its CPU seconds are a command's.
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        asked = {"best": {}, **COMPARED}
        found = [{name: pool.submit(plan, each, more) for name, more in asked.items()} for each in requests]
        for request, answered in zip(requests, found, strict=True):
            said = {"situation": request.situation, "what": request.what, "command": request.command}
            yield said | {name: future.result() for name, future in answered.items()}


# --- the page ------------------------------------------------------------------------------------------------------

ALIKE = 0.02  # the share by which plans must differ for one to be called better


def over_best(row: Mapping[str, Any], name: str) -> float | None:
    """Returns the share by which a step takes longer with one of `COMPARED` than the best; None where nothing fits."""
    found = row[name]
    return None if "refused" in found else found["step seconds"] / row["best"]["step seconds"] - 1


def slices_win(row: Mapping[str, Any]) -> bool:
    """Returns whether the best plan has several slices, and one slice doesn't fit or is slower."""
    longer = over_best(row, "one slice")
    return row["best"]["slices"] > 1 and (longer is None or longer > ALIKE)


def gains(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of each situation's best plan, and what one slice and no pipeline would take."""

    def longer(row: Mapping[str, Any], name: str) -> str:
        share = over_best(row, name)
        if share is None:
            return "doesn't fit"
        as_long = abs(share) <= ALIKE
        return "as long" if as_long else f"{seconds_text(row[name]['step seconds'])}, {share:+.0%}"

    return table(
        "situation | model, GPUs, sequences | the best plan shares a slice by | in a pipeline of | slices | step | "
        "with one slice | without a pipeline",
        (
            [
                row["situation"],
                row["what"],
                row["best"]["shared by"],
                row["best"]["pipeline"],
                row["best"]["slices"],
                seconds_text(row["best"]["step seconds"]),
                *(longer(row, name) for name in COMPARED),
            ]
            for row in rows
        ),
    )


def answers(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns each request with its best plan, the first reason for it, and the CPU seconds that the answer took."""
    lines = []
    for row in rows:
        best = row["best"]
        said = f"{best['plan']}: {seconds_text(best['step seconds'])}, {bytes_text(best['peak memory'])}."
        lines += ["```bash", row["command"], "```", "", f"{said} {best['reason']}".rstrip()]
        lines += ["", f"CPU: {best['CPU seconds']:.0f} s.", ""]
    return "\n".join(lines)


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """Returns the generated parts of the page by the name of their mark."""
    rows = record["rows"]
    return {"gains": gains(rows), "answers": answers(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page from the record, and plan nothing")
    options = parser.parse_args()
    if not options.page:
        restart_in_environment()
        rows = []
        for row in measure(few(REQUESTS)):
            rows.append(row)
            print(answers([row]), flush=True)
            write(NAME, {"setting": setting(), "rows": rows})
    if not is_trial():
        record = json.loads(destination(RESULTS / f"{NAME}.json").read_text())
        PAGE.write_text(with_parts(PAGE.read_text(encoding="utf-8"), tables(record)), encoding="utf-8")
        print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
