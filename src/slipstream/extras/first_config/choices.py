"""The choices of a new configuration: its training by usual numbers, its pipeline by a plan for this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from slipstream.cluster_plans.gpus_here import gpus_here
from slipstream.cluster_plans.plan_file import plan_settings
from slipstream.cluster_plans.plan_model import plan
from slipstream.cost import (
    ASSUMED_EFFICIENCY,
    CPU_LINK,
    CPU_RATES,
    GPU_LINK,
    GPU_RATES,
    Cluster,
    Device,
)
from slipstream.errors import SlipstreamError
from slipstream.extras.first_config.data import DataSizes
from slipstream.options import Memory, Record, Runtime
from slipstream.planner import PlanReport
from slipstream.profile import newest_costs
from slipstream.train.config.sections import ParallelSection
from slipstream.train.metrics.flops import measure_peak

_LONGEST = 8192  # tokens; a model may take more, but few machines do
_SHORTEST = 256
_TOKENS_OF_A_STEP, _MOST_OF_A_STEP = 16_384, 16
_STEPS_OF_A_PASS = 20  # fewest steps of a pass, for something to see
_PASSES_OVER_SAMPLES = 3
_STEPS_FROM_RANDOM, _PASSES_FROM_RANDOM = 1000, 10
# Shares of held-out documents to try; the first one large enough for a validation is taken.
_FRACTIONS = (0.05, 0.1, 0.2)
_ENOUGH = 1.5  # batches; more than one, as lengths differ
_UNIT = 64  # common divisor of chosen lengths, in tokens

# Peak learning rates by the most parameters that a model has
_Rates: TypeAlias = tuple[tuple[float, float], ...]
_FROM_RANDOM: _Rates = ((1e8, 1e-3), (1e9, 6e-4), (1e10, 3e-4), (np.inf, 1.5e-4))
_FINE_TUNING: _Rates = ((1e9, 5e-5), (1e10, 2e-5), (np.inf, 1e-5))
_ADAPTER: _Rates = ((1e10, 2e-4), (np.inf, 1e-4))
_PAIRS: _Rates = ((1e9, 5e-6), (np.inf, 5e-7))
_PAIRS_ADAPTER: _Rates = ((np.inf, 5e-6),)


@dataclass(frozen=True)
class Purpose:
    """The model that is trained, and the kind of its data."""

    are_pairs: bool
    is_text: bool
    from_random: bool  # weights
    is_adapter: bool
    num_parameters: int

    @property
    def learning_rate(self) -> float:
        """The usual peak learning rate of AdamW."""
        if self.are_pairs:
            table = _PAIRS_ADAPTER if self.is_adapter else _PAIRS
        elif self.from_random:
            table = _FROM_RANDOM
        else:
            table = _ADAPTER if self.is_adapter else _FINE_TUNING
        return next(rate for most, rate in table if self.num_parameters <= most)


@dataclass(frozen=True)
class TrainingChoice:
    """The numbers of a training."""

    seq_len: int  # tokens
    batch_size: int  # sequences, or pairs, of a step
    steps: int
    passes: float  # passes over the data
    warmup_steps: int
    eval_every: int  # steps; 0 for no validations, on data too small to hold some out
    held_out: float  # share of the documents
    num_longer: int  # documents longer than a sequence
    epochs: float | None = None  # given instead of steps


def choose_training(
    purpose: Purpose,
    sizes: DataSizes,
    longest: int | None,
    is_packed: bool,
    given: Mapping[str, Any],
    has_validation: bool = False,
) -> TrainingChoice:
    """Returns the numbers of a training; `longest` are the model's positions, `given` the settings already chosen.

    Where no share of the data is enough for a validation, none is held out, unless validations are `given`. With
    `has_validation` other data is.
    """
    seq_len = given.get("seq_len") or choose_length(sizes, longest, is_packed)
    are_alone = not is_packed  # one document per sequence
    num_sequences = max(1, sizes.number if are_alone else sizes.num_tokens // seq_len)
    usual = min(_MOST_OF_A_STEP, max(1, _TOKENS_OF_A_STEP // seq_len), max(1, num_sequences // _STEPS_OF_A_PASS))
    batch = given.get("batch_size") or 2 ** (usual.bit_length() - 1)
    each_pass = max(1, num_sequences // batch)
    epochs = None if given.get("steps") else given.get("epochs")
    steps = given.get("steps") or max(1, round(each_pass * (epochs or _passes(purpose, each_pass))))
    needed = _ENOUGH * batch
    held = {share: sizes.number * share if are_alone else sizes.held_out(share) / seq_len for share in _FRACTIONS}
    enough = next((share for share, size in held.items() if size >= needed), None)
    return TrainingChoice(
        seq_len=seq_len,
        batch_size=batch,
        steps=steps,
        passes=steps / each_pass,
        warmup_steps=min(steps // 20, 1000),
        eval_every=max(1, steps // 5) if enough or has_validation else 0,
        held_out=enough or (_FRACTIONS[0] if "eval_every" in given or has_validation else 0.0),
        num_longer=0 if purpose.is_text and is_packed else int((sizes.lengths > seq_len).sum()),
        epochs=epochs,
    )


def choose_length(sizes: DataSizes, longest: int | None, is_packed: bool) -> int:
    """Returns the tokens of a sequence: of texts a power of two that has room for most, of others for the longest."""
    most = min(longest or _LONGEST, _LONGEST)
    if not sizes.is_text:
        least = _SHORTEST if is_packed else _UNIT
        return min(max(-(-sizes.longest // _UNIT) * _UNIT, least), most)
    usual = int(np.quantile(sizes.lengths, 0.95))
    length: int = min(max(1 << max(0, usual - 1).bit_length(), _SHORTEST), most)
    while length > _UNIT and sizes.num_tokens < _STEPS_OF_A_PASS * length:
        length //= 2
    return length


def _passes(purpose: Purpose, steps_of_one: int) -> float:
    """Returns how often the data is gone through."""
    if purpose.from_random and purpose.is_text:
        return min(_PASSES_FROM_RANDOM, max(1.0, _STEPS_FROM_RANDOM / steps_of_one))
    return 1.0 if purpose.is_text or purpose.are_pairs else _PASSES_OVER_SAMPLES


# A search of seconds: layers that ranks share are compared by `slipstream plan`.
_QUICK = {"tensor_parallel": 1, "offload": 0.0, "slicing": "equal-time", "num_simulated": 10}
_ANEW = "With num_ranks alone, the run measures what the model costs before its first step, and plans by that"
_ALONE = "Without slices, a sequence of one rank gets 8, or as many as a step needs to fit"


@dataclass(frozen=True)
class PipelineChoice:
    """Settings of the sections that a plan decides, and a line on where they come from."""

    settings: Mapping[str, Mapping[str, Any]]
    reason: str

    def of(self, section: str) -> Mapping[str, Any]:
        """Returns the settings of a section, none where the plan leaves it as it is."""
        return self.settings.get(section, {})


def choose_pipeline(
    model_config: Any, machine: Cluster, dtype: str, is_packed: bool, training: Mapping[str, int]
) -> PipelineChoice:
    """Returns the fastest plan that fits this machine, by the costs kept of the model here or counted operations.

    `training` has `seq_len` and `global_batch`. Where documents aren't packed the mesh alone is chosen, and where no
    plan can be made a pipeline over as many devices as there are layers: the run plans the rest from measured costs
    before its first step.
    """
    fastest, problem = _fastest(model_config, machine, dtype, training)
    if fastest is None:
        most = min(machine.devices_per_node, model_config.get_text_config().num_hidden_layers)
        reason = f"the run plans itself, as no plan could be made here ({problem})"
        return PipelineChoice({"pipeline": {"num_ranks": most}}, reason)
    planned = plan_settings(fastest, {}, order="")
    # Named schedules keep the vocabulary whole.
    del planned["pipeline"]["vocabulary"]
    is_alone = planned["pipeline"]["num_ranks"] == 1
    if is_alone:
        # The rest says nothing of a single stage, and a number of slices is for sequences of any length.
        pipeline = {name: planned["pipeline"].get(name, 1) for name in ("num_ranks", "num_microbatches")}
        planned["pipeline"] = pipeline | {"slices": fastest.best.plan.num_slices}
    sections: dict[str, type[Record]] = {"memory": Memory, "parallel": ParallelSection, "runtime": Runtime}
    changed = {name: _changed(section, planned.get(name, {})) for name, section in sections.items()}
    if not is_packed:
        settings = {"pipeline": {"num_ranks": planned["pipeline"]["num_ranks"]}, "parallel": changed["parallel"]}
        return PipelineChoice(settings, "each step is planned, from costs that the run measures first")
    reason = f"planned for {fastest.cluster}, {fastest.best.idle_fraction:.0%} idle.\n{_ALONE if is_alone else _ANEW}"
    return PipelineChoice({"pipeline": planned["pipeline"], **changed}, reason)


def _changed(section: type[Record], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that aren't the section's defaults."""
    return {name: value for name, value in settings.items() if value != section.model_fields[name].default}


