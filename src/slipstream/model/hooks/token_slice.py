"""The token slice that is being computed, for the code inside a model's forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch import Tensor

from slipstream.attention import ContextStore, KeyRanges, TokenExchange
from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import PlaceSeed
from slipstream.model.hooks.masks import MaskTables, NotCausalError

_Caller = TypeVar("_Caller", bound=Hashable)
TokenParts = tuple[tuple[int, int], ...]  # [begin, end) of each rank's tokens within a slice


@dataclass(frozen=True)
class TokenSlice:
    """The inputs of one slice: tokens [start, end) of one microbatch of b sequences of `length` tokens.

    They are the T tokens of `input_ids` or, where several ranks each have a part of them, those of all ranks.
    """

    input_ids: Tensor  # (b, T)
    position_ids: Tensor  # (b, T), restarting with every document
    # (b, end - start), the first token of each token's document; None: one document per sequence.
    document_start: Tensor | None
    start: int
    length: int
    # The largest position of the unsplit model's batch. Rope of the types dynamic and longrope reads it.
    max_position: int
    lone_sequences: tuple[tuple[int, int], ...] = ()  # (tokens here, largest position), per lone sequence
    microbatch: int = 0
    index: int = 0
    seed: int = 0  # the step's seed
    loss_share: float = 0.0  # the microbatch's share of the step's scaled loss, applied to losses that layers add
    parts: TokenParts = ()  # [begin, end) of each rank's tokens within the slice; empty: all tokens here
    part: int = 0  # this rank's index in `parts`
    is_padding: bool = False  # True on a replica without tokens where others have some

    @property
    def end(self) -> int:
        return self.start + (self.parts[-1][1] if self.parts else self.input_ids.shape[1])

    @property
    def first(self) -> int:
        """The first token that is here."""
        return self.start + (self.parts[self.part][0] if self.parts else 0)

    @property
    def num_own(self) -> int:
        """The number of this rank's tokens in the slice; 0 where it computes one only to keep in step."""
        begin, end = self.parts[self.part] if self.parts else (0, self.input_ids.shape[1])
        return 0 if self.is_padding else end - begin

    @property
    def is_cut(self) -> bool:
        """Whether the sequence has other slices."""
        return self.input_ids.shape[1] < self.length

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.input_ids, self.position_ids


