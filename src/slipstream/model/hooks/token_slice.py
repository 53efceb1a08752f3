"""What the code inside a model's forward may ask about the token slice being computed."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from slipstream.attention import ContextStore, KeyRanges
from slipstream.model.hooks.mask_tables import MaskTables, NotCausalError


@dataclass(frozen=True)
class TokenSlice:
    """The inputs of one slice: tokens [start, start + T) of one microbatch of b sequences of `length` tokens."""

    input_ids: Tensor  # (b, T)
    position_ids: Tensor  # (b, T), restarting with every document
    document_start: Tensor | None  # (b, T) where each token's document begins; None: one document a sequence
    start: int
    length: int
    max_position: int  # the largest position of the whole batch: rope of type dynamic and longrope reads it
    microbatch: int = 0
    index: int = 0
    seed: int = 0  # of this step

    @property
    def end(self) -> int:
        return self.start + self.input_ids.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.input_ids, self.position_ids


@dataclass
class SliceContext:
    """The slice a stage's forward is computing, where its keys and values live, and how often each module attended."""

    token_slice: TokenSlice
    store: ContextStore
    tables: MaskTables
    hidden: Tensor | None = None  # what the stage before sent: (b, T, hidden)
    records_masks: bool = False  # the first forward of a stage notes which masks its model builds
    tensor_rank: int = 0  # of those that share this stage's layers, each with heads of its own
    layer: int = -1  # whose forward runs, counted over the whole model
    calls_in_layer: int = 0
    parts_of_layer: int = 0  # how often ranks that share it began or ended to compute on their own
    num_masks: int = 0
    calls: Counter[nn.Module] = field(default_factory=Counter)
    output: Tensor | None = None  # of the last owned layer

    def next_call(self, module: nn.Module) -> tuple[nn.Module, int]:
        """The store's key: a module may attend several times in one forward, so its name alone would collide."""
        self.calls[module] += 1
        self.calls_in_layer += 1
        return module, self.calls[module]

    def enter_layer(self, layer: int) -> None:
        self.layer, self.calls_in_layer, self.parts_of_layer = layer, 0, 0

    def next_mask(self) -> KeyRanges | NotCausalError:
        """The ranges of the next mask the model asks for; models ask for their masks in a fixed order."""
        self.num_masks += 1
        piece = self.token_slice
        return self.tables.ranges(self.num_masks - 1, piece.start, piece.end, piece.length, piece.document_start)

    def attention_seed(self) -> int:
        place = (self.layer, "attention", self.calls_in_layer)
        return self.seed(*place, self.tensor_rank) if self.tensor_rank else self.seed(*place)

    def seed(self, *place: object) -> int:
        """Random state is keyed by (step, place, microbatch, slice), so every split and schedule draws the same."""
        return keyed_seed(self.token_slice.seed, place, self.token_slice.microbatch, self.token_slice.index)


def keyed_seed(*key: object) -> int:
    """Returns a seed of 56 bits that is the same for equal keys on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big")


class RunningForward(Protocol):
    """A stage's forward."""

    layer: int  # that runs, counted over the whole model


_current: ContextVar[RunningForward | None] = ContextVar("slipstream_slice", default=None)


def current_layer() -> int:
    """The layer whose forward runs, counted over the whole model: -1 before the first, beyond all for the loss."""
    context = _current.get()
    return sys.maxsize if context is None else context.layer


def current_slice() -> SliceContext:
    context = _current.get()
    if not isinstance(context, SliceContext):
        raise RuntimeError(
            "attention 'slipstream' was called outside a pipeline. The Pipeline takes a model over: train and "
            "evaluate it through Pipeline.step and Pipeline.evaluate, or load the exported folder for other use."
        )
    return context


def current_forward() -> RunningForward | None:
    """What runs a forward at the moment, if anything does."""
    return _current.get()


@contextmanager
def active_forward(context: RunningForward) -> Iterator[RunningForward]:
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


@contextmanager
def keyed_random_state(enabled: bool) -> Iterator[None]:
    """Let layers seed the random state for their dropout, and give the caller's own state back afterwards."""
    if not enabled:
        yield
        return
    with torch.random.fork_rng():
        yield
