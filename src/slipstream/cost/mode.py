"""What changes the costs of a model: how it is trained, and what is kept where.

A Mode wraps costs and is costs. It states the values of a part of every kind that differ; all else follows. What
changes costs is applied in this order:

0. Which system runs it: counted costs ask its record wherever systems differ (`slipstream.cost.system`).
1. Who shares the work: to what is counted, before any speed is known (`slipstream.cost.sharing`). Measured times are
   those of one rank already.
2. What is trained: of counted models by the counts, of measured times by `PartlyTrained`.
3. Which weights are elsewhere: `WithoutHead`, `WithoutLookups`, in either order.
4. How many tokens have logits at a time, `TiledLoss`.
5. How gradients of keys and values are summed, `NarrowContextGradients`; then where they lie, `ContextOnHost`.
6. The update that ends a step, whose state may be spread (`slipstream.cost.update`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.cost.action_bytes import ActionBytes
from slipstream.cost.costs import Costs, LinkTime
from slipstream.cost.host_memory import ANY_HOST, HostMemorySpec
from slipstream.cost.operation_counts import ModelCount, PartCount
from slipstream.cost.sharing import Copies, Divided
from slipstream.cost.system import System
from slipstream.cost.update import Numbers, Update
from slipstream.cost.work import OPS, Stage, StageParts, Work
from slipstream.options import Degrees, host_share
from slipstream.schedule import BACKWARDS, Op
from slipstream.simulator import TableCost


@dataclass(frozen=True)
class Mode(Costs):
    """Costs as the wrapped ones say."""

    costs: Costs

    @property
    def parts(self) -> Sequence[int]:
        return self.costs.parts

    @property
    def units_per_layer(self) -> int:
        return self.costs.units_per_layer

    @property
    def num_frozen_parts(self) -> int:
        return self.costs.num_frozen_parts

    @property
    def microbatch_size(self) -> int:
        return self.costs.microbatch_size

    @property
    def dtype_bytes(self) -> int:
        return self.costs.dtype_bytes

    @property
    def vocab_size(self) -> int:
        return self.costs.vocab_size

    @property
    def num_head_weights(self) -> int:
        return self.costs.num_head_weights

    @property
    def degrees(self) -> Degrees:
        return self.costs.degrees

    @property
    def divided(self) -> Divided:
        return self.costs.divided

    @property
    def system(self) -> System:
        return self.costs.system

    @property
    def is_tied(self) -> bool:
        return self.costs.is_tied

    @property
    def whole_is_least(self) -> bool:
        return self.costs.whole_is_least

    def least_seconds(self, length: int) -> float:
        return self.costs.least_seconds(length)

    @property
    def deserves_table(self) -> bool:
        return self.costs.deserves_table

    def each_seconds(self, work: Work) -> Floats:
        return self.costs.each_seconds(work)

    def fixed_seconds(self, work: Work) -> Floats:
        return self.costs.fixed_seconds(work)

    def each_exchange(self, work: Work) -> Floats:
        return self.costs.each_exchange(work)

    def each_selective_replay(self, work: Work) -> Floats:
        return self.costs.each_selective_replay(work)

    def each_activation(self, lengths: Any) -> Floats:
        return self.costs.each_activation(lengths)

    def fixed_activation(self, lengths: Any) -> Floats:
        return self.costs.fixed_activation(lengths)

    def each_product(self, lengths: Any) -> Floats:
        return self.costs.each_product(lengths)

    @cached_property
    def each_state(self) -> Floats:
        return self.costs.each_state

    @cached_property
    def each_context(self) -> Floats:
        return self.costs.each_context

    @cached_property
    def each_context_gradient(self) -> Floats:
        return self.costs.each_context_gradient

    def each_reach(self, contexts: Ints) -> Floats:
        return self.costs.each_reach(contexts)

    @property
    def host_context(self) -> Costs | None:
        return self.costs.host_context

    def on_host(self, sizes: Any) -> Any:
        return self.costs.on_host(sizes)

    @property
    def host_share(self) -> float:
        return self.costs.host_share

    @cached_property
    def each_number(self) -> Numbers:
        return self.costs.each_number

    def each_weight(self, each: float) -> Floats:
        return self.costs.each_weight(each)

    def message_bytes(self, length: Any) -> Any:
        return self.costs.message_bytes(length)

    def handling_seconds(self, length: Any) -> Any:
        return self.costs.handling_seconds(length)

    def link(self, num_ranks: int, replicas: int = 1) -> LinkTime:
        return self.costs.link(num_ranks, replicas)

    def action_costs(
        self, times: Mapping[tuple[int, int, Op], float], slices: Sequence[int], data_parallel: int = 1
    ) -> TableCost:
        return self.costs.action_costs(times, slices, data_parallel)

    def action_bytes(self, stage: Stage, length: int) -> ActionBytes:
        return self.costs.action_bytes(stage, length)

    def passing_bytes(self, stage: Stage) -> float:
        return self.costs.passing_bytes(stage)

    def logits_gradient_bytes(self, stage: Stage, length: int) -> float:
        return self.costs.logits_gradient_bytes(stage, length)

    def gathering_seconds(self, num_bytes: float, copies: Copies) -> float:
        return self.costs.gathering_seconds(num_bytes, copies)

    def update_seconds(self, update: Update, trained: float, optimized: float) -> float:
        return self.costs.update_seconds(update, trained, optimized)


@dataclass(frozen=True)
class PartlyTrained(Mode):
    """Costs of training a part of a model that were measured with all weights trained.

    Where some weights are frozen, or an adapter is trained beside them, a part's F, I and W take as much of the
    measured time as their counted products are of those with all weights trained: nothing of I and W below the lowest
    trained part, no W of a frozen one, a little more of F where there is an adapter. The smaller memory of a frozen
    layer isn't known, so that above the lowest trained part activations count as measured.

    Args:
        whole: the counted model with all weights trained.
        part: the same with the trained weights.
    """

    whole: ModelCount
    part: ModelCount

    @cached_property
    def _kinds(self) -> list[tuple[int, int, int]]:
        """The kinds of parts: of the measured costs, of the whole count and of the partly trained one."""
        return [*dict.fromkeys(self._kinds_of_parts)]

    @property
    def _kinds_of_parts(self) -> list[tuple[int, int, int]]:
        return list(zip(self.costs.parts, self.whole.parts, self.part.parts, strict=True))

    @cached_property
    def parts(self) -> Sequence[int]:
        return tuple(map(self._kinds.index, self._kinds_of_parts))

    @property
    def num_frozen_parts(self) -> int:
        return self.part.num_frozen_parts

    @cached_property
    def _measured(self) -> list[int]:
        return [kind for kind, _, _ in self._kinds]

    @cached_property
    def _pairs(self) -> list[tuple[PartCount, PartCount]]:
        return [(self.whole.of_kind[whole], self.part.of_kind[part]) for _, whole, part in self._kinds]

    def _held(self, value: Callable[[PartCount], tuple[float, float]]) -> tuple[Floats, Floats]:
        """Returns a rank's share of a number of a part of each kind, in all and in experts: with all weights trained,
        and with the trained ones."""
        held = [[self.divided.held(*value(count)) for count in pair] for pair in self._pairs]
        whole, part = np.array(held, float).T
        return whole, part

    def each_seconds(self, work: Work) -> Floats:
        if work.op is Op.B:
            inputs, weights = (self.costs.each_seconds(work._replace(op=op))[self._measured] for op in (Op.I, Op.W))
            both = inputs + weights
            computed = inputs * self._shares[Op.I][:, None] + weights * self._shares[Op.W][:, None]
            share = np.divide(computed, both, out=np.zeros_like(both), where=both > 0)
            return self.costs.each_seconds(work)[self._measured] * share
        op = Op.F if work.op is Op.R else work.op
        return self.costs.each_seconds(work)[self._measured] * self._shares[op][:, None]

    @cached_property
    def _shares(self) -> dict[Op, Floats]:
        """The part of a part's measured F, I and W that remains."""
        return {op: np.array([_share(op, *pair) for pair in self._pairs]) for op in (Op.F, Op.I, Op.W)}

    def each_exchange(self, work: Work) -> Floats:
        return self.costs.each_exchange(work)[:, self._measured]

    def each_selective_replay(self, work: Work) -> Floats:
        return self.costs.each_selective_replay(work)[self._measured]

    def each_activation(self, lengths: Any) -> Floats:
        return self.costs.each_activation(lengths)[self._measured]

    def each_product(self, lengths: Any) -> Floats:
        return self.costs.each_product(lengths)[self._measured]

    @cached_property
    def each_state(self) -> Floats:
        return self.costs.each_state[self._measured]

    @cached_property
    def each_context(self) -> Floats:
        return self.costs.each_context[self._measured]

    @cached_property
    def each_context_gradient(self) -> Floats:
        return self.costs.each_context_gradient[self._measured] * self.each_has_backward

    def each_reach(self, contexts: Ints) -> Floats:
        return self.costs.each_reach(contexts)[self._measured]

    @cached_property
    def each_number(self) -> Numbers:
        before, now = self._held(lambda part: (part.num_parameters, part.num_in_experts))
        numbers = self.costs.each_number.all[self._measured] + (now - before).round()
        _, untrained = self._held(lambda part: (part.num_untrained, part.num_in_experts - part.num_trained_in_experts))
        _, in_experts = self._held(lambda part: (part.num_trained_in_experts, part.num_trained_in_experts))
        spread = in_experts.round() * (self.divided.experts > 1)
        return Numbers(numbers, np.maximum(0.0, numbers - untrained.round()), spread)

    def each_weight(self, each: float) -> Floats:
        _, saved = self._held(lambda part: (part.saved_bytes(each), 0.0))
        return each * self.each_number.all - saved

    def action_bytes(self, stage: Stage, length: int) -> ActionBytes:
        parts = self.parts_of(stage)
        if self.has_backward(stage):
            return self.costs.action_bytes(StageParts(max(parts.start, self.num_frozen_parts), parts.stop), length)
        during = self.costs.action_bytes(stage, length).alone
        return ActionBytes(0.0, 0.0, dict.fromkeys(OPS, 0.0) | {Op.F: during}, during)