@dataclass
class SliceContext:
    """The slice a stage's forward is computing, its context store, and how often each module attended."""

    token_slice: TokenSlice
    store: ContextStore
    tables: MaskTables
    hidden: Tensor | None = None  # (b, T, hidden), from the stage before
    reads_prefixes: bool = False  # True for layers whose own code reads keys and values from the cache
    records_masks: bool = False  # True in a stage's first forward, which records its model's masks
    carries_states: bool = False  # states carried between slices or documents, so that the model needs a cache
    has_lone_tokens: bool = False  # some token computed alone by a layer with a state
    received: Sequence[Tensor] = ()  # tensors from the stage before, in addition to the hidden states
    taken: dict[int, Tensor] = field(default_factory=dict)  # tensors computed here for later stages, by index
    tensor_rank: int = 0  # rank among those that share this stage's layers, each with different heads
    exchange: TokenExchange | None = None  # exchange with ranks that have other tokens of the slice
    layer: int = -1  # number of the running layer in the whole model
    calls_in_layer: int = 0
    parts_of_layer: int = 0  # how often its tensor ranks began or ceased to compute different things
    num_masks: int = 0
    calls: Counter[Hashable] = field(default_factory=Counter)
    states: dict[Hashable, Tensor] = field(default_factory=dict)  # states read or changed by the slice's layers
    changed_states: set[Hashable] = field(default_factory=set)
    router_sums: dict[Hashable, Tensor] = field(default_factory=dict)  # over the tokens so far, by router
    fresh_rows: Tensor | None = None  # (b,), rows with states to reset at the beginning of a document; None: no row
    output: Tensor | None = None  # the last owned layer's

    def next_call(self, caller: _Caller) -> tuple[_Caller, int]:
        """Returns the store's key: the caller alone is ambiguous, as it may attend several times in one forward."""
        self.calls[caller] += 1
        self.calls_in_layer += 1
        return caller, self.calls[caller]

    @cached_property
    def prefix_ranges(self) -> KeyRanges:
        """The keys visible to each query: its document's, up to itself."""
        tokens = self.token_slice
        if tokens.document_start is None:
            return KeyRanges.causal(tokens.start, tokens.end)
        return KeyRanges(tokens.document_start, tokens.start)

    def enter_layer(self, layer: int) -> None:
        """Starts the next layer."""
        self.layer = layer
        self.calls_in_layer = 0
        self.parts_of_layer = 0

    def entered_layer(self) -> SliceContext:
        """Returns the slice as the layer that runs found it, without tensors of other layers: to run it again."""
        fresh: dict[str, Any] = {"states": {}, "changed_states": set(), "router_sums": {}, "taken": {}}
        return replace(self, calls=self.calls.copy(), hidden=None, received=(), output=None, **fresh)

    def next_mask(self) -> KeyRanges | NotCausalError:
        """Returns the key ranges of the model's next mask; models build their masks in a fixed order."""
        self.num_masks += 1
        tokens = self.token_slice
        return self.tables.ranges(self.num_masks - 1, tokens.start, tokens.end, tokens.length, tokens.document_start)

    def refuse_shared(self, what: str) -> None:
        """Raises SlipstreamError for states that go from token to token besides attention's keys and values, where
        ranks share slices."""
        if self.exchange is not None:
            raise SlipstreamError(f"layer {self.layer} carries {what} from token to token, through the tokens in order")

    def state(self, call: Hashable, empty: float = 0.0) -> Tensor | None:
        """Returns the state that `call` carries, (b, ...), `empty` for fresh rows; None where all rows begin."""
        self.refuse_shared("a state")
        if call not in self.states:
            left = self.store.carried.read(call, self.token_slice.start)
            if left is None:
                return None
            self.states[call] = left
        if self.fresh_rows is not None:
            rows = self.fresh_rows.view(-1, *[1] * (self.states[call].dim() - 1))
            self.states[call] = self.states[call].masked_fill(rows, empty)
        return self.states[call]

    def change_state(self, call: Hashable, state: Tensor) -> None:
        """Replaces the state that `call` carries."""
        self.refuse_shared("a state")
        self.states[call] = state
        self.changed_states.add(call)

    def leave_states(self, output: Tensor) -> Tensor:
        """Leaves the states to the next slice; returns the stage's last hidden states, whose gradient begins theirs."""
        for call in self.states.keys() - self.changed_states:
            raise SlipstreamError(f"{call!r} is read and not written again, so what to carry on is unknown")
        return self.leave(self.states, output)

    def leave(self, states: Mapping[Hashable, Tensor], output: Tensor) -> Tensor:
        """Leaves states to the next slice; returns `output`, whose gradient begins theirs."""
        if not self.store.makes_graph:
            return output
        tokens = self.token_slice
        return self.store.carried.leave(states, tokens.start, tokens.end, output, self.store.is_replaying)

    def attention_seed(self) -> PlaceSeed:
        """Returns the seed of the next attention dropout."""
        rank = (self.tensor_rank,) if self.tensor_rank else ()
        return self.seed(self.layer, "attention", self.calls_in_layer, *rank)

    def seed(self, *place: object) -> PlaceSeed:
        """Returns a seed keyed by step, place, microbatch, slice and part of it, so every split and schedule draws the
        same."""
        tokens = self.token_slice
        part = (tokens.part,) if tokens.part else ()
        return PlaceSeed(tokens.seed, (place, tokens.microbatch, tokens.index, *part))


class RunningForward(Protocol):
    """A stage's forward while it runs."""

    layer: int  # number of the running layer in the whole model


_current: ContextVar[RunningForward | None] = ContextVar("slipstream_slice", default=None)


class OutsideSliceError(SlipstreamError):
    """Raised where code runs that belongs to the forward of a slice, and none is computed."""


def current_slice() -> SliceContext:
    """Returns the slice that is being computed; raises OutsideSliceError outside a pipeline."""
    context = _current.get()
    if not isinstance(context, SliceContext):
        raise OutsideSliceError(
            "a layer was called outside of a Pipeline's forward. The Pipeline takes a model over: train and evaluate "
            "it through Pipeline.step and Pipeline.evaluate, or load the exported folder for other use. If it was "
            "torch.utils.checkpoint in a backward, leave that out: memory=slipstream.Memory(recompute='full') does the "
            "same."
        )
    return context


def current_forward() -> RunningForward | None:
    """Returns the forward that is running, or None."""
    return _current.get()


@contextmanager
def active_forward(context: RunningForward) -> Iterator[RunningForward]:
    """Makes `context` the forward that is running."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


# Not a context variable, as a backward may run in a thread of its own.
_note: Callable[[str, object], None] | None = None


@contextmanager
def noting_outputs(note: Callable[[str, object], None] | None) -> Iterator[None]:
    """Makes `note` get the outputs of layers from here on, with their names; None: nobody."""
    global _note
    before, _note = _note, note
    try:
        yield
    finally:
        _note = before


# Not a context variable either, as a recomputation in a backward has to see it.
_is_alone = False


@contextmanager
def running_alone() -> Iterator[None]:
    """Makes forwards from here on exchange no tokens with ranks that run other batches: these don't run them too."""
    global _is_alone
    before, _is_alone = _is_alone, True
    try:
        yield
    finally:
        _is_alone = before


def runs_alone() -> bool:
    """Returns whether the current code runs on this rank alone."""
    return _is_alone


def note_output(layer: str, output: object) -> None:
    """Hands a layer's output to whoever notes it."""
    if _note is not None:
        _note(layer, output)
