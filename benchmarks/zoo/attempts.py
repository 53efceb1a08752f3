"""What a child process tries of an architecture: its default configuration, or the variants of it."""

from __future__ import annotations

import gc
from collections import deque
from itertools import count

from benchmarks.zoo.families import default_config
from benchmarks.zoo.outcomes import DEFAULTS, Outcome, Verdict
from benchmarks.zoo.trial import at_own_size, described, explained, try_out
from benchmarks.zoo.variants import ALL_ELSE, alone, tiny_config, variants
from benchmarks.zoo.workers import Send


def try_defaults(name: str, send: Send) -> None:
    """Sends the outcome for an architecture's default configuration."""
    try:
        config = default_config(name)
    except Exception as error:  # of transformers
        send(Outcome(DEFAULTS, Verdict.NOT_BUILT, described(error)))
        return
    try:
        tiny = tiny_config(config)
    except Exception as error:  # the self-check says why
        send(explained(Outcome(DEFAULTS, Verdict.NOT_BUILT, described(error)), config))
        return
    outcome = try_out(DEFAULTS, tiny, "first")
    if outcome.verdict is Verdict.NOT_BUILT:
        outcome = explained(outcome, config)
    send(at_own_size(outcome, config) if outcome.verdict is Verdict.EXACT else outcome)


def try_variants(name: str, send: Send) -> None:
    """Sends an outcome for every variant that transformers can run; in turns the last and the first stage is larger.

    Where not all can be changed at once, one after the other is.
    """
    config = default_config(name)
    waiting = deque(variants(config))
    for number in count():
        if not waiting:
            return
        variant, tiny = waiting.popleft()
        outcome = try_out(variant, tiny, ("last", "first")[number % 2])
        gc.collect()  # pipelines have circles
        if outcome.verdict is not Verdict.NOT_BUILT:
            send(outcome)
        if variant == ALL_ELSE and outcome.verdict is not Verdict.EXACT:
            waiting.extend(alone(config))
