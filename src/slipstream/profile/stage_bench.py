"""Times one stage on one slice with a context before it: the seconds of F, B, I and W, and the bytes F leaves."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.attention import CarriedStates, ContextStore, StoredSlice
from slipstream.cost import ActionBytes, AttentionWindow, find_windows
from slipstream.host_memory import lies_in_file
from slipstream.model import IGNORED, CausalLMStage, causal_cross_entropy, storage_bytes, storage_id, storage_ids
from slipstream.model.hooks import TokenSlice
from slipstream.model.weight_gradients import defer_weight_gradients
from slipstream.parallel import RankGroup, Ranks, own_tokens, shared_slice
from slipstream.parallel.tensor import TensorParallel, vocabulary_cross_entropy
from slipstream.schedule import Op

_PIECE = 1024  # tokens per step of filling the context; few, so that the head's logits stay small


class PrefilledStore(ContextStore):
    """A store with the keys and values of a whole sequence, where any slice can be run again after any context.

    It is one token longer than the sequence, and no slice computes that token: so it is never complete, and nothing is
    freed.
    """

    def __init__(self, length: int) -> None:
        super().__init__(length + 1)
        self.carried = PrefilledStates()

    def rewind(self, context: int) -> None:
        """Forgets the slices that ran, except one that covers the first `context` tokens."""
        for buffers in self._contexts.values():
            buffers.slices = {0: StoredSlice(end=context, first=0)} if context else {}
            buffers.num_done = 0


class PrefilledStates(CarriedStates):
    """The states that were left last, with which a slice begins wherever it does."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[Hashable, Tensor] = {}

    def read(self, call: Hashable, token: int) -> Tensor | None:
        """See `CarriedStates`."""
        if token:
            self.keep(call, token, self._last[call], has_gradient=torch.is_grad_enabled())
        return super().read(call, token)

    def leave(
        self, states: Mapping[Hashable, Tensor], first: int, end: int, output: Tensor, is_replay: bool = False
    ) -> Tensor:
        """See `CarriedStates`."""
        self._last |= {call: state.detach().clone() for call, state in states.items()}
        return super().leave(states, first, end, output, is_replay)


