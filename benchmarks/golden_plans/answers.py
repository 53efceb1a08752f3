"""The answer to a request: everything that a plan decides, its seconds, and every rank's bytes at their peak."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from peft import LoraConfig
from transformers import AutoConfig, PretrainedConfig

import slipstream
from benchmarks.golden_plans.requests import MODELS, PROFILES, Request
from slipstream.cost import Costs, MeasuredCosts, Profile, ProfileSource, StageParts, Update, load_profile, partition_of
from slipstream.errors import SlipstreamError
from slipstream.model import ALL_WEIGHTS, Adapter, TrainedWeights, find_frozen
from slipstream.model.loading import meta_model
from slipstream.pipeline.planning import plan_before_training
from slipstream.planner.cuts import Cuts
from slipstream.planner.find_plan import find_plan
from slipstream.planner.joint import (
    JointPlan,
    JointProblem,
)
from slipstream.planner.plan import AUTO, CHOICES, OPEN, Plan
from slipstream.planner.plan_fields import PLAN_FIELDS
from slipstream.planner.plan_report import Prediction
from slipstream.planner.ragged import StageRates, StepMemory, StepPlan, StepProblem, fit_rates
from slipstream.planner.search import ClusterProblem, PlanOptions
from slipstream.schedule import Op, Schedule
from slipstream.simulator import MicrobatchCost, activation_peaks, simulate

Answer = dict[str, Any]

_FOLDER = Path(__file__).parent / "profiles"
_GRANULARITY = 64  # tokens
_NEW = ("context", "optimizer", "loss_tokens")  # choices that have come since plans.json was recorded
_ROUNDING = 1e-12  # of a step: causes are differences
_ROUNDING_OF_BYTES = 1e-9
_EFFORT = 0.05  # of a run's search
_EFFORT_OF_ROWS = 2e7  # actions
# What wasn't asked for when the plans were kept
_SINCE: dict[str, Any] = {"context": "device"}


def answer(request: Request) -> Answer:
    """Returns the plan of a request, or the error that refuses it."""
    makers = {
        "counted": _counted,
        "joint": _counted,
        "measured": _measured,
        "start": _start,
        "ragged": _ragged,
        "rows": _rows,
    }
    try:
        return makers[request["kind"]](request)
    except SlipstreamError as error:
        return {"error": _without_news(str(error))}


def _without_news(error: str) -> str:
    """Returns a message without what requests ask for since the plans were kept."""
    for choice, value in _SINCE.items():
        error = error.replace(f", {choice}={value}", "")
    return error


def _digest(schedule: Schedule) -> str:
    """Returns a short name of an order: equal where every rank's actions are."""
    text = "\n".join(" ".join(map(str, row)) for row in schedule.actions)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _config(name: str, is_profiled: bool = False) -> PretrainedConfig:
    settings = (PROFILES if is_profiled else MODELS)[name]
    return AutoConfig.for_model(**settings)


@cache
def _profile(name: str) -> Profile:
    return load_profile(_FOLDER / f"{name}.json")


def _counted(request: Request) -> Answer:
    config = _config(request["model"])
    names = ("cluster", "num_nodes", "seq_len", "global_batch", "dtype", "freeze", "lora_base_precision", "fused")
    asked = {name: request[name] for name in names if name in request}
    if config.model_type == "gpt2" and "freeze" in asked:
        asked["freeze"] = ["transformer.h.0.*", "transformer.wte.*", "transformer.wpe.*"]
    if "lora" in request:
        asked["lora"] = LoraConfig(**request["lora"], task_type="CAUSAL_LM")
    return _of_plan(slipstream.plan(config, **asked, **_SINCE | request["options"]))


def _measured(request: Request) -> Answer:
    source = ProfileSource(_profile(request["profile"]), request["num_ranks"])
    options = PlanOptions(**request["options"])
    return _of_plan(find_plan(ClusterProblem(source, request["seq_len"], request["global_batch"], options=options)))


