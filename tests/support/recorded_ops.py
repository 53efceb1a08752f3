"""Records the operations of a computation on a CPU and repeats them on the same memory, as a CUDA graph does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

_WAITING = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)  # so that the host can read a number


class RecordedOps:
    """A recorder for devices without graphs. As nothing has run when a graph is recorded, what operations changed in
    place is put back."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        log = _Log()
        try:
            with log:
                compute()
        finally:
            log.undo()
        return log.replay


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
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
        if not moves and "empty" not in func.overloadpacket.__name__:  # what has no numbers
            self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, copy in reversed(self.before):
            tensor.copy_(copy)
        self.before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            found = func(*args, **kwargs)
            for own, new in zip(tree_flatten(result)[0], tree_flatten(found)[0], strict=True):
                if isinstance(own, Tensor) and own.numel() and not _same_memory(own, new):
                    own.copy_(new)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
