"""A plan in words and numbers, the same on the terminal and in the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite

from slipstream.planner.plans import Alternative, Configuration, Plan, Prediction
from slipstream.units import bytes_text, count_text, seconds_text, share_text

_SMALL = 0.05  # of the largest change: smaller ones aren't named as reasons,
_TINY = 5e-4  # nor those below this share of the step
_NUM_REASONS = 3
_MOST_NUMBERS = 16  # in a list of them


# --- a configuration -------------------------------------------------------------------------------------------------

_NAMES = {"num_slices": "slices", "shard_optimizer": "optimizer sharded"}  # of choices; others are named as they are


def choice_text(choice: str, configuration: Configuration) -> str:
    """Returns the value of one field of a configuration."""
    value = getattr(configuration, choice)
    if choice == "offload":
        return f"{value:.0%}" if value else "none"
    return ("yes" if value else "no") if choice == "shard_optimizer" else str(value)


def _named_choice(choice: str, configuration: Configuration) -> str:
    return f"{_NAMES.get(choice, choice.replace('_', ' '))} {choice_text(choice, configuration)}"


def configuration_text(configuration: Configuration) -> str:
    """Returns the configuration on one line; ways to save memory that it doesn't use are left out."""
    c = configuration
    parts = [
        f"tensor {c.tensor_parallel} x pipeline {c.pipeline_parallel} x data {c.data_parallel}",
        f"schedule {c.schedule}",
        f"{plural(c.stages_per_rank, 'stage')} per rank",
        plural(c.num_slices, "exact slice" if c.slicing == "exact" else "slice"),
        f"{plural(c.microbatch_size, 'sequence')} per microbatch",
        f"recompute {c.recompute}" if c.recompute != "none" else "",
        f"{c.offload:.0%} offloaded" if c.offload else "",
        "optimizer state sharded" if c.shard_optimizer else "",
    ]
    return ", ".join(filter(None, parts))


