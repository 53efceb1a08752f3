"""The bytes that the actions of one stage keep, and those that they hold while they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.schedule import Op


@dataclass(frozen=True)
class ActionBytes:
    """The bytes of a stage's actions on a slice. Messages, keys and values, and weight gradients are counted apart.

    Args:
        kept: what F keeps for the backward.
        deferred: what I leaves for W, output gradients among it, less what it frees of what F kept.
        peaks: the most that F holds above what it keeps, and B, I and W above what was there before.
        alone: the most that F holds where it keeps nothing.
    """

    kept: float
    deferred: float
    peaks: Mapping[Op, float]
    alone: float = 0.0

    @classmethod
    def estimated(cls, kept: float, made: float, num_layers: int) -> ActionBytes:
        """Returns the bytes where only those that F keeps are known, and those that a backward makes before it frees
        any: W needs all that F kept, and a layer's F holds what it would keep."""
        return cls(kept, 0.0, {Op.F: 0.0, Op.B: made, Op.I: made, Op.W: 0.0}, kept / num_layers)
