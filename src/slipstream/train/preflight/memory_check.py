"""Checks that the memory limit has room for every step's memory, and names settings to change where memory ran out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from slipstream.cost import (
    ANY_HOST,
    SOME_GPUS_HOST,
    CountedOperations,
    ModelCount,
    StateBytes,
    with_context_gradients,
    with_exchange,
)
from slipstream.errors import SlipstreamError
from slipstream.model import expert_modules, meta_model, recompute_advice, torch_dtype
from slipstream.pipeline import UNCOUNTABLE, held_beside
from slipstream.planner import OPEN, Plan
from slipstream.planner.search import Evaluation, GlobalBatch, balanced_partition, evaluate
from slipstream.profile import count_model
from slipstream.schedule import SCHEDULES, USUAL_SCHEDULE, USUAL_SLICES, Schedule, slice_lengths
from slipstream.train.config import Config, named_schedule, precision_named
from slipstream.train.device_choice import choose_device_type
from slipstream.train.preflight.model_checks import trained_weights
from slipstream.train.training_step import compute_dtype
from slipstream.units import bytes_text

# Bytes of a trained parameter at least: float32, or bfloat16 with a float32 master, whose gradient may be in either
_TRAINED_BYTES, _STATE_BYTES = 8, 8
_WIDE_BYTES = 4  # bytes of a gradient in float32

_RAN_OUT = re.compile(r"out of memory|can't allocate memory|MemoryError|bad_alloc|memory ran out", re.IGNORECASE)


def less_memory(failure: str, config: Config, account: Callable[[], Account | None] = lambda: None) -> list[str]:
    """Returns sentences about settings to change and by how much, where the last line of a failure is one of memory.

    Those that change no numbers come first. `account` makes the account of the run's memory, by which each change is
    told with the fullest rank's memory then.
    """
    if not _RAN_OUT.search(failure.splitlines()[-1]):
        return []
    planned = account()
    changes = _changes(config)
    # On a CPU the host's memory is the device's.
    if re.search("CUDA|HIP", failure.splitlines()[-1]) is None:
        changes = [(text, change) for text, change in changes if "optimizer" not in change]
    told = [text if planned is None else f"{text}: {_bytes_with(planned, change)}" for text, change in changes]
    holds = "" if planned is None else f"By the planner's account the fullest rank holds {bytes_text(planned())}. "
    return [f"{holds}To need less memory, try in this order: {'; '.join(told)}; or more ranks"]


def _changes(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """Returns changes that need less memory, as they are typed, and as an account takes them."""
    pipeline = config.pipeline
    memory = config.memory
    training = config.training
    rows = training.batch_size // config.parallel.data
    changes = list[tuple[str, dict[str, Any]]]()
    if training.batch_tokens is None and pipeline.num_microbatches < rows and pipeline.microbatches is None:
        more = min(2 * pipeline.num_microbatches, rows)
        text = f"--pipeline.num_microbatches={more} (now {pipeline.num_microbatches})"
        changes.append((text, {"num_microbatches": more}))
    slices = pipeline.slices
    if isinstance(slices, int) and pipeline.schedule in (None, *SCHEDULES) and 2 * slices <= training.seq_len:
        changes.append((f"--pipeline.slices={2 * slices} (now {slices})", {"slices": 2 * slices}))
    if less := recompute_advice(memory.recompute, waits=pipeline.num_ranks > 1 or slices != 1).removesuffix(", "):
        setting = less.partition("=")[2].strip("'")
        changes.append((f"--memory.recompute={setting}", {"recompute": setting}))
    if memory.recompute != "none" and memory.offload < 1:
        share = min(1.0, memory.offload + 0.5)
        changes.append((f"--memory.offload={share:g} (now {memory.offload:g})", {"offload": share}))
    if config.parallel.num_copies > 1 and config.parallel.shard == "none":
        changes.append(("--parallel.shard=optimizer", {"shard": "optimizer"}))
    if memory.optimizer == "device" and config.parallel.shard != "parameters":
        changes.append(("--memory.optimizer=host", {"optimizer": "host"}))
    half = max(1, training.seq_len // 2)
    changes.append((f"--training.seq_len={half} (now {training.seq_len})", {"seq_len": half}))
    return changes


def _bytes_with(account: Account, change: dict[str, Any]) -> str:
    """Returns the fullest rank's memory with a change; "unknown" where the planner has no such plan."""
    try:
        return bytes_text(account(**change))
    except SlipstreamError:
        return "unknown"


