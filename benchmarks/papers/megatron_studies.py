"""PTD-P's Figures 6 to 8 and 10 to 16: what its text says of them, and whether the planner's predictions agree.

Throughputs are simulated with the two constants of Table 1, and each configuration's memory is that of the planner's
account. Figures are pictures there, so their order is compared, and sizes where the text has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from benchmarks.papers.megatron import SELENE, Model, Run, fit, peak_bytes, seconds, tflops
from slipstream.cost import Cluster
from slipstream.schedule import make_schedule
from slipstream.simulator import UnitCost, simulate

GPT_1B, GPT_1B_8_STAGES = Model(4, 4096, 128), Model(8 * 4, 4096, 128, layers_alone=True)
GPT_5_9B, GPT_91B = Model(32, 3840, 32), Model(72, 10240, 80)
GPT_162B, GPT_175B = Model(32, 20480, 128), Model(96, 12288, 96)
SIZES = (1, 2, 4, 8, 16)
BATCHES = (12, 24, 36, 48, 60)

Curve: TypeAlias = Mapping[int, float]  # what is predicted by what is varied


@dataclass
class Studies:
    """The predictions of one cluster, and the memory of everything that was predicted."""

    cluster: Cluster
    memory: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by figure

    def sweep(self, figure: str, model: Model, runs: Mapping[int, Run]) -> Curve:
        """Returns teraFLOP/s per GPU, and notes the memory."""
        self.memory.setdefault(figure, []).extend(_memory(model, run) for run in runs.values())
        return {name: tflops(model, run, self.cluster) for name, run in runs.items()}


def studies() -> dict[str, Any]:
    """Returns each study's predictions and whether they agree, and the memory of each figure's configurations."""
    found = Studies(fit().cluster())
    rows = [*_bubble(), *_microbatch_sizes(found), *_pipelines(found), *_interleaving(found), *_degrees(found)]
    return {"rows": rows, "memory": [_fit(figure, each) for figure, each in found.memory.items()]}


def _bubble() -> Iterable[dict[str, Any]]:
    """Idle over busy time of 32 GPUs that run 128 microbatches, with equal stages."""
    idle = {d: _idle_over_busy(32 // d, 128 // d) for d in (1, 2, 4, 8, 16, 32)}
    yield _study("6", "the bubble falls as d rises", {"idle over busy time": idle}, _falls(idle))
    formula = {d: (32 - d) / 128 for d in idle}
    same = all(abs(idle[d] - formula[d]) < 1e-9 for d in idle)
    yield _study("6, by how much", "(n - d) / b' of it", {"the paper's formula": formula}, same)


def _idle_over_busy(num_ranks: int, num_microbatches: int) -> float:
    idle = simulate(make_schedule("1f1b", num_ranks, num_microbatches), UnitCost()).idle_fraction
    return float(idle / (1 - idle))


def _microbatch_sizes(found: Studies) -> Iterable[dict[str, Any]]:
    alone = found.sweep("7", GPT_1B, {b: Run(1, 1, 1, 16, b) for b in SIZES})
    yield _study("7", "a larger microbatch is faster on one GPU", {"TFLOP/s": alone}, _rises(alone))
    yield _study("7, by how much", "by up to 1.3 times", {"gain": _over_first(alone)}, alone[16] / alone[1] > 1.2)
    rates = {f"batch {batch}": _sequences_per_second(found, batch) for batch in (128, 512)}
    right = all(_best(rate) == 4 for rate in rates.values())
    yield _study("8", "for p = 8 and batches of 128 and 512 a microbatch of 4 is best", rates, right)
    sized = {
        f"batch {batch}": found.sweep("15", GPT_91B, {b: Run(8, 8, 1, batch, b) for b in (1, 2, 4, 8)})
        for batch in (128, 512)
    }
    yield _study("15", "a microbatch of 2 is best", sized, all(_best(each) == 2 for each in sized.values()))


def _sequences_per_second(found: Studies, batch: int) -> Curve:
    """Figure 8 estimates a pipeline of 8 stages, each of which takes the time of Figure 7's four layers on a GPU."""
    runs = {b: Run(1, 8, 1, batch, b) for b in SIZES}
    found.memory.setdefault("8", []).extend(_memory(GPT_1B_8_STAGES, run) for run in runs.values())
    return {b: batch / seconds(GPT_1B_8_STAGES, run, found.cluster) for b, run in runs.items()}


