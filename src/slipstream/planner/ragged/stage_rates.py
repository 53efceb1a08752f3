"""The rates of a pipeline's stages on slices that may hold pieces of several documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from typing import Any, Self

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.cost import OPS, AttentionWindow, Costs, LinkTime, Work, unit_bounds
from slipstream.cost.fit import fit_relative
from slipstream.errors import SlipstreamError
from slipstream.planner.cuts import Cuts
from slipstream.planner.joint import SlicedUnits
from slipstream.schedule import Op
from slipstream.simulator import TableCost

_LITTLE = 1e-6  # share of a slice's fixed part
_LEAST = 1e-12  # seconds of any action


@dataclass(frozen=True)
class StageRates(Costs):
    """The costs of stages that stay where they are, each a part of its own: seconds and bytes for a slice, for each of
    its tokens, and for each score of its attention.

    A slice holds pieces of documents: i tokens that follow j others of their document. It takes

        t = a0 + a1 * (the sum of i) + a2 * (the sum of i j + i (i + 1) / 2)

    TeraPipe's t(i, j) (section 3.3, equation 9) has these terms for a single piece, and more. Pieces add up, because
    only the scores within a document are computed (`slipstream.attention.KeyRanges`); a0, the launches and messages of
    any slice, counts once. Windows of attention have an a2 each, for the scores under their masks.

    Args:
        rates: of F, B, I and W: (stages, 2 + windows), a0, a1 and a2 in seconds.
        held: bytes kept by F for its backward, keys and values included: (stages, 2), of a slice and a token.
        token_bytes: of each token's hidden state in a message.
        latency: seconds of a message, however short.
        bandwidth: bytes per second. None: messages take their latency only.
        windows: of attention.
    """

    rates: Mapping[Op, Floats]
    held: Floats
    token_bytes: float = 0.0
    latency: float = 0.0
    bandwidth: float | None = None
    windows: tuple[AttentionWindow, ...] = (AttentionWindow(),)

    @property
    def num_stages(self) -> int:
        return len(self.held)

    @cached_property
    def parts(self) -> Sequence[int]:
        return range(self.num_stages)

    @cached_property
    def num_frozen_parts(self) -> int:
        trains = np.sum([self.rates[op].any(axis=1) for op in (Op.B, Op.I)], axis=0) > 0
        return int(trains.argmax())

    @cached_property
    def sends_back(self) -> Flags:
        """Marks the stages that send a gradient to the stage before."""
        return self.trains_below(self.parts)

    def each_seconds(self, work: Work) -> Floats:
        after = self.scores(work.contexts + work.lengths)
        return self.stage_seconds(work.op, work.lengths, after - self.scores(work.contexts))

    def each_activation(self, lengths: Any) -> Floats:
        return self.held_bytes(lengths)

    def message_bytes(self, length: Any) -> Any:
        return self.token_bytes * np.asarray(length)

    def link(self, num_ranks: int, replicas: int = 1) -> LinkTime:
        return LinkTime(self.latency, self.bandwidth)

    def to_json(self) -> dict[str, Any]:
        """Returns the rates as JSON and YAML hold them: `from_json` finds the same numbers, to the bit."""
        return {
            "seconds": {op.value: rates.tolist() for op, rates in self.rates.items()},
            "activation_bytes": self.held.tolist(),
            "message_bytes": self.token_bytes,
            "latency": self.latency,
            "bandwidth": self.bandwidth,
            "windows": [asdict(window) for window in self.windows],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Returns the rates that `to_json` wrote. Raises SlipstreamError where something is missing or has another
        shape."""
        try:
            windows = tuple(AttentionWindow(**window) for window in values["windows"])
            rates = {Op(name): np.array(of_op, float) for name, of_op in values["seconds"].items()}
            held = np.array(values["activation_bytes"], float)
            of_token, latency, bandwidth = (values[name] for name in ("message_bytes", "latency", "bandwidth"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SlipstreamError(f"the rates of stages can't be read ({error!r}): plan anew.") from None
        shapes = {"activation_bytes": held.shape} | {f"seconds.{op.value}": s.shape for op, s in rates.items()}
        wanted = {name: (len(held), 2 + (name != "activation_bytes") * len(windows)) for name in shapes}
        if shapes != wanted or rates.keys() != set(OPS):
            raise SlipstreamError(f"the rates of stages have the shapes {shapes}, not {wanted}, of {OPS}: plan anew.")
        return cls(rates, held, of_token, latency, bandwidth, windows)

    def work(self, tokens: Ints, scores: Floats) -> Floats:
        """Returns the seconds of F and B on all stages of so many tokens and scores, (n,) and (n, windows), without a
        slice's fixed part.

        Where no time grows with the tokens, as in models so small that only a slice's fixed part was seen, each token
        takes a little of that, so that equal parts are those of equal length.
        """
        total = (self.rates[Op.F] + self.rates[Op.B]).sum(axis=0)
        if not total[1:].any():
            total[1] = _LITTLE * total[0] if total[0] else 1.0
        work: Floats = total[1] * tokens + scores @ total[2:]
        return work

    def stage_seconds(self, op: Op, tokens: Ints, scores: Floats) -> Floats:
        """Returns the seconds of slices of so many tokens and scores, (n,) and (n, windows): (stages, n)."""
        features = np.concatenate([np.ones((1, len(tokens))), tokens[None], scores.T])
        seconds: Floats = self.rates[op] @ features
        return seconds

    def action_seconds(self, tokens: Ints, scores: Floats) -> dict[Op, Floats]:
        """Returns the seconds of F, B, I and W of slices of so many tokens and scores, (stages, n), none quite 0."""
        return {op: np.maximum(self.stage_seconds(op, tokens, scores), _LEAST) for op in OPS}

    def table(self, tokens: Ints, seconds: Mapping[Op, Floats]) -> TableCost:
        """Returns the simulator's costs of a microbatch in slices of so many tokens and `action_seconds`."""
        return TableCost(
            times={(g, i, op): float(value) for op in OPS for (g, i), value in np.ndenumerate(seconds[op])},
            message_bytes=[float(self.token_bytes * count) for count in tokens],
            latency=self.latency,
            bandwidth=self.bandwidth,
            activations={key: float(value) for key, value in np.ndenumerate(self.held_bytes(tokens))},
        )

    def on_slices(self, slices: Sequence[int]) -> TableCost:
        """Returns the simulator's costs of the stages on slices of a row."""
        tokens = np.array(slices, np.int64)
        ends = np.array([0, *accumulate(slices)], np.int64)
        return self.table(tokens, self.action_seconds(tokens, np.diff(self.scores(ends), axis=0)))

    def of_rows(self, num_rows: int) -> StageRates:
        """Returns the rates of microbatches of `num_rows` rows, given those of one row."""
        more = np.array([1.0, *(num_rows for _ in self.windows), num_rows])
        rates = {op: of_op * more for op, of_op in self.rates.items()}
        held = self.held * np.array([1.0, num_rows])
        return replace(self, rates=rates, held=held, token_bytes=num_rows * self.token_bytes)

    def holding(self, kept: Mapping[tuple[int, int], float], slices: Sequence[int]) -> StageRates:
        """Returns the rates whose activations are those that slices of a row are known to keep, by stage and slice, for
        each token."""
        held = np.zeros((self.num_stages, 2))
        for (stage, index), size in kept.items():
            held[stage, 1] = max(held[stage, 1], size / slices[index])
        return replace(self, held=held)

    def held_bytes(self, tokens: Ints) -> Floats:
        """Returns the bytes that F of slices of so many tokens keeps, (stages, n)."""
        held: Floats = self.held[:, :1] + self.held[:, 1:] * tokens
        return held

    def link_seconds(self, tokens: Ints) -> tuple[Floats, Floats]:
        """Returns the seconds that the messages of slices travel, and for which they occupy their channel, (n,)."""
        occupied = np.zeros(len(tokens))
        if self.bandwidth is not None:
            occupied += self.token_bytes * tokens / self.bandwidth
        return self.latency + occupied, occupied

    def scores(self, num_queries: Ints) -> Floats:
        """Returns the scores of the first queries of a document under each window, (n, windows)."""
        return np.stack([np.asarray(window.scores(num_queries), float) for window in self.windows], axis=1)


_POINTS = 5  # numbers of slice lengths, and of contexts


def fit_rates(
    costs: Costs,
    partition: Sequence[float],
    cuts: Cuts,
    longest_sequence: int,
    windows: Sequence[AttentionWindow] = (AttentionWindow(),),
    recompute: str = "none",
) -> StageRates:
    """Returns the rates with the least squared relative error to the parts' times; none is below 0. Stages whose
    parameters are all frozen have no backward.

    Args:
        costs: of the model's parts, for microbatches of one row.
        partition: layers of each stage, in halves where layers can be cut.
        cuts: where sequences may be cut, so that the times of slices are known from a granule to the longest.
        longest_sequence: where contexts end.
        windows: of attention.
        recompute: the recomputation before backwards or within them.
    """
    longest_slice = cuts.longest_slice or longest_sequence
    shortest_slice = min(cuts.granularity, longest_slice)
    lengths = np.unique(np.geomspace(shortest_slice, longest_slice, _POINTS).round().astype(np.int64))
    contexts = np.linspace(0, max(longest_sequence - longest_slice, 0), _POINTS).round().astype(np.int64)
    i, j = np.array([*product(lengths, np.unique(contexts))], np.int64).T
    bounds = unit_bounds(partition, costs.num_layers, costs.units_per_layer)
    scores = [np.asarray(window.scores(i + j) - window.scores(j), float) for window in windows]
    features = np.stack([np.ones(len(i)), i.astype(float), *scores], axis=1)
    link = costs.link(2)
    points = SlicedUnits(costs, tuple(i.tolist()), link, recompute, tuple(j.tolist()))
    held = SlicedUnits(costs, tuple(lengths.tolist()), link).stage_activations(bounds)
    per_token = np.stack([np.ones(len(lengths)), lengths.astype(float)], axis=1)
    return StageRates(
        rates={op: _fitted(features, points.stage_seconds(op, bounds)) for op in OPS},
        held=_fitted(per_token, held),
        token_bytes=float(costs.message_bytes(lengths[-1:])[0] / lengths[-1]),
        latency=link.latency,
        bandwidth=link.bandwidth,
        windows=tuple(windows),
    )


def _fitted(features: Floats, stages: Floats) -> Floats:
    return np.array([fit_relative(features, values, values.max() * 1e-6) for values in stages])
