"""Bytes of tensors that are alive, whoever holds them: Python, an autograd graph or nobody any more."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream import Action, Op, Pipeline
from slipstream.host_memory import lies_in_file
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.execution import StepState
from support.observers import BeforeEach


def limit_that_would_do(problem: BaseException) -> int:
    """The bytes that the refusal of a limit names as enough."""
    return int(re.findall(r"memory\.limit=(\d+) would do", str(problem))[0])


class LiveMemory(TorchDispatchMode):
    """Watches what every operation within it returns; `besides` are tensors that don't count, nor do their views."""

    def __init__(self, besides: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._besides = {tensor.untyped_storage().data_ptr() for tensor in besides}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor) and not lies_in_file(tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._besides:
                    reference = StorageWeakRef(storage)
                    self._storages[reference.cdata] = reference, storage.nbytes()
        return result

    @property
    def num_bytes(self) -> int:
        """Of all storages made by an operation, or viewed by one, that are alive now."""
        self._storages = {key: item for key, item in self._storages.items() if not item[0].expired()}
        return sum(size for _, size in self._storages.values())


def held_after_three_slices(pipe: Pipeline, inputs: Tensor) -> tuple[int, int, int]:
    """Takes a step of one stage in four slices; returns three counts of bytes that are alive.

    Those of everything and of the context store before the last slice's forward; those of everything after the step.
    """
    memory, found = LiveMemory(besides=pipe.parameters()), (0, 0)
    (executor,) = pipe._runtime.executors

    def note(action: Action, state: StepState) -> None:
        nonlocal found
        if action.op is Op.F and action.slice == 3:
            (store,) = state.stores.values()
            found = memory.num_bytes, store.num_bytes

    executor.observe(BeforeEach(note))
    with memory:
        pipe.step(inputs, inputs)
    return *found, memory.num_bytes


def rehearsed_bytes(pipe: Pipeline, inputs: Tensor) -> float:
    """The most bytes that a rank would hold in a step, as it is rehearsed before one runs."""
    runtime = pipe._runtime
    return max(runtime.memory_limit.peak_memory_of(runtime.rehearsed_step(Batch.of(pipe.device, inputs, inputs))).peaks)