def plural(number: int, noun: str) -> str:
    """Returns a number and its noun: 2 slices, 1 slice."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def slices_text(slices: Sequence[int]) -> str:
    """Returns the number of slices and their lengths."""
    lengths = f"{slices[0]:,}" if len(set(slices)) == 1 else ", ".join(f"{length:,}" for length in slices)
    return f"{plural(len(slices), 'slice')} of {lengths} tokens"


def stages_text(placement: Sequence[int]) -> str:
    """Returns the number of stages on a rank, or the fewest and the most."""
    counts = {placement.count(rank) for rank in placement}
    return " or ".join(str(count) for count in sorted(counts, reverse=True))


def _numbers(numbers: Sequence[float]) -> str:
    """Returns the numbers, of many the first and the last."""
    words = [f"{each:g}" for each in numbers]
    return " ".join(words if len(words) <= _MOST_NUMBERS else [*words[: _MOST_NUMBERS // 2], "...", words[-1]])


def cut_lines(prediction: Prediction) -> list[str]:
    """Returns which rank has which stage, how many layers stages have, and what was gained over the exact slices."""
    ranks, layers = (_numbers(row) for row in (prediction.placement, prediction.partition))
    lines = [f"The best has its stages on ranks {ranks}, with layers {layers}; {slices_text(prediction.slices)}."]
    found = prediction.joint
    if found is not None and found.exact is not None and found.exact.slices != found.slices:
        gain = found.exact.seconds / found.seconds - 1
        lines.append(
            f"The {plural(len(found.exact.slices), 'slice')} of the dynamic program for equal stages, with the best "
            f"cut for them, take {gain:.1%} longer."
        )
    return lines


COLUMNS: Mapping[str, Callable[[Prediction], str]] = {
    "tp x pp x dp": lambda p: " x ".join(
        choice_text(f"{kind}_parallel", p.configuration) for kind in ("tensor", "pipeline", "data")
    ),
    "stages per rank": lambda p: stages_text(p.placement),
    "schedule": lambda p: choice_text("schedule", p.configuration),
    "slices": lambda p: choice_text("num_slices", p.configuration),
    "slicing": lambda p: choice_text("slicing", p.configuration),
    "microbatches": lambda p: f"{p.num_microbatches} of {p.configuration.microbatch_size}",
    "recompute": lambda p: choice_text("recompute", p.configuration),
    "offload": lambda p: choice_text("offload", p.configuration),
    "sharded": lambda p: choice_text("shard_optimizer", p.configuration),
    "step": lambda p: seconds_text(p.step_seconds),
    "tokens/s": lambda p: count_text(p.tokens_per_second),
    "MFU": lambda p: share_text(p.mfu),
    "idle": lambda p: share_text(p.idle_fraction),
    "memory": lambda p: memory_text(p),
}
"""The columns of the table of predictions: heading -> the text of a cell."""

_NUM_CHOSEN = 9  # the first columns are choices, the others predictions


def memory_text(prediction: Prediction) -> str:
    """Returns what the fullest rank holds, and the limit if there is one."""
    held = bytes_text(prediction.peak_memory)
    return f"{held} of {bytes_text(prediction.memory_limit)}" if isfinite(prediction.memory_limit) else held


def shared_choices(predictions: Sequence[Prediction]) -> dict[str, str]:
    """Returns heading and value of the choices, other than the degrees, that are the same in every row."""
    values = {name: {COLUMNS[name](each) for each in predictions} for name in list(COLUMNS)[1:_NUM_CHOSEN]}
    return {name: found.pop() for name, found in values.items() if len(found) == 1}


def shared_text(choices: Mapping[str, str]) -> str:
    """Returns a line that replaces the columns left out."""
    return f"In every row: {', '.join(f'{name} {value}' for name, value in choices.items())}."


# --- reasons ---------------------------------------------------------------------------------------------------------


def reasons(plan: Plan) -> list[str]:
    """Returns a line for each configuration that is the best with other values of one or more choices.

    It says which choices differ, how much longer a step takes, where that time goes, and what else differs.
    """
    best, groups = plan.best, dict[Configuration, list[Alternative]]()
    for alternative in plan.alternatives:
        groups.setdefault(alternative.prediction.configuration, []).append(alternative)
    return [_reason([each.choice for each in group], group[0], best) for group in groups.values()]


def _reason(choices: Sequence[str], alternative: Alternative, best: Prediction) -> str:
    other, mine = alternative.prediction.configuration, best.configuration
    instead = ", ".join(f"{_named_choice(each, other)} instead of {choice_text(each, mine)}" for each in choices)
    longer = alternative.prediction.step_seconds / best.step_seconds - 1
    changes = [f"{seconds_text(abs(s))} {'more' if s > 0 else 'less'} {c}" for c, s in _main_changes(alternative, best)]
    others = ", ".join(_named_choice(each, other) for each in other.differences(mine) if each not in choices)
    notes = "; ".join(filter(None, [", ".join(changes), f"with {others}" if others else ""]))
    how_much = f"{longer:+.1%}" if abs(longer) >= _TINY else "as fast"
    return f"{instead}: {how_much}" + (f" ({notes})" if notes else "")


def _main_changes(alternative: Alternative, best: Prediction) -> list[tuple[str, float]]:
    changes = alternative.why(best)
    least = max(_SMALL * abs(changes[0][1]), _TINY * best.step_seconds) if changes else 0.0
    return [(cause, seconds) for cause, seconds in changes[:_NUM_REASONS] if abs(seconds) > least]


def search_text(plan: Plan) -> str:
    """Returns how many configurations were searched, and whether a better one may have been missed."""
    faster = f"one of the others could be faster by {plan.gap:.1%} at most"
    gap = faster if plan.gap > 0 else "no other one can be faster"
    return (
        f"searched {plan.num_configurations:,} configurations in {seconds_text(plan.seconds)}: {plan.num_too_large:,} "
        f"too large for the memory, {plan.num_simulated:,} simulated; {gap}"
    )
