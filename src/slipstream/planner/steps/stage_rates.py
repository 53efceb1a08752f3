"""What the stages of a pipeline cost on slices that may hold pieces of several documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.costs import AttentionWindow
from slipstream.schedule import Op


@dataclass(frozen=True)
class StageRates:
    """The seconds and bytes of each stage for a slice, for each of its tokens, and for each score of its attention.

    A slice holds pieces of documents: i tokens that follow j others of their document. It takes

        t = a0 + a1 * (the sum of i) + a2 * (the sum of i j + i (i + 1) / 2)

    TeraPipe's t(i, j) (section 3.3, equation 9) has these terms for a single piece, and more. Pieces add up, because
    only the scores within a document are computed (`slipstream.attention.KeyRanges`); a0, what is launched and sent
    whatever the slice's length, counts once. Windows of attention have an a2 each, for the scores under their masks.

    Args:
        seconds: of F, B, I and W: (stages, 2 + windows), the rates a0, a1, a2.
        activation_bytes: what F keeps for its backward, keys and values included: (stages, 2), of a slice and a token.
        message_bytes: of each token's hidden state.
        latency: seconds of a message, however short.
        bandwidth: bytes per second. None: messages take their latency only.
        windows: of attention.
    """

    seconds: Mapping[Op, Floats]
    activation_bytes: Floats
    message_bytes: float = 0.0
    latency: float = 0.0
    bandwidth: float | None = None
    windows: tuple[AttentionWindow, ...] = (AttentionWindow(),)

    @property
    def num_stages(self) -> int:
        return len(self.activation_bytes)

    def work(self, tokens: Ints, scores: Floats) -> Floats:
        """Returns the seconds of F and B on all stages of so many tokens and scores, (n,) and (n, windows), without
        what a slice costs besides."""
        total = (self.seconds[Op.F] + self.seconds[Op.B]).sum(axis=0)
        work: Floats = total[1] * tokens + scores @ total[2:]
        return work

    def stage_seconds(self, op: Op, tokens: Ints, scores: Floats) -> Floats:
        """Returns the seconds of slices of so many tokens and scores, (n,) and (n, windows): (stages, n)."""
        features = np.concatenate([np.ones((1, len(tokens))), tokens[None], scores.T])
        seconds: Floats = self.seconds[op] @ features
        return seconds

    def held_bytes(self, tokens: Ints) -> Floats:
        """Returns the bytes that F of slices of so many tokens keeps, (stages, n)."""
        held: Floats = self.activation_bytes[:, :1] + self.activation_bytes[:, 1:] * tokens
        return held

    def link_seconds(self, tokens: Ints) -> tuple[Floats, Floats]:
        """Returns the seconds that the messages of slices travel, and for which they occupy their channel, (n,)."""
        occupied = np.zeros(len(tokens))
        if self.bandwidth is not None:
            occupied += self.message_bytes * tokens / self.bandwidth
        return self.latency + occupied, occupied

    def scores(self, num_queries: Ints) -> Floats:
        """Returns the scores of the first queries of a document under each window, (n, windows)."""
        return np.stack([np.asarray(window.scores(num_queries), float) for window in self.windows], axis=1)
