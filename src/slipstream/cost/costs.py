"""The costs of a model's work on one rank: those of a part of each kind, and their sums, those of any stage.

`Costs` is the one interface by which a plan learns what a piece costs. Operations that were counted on described
hardware, measured times, observed steps, and estimates each state what a part of every kind costs; what follows from
that, such as the costs of stages, is said here once. A `Mode` (`slipstream.cost.mode`) wraps costs to change them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.cost.action_bytes import ActionBytes
from slipstream.cost.sharing import EXCHANGES, Copies, Divided, divided_by
from slipstream.cost.system import SLIPSTREAM, System
from slipstream.cost.update import Numbers, Update
from slipstream.cost.work import (
    OPS,
    WITH_MESSAGES,
    Stage,
    StageParts,
    Work,
    check_partition,
    messages_of_stages,
    parts_of,
)
from slipstream.errors import SlipstreamError
from slipstream.options import UNSHARED, Degrees
from slipstream.schedule import BACKWARDS, Op
from slipstream.simulator import TableCost


class LinkTime(NamedTuple):
    """A message between neighbouring ranks takes `latency` + bytes / `bandwidth` seconds."""

    latency: float = 0.0
    bandwidth: float | None = None  # bytes per second. None: messages take only their latency


NO_LINK = LinkTime()


class Costs(ABC):
    """The costs of a model's parts on one rank, for microbatches of one size.

    Methods that begin with `each_` return a value for a part of each kind, (kinds, ...), without the fixed part that
    every stage has besides its parts. Other methods take a stage, by its layers or its parts. Times are in seconds,
    sizes in bytes. A slice's length and context are in tokens of each sequence.
    """

    # --- what they are the costs of ----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def parts(self) -> Sequence[int]:
        """The kind of every part of the model, in order: the embedding, the units of the layers, the head."""

    @property
    def units_per_layer(self) -> int:
        """2 where the halves of layers are known, else 1."""
        return 1

    @property
    def num_frozen_parts(self) -> int:
        """The first parts without a backward, as nothing up to there is trained."""
        return 0

    @property
    def microbatch_size(self) -> int:
        """The sequences of a microbatch."""
        return 1

    @property
    def dtype_bytes(self) -> int:
        """The bytes of a number that is sent between stages."""
        return 4

    @property
    def vocab_size(self) -> int:
        """The rows of the head."""
        return 0

    @property
    def num_head_weights(self) -> int:
        """The elements of the head's matrix."""
        return 0

    @property
    def is_tied(self) -> bool:
        """Whether the head's matrix embeds the tokens, too."""
        return False

    @property
    def degrees(self) -> Degrees:
        """By how many ranks a stage's work is shared."""
        return UNSHARED

    @property
    def divided(self) -> Divided:
        """Among how many of these ranks each quantity is divided."""
        return divided_by(self.degrees)

    @property
    def system(self) -> System:
        """The training system that runs the work."""
        return SLIPSTREAM

    # --- what a search may take for granted --------------------------------------------------------------------------

    @property
    def whole_is_least(self) -> bool:
        """Whether a whole sequence takes no longer than its slices do together, however it is cut."""
        return False

    def least_seconds(self, length: int) -> float:
        """Returns the least seconds of forward and backward of all parts on a sequence, however it is cut; 0 where
        slices may be faster by an unknown amount."""
        return 0.0

    @property
    def deserves_table(self) -> bool:
        """Whether a search of many slices is faster with a table of the seconds, made once."""
        return False

    # --- seconds of a part of each kind ------------------------------------------------------------------------------

    @abstractmethod
    def each_seconds(self, work: Work) -> Floats:
        """Returns the seconds of the work, (kinds, slices); those of a backward are 0 for a part without one."""

    def fixed_seconds(self, work: Work) -> Floats:
        """Returns the seconds that an action of any stage takes besides its parts, (slices,)."""
        return np.zeros(len(work.lengths))

    def each_exchange(self, work: Work) -> Floats:
        """Returns the part of them that are exchanges of ranks that share work, (EXCHANGES, kinds, slices)."""
        return np.zeros((len(EXCHANGES), self.num_kinds, len(work.lengths)))

    def each_selective_replay(self, work: Work) -> Floats:
        """Returns the seconds in which selective recomputation repeats the parts' F, (kinds, slices).

        Raises:
            SlipstreamError: where they aren't known.
        """
        raise SlipstreamError(
            "recompute='selective' can't be predicted by measured times. Give none, full, stage or stage+full, or plan "
            "on a described cluster."
        )

    # --- bytes of a part of each kind --------------------------------------------------------------------------------

    def each_activation(self, lengths: Any) -> Floats:
        """Returns the bytes that F keeps for its backward without recomputation, except keys and values, and with the
        states that it leaves to the next slice, (kinds, slices)."""
        return np.zeros((self.num_kinds, len(lengths)))

    def fixed_activation(self, lengths: Any) -> Floats:
        """Returns the bytes of them that a stage keeps besides its parts, (slices,)."""
        return np.zeros(len(lengths))

    def each_product(self, lengths: Any) -> Floats:
        """Returns the bytes of the outputs of products and attention, which selective recomputation keeps, (kinds,
        slices)."""
        return np.zeros((self.num_kinds, len(lengths)))

    @cached_property
    def each_state(self) -> Floats:
        """The bytes of the states that a slice leaves to the next one, besides keys and values, (kinds,)."""
        return np.zeros(self.num_kinds)

    @cached_property
    def each_context(self) -> Floats:
        """The bytes of a token's keys and values, (kinds,)."""
        return np.zeros(self.num_kinds)

    @cached_property
    def each_context_gradient(self) -> Floats:
        """The bytes of their gradients, (kinds,)."""
        return np.zeros(self.num_kinds)

    def each_reach(self, contexts: Ints) -> Floats:
        """Returns how many of the tokens before a slice its first query attends to, (kinds, slices)."""
        return np.broadcast_to(np.asarray(contexts, float), (self.num_kinds, len(contexts)))

    @property
    def host_context(self) -> Costs | None:
        """The costs that say how large the keys and values are where some lie on the host. None: all are on the
        device."""
        return None

    def on_host(self, sizes: Any) -> Any:
        """Returns the bytes that tensors of these sizes take on the host."""
        return sizes

    @property
    def host_share(self) -> float:
        """The share of keys and values on the host, those of each sequence's first slices."""
        return 0.0

    @cached_property
    def each_number(self) -> Numbers:
        """The numbers of parameters, (kinds,)."""
        return Numbers(*np.zeros((3, self.num_kinds)))

    def each_weight(self, each: float) -> Floats:
        """Returns the bytes of weights, (kinds,), of which those that aren't quantised take `each`."""
        return each * self.each_number.all

    # --- messages ----------------------------------------------------------------------------------------------------

    def message_bytes(self, length: Any) -> Any:
        """Returns the bytes of a slice's message to the next stage, as large as its gradient back."""
        return 0.0 * np.asarray(length)

    def handling_seconds(self, length: Any) -> Any:
        """Returns the seconds for which a slice's message keeps each of its two ranks from computing."""
        return 0.0 * np.asarray(length)

    def link(self, num_ranks: int, replicas: int = 1) -> LinkTime:
        """Returns the slowest link between neighbours of a pipeline of which there are so many `replicas`."""
        return NO_LINK

    def action_costs(
        self, times: Mapping[tuple[int, int, Op], float], slices: Sequence[int], data_parallel: int = 1
    ) -> TableCost:
        """Returns the simulator's costs with the given times by (stage, slice, op) and the links' times of messages."""
        link = self.link(2)
        return TableCost(
            times=times,
            message_bytes=[float(self.message_bytes(length)) for length in slices],
            latency=link.latency,
            bandwidth=link.bandwidth,
        )

    # --- replicas and the optimizer ----------------------------------------------------------------------------------

    def gathering_seconds(self, num_bytes: float, copies: Copies) -> float:
        """Returns the time in which ranks with the same weights gather, or reduce-scatter, so many bytes."""
        return 0.0

    def update_seconds(self, update: Update, trained: float, optimized: float) -> float:
        """Returns the time of the rule on so many trained parameters, of so many of which the state is here."""
        return 0.0

    # --- the parts of a stage ----------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """The layers of the model."""
        return (len(self.parts) - 2) // self.units_per_layer

    @cached_property
    def num_kinds(self) -> int:
        """The kinds of parts."""
        return max(self.parts) + 1

    @cached_property
    def each_has_backward(self) -> Floats:
        """1 for the kinds of parts that have a backward, 0 for others, (kinds,)."""
        flags = np.zeros(self.num_kinds)
        flags[list(self.parts[self.num_frozen_parts :])] = 1.0
        return flags

    def parts_of(self, stage: Stage) -> range:
        """Returns the numbers of a stage's parts: 0 is the embedding, the last the head.

        Raises:
            SlipstreamError: where the model doesn't have these layers.
        """
        if isinstance(stage, range) and not 0 <= stage.start < stage.stop <= self.num_layers:
            raise SlipstreamError(
                f"there is no stage with the layers {stage.start} to {stage.stop - 1}: the model has the layers 0 to "
                f"{self.num_layers - 1}."
            )
        return parts_of(stage, self.num_layers, self.units_per_layer)

    def has_backward(self, stage: Stage) -> bool:
        """Returns whether a stage has a trained parameter, or one below it has."""
        return self.parts_of(stage).stop > self.num_frozen_parts

    def trains_below(self, bounds: Sequence[int] | Ints) -> Flags:
        """Marks the parts below which something is trained: a stage that ends there has a backward, and one that begins
        there sends gradients to the stage before."""
        return np.asarray(np.asarray(bounds) > self.num_frozen_parts)

    def has_head(self, stage: Stage) -> bool:
        """Returns whether the head is among a stage's parts."""
        return self.parts_of(stage).stop == len(self.parts)

    def count(self, stage: Stage) -> Floats:
        """Returns how many parts of each kind a stage has, (kinds,)."""
        parts = self.parts_of(stage)
        number: Floats = self._counts[parts.stop] - self._counts[parts.start]
        return number

    @cached_property
    def _counts(self) -> Floats:
        """How many of the first 0, 1, ... parts are of each kind, (1 + parts, kinds)."""
        kinds = np.eye(self.num_kinds)[list(self.parts)]
        return np.concatenate([np.zeros((1, self.num_kinds)), np.cumsum(kinds, axis=0)])

    def layers_with_backward(self, stage: Stage) -> list[StageParts]:
        """Returns the layers of a stage that have a backward, of each the parts that are there."""
        inner = [part for part in self.parts_of(stage) if 0 < part < len(self.parts) - 1]
        layers = [[*layer] for _, layer in groupby(inner, lambda part: (part - 1) // self.units_per_layer)]
        return [StageParts(layer[0], layer[-1] + 1) for layer in layers if layer[-1] + 1 > self.num_frozen_parts]

    # --- seconds of a stage ------------------------------------------------------------------------------------------

    def seconds(self, stage: Stage, op: Op, length: Any, context: Any) -> Any:
        """Returns the time of F, B, I, W or R; ints give a number, integer arrays an array. It is 0 for a backward that
        doesn't run, as nothing up to there is trained."""
        runs = op not in BACKWARDS or self.has_backward(stage)
        if isinstance(length, int) and isinstance(context, int):
            fixed, each = self._of_one_slice(op, length, context)
            return float(fixed + total(self.count(stage), each)) if runs else 0.0
        work, shape = _as_work(op, length, context)
        if not runs:
            return _shaped(np.zeros(len(work.lengths)), shape)
        return _shaped(self.fixed_seconds(work) + total(self.count(stage), self.each_seconds(work)), shape)

    def _of_one_slice(self, op: Op, length: int, context: int) -> tuple[float, Floats]:
        """Returns the seconds on one slice of the fixed part of a stage, and of a part of each kind, (kinds,). They are
        kept, as a search asks for those of many stages."""
        key = op, length, context
        if key not in self._known:
            work, _ = _as_work(op, length, context)
            self._known[key] = float(self.fixed_seconds(work)[0]), self.each_seconds(work)[:, 0]
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[Op, int, int], tuple[float, Floats]]:
        return {}

    # --- bytes of a stage --------------------------------------------------------------------------------------------

    def activation_bytes(self, stage: Stage, length: int) -> float:
        """Returns the bytes that a slice's F keeps for its backward without recomputation, except keys and values."""
        if not self.has_backward(stage):
            return 0.0
        lengths = np.array([length])
        kept = total(self.each_has_backward * self.count(stage), self.each_activation(lengths))
        return float((kept + self.fixed_activation(lengths))[0])

    def kept_bytes(self, stage: Stage, recompute: str, length: int) -> float:
        """Returns the bytes that F keeps of it until R: states that it leaves to the next slice, the stage's input,
        which for the first stage are tokens; with "selective" also the outputs of matrix products and attention. With
        "full", those that it keeps until the backward."""
        if not self.has_backward(stage):
            return 0.0
        if recompute == "full":
            layers = self.layers_with_backward(stage)
            states = float(total(self.count(all_of(layers)), self.each_state))
            return self._kept_by_layers(stage, layers, length) + states
        kept = float(self.message_bytes(length)) if self.parts_of(stage).start else 0.0
        count = self.count(stage)
        if recompute == "selective":
            kept += float(total(self.each_has_backward * count, self.each_product(np.array([length])))[0])
        return kept + float(total(count, self.each_state))

    def _kept_by_layers(self, stage: Stage, layers: Sequence[StageParts], length: int) -> float:
        """Returns the bytes that F keeps where its layers are recomputed one by one: the input of each of them, and the
        saved tensors of the model's ends."""
        ends = [StageParts(part, part + 1) for part in (0, len(self.parts) - 1) if part in self.parts_of(stage)]
        saved = sum(self.activation_bytes(end, length) for end in ends)
        return saved + len(layers) * float(self.message_bytes(length))

    def action_bytes(self, stage: Stage, length: int) -> ActionBytes:
        """Returns the bytes that a slice's actions keep, and those in use while they run."""
        made = 2 * float(self.message_bytes(length)) + self.logits_gradient_bytes(stage, length)
        made = made if self.has_backward(stage) else 0.0
        num_layers = max(1, len(self.parts_of(stage)) // self.units_per_layer)
        passing = self.passing_bytes(stage)
        return ActionBytes.estimated(self.activation_bytes(stage, length), made, num_layers, passing)

    def passing_bytes(self, stage: Stage) -> float:
        """Returns the bytes that pass while an action of a stage runs, such as weights that are made of 4 bits."""
        return 0.0

    def context_bytes(self, stage: Stage, length: int) -> float:
        """Returns the keys and values of `length` tokens, kept from a microbatch's first F to its last backward."""
        return length * float(total(self.count(stage), self.each_context))

    def context_gradient_bytes(self, stage: Stage, length: int) -> float:
        """Returns the bytes of the sums of the gradients of `length` tokens' keys and values, alive from a
        microbatch's first backward to its last."""
        return length * float(total(self.count(stage), self.each_context_gradient))

    def logits_gradient_bytes(self, stage: Stage, length: int) -> float:
        """Returns the gradient of a slice's logits in float32, made before any activation is freed; 0 without the
        head."""
        return 0.0

    # --- the state of a stage ----------------------------------------------------------------------------------------

    def num_parameters(self, stage: Stage) -> float:
        """Returns the number of a stage's parameters."""
        return float(total(self.count(stage), self.each_number.all))

    def weight_bytes(self, stage: Stage, each: float) -> float:
        """Returns the bytes of a stage's parameters, of which those that aren't quantised take `each`."""
        return float(total(self.count(stage), self.each_weight(each)))

    def num_trained(self, stage: Stage) -> float:
        """Returns the number of a stage's parameters that are trained."""
        return float(total(self.count(stage), self.each_number.trained))

    def num_optimized(self, stage: Stage, update: Update) -> float:
        """Returns the number of trained parameters whose optimizer state is here."""
        return float(total(self.count(stage), update.optimized(self.each_number, self.divided)))

    def gradient_seconds(self, stage: Stage, update: Update) -> float:
        """Returns the time of reducing a stage's gradients over the ranks with the same weights, as far as nothing
        hides it."""
        replicas = self.system.replicas
        each = update.state.gradients if replicas.gradient_bytes is None else replicas.gradient_bytes
        reduced = self.between_copies(stage, each, update.copies, self._reducing_seconds)
        whole = update.passes_of_gradients * reduced
        num_reductions = (replicas.num_gathers(update.num_microbatches) + 1) // 2
        return num_reductions * self._beside_pass(stage, Op.B, whole, update)

    def gather_seconds(self, stage: Stage, update: Update) -> float:
        """Returns the time in which the ranks of a sharded optimizer gather the updated parameters, as far as nothing
        hides it."""
        replicas = self.system.replicas
        sharing = min(update.shards, replicas.num_sharing or update.shards)
        whole = self.between_copies(stage, update.state.weights, sharing)
        if replicas.each_microbatch:
            # Weights that are gathered for every pass are sharded, whether they are trained or not.
            frozen = self.weight_bytes(stage, update.state.weights) - update.state.weights * self.num_trained(stage)
            whole += self.gathering_seconds(frozen, Copies(sharing, self.divided.width)) if frozen > 0 else 0.0
        return replicas.num_gathers(update.num_microbatches) * self._beside_pass(stage, Op.F, whole, update)

    def _reducing_seconds(self, num_bytes: float, copies: Copies) -> float:
        """Returns the time in which ranks with the same weights reduce so many bytes of gradients, each its part; where
        fewer of them share a state, these do so first, and then add up equal parts with the others."""
        sharing = self.system.replicas.num_sharing or copies.num_ranks
        if copies.num_ranks <= sharing:
            return self.gathering_seconds(num_bytes, copies)
        others = Copies(copies.num_ranks // sharing, copies.stride * sharing)
        inside = self.gathering_seconds(num_bytes, copies._replace(num_ranks=sharing))
        return inside + 2 * self.gathering_seconds(num_bytes / sharing, others)

    def _beside_pass(self, stage: Stage, op: Op, whole: float, update: Update) -> float:
        """Returns what isn't hidden of an exchange of a stage's weights or gradients: what takes longer than the pass
        of a microbatch beside which it runs, at least those of one part of the stage."""
        if not self.system.replicas.beside_passes:
            return whole
        hidden = float(self.seconds(stage, op, update.seq_len, 0))
        return max(whole / max(1, len(self.parts_of(stage))), whole - hidden)

    def between_copies(
        self, stage: Stage, num_bytes: float, copies: int, exchange: Callable[[float, Copies], float] | None = None
    ) -> float:
        """Returns the time in which ranks gather, or reduce-scatter, `num_bytes` of each trained parameter: over all
        that have the same weights, but those of experts over the ranks that have the same experts.

        `exchange` says the time of bytes between some ranks. Default: `gathering_seconds`.
        """
        seconds = exchange or self.gathering_seconds
        in_experts = float(total(self.count(stage), self.each_number.trained_in_experts))
        shared = self.num_trained(stage) - in_experts
        both = zip((shared, in_experts), self.divided.copies(copies), strict=True)
        return sum(seconds(num_bytes * number, ranks) for number, ranks in both)

    def optimizer_step_seconds(self, stage: Stage, update: Update) -> float:
        """Returns the time of the optimizer's rule on a stage."""
        return self.update_seconds(update, self.num_trained(stage), self.num_optimized(stage, update))

    # --- a pipeline --------------------------------------------------------------------------------------------------

    def cost(self, partition: Sequence[float], slices: Sequence[int]) -> TableCost:
        """Returns the simulator's costs of a pipeline: times and activations of every stage and slice, and messages.

        Args:
            partition: layers of each stage; with halves where these are counted, 0 for an end of the model alone.
            slices: tokens of each slice.

        Raises:
            SlipstreamError: where the layers don't add up to the model's, a slice is empty, or its time is unknown.
        """
        check_partition(partition, self.num_layers, self.units_per_layer)
        if min(slices, default=0) < 1:
            raise SlipstreamError(f"slices={list(slices)}: give at least one, each of 1 token or more.")
        stages = StageParts.of_partition(partition, self.num_layers, self.units_per_layer)
        handled = np.outer(messages_of_stages(len(stages)), self.handling_seconds(np.array(slices)))
        times: dict[tuple[int, int, Op], float] = {}
        for op in (*OPS, Op.R):
            _, lengths, contexts = Work.of_slices(op, slices)
            for g, stage in enumerate(stages):
                seconds = self.seconds(stage, op, lengths, contexts) + handled[g] * (op in WITH_MESSAGES)
                times |= {(g, index, op): float(each) for index, each in enumerate(seconds)}
        units = [(g, index, stage, n) for g, stage in enumerate(stages) for index, n in enumerate(slices)]
        return replace(
            self.action_costs(times, slices),
            activations={(g, index): self.activation_bytes(stage, n) for g, index, stage, n in units},
            kept={(g, index): self.kept_bytes(stage, "stage", n) for g, index, stage, n in units},
        )


def total(numbers: Sequence[float] | Floats, rows: Floats) -> Any:
    """Returns the sum of the rows, each so many times: added one after the other, so that equal sums are equal to the
    bit and searches find the same plans on every processor."""
    added: Any = np.zeros(np.shape(rows)[1:])
    for number, row in zip(numbers, rows, strict=True):
        if number:
            added = added + number * row
    return added


def _as_work(op: Op, length: Any, context: Any) -> tuple[Work, tuple[int, ...]]:
    """Returns the work on slices, and the shape that its times are to have."""
    lengths, contexts = np.broadcast_arrays(np.asarray(length), np.asarray(context))
    return Work(op, lengths.ravel(), contexts.ravel()), lengths.shape


def _shaped(seconds: Floats, shape: tuple[int, ...]) -> Any:
    return float(seconds[0]) if not shape else seconds.reshape(shape)


def all_of(layers: Sequence[StageParts]) -> StageParts:
    """Returns consecutive layers as one stage, which may be empty."""
    return StageParts(layers[0].start, layers[-1].stop) if layers else StageParts(0, 0)