def check_memory(config: Config, model_config: Any) -> None:
    """Raises SlipstreamError where weights, gradients and AdamW's state alone are more than `memory.limit`.

    They are counted as if the ranks had equal parts, of which one at least has the mean. A step's other memory is known
    only to the ranks, which refuse it before their first step.
    """
    limit = config.memory.limit
    parallel = config.parallel
    num_ranks = config.pipeline.num_ranks
    if limit is None:
        return
    whole = meta_model(model_config, torch_dtype(precision_named(config.training.precision).dtype))
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    whole = trained_weights(config, model_config).apply(whole)
    experts = [module for _, module in expert_modules(whole)] if parallel.experts > 1 else []
    spread = {id(parameter) for module in experts for parameter in module.parameters()}

    def held(each: Tensor) -> float:
        total: float
        is_spread = id(each) in spread
        alike = parallel.experts if is_spread else 1
        of_weights = parallel.num_copies if parallel.shard == "parameters" else alike
        of_state = parallel.num_copies if parallel.shard != "none" else alike
        if each.requires_grad and config.memory.optimizer == "host":
            total = each.nbytes + _WIDE_BYTES * each.numel()
        elif each.requires_grad:
            total = each.numel() * (_TRAINED_BYTES / of_weights + _STATE_BYTES / of_state)
        else:
            total = each.nbytes / of_weights
        # Tensor ranks don't cut experts that are spread.
        return total / (1 if is_spread else parallel.tensor)

    least = sum(map(held, whole.parameters())) / num_ranks
    if least <= limit:
        return
    on = "the rank holds" if config.num_processes == 1 else f"one of the {config.num_processes} ranks holds"
    raise SlipstreamError(
        f"memory.limit={limit:.6g} ({bytes_text(limit)}), but {on} {bytes_text(least)} or more of weights, gradients "
        f"and AdamW's state alone, of {num_parameters:,} parameters. Give --memory.limit={math.ceil(2 * least):.1e} or "
        f"so, --pipeline.num_ranks={math.ceil(2 * num_ranks * least / limit)}, or a smaller model"
    )


Account = Callable[..., float]


def memory_account(config: Config, model_config: Any) -> Account | None:
    """Returns a function of changes, named `seq_len`, `num_microbatches`, `slices`, `recompute`, `offload`, `context`,
    `shard` and `optimizer`, that returns the bytes of the fullest rank with them. None where the model can't be
    counted.

    Activations are those of the longest sequences, attention that of a fused kernel; an order that is open is taken
    for 1f1b with 8 slices.
    """
    evaluate_with = step_account(config, model_config)

    def account(**changes: Any) -> float:
        return max(evaluate_with(**changes).peaks())

    with suppress(*UNCOUNTABLE):
        account()
        return account
    return None


def step_account(config: Config, model_config: Any) -> Callable[..., Evaluation]:
    """Returns a function of changes, named as in `memory_account`, that returns what the run's step takes and holds
    with them. It raises one of `UNCOUNTABLE` where the model can't be counted, or the planner knows no such plan."""
    dtype = compute_dtype(config)
    trained = trained_weights(config, model_config)
    counts: dict[int, ModelCount] = {}

    def evaluate_with(**changes: Any) -> Evaluation:
        length = changes.get("seq_len", config.training.seq_len)
        if length not in counts:
            counts[length] = count_model(model_config, length, dtype, trained, config.runtime.fused)
        return _evaluate(config, counts[length], length, changes)

    return evaluate_with


