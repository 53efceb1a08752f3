"""The bytes of a stage's actions on a slice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.schedule import Op


@dataclass(frozen=True)
class ActionBytes:
    """The bytes of a stage's actions on a slice. Messages, keys and values, and weight gradients are counted apart.

    Args:
        kept: those that F keeps for the backward.
        deferred: those that I leaves for W, output gradients among it, less those of F's that it frees.
        peaks: the most that F needs above those it keeps, and B, I and W above those in use before.
        alone: the most that F holds where it keeps nothing.
        loss: the most that B and I need besides while they differentiate a loss that runs on some tokens at a time,
            before weights other than the head's have gradients.
    """

    kept: float
    deferred: float
    peaks: Mapping[Op, float]
    alone: float = 0.0
    loss: float = 0.0

    @classmethod
    def estimated(cls, kept: float, made: float, num_layers: int, passing: float = 0.0) -> ActionBytes:
        """Returns the bytes where only those that F keeps are known, those that a backward makes before it frees any,
        and those that pass in both: W needs all that F kept, and a layer's F holds what it would keep."""
        peaks = {Op.F: passing, Op.B: made + passing, Op.I: made + passing, Op.W: 0.0}
        return cls(kept, 0.0, peaks, kept / num_layers + passing)