def _of_plan(plan: slipstream.PlanReport) -> Answer:
    best = plan.best
    return {
        "best": _of_prediction(best),
        "order": _digest(plan.schedule),
        "others": [_in_short(other) for other in plan.predictions[1:]],
        "alternatives": [[each.choice, *_in_short(each.prediction)] for each in plan.alternatives],
        "numbers": [plan.num_meshes, plan.num_bounded_meshes, plan.num_configurations, plan.num_too_large],
    }


def _in_short(prediction: Prediction) -> list[Any]:
    """Returns the choices and the seconds."""
    return [[*_choices(prediction.plan).values()], prediction.step_seconds]


def _choices(plan: Plan) -> dict[str, Any]:
    """Returns the choices by name, without those that the kept plans don't know yet where they are as ever."""
    named = {name: plan.choice(name) for name in CHOICES}
    return {name: value for name, value in named.items() if name not in _NEW or value != PLAN_FIELDS[name].absent}


def _without_rounding(seconds: float, prediction: Prediction) -> float:
    return seconds if abs(seconds) > _ROUNDING * prediction.step_seconds else 0.0


def _of_prediction(prediction: Prediction) -> Answer:
    causes, plan = prediction.seconds_by_cause, prediction.plan
    return {
        "configuration": _choices(plan),
        "partition": [*plan.partition],
        "placement": [*plan.placement],
        "slices": [*plan.slices],
        "num_microbatches": plan.num_microbatches,
        "step_seconds": prediction.step_seconds,
        "mfu": prediction.mfu,
        "idle_fraction": prediction.idle_fraction,
        "seconds_by_cause": {cause: _without_rounding(s, prediction) for cause, s in causes.items()},
        "memory": [{str(kind): size for kind, size in rank.items()} for rank in prediction.memory],
    }


def _trained(request: Request, config: PretrainedConfig) -> TrainedWeights:
    if "freeze" in request:
        return TrainedWeights(find_frozen(meta_model(config), request["freeze"]))
    if "lora" in request:
        lora = LoraConfig(**request["lora"], target_modules="all-linear", task_type="CAUSAL_LM")
        return TrainedWeights(adapter=Adapter("default", lora, "full"))
    return ALL_WEIGHTS


def _start(request: Request) -> Answer:
    """The search of a run's start on given costs, as `plan_start` makes it on those it measures."""
    name = request["profile"]
    config, profile = _config(name, is_profiled=True), _profile(name)
    asked = plan_before_training.StartRequest(
        seq_len=request["seq_len"],
        num_microbatches=request["num_microbatches"],
        dtype="float32",
        num_ranks=request["num_ranks"],
        longest=request["longest"],
        vocabulary=OPEN if request["vocabulary"] == AUTO else request["vocabulary"],
        trained=_trained(request, config),
        memory_limit=request.get("memory_limit"),
        effort=_EFFORT,
    )
    costs = plan_before_training.of_what_is_trained(MeasuredCosts(profile), config, asked, lambda text: None)
    problem = asked.problem(costs, profile.longest_slice)
    plan = find_plan(problem)
    rates = asked.fit_rates(costs, profile.longest_slice, plan.partition, "none")
    of_rates = {op.value: seconds.tolist() for op, seconds in rates.rates.items()}
    peaks = asked.evaluate(costs, plan.plan).peaks()
    tail = _tail(costs, plan, Update(asked.state, 2, "optimizer"))
    return _of_joint(plan) | {"tail": tail, "peaks": peaks, "rates": of_rates}


def _tail(costs: Costs, plan: JointPlan, update: Update) -> float:
    """Returns the most seconds in which a rank reduces gradients, updates its part of the state and gathers weights."""
    seconds = [0.0] * plan.schedule.num_ranks
    stages = StageParts.of_partition(plan.partition, costs.num_layers, costs.units_per_layer)
    for stage, rank in zip(stages, plan.schedule.placement, strict=True):
        seconds[rank] += costs.gradient_seconds(stage, update) + costs.optimizer_step_seconds(stage, update)
        seconds[rank] += costs.gather_seconds(stage, update)
    return max(seconds)


