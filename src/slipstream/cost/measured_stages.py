"""The few stages to measure so that every other stage of a model is a sum of them.

A stage's time is that of a fixed part and of its own parts:

    row of a stage = [1, parts of kind 0, parts of kind 1, ..., embeddings, heads]

The rows of the measured stages span those of all stages, so any stage is a combination of them. One of them is long:
the fixed part is a difference of measurements, whose errors would count again for every part of a longer stage, and a
long stage divides them by its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Rows are small integers.
_EXACT = 1e-6
_LONGEST = 6  # parts: three layers where these can be cut


def choose_stages(parts: Sequence[int]) -> tuple[range, ...]:
    """Returns the stages to measure, one part of each kind and a run of several; `parts` has the kind of every part."""
    rank = max(parts) + 2
    chosen: list[range] = []
    for stage in _candidates(len(parts)):
        tried = [stage_row(parts, chosen_stage) for chosen_stage in (*chosen, stage)]
        if np.linalg.matrix_rank(np.array(tried)) == len(tried):
            chosen.append(stage)
        if len(chosen) == rank:
            break
    return tuple(chosen)


def stage_row(parts: Sequence[int], stage: range) -> list[float]:
    """Returns the row of a stage."""
    kinds = [parts[part] for part in stage]
    return [1.0, *(float(kinds.count(kind)) for kind in range(max(parts) + 1))]


def combine(parts: Sequence[int], measured: Sequence[range], row: Sequence[float]) -> list[float]:
    """Returns the weight of each measured stage in `row`.

    Raises:
        ValueError: where they don't span it.
    """
    rows = np.array([stage_row(parts, stage) for stage in measured])
    weights = np.linalg.lstsq(rows.T, np.array(row), rcond=None)[0]
    if np.abs(rows.T @ weights - row).max() > _EXACT:
        raise ValueError(f"the measured stages {[*measured]} don't span {[*row]}")
    return [float(weight) for weight in weights.round(9)]


def _candidates(num_parts: int) -> list[range]:
    """Returns stages of one part, then of several, the longest first; those with an end of the model after the others
    of their size."""
    sizes = (1, *range(min(_LONGEST, num_parts), 1, -1))
    stages = [range(a, a + size) for size in sizes for a in range(num_parts - size + 1)]
    return sorted(stages, key=lambda stage: (sizes.index(len(stage)), stage.start == 0 or stage.stop == num_parts))