class StageBench:
    """Runs a stage's ops on slices of random tokens, as the executor runs them.

    In a step a rank's other layers and slices come between two ops of a layer: its weights and gradients are no longer
    in the caches, nor is the memory that it will write to. So on a CPU `others` are read before every op. Other devices
    don't have caches of this size.

    With `shared`, every rank has its share of the stage; where `ranks` share slices, its tokens of each. All ranks of a
    team call the same methods in the same order and begin every op together, so that its time includes their exchanges.
    """

    def __init__(
        self,
        stage: CausalLMStage,
        batch: int,
        seq_len: int,
        others: Tensor | None = None,
        shared: TensorParallel | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        stage.check_measurable()
        self.stage = stage
        self.seq_len = seq_len
        self._others = others
        self._shared = shared
        self._team, self._sharing = (RankGroup(),) * 2 if ranks is None else (ranks.team, ranks.sharing)
        self._loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = causal_cross_entropy
        if shared is not None:
            self._loss = vocabulary_cross_entropy(shared.group, shared.first_id, IGNORED)
        self._device = device = stage.model.device
        generator = torch.Generator(device).manual_seed(0)
        vocabulary = stage.model.config.get_text_config().vocab_size
        self._ids = torch.randint(0, vocabulary, (batch, seq_len), generator=generator, device=device)
        self._positions = torch.arange(seq_len, device=device).expand(batch, -1)
        shape = (batch, seq_len, stage.hidden_size)
        self._hidden = torch.randn(shape, generator=generator, dtype=stage.hidden_dtype, device=device)
        self._store = PrefilledStore(seq_len)
        self._warm: set[int] = set()  # lengths of slices with warm F and B
        self._wall, self._computing = 0.0, 0.0  # seconds
        self._fill()

    def warm_up(self, length: int, context: int) -> None:
        """Runs all ops of the slice, so that the code and the memory that they need on so many tokens are there.

        Memory that is new to the process is slow at first, and W keeps more of it than B does.
        """
        self.run(length, context)

    def run(self, length: int, context: int) -> dict[Op, float]:
        """Returns the seconds of F and B of the slice, then of F, I and W."""
        self._warm.add(length)
        first, backward = self._forward(length, context)
        seconds = {Op.B: self._timed(backward)}
        second, backward = self._forward(length, context)
        with defer_weight_gradients() as work:
            seconds[Op.I] = self._timed(backward)
        seconds[Op.W] = self._timed(lambda: [add() for add in work], exchanges=False)
        return {Op.F: mean((first, second))} | seconds

    def activation_bytes(self, length: int) -> int:
        """Returns the bytes that F leaves alive for the backward, its input and output included: each storage once.

        Parameters, buffers, the batch, the context store's keys and values, and tensors that another slice of the same
        stage saves too (weights that autocast has cast) don't count.
        """
        others = [*self.stage.model.parameters(), *self.stage.model.buffers(), self._ids, self._positions]
        # The first result stays alive until the second slice is counted.
        twin = self._saved(1)
        return storage_bytes(self._saved(length), apart_from=storage_ids([*others, *twin]))

    def action_bytes(self, *lengths: int) -> list[ActionBytes]:
        """Returns the bytes of F, B, I and W of the sequence's last slice, which has the longest context, for every
        length of it."""
        # Warming up makes the weight gradients, and everything that is cached.
        for length in {*lengths} - self._warm:
            self.warm_up(length, self.seq_len - length)
        with memory_meter(self._device) as memory:
            return [self._action_bytes(length, memory) for length in lengths]

    def _action_bytes(self, length: int, memory: MemoryMeter) -> ActionBytes:
        kept_bytes, peaks, backward = self._forward_bytes(length, memory)
        peaks[Op.B] = _changed(memory, backward)[1]
        _, _, backward = self._forward_bytes(length, memory)
        with defer_weight_gradients() as work:
            deferred, peaks[Op.I] = _changed(memory, backward)
        peaks[Op.W] = _changed(memory, lambda: [add() for add in work])[1]
        return ActionBytes(kept_bytes, deferred, peaks)

    def _forward_bytes(self, length: int, memory: MemoryMeter) -> tuple[int, dict[Op, float], Callable[[], None]]:
        """Returns the bytes F keeps besides its input and output, the most above them, and its backward."""
        context = self.seq_len - length
        self._store.rewind(context)
        hidden = self._input(length)
        outputs: list[Tensor] = []
        made, peak = _changed(memory, lambda: outputs.append(self._compute(length, context, hidden)))
        kept_bytes = made - outputs[0].nbytes
        gradient = self._gradient(outputs[0])
        if hidden is not None:
            hidden.grad = torch.zeros_like(hidden)  # a message: made before, and added to
        return kept_bytes, {Op.F: peak - kept_bytes}, partial(torch.autograd.backward, outputs[0], gradient)

    def context_bytes(self) -> tuple[int, int]:
        """Returns the bytes per token of the keys and values, and of their gradients."""
        # The gradients are there.
        if self._warm:
            self._store.free()
            self._fill()
        before = self._store.num_bytes
        self.warm_up(1, self.seq_len - 1)
        return before // self._store.length, (self._store.num_bytes - before) // self._store.length

    def num_parameters(self, of_experts: bool = False) -> int:
        """Returns how many this rank has of the stage's parameters, or of those of experts that are spread."""
        spread = self.stage.experts
        named = self.stage.named_parameters()
        return sum(parameter.numel() for name, parameter in named if not of_experts or (spread and spread.has(name)))

    def windows(self) -> tuple[AttentionWindow, ...]:
        """Returns the distinct windows of the stage's attention calls."""
        return tuple(dict.fromkeys(find_windows(self._first_keys, self.seq_len)))

    @torch.no_grad()
    def _first_keys(self, position: int) -> list[int]:
        """Returns the first key that the query at a position sees, in every attention call."""
        self._store.rewind(position)
        self._compute(1, position, self._input(1))
        return [reads[-1][0] for reads in self._store.reads.values()]

    def _forward(self, length: int, context: int) -> tuple[float, Callable[[], None]]:
        """Returns the seconds of F, and its backward."""
        self._store.rewind(context)
        hidden = self._input(length)
        outputs: list[Tensor] = []
        seconds = self._timed(lambda: outputs.append(self._compute(length, context, hidden)))
        return seconds, partial(torch.autograd.backward, outputs[0], self._gradient(outputs[0]))

    def _saved(self, length: int) -> list[Tensor]:
        """Returns the tensors that the first slice saves, its input and its output."""
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            # The output itself would hold the graph that holds it.
            saved.append(tensor.detach())
            return saved[-1]

        self._store.rewind(0)
        hidden = self._input(length)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self._compute(length, 0, hidden)
        return [*saved, output] if hidden is None else [*saved, output, hidden]

    def _compute(self, length: int, context: int, hidden: Tensor | None) -> Tensor:
        span = slice(context, context + length)
        ids, positions = self._ids[:, span], self._positions[:, span]
        # Layers compute a whole sequence without a state, so the sequence is longer than any slice.
        longer = self._store.length
        token_slice = TokenSlice(ids, positions, None, context, longer, max_position=self.seq_len - 1)
        if self._sharing.size > 1:
            token_slice = shared_slice(token_slice, self._sharing.rank, self._sharing.size)
        output = self.stage.compute(token_slice, () if hidden is None else (hidden,), self._store)
        if not self.stage.is_last:
            return output[0]  # type: ignore[no-any-return]
        # Any labels do.
        total, _ = self._loss(output, token_slice.input_ids)
        return total / ids.numel()

    def _input(self, length: int) -> Tensor | None:
        if self.stage.is_first:
            return None
        here = self._hidden[:, : self._local(length)]
        return here.clone(memory_format=torch.contiguous_format).requires_grad_()

    def _local(self, length: int) -> int:
        """Returns how many of a slice's tokens are on this rank between the parts of a layer."""
        length_here = own_tokens(self._ids[:, :length], self._sharing.rank, self._sharing.size).shape[1]
        return length_here if self._shared is None else self._shared.local_length(length_here)

    def _gradient(self, output: Tensor) -> Tensor | None:
        return None if output.dim() == 0 else self._hidden[:, : output.shape[1]].contiguous().to(output.dtype)

    def _fill(self) -> None:
        """Computes keys and values of the whole sequence."""
        with torch.no_grad():
            for start in range(0, self.seq_len, _PIECE):
                length = min(_PIECE, self.seq_len - start)
                here = slice(start, start + self._local(length))
                hidden = None if self.stage.is_first else self._hidden[:, here].contiguous()
                self._compute(length, start, hidden)

    @property
    def disturbed(self) -> float:
        """The share of the measuring during which a CPU's core did something else; 0 on other devices."""
        return max(0.0, 1 - self._computing / self._wall) if self._device.type == "cpu" and self._wall else 0.0

    def _timed(self, work: Callable[[], object], exchanges: bool = True) -> float:
        """Returns the seconds of `work`, in which the ranks of the team exchange something or nothing.

        A single thread on a CPU, which waits for nobody, has the seconds in which it computed: those in which another
        program had its core don't lengthen them.
        """
        if self._others is not None:
            self._others.sum()
        self._team.barrier()
        # The time of all threads of this process leaves out another program's share.
        began = time.process_time()
        seconds = seconds_of(work, self._device)
        # A rank that waits for another one doesn't compute either.
        if self._team.size > 1 and exchanges:
            return seconds
        computing = time.process_time() - began
        self._computing += computing
        self._wall += seconds
        alone = self._device.type == "cpu" and torch.get_num_threads() == 1
        return min(seconds, computing) if alone else seconds


def _changed(memory: MemoryMeter, work: Callable[[], object]) -> tuple[int, int]:
    """Returns the bytes that are alive after the work, and the most during it, above those before."""
    before = memory.num_bytes
    memory.restart_peak()
    work()
    return memory.num_bytes - before, memory.peak - before


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of `work`; on a GPU between two events, once it is idle."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    began_event, ended_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    began_event.record()
    work()
    ended_event.record()
    torch.cuda.synchronize(device)
    return float(began_event.elapsed_time(ended_event)) / 1e3


class LiveMemory(TorchDispatchMode):
    """The storages of the CPU's tensors: those of `present` tensors, and all that operations within the block make.

    An operation's result is in a storage of its own or in that of an argument, so the arguments show which storages
    were there before. Such a one doesn't count unless it is `present`, but where an operation has read it, its end
    does. Exact for tensors' memory, each storage once, until its last owner, Python or an autograd graph, releases it.
    Tensors in files are the host's, and counted apart. Buffers inside a kernel are not tensors and not seen. Backwards
    are seen because on the CPU they run in the calling thread.
    """

    def __init__(self, present: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.num_bytes = 0
        self.peak = 0
        self._on_host = 0
        self.host_peak = 0
        for tensor in present:
            self._add(tensor)

    def restart_peak(self) -> None:
        self.peak = self.num_bytes
        self.host_peak = self._on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The argument of this op has just been made, without an operation.
        if func is not torch.ops.aten.lift_fresh.default:
            for tensor in _tensors(args if not kwargs else (*args, *kwargs.values())):
                self._add(tensor, counted=False)
        result = func(*args, **kwargs or {})
        for tensor in _tensors((result,)):
            self._add(tensor)
        return result

    def _add(self, tensor: Tensor, counted: bool = True) -> None:
        key = storage_id(tensor)
        # A trace's tensors have no memory.
        if key in self._references or tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        if not (size := storage.nbytes()):
            return
        is_on_host = lies_in_file(tensor)
        remove = self._remove_file if is_on_host else self._remove
        self._references[key] = weakref.ref(storage, partial(remove, key, size))
        if is_on_host:
            self._on_host += size * counted
            self.host_peak = max(self.host_peak, self._on_host)
        else:
            self.num_bytes += size * counted
            self.peak = max(self.peak, self.num_bytes)

    def _remove(self, key: int, size: int, _: object) -> None:
        del self._references[key]
        self.num_bytes -= size

    def _remove_file(self, key: int, size: int, _: object) -> None:
        del self._references[key]
        self._on_host -= size


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among an operation's arguments or results, which are in lists at most."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


class AllocatedMemory:
    """Reads the bytes that CUDA's caching allocator has allocated: blocks, so sizes are rounded up. Those on the host
    aren't its own."""

    host_peak = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart_peak()

    @property
    def num_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


# `num_bytes` now, their `peak` since `restart_peak` or the beginning, and the `host_peak` of tensors in files
MemoryMeter = LiveMemory | AllocatedMemory


def memory_meter(device: torch.device, present: Iterable[Tensor] = ()) -> AbstractContextManager[MemoryMeter]:
    """Measures how a device's tensors change within a block. On the CPU those `present` count from the beginning."""
    return nullcontext(AllocatedMemory(device)) if device.type == "cuda" else LiveMemory(present)


def tensors_alive() -> list[Tensor]:
    """Returns every tensor in this process that Python knows of.

    It leaves out those that only stand for one and have no memory: torch.compile's stay in its caches.
    """
    gc.collect()
    tensors = (candidate for candidate in gc.get_objects() if issubclass(type(candidate), Tensor))
    return [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
