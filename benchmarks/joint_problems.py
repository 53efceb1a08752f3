"""The problems with which the joint search is measured: models by random costs, and one that is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers import LlamaConfig

from slipstream.array_types import Floats
from slipstream.cost import Costs, CountedCosts, LinkTime, Work, load_cluster
from slipstream.planner.cuts import Cuts
from slipstream.planner.joint import JointProblem, Tabulated
from slipstream.profile import count_model
from slipstream.schedule import Op

_TOKENS = 2048
_LAYERS = 8
_SHARES = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.1, Op.W: 1.0}  # of a forward's time
_WIDE = {"hidden_size": 12288, "intermediate_size": 28672, "num_hidden_layers": 96, "num_attention_heads": 96}
_LONG = 131072


@dataclass(frozen=True)
class RandomCosts(Costs):
    """Eight layers in halves on a processor, as far from each other as models are.

    Args:
        attention: of the time of a layer on the whole sequence, spent on pairs of tokens.
        head: the head with the loss, in layers.
        fixed: seconds of an action, where a layer takes 0.02 s for the whole sequence.
    """

    attention: float
    head: float
    fixed: float
    latency: float

    @property
    def units_per_layer(self) -> int:
        return 2

    @cached_property
    def parts(self) -> Sequence[int]:
        return (2, *[0, 1] * _LAYERS, 3)

    def link(self, num_ranks: int, replicas: int = 1) -> LinkTime:
        return LinkTime(self.latency)

    @classmethod
    def of(cls, seed: int) -> RandomCosts:
        """Returns the problem's costs with this number."""
        draw = np.random.default_rng(seed)
        return cls(
            attention=draw.uniform(0.1, 0.6),
            head=draw.uniform(0.5, 4.0),
            fixed=draw.uniform(1e-4, 1e-3),
            latency=draw.uniform(5e-5, 3e-4),
        )

    def each_seconds(self, work: Work) -> Floats:
        portion = work.lengths / _TOKENS
        pairs = portion * (2 * work.contexts + work.lengths) / _TOKENS
        attention = 0.3 * (1 - self.attention) * portion + self.attention * pairs
        rows = 0.02 * np.array([attention, 0.7 * (1 - self.attention) * portion, 0.05 * portion, self.head * portion])
        return rows * _SHARES[work.op]

    def fixed_seconds(self, work: Work) -> Floats:
        return np.full(len(work.lengths), self.fixed)

    def message_bytes(self, length: Any) -> Any:
        return 1024.0 * length


def joint_problems() -> Iterator[tuple[str, JointProblem]]:
    """Yields five problems of two ranks, and one of 16 that is 192 halves of layers at 131,072 tokens."""
    for seed in range(5):
        yield f"2 ranks, 8 layers, random costs {seed}", JointProblem(RandomCosts.of(seed), _TOKENS, num_ranks=2)
    model = count_model(LlamaConfig(**_WIDE, num_key_value_heads=8, vocab_size=128256), _LONG)
    costs = CountedCosts(model, load_cluster("h100-dgx").with_nodes(2))
    cuts = Cuts(512)
    tabulated = Tabulated(costs, _LONG, cuts)
    yield "16 ranks, 96 layers, 131,072 tokens", JointProblem(tabulated, _LONG, num_ranks=16, cuts=cuts)
