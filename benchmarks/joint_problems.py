"""The problems with which the joint search is measured: models by random costs, and one that is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from transformers import LlamaConfig

from slipstream.array_types import Floats, Ints
from slipstream.cost import AnalyticCosts, load_cluster
from slipstream.planner.joint import AnalyticUnits, JointProblem
from slipstream.profile import count_model
from slipstream.schedule import Op

_TOKENS = 2048
_SHARES = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.1, Op.W: 1.0}  # of a forward's time
_WIDE = {"hidden_size": 12288, "intermediate_size": 28672, "num_hidden_layers": 96, "num_attention_heads": 96}
_LONG = 131072


@dataclass(frozen=True)
class RandomUnits:
    """Eight layers in halves on a processor, as far from each other as models are (see `UnitCosts`).

    Args:
        attention: of the time of a layer on the whole sequence, spent on pairs of tokens.
        head: the head with the loss, in layers.
        fixed: seconds of an action, where a layer takes 0.02 s for the whole sequence.
    """

    attention: float
    head: float
    fixed: float
    latency: float
    num_layers: int = 8
    units_per_layer: int = 2
    num_frozen_units: int = 0
    bandwidth: float | None = None

    @classmethod
    def of(cls, seed: int) -> RandomUnits:
        """Returns the problem's costs with this number."""
        draw = np.random.default_rng(seed)
        return cls(
            attention=draw.uniform(0.1, 0.6),
            head=draw.uniform(0.5, 4.0),
            fixed=draw.uniform(1e-4, 1e-3),
            latency=draw.uniform(5e-5, 3e-4),
        )

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        portion = lengths / _TOKENS
        pairs = portion * (2 * contexts + lengths) / _TOKENS
        halves = [0.3 * (1 - self.attention) * portion + self.attention * pairs, 0.7 * (1 - self.attention) * portion]
        rows = 0.02 * np.array([0.05 * portion, *halves * self.num_layers, self.head * portion])
        return rows * _SHARES[op], np.full(len(lengths), self.fixed)

    def activation_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        return np.zeros((2 * self.num_layers + 2, len(lengths))), np.zeros(len(lengths))

    def kept_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        return self.activation_bytes(lengths)

    def state_bytes(self) -> Floats:
        return np.zeros(2 * self.num_layers + 2)

    def message_bytes(self, lengths: Ints) -> Floats:
        return 1024.0 * lengths

    def handling_seconds(self, lengths: Ints) -> Floats:
        return np.zeros(len(lengths))


def joint_problems() -> Iterator[tuple[str, JointProblem]]:
    """Yields five problems of two ranks, and one of 16 that is 192 halves of layers at 131,072 tokens."""
    for seed in range(5):
        yield f"2 ranks, 8 layers, random costs {seed}", JointProblem(RandomUnits.of(seed), _TOKENS, num_ranks=2)
    model = count_model(LlamaConfig(**_WIDE, num_key_value_heads=8, vocab_size=128256), _LONG)
    costs = AnalyticCosts(model, load_cluster("h100-dgx").with_nodes(2))
    units = AnalyticUnits(costs, _LONG, 512, num_ranks=16)
    yield "16 ranks, 96 layers, 131,072 tokens", JointProblem(units, _LONG, num_ranks=16, granularity=512)