def _share(op: Op, whole: PartCount, part: PartCount) -> float:
    """Returns the products of an op in relation to those with all weights trained; of a part without products whether
    the op runs."""
    runs = {Op.F: True, Op.I: part.has_backward, Op.W: part.num_trained > 0}[op]
    before, now = (count.ops[op].flops.per_token for count in (whole, part))
    return float(runs) if not before else now / before * runs


@dataclass(frozen=True)
class WithoutHead(Mode):
    """Costs of which the head takes nothing, as its rows are spread over the ranks."""

    @cached_property
    def parts(self) -> Sequence[int]:
        # a kind of its own, which no other part shares
        return (*self.costs.parts[:-1], self.costs.num_kinds)

    @property
    def num_frozen_parts(self) -> int:
        # the rows of a head that is trained are next to any stage, also to frozen ones
        return 0

    def each_seconds(self, work: Work) -> Floats:
        return _and_nothing(self.costs.each_seconds(work))

    def each_exchange(self, work: Work) -> Floats:
        return np.stack([_and_nothing(kind) for kind in self.costs.each_exchange(work)])

    def each_activation(self, lengths: Any) -> Floats:
        return _and_nothing(self.costs.each_activation(lengths))

    def each_product(self, lengths: Any) -> Floats:
        return _and_nothing(self.costs.each_product(lengths))

    @cached_property
    def each_state(self) -> Floats:
        return _and_nothing(self.costs.each_state)

    @cached_property
    def each_context(self) -> Floats:
        return _and_nothing(self.costs.each_context)

    @cached_property
    def each_context_gradient(self) -> Floats:
        return _and_nothing(self.costs.each_context_gradient)

    def each_reach(self, contexts: Ints) -> Floats:
        return _and_nothing(self.costs.each_reach(contexts))

    @cached_property
    def each_number(self) -> Numbers:
        return Numbers(*map(_and_nothing, self.costs.each_number))

    def each_weight(self, each: float) -> Floats:
        return _and_nothing(self.costs.each_weight(each))