def _fastest(
    model_config: Any, machine: Cluster, dtype: str, training: Mapping[str, int]
) -> tuple[PlanReport | None, str]:
    """Returns the fastest plan for all devices, their half, and so on, and why there is none."""
    options: dict[str, Any] = {**_QUICK, **training, "dtype": dtype}
    with suppress(SlipstreamError):
        newest_costs(model_config, training["seq_len"], dtype)
        # The plan uses these measurements of a run on this machine.
        return plan(model_config, None, **options), ""
    plans, problems = [], []
    for num_devices in _halves(machine.devices_per_node):
        here = replace(machine, devices_per_node=num_devices, name=f"{num_devices} x {machine.device.name}")
        try:
            plans.append(plan(model_config, here, **options))
        except SlipstreamError as error:
            problems.append(str(error).partition("\n")[0])
    best = min(plans, key=lambda candidate: candidate.best.step_seconds, default=None)
    return best, "" if best else problems[0]


def _halves(number: int) -> Iterator[int]:
    """Yields a number, its half, and so on to 1."""
    while number:
        yield number
        number //= 2


# More cores share the memory's bandwidth more than they help.
_MOST_CORES = 8


def this_machine() -> Cluster:
    """Returns one node of this machine's GPUs, or of its cores where there is no GPU, with one thread each."""
    return _gpus(torch.cuda.device_count()) if torch.cuda.is_available() else _cores()


def dtype_here() -> str:
    """Returns the dtype in which this machine trains fastest: bfloat16 on GPUs that have it."""
    return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"


def _gpus(number: int) -> Cluster:
    kind = dtype_here()
    described = gpus_here()
    if described is not None and kind in described.device.flops:
        return described
    memory = float(torch.cuda.get_device_properties(0).total_memory)
    name = torch.cuda.get_device_name(0)
    measured = measure_peak(torch.device("cuda"), getattr(torch, kind)).flops
    device = Device(name, {kind: measured}, memory, matmul_efficiency=ASSUMED_EFFICIENCY, **GPU_RATES)
    return Cluster(f"{number} of {name}", device, 1, number, GPU_LINK, GPU_LINK)


def _cores() -> Cluster:
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    allowed = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    cores = min(allowed, _MOST_CORES)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / cores
    with _one_thread():
        measured = measure_peak(torch.device("cpu"), torch.float32).flops
    device = Device("CPU core", {"float32": measured}, memory, matmul_efficiency=ASSUMED_EFFICIENCY, **CPU_RATES)
    return Cluster(f"{cores} CPU {'core' if cores == 1 else 'cores'}", device, 1, cores, CPU_LINK, CPU_LINK)


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
