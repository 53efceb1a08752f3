"""The context store of one microbatch on one stage: keys, values and other carried states, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from slipstream.attention.key_blocks import DeviceBlock, HostBlock, HostContext, KeyBlock, SeenBlock, streamed
from slipstream.attention.masks import KeyRanges
from slipstream.autograd_calls import begin_graph, with_backward
from slipstream.errors import SlipstreamError
from slipstream.host_memory import HostMemory, HostTensors

AttentionResult = tuple[Tensor, Tensor]  # output (B, H, T, Dv) and log-sum-exp (B, H, T) of one slice
AttentionWrapper = Callable[[Callable[[], AttentionResult]], AttentionResult]


class SharedState(Protocol):
    """State other than keys and values that the slices of a microbatch share on a stage."""

    def close(self) -> None:
        """Ends the microbatch. Raises ContextError where something is left in it."""
        ...


@dataclass
class StoredSlice:
    """A slice that was written to the store."""

    end: int
    first: int  # the smallest key it attends to
    done: bool = False  # True once the backward of the slice has run


@dataclass
class _CallBuffers:
    """The buffers of one attention call, its blocks on the host, and the state of each slice of it."""

    # key (B, Hkv, L', D) and value (B, Hkv, L', Dv) of the last tokens; in a backward also their gradients
    buffers: list[Tensor]
    blocks: dict[int, HostBlock] = field(default_factory=dict)  # blocks of the first tokens, by first token
    slices: dict[int, StoredSlice] = field(default_factory=dict)  # slices by their first token
    num_done: int = 0  # tokens of slices with a finished backward


class ContextStore:
    """K, V and their gradients for every attention call of one microbatch on one stage.

        K, V     |  0  |  1  |  2  |     |     buffers of the whole sequence, slices written in place
        dK, dV   |     | +=2 | own |     |     a slice's backward adds to all it read, then takes its own part

    Slices may be written in any order that puts keys before their reader (rule 1); a slice runs backward after every
    later slice that attends to it (rule 2). Anything else is a ContextError. A call's buffers are freed after the
    backward of its last slice (rule 5). Without gradients (evaluation, frozen layers) there is none: then call `free`.

    Args:
        length: tokens of the whole sequence.
        host: where keys, values and their gradients lie instead, a block for each slice. None: on the device.
        has_wide_sums: whether gradients are summed in float32 or wider, and not in the type of keys and values.
        num_on_host: the first tokens of which they lie there, whole slices. None: all.
    """

    def __init__(
        self,
        length: int,
        host: HostContext | None = None,
        has_wide_sums: bool = True,
        num_on_host: int | None = None,
    ) -> None:
        self.length = length
        self._host = None if host is None else host.memory
        self._first_here = 0 if host is None else length if num_on_host is None else num_on_host
        # The least type of sums: a type that is promoted by a bool stays as it is.
        self._least_sums = torch.float32 if has_wide_sums else torch.bool
        self._contexts: dict[Hashable, _CallBuffers] = {}
        # by call, in the order of their first use and including freed ones: the keys [first, end) that each slice read
        self.reads: dict[Hashable, list[tuple[int, int]]] = {}
        self.shared: SharedState | None = None  # an object of the code that runs the slices
        self.carried = CarriedStates(self._host, self._first_here)
        self.is_replaying = False
        self.is_repeated = False  # True in a forward whose graph is dropped, as a replay makes that of the backward
        self.makes_graph = True  # False in a replay after which the forward's graph is that of the backward
        self._wrapper: AttentionWrapper | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers. Carried states don't count: each is left by a slice and freed by its backward."""
        return sum(buffer.nbytes for context in self._contexts.values() for buffer in context.buffers)

    @property
    def host_bytes(self) -> int:
        """Bytes of all blocks and carried states on the host."""
        blocks = sum(block.num_bytes for context in self._contexts.values() for block in context.blocks.values())
        return blocks + self.carried.host_bytes

    def free(self) -> None:
        """Drops all buffers; needed where no backward does it."""
        self._contexts.clear()
        self.carried.free()
        shared, self.shared = self.shared, None
        if shared is not None:
            shared.close()

    @contextmanager
    def replay(self, makes_graph: bool = False) -> Iterator[None]:
        """Makes slices run a second time (recomputation, rule 4): K and V are read, never changed."""
        before = self.is_replaying, self.makes_graph
        self.is_replaying, self.makes_graph = True, makes_graph
        try:
            yield
        finally:
            self.is_replaying, self.makes_graph = before

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Surrounds a forward whose graph is dropped, as a replay makes that of the backward."""
        self.is_repeated = True
        try:
            yield
        finally:
            self.is_repeated = False

    def keep_for_layers(self) -> None:
        """Keeps the tensors that slices read until they are done, as each layer's backward computes it again."""
        self.carried.keeps_read = True

    def drop_lone_slices(self) -> None:
        """Drops the buffers of the last calls whose only slice is the whole sequence: its layer will write them again
        for its backward (a replay), and no other slice reads them."""
        for context in reversed(self._contexts.values()):
            whole = context.slices.get(0)
            if not (context.buffers or context.blocks) or whole is None or whole.end < self.length:
                return
            context.buffers.clear()
            context.blocks.clear()

    @contextmanager
    def wrapped_attention(self, wrapper: AttentionWrapper) -> Iterator[None]:
        """Passes each slice's computation to `wrapper`, which may keep the result, or return one it kept."""
        self._wrapper = wrapper
        try:
            yield
        finally:
            self._wrapper = None

    def attend(self, compute: Callable[[], AttentionResult]) -> AttentionResult:
        """Returns a slice's attention, computed by the wrapper if there is one."""
        return compute() if self._wrapper is None else self._wrapper(compute)

    def can_replay(self, call: Hashable) -> bool:
        """Returns whether slices run a second time, and a call's keys and values are here, so that none are needed."""
        if not self.is_replaying or call not in self._contexts:
            return False
        return bool(self._contexts[call].buffers or self._contexts[call].blocks)

    def write_keys(
        self, call: Hashable, key: Tensor, value: Tensor, ranges: KeyRanges, queries: KeyRanges
    ) -> Iterator[KeyBlock]:
        """Writes a slice's key (B,Hkv,T,D) and value (B,Hkv,T,Dv); returns all that its queries see, in blocks.

        The first block has the queries' own keys. A block may be used until the next one is asked for.

        Args:
            call: identifies the attention within the stage.
            key: of the slice; unused in a replay.
            value: of the slice.
            ranges: which keys the slice's queries see.
            queries: the same of those queries that are here.
        """
        if self._host is None:
            keys, values = self.write(call, key, value, ranges)
            return iter((KeyBlock(queries, 0, queries.seen(keys), queries.seen(values)),))
        context = self._written_slice(call, ranges)
        self._keep(context, key, value, ranges)
        return streamed(self._seen_blocks(context, ranges, queries), with_sums=False)

    def write(self, call: Hashable, key: Tensor, value: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """Writes a slice's key (B,Hkv,T,D) and value (B,Hkv,T,Dv); returns buffers of the whole sequence on the device,
        which are copies where some of it lies on the host."""
        context = self._written_slice(call, ranges)
        self._keep(context, key, value, ranges)
        if self._host is None:
            return context.buffers[0], context.buffers[1]
        whole = _buffer(key, self.length), _buffer(value, self.length)
        for start, block in context.blocks.items():
            block.begin(with_sums=False)
            for buffer, part in zip(whole, block.keys(), strict=True):
                buffer.narrow(2, start, part.shape[2]).copy_(part)
            block.put_back()
        for buffer, part in zip(whole, context.buffers, strict=False):
            buffer.narrow(2, self._first_here, part.shape[2]).copy_(part)
        return whole

    def _keep(self, context: _CallBuffers, key: Tensor, value: Tensor, ranges: KeyRanges) -> None:
        """Puts a slice's keys and values where they lie. The first slice makes the buffers on the device."""
        # A replay needs new ones where they were dropped.
        is_new = not context.buffers
        if is_new and self._first_here < self.length:
            num_here = self.length - self._first_here
            context.buffers = [_buffer(key, num_here), _buffer(value, num_here)]
        if ranges.start < self._first_here:
            assert self._host is not None
            if ranges.start not in context.blocks:
                context.blocks[ranges.start] = HostBlock(self._host, key, value, self._least_sums)
        elif is_new or not self.is_replaying:
            for buffer, part in zip(context.buffers[:2], (key, value), strict=True):
                ranges.own(buffer, self._first_here).copy_(part)

    def _seen_blocks(self, context: _CallBuffers, ranges: KeyRanges, queries: KeyRanges) -> list[SeenBlock]:
        """Returns the blocks of which queries of a slice see some keys: that with the slice's own, and then the latest
        first, which a backward needs again first."""
        seen = list[SeenBlock]()
        if ranges.start >= self._first_here:
            # All that the device has is one block.
            here = queries.among(self._first_here, queries.end)
            assert here is not None, "a query sees its own key"
            seen.append(SeenBlock(self._first_here, DeviceBlock(context.buffers), here))
        for start in sorted((start for start in context.blocks if start <= ranges.start), reverse=True):
            end = queries.end if start == ranges.start else context.slices[start].end
            keys = queries.among(start, end)
            if keys is not None:
                seen.append(SeenBlock(start, context.blocks[start], keys))
        return seen

    def check_on_device(self, what: str) -> None:
        """Raises SlipstreamError where keys and values lie on the host, which `what` can't use."""
        if self._host is not None:
            raise SlipstreamError(f"memory.context isn't device, with {what}: give memory.context=device.")

    def _written_slice(self, call: Hashable, ranges: KeyRanges) -> _CallBuffers:
        """Notes that a slice is written, and returns the buffers of its call; all other keys that it sees must be."""
        context = self._contexts.get(call)
        if self.is_replaying:
            if context is None or ranges.start not in context.slices:
                raise ContextError(f"{_name(call, ranges)} is replayed, but its forward never ran")
        else:
            if context is None:
                context = self._contexts[call] = _CallBuffers([])
            if ranges.end > self.length:
                raise ContextError(f"{_name(call, ranges)} ends after the sequence of {self.length} tokens")
            for start, other in context.slices.items():
                if start < ranges.end and ranges.start < other.end:
                    raise ContextError(f"{_name(call, ranges)} is written over the slice [{start}, {other.end})")
            context.slices[ranges.start] = StoredSlice(ranges.end, ranges.first)
            self.reads.setdefault(call, []).append((ranges.first, ranges.end))
        self._check_present(call, context, ranges)
        return context

    def key_gradients(self, call: Hashable, ranges: KeyRanges, queries: KeyRanges) -> Iterator[KeyBlock]:
        """Returns all that the queries of a slice see whose backward begins, with the sums of the gradients, in blocks.

        The first block has the queries' own keys. Every later slice that attends to this one must be done.

        Args:
            call: identifies the attention within the stage.
            ranges: which keys the slice's queries see.
            queries: the same of those queries that are here.
        """
        context = self._contexts.get(call)
        if context is None or ranges.start not in context.slices:
            raise ContextError(f"{_name(call, ranges)} runs backward, but its keys aren't in the store (any more)")
        if context.slices[ranges.start].done:
            raise ContextError(f"{_name(call, ranges)} runs backward a second time")
        for start, later in context.slices.items():
            if start >= ranges.end and later.first < ranges.end and not later.done:
                raise ContextError(
                    f"{_name(call, ranges)} runs backward before the slice [{start}, {later.end}), which "
                    "attends to it: run the slices of a microbatch in reverse order"
                )
        if len(context.buffers) == 2:
            dtype = torch.promote_types(context.buffers[0].dtype, self._least_sums)
            context.buffers += [torch.zeros_like(buffer, dtype=dtype) for buffer in context.buffers]
        if self._host is not None:
            return streamed(self._seen_blocks(context, ranges, queries), with_sums=True)
        key, value, *sums = map(queries.seen, context.buffers)
        return iter((KeyBlock(queries, 0, key, value, tuple(sums)),))

    def finish(self, call: Hashable, ranges: KeyRanges) -> list[Tensor]:
        """Marks a slice's backward as done; frees the call's buffers after the last one (rule 5).

        Returns the sums of the gradients of the slice's own keys and values (B,Hkv,T,D), which are final.
        """
        context = self._contexts[call]
        stored = context.slices[ranges.start]
        if not stored.done:
            stored.done = True
            context.num_done += ranges.end - ranges.start
        if context.num_done == self.length:
            del self._contexts[call]
        if ranges.start >= self._first_here:
            return [ranges.own(total, self._first_here) for total in context.buffers[2:]]
        return context.blocks.pop(ranges.start).sums()

    def _check_present(self, call: Hashable, context: _CallBuffers, ranges: KeyRanges) -> None:
        position = ranges.first
        for start, written in sorted(context.slices.items()):
            if start <= position < written.end:
                position = written.end
        if position < ranges.end:
            raise ContextError(
                f"{_name(call, ranges)} attends to the keys from {ranges.first} on, but {position} isn't "
                "written yet: first run the slices that it attends to"
            )


def _buffer(part: Tensor, length: int) -> Tensor:
    """Returns an empty (B,Hkv,L,D); on a GPU stored as (B,L,Hkv,D), so that a slice of it is one piece, as models have
    it. The CPU's kernels are faster where a head is one piece."""
    batch, heads, _, width = part.shape
    if part.device.type == "cpu":
        return part.new_empty(batch, heads, length, width)
    return part.new_empty(batch, length, heads, width).transpose(1, 2)


def _name(call: Hashable, ranges: KeyRanges) -> str:
    return f"slice [{ranges.start}, {ranges.end}) of attention call {call!r}"


@dataclass
class _State:
    """A state between two slices."""

    # None once the backward of its reader has begun: that graph keeps the value as far as it is needed.
    held: Tensor | HostTensors | None
    has_gradient: bool
    is_done: bool = False  # True once the backward of the reader has begun
    gradient: Tensor | None = None  # None: none yet, or a reader whose outputs don't depend on the state
    is_read: bool = False  # True once a forward has read it

    @property
    def value(self) -> Tensor | None:
        """The state on the device, where it stays as long as its reader needs it."""
        if self.held is None or isinstance(self.held, Tensor):
            return self.held
        self.held.begin()
        (value,) = self.held.wait()
        self.held.leave()
        return value


class CarriedStates:
    """The states of one microbatch on one stage: windows of convolutions, recurrent and state-space states.

        forward   slice 0 --S--> slice 1 --S--> slice 2     read by the next slice alone, not by all later ones
        backward  slice 0 <-dS-- slice 1 <-dS-- slice 2     final when the next slice's backward has run (rule 2)

    Each is kept by its carrier (`call`) and by the first token that is computed from it. A replay reads what the
    forward read, so a value stays until the backward of its reader: on the device, or on the `host`, where it was left
    by slices of the first `num_on_host` tokens.
    """

    def __init__(self, host: HostMemory | None = None, num_on_host: int = 0) -> None:
        self._host = host
        self._num_on_host = num_on_host
        self._states: dict[tuple[Hashable, int], _State] = {}
        self.keeps_read = False  # True: kept in a backward too, for layers to read again

    @property
    def calls(self) -> set[Hashable]:
        """The carriers of states: the calls that left one for a slice whose backward hasn't begun."""
        return {call for call, _ in self._states}

    @property
    def values(self) -> list[Tensor]:
        """The states that are kept on the device."""
        return [state.held for state in self._states.values() if isinstance(state.held, Tensor)]

    @property
    def host_bytes(self) -> int:
        """Bytes of the states on the host."""
        held = (state.held for state in self._states.values())
        return sum(each.num_bytes for each in held if each is not None and not isinstance(each, Tensor))

    def read(self, call: Hashable, token: int) -> Tensor | None:
        """Returns the state with which a slice begins, connected to its gradient; None at the sequence's start."""
        if token == 0:
            return None
        state = self._states.get((call, token))
        if state is None or (kept := state.value) is None:
            raise ContextError(
                f"the slice from token {token} on needs the state of {call!r}, which isn't there (any more): "
                "first run the slice before it, and no forward after a backward"
            )
        state.is_read = True
        if not state.has_gradient or not torch.is_grad_enabled():
            return kept
        value: Tensor = begin_graph(torch.empty(0, requires_grad=True), kept, partial(_add_gradient, state))
        return value

    def keep(self, call: Hashable, token: int, value: Tensor, has_gradient: bool) -> None:
        """Keeps the state with which the slice from `token` on begins."""
        held = value if self._host is None or token > self._num_on_host else self._host.keep([value])
        self._states[call, token] = _State(held, has_gradient)

    def leave(
        self, states: Mapping[Hashable, Tensor], first: int, end: int, output: Tensor, is_replay: bool = False
    ) -> Tensor:
        """Keeps the states with which the slice [first, end) ends, for the next one; in a replay they are kept already.

        Returns `output`, anything that the rest of the slice's forward depends on: where its gradient arrives, those of
        the states do, too.
        """
        if not is_replay:
            for call, value in states.items():
                # a copy, since it may be a view of something as long as the slice
                self.keep(call, end, value.detach().clone(), value.requires_grad)
        if not torch.is_grad_enabled():
            for call in states:
                self._states.pop((call, first), None)
            return output
        reachable = {call: value for call, value in states.items() if value.requires_grad}
        if not reachable:
            return output
        return begin_with(output, partial(self._gradients, tuple(reachable), first, end), *reachable.values())

    def free(self) -> None:
        """Drops all states."""
        self._states.clear()

    def _gradients(self, calls: tuple[Hashable, ...], first: int, end: int) -> list[Tensor | None]:
        """Returns the gradients of the states that the slice [first, end) left, whose backward begins here."""
        gradients = []
        for call in calls:
            left = self._states.pop((call, end))
            if left.is_read and not left.is_done:
                raise ContextError(
                    f"the slice [{first}, {end}) runs backward before the slice from {end} on, which begins with its "
                    f"state of {call!r}: run the slices of a microbatch in reverse order"
                )
            if (read := self._states.get((call, first))) is not None:
                read.is_done = True
                if not self.keeps_read:
                    read.held = None
            gradients.append(left.gradient)
            # The reader's graph, which W may still need, would keep the gradient alive.
            left.gradient = None
        return gradients


def _add_gradient(state: _State, gradient: Tensor) -> None:
    # a copy, since it may be a view of something as long as the slice, which W holds too
    state.gradient = gradient.clone() if state.gradient is None else state.gradient + gradient


def begin_with(output: Tensor, gradients: Callable[[], Sequence[Tensor | None]], *others: Tensor) -> Tensor:
    """Returns `output`, whose backward also begins that of others, with the gradients that `gradients` then returns."""
    return with_backward(
        lambda output, *_: (output.view_as(output),), lambda gradient: (gradient, *gradients()), output, *others
    )[0]


class ContextError(RuntimeError):
    """Raised where the slices of a microbatch run in an order that their attention doesn't allow: a schedule's
    mistake."""