def _and_nothing(rows: Floats) -> Floats:
    # For one more kind.
    return np.concatenate([rows, np.zeros_like(rows[:1])])


@dataclass(frozen=True)
class WithoutLookups(Mode):
    """Costs of the model whose embedding has no weight for its tokens, as the rows of a spread, tied head have it."""

    @cached_property
    def each_number(self) -> Numbers:
        whole = self.costs.each_number
        left = np.zeros(self.num_kinds)
        left[self.parts[0]] = self.num_head_weights
        return Numbers(whole.all - left, whole.trained - left, whole.trained_in_experts)

    def each_weight(self, each: float) -> Floats:
        weights = self.costs.each_weight(each).copy()
        weights[self.parts[0]] -= each * self.num_head_weights
        return weights


@dataclass(frozen=True)
class ContextOnHost(Mode):
    """Costs of a device that has none of the keys, values and gradients of them, or some, as others lie on the host.

    A slice fetches those of earlier slices, block after block, while it attends to the blocks before; its own ones,
    which its backward needs first, it waits for. In a backward the sums of the gradients come and go with them:

        seconds = max(all that is computed, what is computed without context + bytes of the context / bandwidth)
                  + bytes of the slice's own / bandwidth          in a backward, or a forward that runs again

    Of a share that is on the host, these are the bytes of those tokens that come first; whole slices of them, which
    only the memory of an order knows.

    So copies are hidden where slices are long: of a slice of n tokens, one of the context takes n times its scores, and
    its bytes once.

    Args:
        costs: those with keys and values on the device.
        host: whose memory they are in.
        share: of each sequence's tokens that has them there, the first.
        seq_len: tokens of a sequence.
    """

    host: HostMemorySpec
    share: float = 1.0
    seq_len: float = inf

    @property
    def host_context(self) -> Costs | None:
        return self.costs

    def on_host(self, sizes: Any) -> Any:
        return self.host.held_bytes(sizes)

    @property
    def host_share(self) -> float:
        return self.share

    @cached_property
    def each_context(self) -> Floats:
        return (1 - self.share) * self.costs.each_context

    @cached_property
    def each_context_gradient(self) -> Floats:
        return (1 - self.share) * self.costs.each_context_gradient

    def each_seconds(self, work: Work) -> Floats:
        seconds = self.costs.each_seconds(work)
        if not self.host.is_apart or work.op is Op.W:
            return seconds
        keys = self.costs.each_context
        sums = self.costs.each_context_gradient
        own = 0.0 * keys
        moved = keys
        if work.op in BACKWARDS:
            own = self.each_has_backward * (keys + sums)
            moved = self.each_has_backward * (keys + 2 * sums)
        elif work.op is Op.R:
            own = keys
        num_there = inf if self.share == 1 else self.share * self.seq_len
        first_seen = work.contexts - self.costs.each_reach(work.contexts)
        copied = moved[:, None] * np.maximum(0.0, np.minimum(work.contexts, num_there) - first_seen)
        alone = self.costs.each_seconds(work._replace(contexts=np.zeros_like(work.contexts)))
        longest = np.maximum(seconds, alone + copied / self.host.bandwidth)
        return longest + np.outer(own, work.lengths * (work.contexts < num_there)) / self.host.bandwidth

    def action_bytes(self, stage: Stage, length: int) -> ActionBytes:
        action = self.costs.action_bytes(stage, length)
        if not self.host.is_apart:
            return action
        # Blocks are about as long as the slice: one is used, and the next one comes; in a backward the one before goes.
        has = self.count(stage) > 0
        keys = length * float((self.costs.each_context * has).max())
        sums = length * float((self.costs.each_context_gradient * has).max())
        more = {Op.F: 2 * keys, Op.B: 2 * keys + 3 * sums, Op.I: 2 * keys + 3 * sums, Op.W: 0.0}
        peaks = {op: peak + more.get(op, 0.0) for op, peak in action.peaks.items()}
        return replace(action, peaks=peaks, alone=action.alone + more[Op.F])