def _pipelines(found: Studies) -> Iterable[dict[str, Any]]:
    curves: dict[str, Curve] = {
        f"batch {batch}": {
            p: found.sweep("10", Model(3 * p, 20480, 128), {p: Run(8, p, 1, batch)})[p] for p in (1, 2, 4, 8)
        }
        for batch in (8, 128)
    }
    lost = [curve[8] / curve[1] for curve in curves.values()]
    yield _study("10", "the larger of two batches scales better over p", curves, lost[0] < lost[1])


def _interleaving(found: Studies) -> Iterable[dict[str, Any]]:
    def throughputs(figure: str, v: int, scattered: bool) -> Curve:
        return found.sweep(figure, GPT_175B, {b: Run(8, 12, 1, b, 1, v, scattered) for b in BATCHES})

    plain, interleaved = throughputs("11", 1, True), throughputs("11", 2, True)
    gains = _over(interleaved, plain)
    yield _study(
        "11",
        "interleaving is faster, and the gap closes as the batch grows",
        {"default": plain, "interleaved": interleaved},
        min(gains.values()) > 1 and _falls(gains),
    )
    plain_whole, whole = throughputs("11", 1, False), throughputs("16", 2, False)
    yield _study(
        "11, without scatter/gather",
        "the default schedule is faster than interleaving at larger batches",
        {"default": plain_whole, "interleaved": whole},
        plain_whole[BATCHES[-1]] > whole[BATCHES[-1]],
    )
    gains = _over(interleaved, whole)
    yield _study("16", "scatter/gather helps", {"with": interleaved, "without": whole}, min(gains.values()) > 1)
    most = max(gains.values())
    yield _study("16, by how much", "by up to 11%, with a large batch", {"gain": gains}, most > 1.08 and _rises(gains))


def _degrees(found: Studies) -> Iterable[dict[str, Any]]:
    mixed = found.sweep("12", GPT_162B, {t: Run(t, 64 // t, 1, 128) for t in (2, 4, 8, 16, 32)})
    yield _study("12", "tensor parallelism of a node's 8 GPUs is best", {"TFLOP/s by t": mixed}, _best(mixed) == 8)
    pipeline = found.sweep("13", GPT_5_9B, {p: Run(1, p, 64 // p, 512) for p in (2, 4, 8, 16, 32)})
    yield _study("13", "throughput falls as p rises", {"TFLOP/s by p": pipeline}, _falls(pipeline))
    tensor = found.sweep("14", GPT_5_9B, {t: Run(t, 1, 64 // t, 512) for t in (2, 4, 8, 16, 32)})
    yield _study("14", "throughput falls as t rises", {"TFLOP/s by t": tensor}, _falls(tensor))


def _memory(model: Model, run: Run) -> dict[str, Any]:
    c = run
    name = f"t={c.tensor_parallel} p={c.pipeline_parallel} d={c.data_parallel} b={c.microbatch_size}"
    name += f" v={c.stages_per_rank} B={c.batch_size}"
    return {"run": name, "bytes": peak_bytes(model, run)}


def _fit(figure: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    room = SELENE.device.memory
    return {
        "figure": figure,
        "number": len(runs),
        "most bytes": max(each["bytes"] for each in runs),
        "too large": [each for each in runs if each["bytes"] > room],
    }


def _study(figure: str, text: str, values: Mapping[str, Curve], holds: bool) -> dict[str, Any]:
    return {"figure": figure, "the paper says": text, "predicted": values, "holds": holds}


def _best(values: Curve) -> int:
    return max(values, key=lambda name: values[name])


def _over(values: Curve, others: Curve) -> Curve:
    return {name: values[name] / others[name] for name in values}


def _over_first(values: Curve) -> Curve:
    return {name: value / next(iter(values.values())) for name, value in values.items()}


def _falls(values: Curve) -> bool:
    return list(values.values()) == sorted(values.values(), reverse=True)


def _rises(values: Curve) -> bool:
    return list(values.values()) == sorted(values.values())
