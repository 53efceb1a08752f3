"""The few stages to measure so that every other stage of a model is a sum of them.

A stage's time is that of its fixed part, its layers, and at the ends the embedding and the head with the loss:

    row of a stage = [1, layers of kind 0, layers of kind 1, ..., is first, is last]

The rows of the measured stages span those of all stages, so any stage is a combination of them, even where a small
model's parts can't be separated (such as the embedding and the only layer that ever follows it).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_EXACT = 1e-6  # rows are small integers


def choose_stages(kinds: Sequence[int]) -> tuple[range, ...]:
    """Returns the stages to measure, of one or two layers each; `kinds[layer]` numbers the layers' kinds from 0."""
    rows = np.array([stage_row(kinds, stage) for stage in _candidates(len(kinds))])
    rank = np.linalg.matrix_rank(rows)
    chosen: list[range] = []
    for stage in _candidates(len(kinds)):
        tried = [stage_row(kinds, each) for each in (*chosen, stage)]
        if np.linalg.matrix_rank(np.array(tried)) == len(tried):
            chosen.append(stage)
        if len(chosen) == rank:
            break
    return tuple(chosen)


def stage_row(kinds: Sequence[int], layers: range) -> list[float]:
    """Returns the row of the stage that has `layers`."""
    own = [kinds[layer] for layer in layers]
    counts = [float(own.count(kind)) for kind in range(max(kinds) + 1)]
    return [1.0, *counts, float(layers.start == 0), float(layers.stop == len(kinds))]


def combine(kinds: Sequence[int], measured: Sequence[range], row: Sequence[float]) -> list[float] | None:
    """Returns the weight of each measured stage in `row`, or None where they don't span it."""
    rows = np.array([stage_row(kinds, stage) for stage in measured])
    weights = np.linalg.lstsq(rows.T, np.array(row), rcond=None)[0]
    if np.abs(rows.T @ weights - row).max() > _EXACT:
        return None
    return [float(weight) for weight in weights.round(9)]


def _candidates(num_layers: int) -> list[range]:
    """Returns the stages of one and two layers, the model's first and last stages at the end."""
    stages = [range(a, a + size) for size in (1, 2) for a in range(num_layers - size + 1)]
    return sorted(stages, key=lambda stage: stage.start == 0 or stage.stop == num_layers)