def _of_joint(plan: JointPlan) -> Answer:
    return {
        "order": _digest(plan.schedule),
        "placement": [*plan.schedule.placement],
        "partition": [*plan.partition],
        "slices": [*plan.slices],
        "recompute": plan.recompute,
        "head": plan.head,
        "seconds": plan.seconds,
        "bound": plan.bound,
        "ideal": plan.ideal,
        "rejected": [[[*other.schedule.placement], other.seconds] for other in plan.rejected],
    }


def _rates(request: Request) -> StageRates:
    """The rates of equal stages."""
    profile, placement = _profile(request["profile"]), request["placement"]
    num_layers, num_stages = len(profile.kinds), len(placement)
    partition = [num_layers // num_stages] * num_stages
    partition[0] += num_layers - sum(partition)
    rates = fit_rates(MeasuredCosts(profile), partition, Cuts(_GRANULARITY, profile.longest_slice), 2048)
    for stage in range(request.get("frozen", 0)):
        for op in (Op.B, Op.I, Op.W):
            rates.rates[op][stage] = 0.0
    return rates


def _ragged(request: Request) -> Answer:
    rates, lengths = _rates(request), request["lengths"]
    problem = StepProblem(
        lengths=tuple(lengths),
        rates=rates,
        given=Plan(
            placement=tuple(request["placement"]),
            schedule=request.get("schedule", OPEN),
            num_microbatches=request.get("num_microbatches", OPEN),
            num_slices=request.get("num_slices", OPEN),
        ),
        packs=request["packs"],
        split=request["split"],
    )
    if "room" in request:
        held = rates.held_bytes(np.array([max(lengths)], np.int64))[:, 0]
        room = request["room"] * np.bincount(request["placement"], held).max()
        state = [1e6] * problem.num_ranks

        def account(step: StepPlan) -> Sequence[float]:
            return [1e6 + float(peak) for peak in _activation_peaks(rates, step)]

        problem = replace(problem, memory=StepMemory(1e6 + room, state, account))
    plan = find_plan(problem)
    return {
        "groups": [[*group] for group in plan.groups],
        "slices": [[*slices] for slices in plan.slices],
        "order": _digest(plan.schedule),
        "seconds": plan.seconds,
        "peaks": [*map(float, _activation_peaks(rates, plan))],
    }


def _activation_peaks(rates: StageRates, plan: StepPlan) -> Sequence[float]:
    """Returns the most bytes of activations that each rank holds in a step."""
    tables = []
    for slices in plan.slices:
        tokens = np.array(slices, np.int64)
        no_scores = np.zeros((len(tokens), len(rates.windows)))
        tables.append(rates.table(tokens, rates.action_seconds(tokens, no_scores)))
    return simulate(plan.schedule, MicrobatchCost(tables)).peak_memory


def _rows(request: Request) -> Answer:
    rates, placement = _rates(request), tuple(request["placement"])
    slices = OPEN if request["slices"] is None else (request["length"] // request["slices"],) * request["slices"]
    problem = JointProblem(
        costs=rates,
        seq_len=request["length"],
        num_ranks=max(placement) + 1,
        num_microbatches=request["num_microbatches"],
        cuts=Cuts.of_rows(request["length"]),
        split=request["splits"],
        effort=_EFFORT_OF_ROWS,
        given=Plan(
            schedule=OPEN if request["reorders"] else request["schedule"],
            placement=placement,
            partition=partition_of(range(len(placement) + 1), 1),
            slices=slices,
            recompute="none",
        ),
    )
    if "room" in request:
        held = rates.held_bytes(np.array([request["length"]], np.int64))[:, 0]
        room = request["room"] * np.bincount(placement, held)
        besides = 1e6 + room.max() - room

        def account(plan: Plan) -> list[float]:
            assert isinstance(plan.schedule, Schedule)
            return [*map(float, besides + activation_peaks(plan.schedule, rates.on_slices(plan.slices)))]

        problem = replace(problem, memory_limit=(1 + _ROUNDING_OF_BYTES) * (1e6 + room.max()), account=account)
    plan = find_plan(problem)
    return {"slices": [*plan.slices], "order": _digest(plan.schedule), "seconds": plan.seconds}
