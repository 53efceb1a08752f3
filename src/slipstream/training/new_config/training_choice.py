"""How long sequences are, how many are in a step, and how the model learns: usual choices for a model and its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from slipstream.training.new_config.data_sizes import DataSizes

_LONGEST = 8192  # tokens; a model may take more, but few machines do
_SHORTEST = 256
_TOKENS_OF_A_STEP, _MOST_OF_A_STEP = 16_384, 16
_STEPS_OF_A_PASS = 20  # at least, so that there is something to see
_PASSES_OVER_SAMPLES = 3
_STEPS_FROM_RANDOM, _PASSES_FROM_RANDOM = 1000, 10
_FRACTIONS = (0.05, 0.1, 0.2)  # of documents that are held out: the first that is enough for a validation
_ENOUGH = 1.5  # batches, as lengths differ
_UNIT = 64  # tokens to which a length is rounded

# Peak learning rates by the most parameters that a model has
_Rates: TypeAlias = tuple[tuple[float, float], ...]
_FROM_RANDOM: _Rates = ((1e8, 1e-3), (1e9, 6e-4), (1e10, 3e-4), (np.inf, 1.5e-4))
_FINE_TUNING: _Rates = ((1e9, 5e-5), (1e10, 2e-5), (np.inf, 1e-5))
_ADAPTER: _Rates = ((1e10, 2e-4), (np.inf, 1e-4))
_PAIRS: _Rates = ((1e9, 5e-6), (np.inf, 5e-7))
_PAIRS_ADAPTER: _Rates = ((np.inf, 5e-6),)


@dataclass(frozen=True)
class Purpose:
    """What is trained, and on what."""

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
    passes: float  # over the data
    warmup_steps: int
    eval_every: int  # 0: the data is too little to hold some out
    held_out: float  # share of the documents
    num_longer: int  # documents that a sequence has no room for


def choose_training(
    purpose: Purpose, sizes: DataSizes, longest: int | None, is_packed: bool, given: Mapping[str, Any]
) -> TrainingChoice:
    """Returns the numbers of a training; `longest` are the model's positions, `given` what is already chosen."""
    seq_len = given.get("seq_len") or choose_length(sizes, longest, is_packed)
    are_alone = not is_packed  # each is a sequence
    number = max(1, sizes.number if are_alone else sizes.num_tokens // seq_len)
    usual = min(_MOST_OF_A_STEP, max(1, _TOKENS_OF_A_STEP // seq_len), max(1, number // _STEPS_OF_A_PASS))
    batch = given.get("batch_size") or 2 ** (usual.bit_length() - 1)
    each_pass = max(1, number // batch)
    steps = given.get("steps") or round(each_pass * _passes(purpose, each_pass))
    needed = _ENOUGH * batch
    held = {share: sizes.number * share if are_alone else sizes.held_out(share) / seq_len for share in _FRACTIONS}
    enough = next((share for share, found in held.items() if found >= needed), None)
    return TrainingChoice(
        seq_len=seq_len,
        batch_size=batch,
        steps=steps,
        passes=steps / each_pass,
        warmup_steps=min(steps // 20, 1000),
        eval_every=0 if enough is None else max(1, steps // 5),
        held_out=_FRACTIONS[0] if enough is None else enough,
        num_longer=0 if purpose.is_text and is_packed else int((sizes.lengths > seq_len).sum()),
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