def with_context(costs: Costs, context: str | float, host: HostMemorySpec | None, seq_len: float = inf) -> Costs:
    """Returns the costs where keys and values lie on the "device" or on the "host", or a share of those of sequences of
    `seq_len` tokens there."""
    share = host_share(context)
    return ContextOnHost(costs, host or ANY_HOST, share, seq_len) if share else costs


_WIDE = 4  # bytes of a logit's gradient in float32


@dataclass(frozen=True)
class TiledLoss(Mode):
    """Costs where the head and the loss run on some tokens of a slice at a time, and again in the backward: so the
    logits of no more tokens exist, and none are kept.

    Args:
        num_tokens: of a row, whose logits exist at the same time.
    """

    num_tokens: int

    @property
    def _head(self) -> StageParts:
        last = len(self.costs.parts) - 1
        return StageParts(last, last + 1)

    def _of_head(self, row: Any) -> Floats:
        """Returns a row of the head's kind, and zeros for other kinds, (kinds, slices)."""
        rows = np.zeros((self.num_kinds, len(row)))
        rows[self.parts[-1]] = row
        return rows

    def each_seconds(self, work: Work) -> Floats:
        seconds = self.costs.each_seconds(work)
        if work.op not in (Op.B, Op.I):
            return seconds
        again = self.costs.each_seconds(work._replace(op=Op.F))[self.parts[-1]]
        return seconds + self._of_head(again * self.each_has_backward[self.parts[-1]])

    def _kept_logits(self, lengths: Any) -> Floats:
        """Returns what the head keeps otherwise, (kinds, slices): probabilities, as wide as the gradient."""
        return self._of_head([self.costs.logits_gradient_bytes(self._head, int(length)) for length in lengths])

    def each_activation(self, lengths: Any) -> Floats:
        return np.maximum(self.costs.each_activation(lengths) - self._kept_logits(lengths), 0.0)

    def each_product(self, lengths: Any) -> Floats:
        return np.maximum(self.costs.each_product(lengths) - self._kept_logits(lengths), 0.0)

    def logits_gradient_bytes(self, stage: Stage, length: int) -> float:
        return self.costs.logits_gradient_bytes(stage, min(length, self.num_tokens))

    def action_bytes(self, stage: Stage, length: int) -> ActionBytes:
        action = self.costs.action_bytes(stage, length)
        if not self.has_head(stage) or not self.has_backward(stage):
            return action
        parts = self.parts_of(stage)
        before = StageParts(parts.start, parts.stop - 1)
        others = ActionBytes.estimated(0.0, 2 * float(self.message_bytes(length)), 1)
        if before.start < before.stop:
            others = self.costs.action_bytes(before, length)
        tile = self.logits_gradient_bytes(stage, length)
        whole = self.costs.logits_gradient_bytes(stage, length)
        kept = max(0.0, action.kept - whole)
        # W multiplies the gradients of all logits, in the model's type.
        deferred = others.deferred + whole * min(1.0, self.dtype_bytes / _WIDE)
        # A forward has logits and probabilities at the same time, a backward these and the gradients of both.
        peaks = {op: max(peak, 2 * tile * (op is Op.F)) for op, peak in others.peaks.items()}
        alone = max(others.alone, others.peaks[Op.F], 2 * tile)
        return ActionBytes(kept, deferred, peaks, alone, loss=3 * tile)


def with_loss_tokens(costs: Costs, num_tokens: int) -> Costs:
    """Returns the costs where so many tokens of a slice have logits at a time; 0: all of them."""
    return TiledLoss(costs, num_tokens) if num_tokens else costs


@dataclass(frozen=True)
class NarrowContextGradients(Mode):
    """Costs where the gradients of keys and values are summed in the type of these, and so are as large."""

    @cached_property
    def each_context_gradient(self) -> Floats:
        # A part without a backward has none.
        return np.minimum(self.costs.each_context_gradient, self.costs.each_context)


def with_context_gradients(costs: Costs, kind: str) -> Costs:
    """Returns the costs where gradients of keys and values are summed in "wide" numbers or in those of the "model"."""
    return NarrowContextGradients(costs) if kind == "model" else costs
