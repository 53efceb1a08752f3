"""Records the operations of a computation on a CPU and repeats them on the same memory, as a CUDA graph does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from slipstream.keyed_draws import PlaceSeed, drawing

_WAITING = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)  # so that the host can read a number


class RecordedOps:
    """A recorder for devices without graphs. As nothing has run when a graph is recorded, what operations changed in
    place is put back.

    It seeds where what it recorded did, by the seed of the step that is replayed.
    """

    def __init__(self) -> None:
        self._log, self._most_seeds = _Log(), 0  # of what is being recorded

    def record(self, compute: Callable[[], None], num_seeds: int) -> Callable[[int], None]:
        log = _Log()
        self._log, self._most_seeds = log, num_seeds
        try:
            with drawing(self), torch.random.fork_rng(devices=[]), log:
                compute()
        finally:
            log.undo()
        return log.replay

    def lane(self) -> LateCopies:
        return LateCopies()

    def forked(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[])

    def seed(self, seed: PlaceSeed) -> None:
        self._note(torch.default_generator, seed)

    def generator(self, device: torch.device, seed: PlaceSeed) -> torch.Generator:
        generator = torch.Generator(device)
        self._note(generator, seed)
        return generator

    def _note(self, generator: torch.Generator, seed: PlaceSeed) -> None:
        assert self._most_seeds, "more seeds than CUDA graphs would have generators"
        self._most_seeds -= 1
        self._log.calls.append(_Seeding(generator, seed))


class LateCopies:
    """Copies as late as whoever waits for them lets it, as a slow link would."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._num_done = 0

    def start(self, copy: Callable[[], None]) -> int:
        self._waiting.append(copy)
        return self._num_done + len(self._waiting)

    def wait(self, copy: int) -> None:
        while self._num_done < copy:
            self._waiting.pop(0)()
            self._num_done += 1


class _Seeding(NamedTuple):
    generator: torch.Generator
    seed: PlaceSeed


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any] | _Seeding] = []
        self.before: list[tuple[Tensor, Tensor]] = []  # tensors that were changed, and copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        moves = func.overloadpacket in (torch.ops.aten.set_, torch.ops.aten.resize_)
        if func._schema.is_mutable and not moves:
            arguments = zip(func._schema.arguments, args, strict=False)
            changed = [value for argument, value in arguments if argument.is_write and isinstance(value, Tensor)]
            self.before += [(tensor.data, tensor.clone()) for tensor in changed]
        if func.overloadpacket in _WAITING:
            raise RuntimeError(f"{func} waits for the device, which a graph can't")
        result = func(*args, **kwargs or {})
        if "empty" in func.overloadpacket.__name__:  # memory without numbers
            result.zero_()  # which recorded operations may read as indices
        elif not moves:
            self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, copy in reversed(self.before):
            tensor.copy_(copy)
        self.before.clear()

    @torch.no_grad()
    def replay(self, step_seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            for call in self.calls:
                if isinstance(call, _Seeding):
                    call.generator.manual_seed(call.seed.in_step(step_seed).number)
                else:
                    _repeat(*call)


def _repeat(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    found = func(*args, **kwargs)
    for each in tree_flatten(found)[0]:
        if hasattr(each, "wait"):  # an exchange between ranks
            each.wait()
    for own, new in zip(tree_flatten(result)[0], tree_flatten(found)[0], strict=True):
        if isinstance(own, Tensor) and own.numel() and not _same_memory(own, new):
            own.copy_(new)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