def simulated_ratio(before: Config, now: Config, model_config: Any) -> float | None:
    """Returns how many times as long a step takes with another mesh, by counted operations.

    None where the model can't be counted, where the planner knows no such plan, and where ranks share the work of a
    stage differently, as operations don't tell how long their exchanges take.
    """
    if before.parallel.degrees != now.parallel.degrees:
        return None
    length = now.training.seq_len
    with suppress(*UNCOUNTABLE):
        count = count_model(model_config, length, compute_dtype(now), trained_weights(now, model_config))
        first, second = (_evaluate(settings, count, length, {}).seconds for settings in (before, now))
        return second / first
    return None


def _evaluate(config: Config, count: ModelCount, length: int, changes: dict[str, Any]) -> Evaluation:
    """Returns a step of the run's plan with some changes, by counted operations."""
    plan = _run_plan(config, length, changes)
    num_experts = count.num_experts
    if plan.expert_parallel > 1 and (not num_experts or num_experts % plan.expert_parallel):
        raise SlipstreamError(f"the model's {num_experts} experts can't be spread over {plan.expert_parallel} ranks.")
    degrees = with_exchange(count, config.parallel.degrees, is_whole=plan.num_slices == 1)
    counted = CountedOperations(count, degrees, plan.microbatch_size, config.parallel.sequence_parallel)
    costs = with_context_gradients(counted, config.memory.context_gradients)
    plan = plan.closed(context_exchange=degrees.exchange)
    if plan.partition is OPEN:
        plan = plan.closed(partition=balanced_partition(costs, length, plan.placement))
    rows = plan.num_microbatches * plan.microbatch_size
    batch = GlobalBatch(length, plan.data_parallel * rows)
    state = StateBytes.of(count.dtype)
    host = SOME_GPUS_HOST if choose_device_type(config) == "cuda" else ANY_HOST
    return evaluate(plan, costs, batch, state, host, held_beside(rows * length))


def _run_plan(config: Config, length: int, changes: dict[str, Any]) -> Plan:
    """Returns the plan that a configuration gives, with some changes. Where it leaves the order or slices open, they
    are 1f1b and 8 even slices; an open partition stays open."""
    pipeline = config.pipeline
    parallel = config.parallel
    plan = Plan.load(config.model_dump(mode="json", include={"pipeline", "memory", "parallel"}), _order_of(config))
    rows = max(1, _sequences(config, length) // parallel.data)
    num_microbatches = pipeline.num_microbatches if pipeline.microbatches is None else len(pipeline.microbatches)
    rows_each = -(-rows // changes.get("num_microbatches", num_microbatches))
    num_slices = changes.get("slices", USUAL_SLICES if plan.num_slices is OPEN else plan.num_slices)
    is_given = "slices" not in changes and plan.slices is not OPEN and sum(plan.slices) == length
    counts = -(-rows // rows_each), num_slices
    schedule = plan.schedule
    if isinstance(schedule, Schedule) and (schedule.num_microbatches, schedule.num_slices) != counts:
        schedule = OPEN
    stages = plan.stages_per_rank
    if schedule is OPEN:
        stages = 1
    elif stages is OPEN:
        stages = pipeline.fewest_stages
    return replace(plan, schedule=OPEN, placement=OPEN, num_microbatches=OPEN, slices=OPEN, num_slices=OPEN).closed(
        schedule=USUAL_SCHEDULE if schedule is OPEN else schedule,
        stages_per_rank=stages,
        microbatch_size=rows_each,
        num_microbatches=counts[0],
        slices=plan.slices if is_given else tuple(slice_lengths(num_slices, length)),
        recompute=str(changes.get("recompute", plan.recompute)),
        offload=float(changes.get("offload", plan.offload)),
        context=changes.get("context", plan.context),
        optimizer=changes.get("optimizer", plan.optimizer),
        shard=changes.get("shard", plan.shard) if parallel.num_copies > 1 else "none",
        vocabulary="whole" if isinstance(schedule, str) or schedule is OPEN else plan.vocabulary,
    )


def _order_of(config: Config) -> Schedule | None:
    """Returns the order in the file that the configuration names, if it names one."""
    schedule = named_schedule(config.pipeline)
    return schedule if isinstance(schedule, Schedule) else None


def _sequences(config: Config, length: int) -> int:
    """Returns how many of the longest sequences a step has."""
    tokens = config.training.batch_tokens
    return config.training.batch_size if tokens is None else max(1, tokens // length)
