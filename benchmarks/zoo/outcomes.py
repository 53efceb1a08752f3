"""What the sweep finds about an architecture, as the record has it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

DEFAULTS = "defaults"  # the variant that is an architecture's default configuration, and its key in a row
VARIANTS = "variants"  # the key of a row's other outcomes


class Kind(Enum):
    """What a causal language model was made for."""

    PLAIN = "decoder"
    ENCODER = "encoder family, with is_decoder=True"
    PART = "decoder of an encoder-decoder or audio model"


class Verdict(Enum):
    """What became of a configuration."""

    EXACT = "exact"
    WRONG = "silently wrong"
    REFUSED = "refused"
    CRASH = "crash"  # an exception that isn't Slipstream's, or a refusal that names no feature but quotes an exception
    OUT_OF_LIMITS = "out of limits"
    NOT_BUILT = "not built"  # transformers itself can't run it


@dataclass(frozen=True)
class Outcome:
    """The verdict about one configuration."""

    variant: str
    verdict: Verdict
    reason: str = ""  # of a refusal or a crash
    error: float = 0.0  # the largest relative error
    paths: tuple[str, ...] = ()  # by which earlier tokens reach a slice
    stages: tuple[int, ...] = ()  # layers each; empty: the partition was left to Slipstream
    seconds: float = 0.0  # of processor time
