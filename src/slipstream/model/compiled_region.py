"""Compiles a function of tensors, its forward and its backward, and calls them without asking torch.compile each time.

A function of `torch.compile` looks in every call whether anything changed since it compiled: guards, then the wrappers
of its autograd function, and those of symbolic sizes, together several times the time of the few small kernels that are
saved. The functions here have tensors as their only inputs. So a table of the inputs' kinds says all of that:

    shapes, dtypes, ... ─ table ─> forward, backward        met before: one look-up
                          └ else: a kernel whose sizes allow these shapes, else a new one, made by Inductor from the
                            function's graph under symbolic sizes, all but the last of each activation

A backward gets again those inputs that it needs, and recomputes in its kernel the parts that it needs of the forward:
nothing else is saved.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from slipstream.autograd_calls import differentiable_once, direct_apply

_log = logging.getLogger(__name__)
_Function = Callable[..., Any]
_TENSORS = (Tensor, nn.Parameter)
# Documents keep coming in new lengths, so only this many kinds of inputs are remembered.
_MOST_KINDS = 4096


def compiled_region(plain: _Function, ways: dict[object, _Function] | None = None) -> _Function:
    """Returns a pure function of tensors, which returns a tuple of them, compiled when it first meets a kind of inputs.

    It isn't compiled for a single token, whose sizes of 1 would need separate code. Where a dispatch mode watches the
    operations, as recompute="selective" does in a forward and in its replay, it runs uncompiled: PyTorch would compile
    the one and not the other, depending on which came first. Inputs that the table can't describe are left to
    torch.compile: autocast, inputs that aren't stored in order, outputs that share memory with inputs. `ways` is the
    table of the kinds that were met.
    """
    region = _Region(plain)
    ways = {} if ways is None else ways

    def kernel(*inputs: Any) -> Any:
        if is_in_torch_dispatch_mode(include_infra_modes=False):
            return _watchers[-1](plain, *inputs) if _watchers else plain(*inputs)
        key = _key(inputs)
        way = ways.get(key)
        if way is None:
            if len(ways) > _MOST_KINDS:
                ways.clear()
            way = ways[key] = region.find(inputs) if key is not None else region.by_dynamo
        return way(*inputs)

    return kernel


_watchers: list[Callable[..., Any]] = []


@contextmanager
def watched_kernels(watcher: Callable[..., Any]) -> Iterator[None]:
    """Calls `watcher` with a region's function and its inputs, instead of the function, where a dispatch mode watches
    operations: for counters, which take a region as the one kernel that it becomes, and dropout as that of a GPU."""
    _watchers.append(watcher)
    try:
        with _KernelOfDropout():
            yield
    finally:
        _watchers.pop()


class _KernelOfDropout(TorchFunctionMode):
    """Runs dropout as one kernel that saves a mask of one byte per element, as PyTorch does on GPUs only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = kwargs or {}
        if func is functional.dropout and settings["training"] and settings["p"]:
            return torch.native_dropout(args[0], settings["p"], True)[0]
        return func(*args, **settings)


def _key(inputs: Sequence[Any]) -> object:
    """Returns everything that a compiled kernel depends on."""
    first = inputs[0]
    if not isinstance(first, Tensor) or torch.is_autocast_enabled(first.device.type):
        return None
    kinds = [(x.shape, x.dtype, x.requires_grad, x.is_contiguous()) if type(x) in _TENSORS else None for x in inputs]
    return first.device, torch.is_grad_enabled(), *kinds


class _Region:
    """The kernels of one function."""

    def __init__(self, plain: _Function) -> None:
        self._plain = plain
        self._graphs: dict[object, list[_SizedKernel]] = {}

    @cached_property
    def by_dynamo(self) -> _Function:
        """The function as torch.compile compiles it."""
        return torch.compile(self._plain, dynamic=True)

    def find(self, inputs: Sequence[Tensor]) -> _Function:
        """Returns the function for these inputs, and others with an equal key."""
        if all(tensor.shape[:-1].numel() == 1 for tensor in inputs):
            return self._plain
        if not all(type(tensor) in _TENSORS and tensor.is_contiguous() for tensor in inputs):
            return self.by_dynamo
        needed = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in inputs)
        try:
            forward = self._sized(inputs, None)
            if not any(needed):
                return forward.run
            backward = self._sized(inputs, needed)
        # Any part of the compiler may raise any exception.
        except Exception as error:
            _log.warning("a kernel is left to torch.compile: %s: %s", type(error).__name__, error)
            return self.by_dynamo
        kernels = _Kernels(forward.run, backward.run, needed, backward.kept)

        def differentiated(*inputs: Tensor) -> Any:
            return _apply(kernels, *inputs)

        return differentiated

    def _sized(self, inputs: Sequence[Tensor], needed: tuple[bool, ...] | None) -> _SizedKernel:
        """Returns the forward, or the gradients of the inputs that need them, for these sizes."""
        kinds = tuple((x.dtype, x.device, x.shape if _is_fixed(x) else _free(x)) for x in inputs)
        known = self._graphs.setdefault((kinds, needed), [])
        for kernel in known:
            if kernel.takes(inputs):
                return kernel
        known.append(_in_other_thread(partial(_compile, self._plain, inputs, needed), inputs[0].device))
        return known[-1]


@dataclass(frozen=True)
class _SizedKernel:
    """A compiled graph and the sizes that it takes."""

    run: _Function
    shape_env: Any
    symbolic: Sequence[Tensor]  # inputs of the trace
    kept: tuple[bool, ...]  # True for each input that is used

    def takes(self, inputs: Sequence[Tensor]) -> bool:
        """Returns whether the kernel was compiled for these inputs' sizes."""
        like = [torch.empty(tensor.shape, device="meta") for tensor in inputs]
        return bool(self.shape_env.evaluate_guards_for_args(self.symbolic, like))


@dataclass(frozen=True)
class _Kernels:
    """A function's forward and backward: gradients of the outputs, inputs `kept` -> gradients of inputs `needed`."""

    forward: _Function
    backward: _Function
    needed: tuple[bool, ...]
    kept: tuple[bool, ...]


class _Compiled(torch.autograd.Function):
    """Calls compiled kernels."""

    @staticmethod
    def forward(ctx: Any, kernels: _Kernels, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*compress(inputs, kernels.kept))
        ctx.kernels = kernels
        return tuple(kernels.forward(*inputs))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        kernels = ctx.kernels
        gradients = iter(kernels.backward(*(gradient.contiguous() for gradient in grad_outputs), *ctx.saved_tensors))
        return None, *[next(gradients) if needed else None for needed in kernels.needed]


_apply = direct_apply(_Compiled)


def _is_fixed(each: Tensor) -> bool:
    return isinstance(each, nn.Parameter) or each.dim() < 2


def _free(tensor: Tensor) -> tuple[int | None, ...]:
    # None stands for sizes that may differ.
    return *[1 if size == 1 else None for size in tensor.shape[:-1]], tensor.shape[-1]


@cache
def _other_thread() -> ThreadPoolExecutor:
    """Returns the thread that compiles, the same one as long as the process lasts.

    PyTorch built for CUDA, on a machine without a GPU, keeps a pointer into the thread that first made fake tensors. A
    second thread follows it and crashes once the first has ended.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="compiler")


os.register_at_fork(after_in_child=_other_thread.cache_clear)


def _in_other_thread(compute: Callable[[], _SizedKernel], device: torch.device) -> _SizedKernel:
    """Computes where no hooks see saved tensors, as they do where activations are recomputed or offloaded: torch.func
    differentiates nothing under them."""

    def call() -> _SizedKernel:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return compute()

    return _other_thread().submit(call).result()


def _compile(plain: _Function, inputs: Sequence[Tensor], needed: tuple[bool, ...] | None) -> _SizedKernel:
    """Compiles the forward, or the backward, for inputs of these kinds."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    symbolic = [_symbolic(tensor, mode) for tensor in inputs]
    with mode, torch.no_grad():
        outputs = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in _outputs(plain, symbolic)]
    function, arguments = (plain, symbolic) if needed is None else (_backward(plain, needed), [*outputs, *symbolic])
    with torch.no_grad():
        # Within the mode, the backward can make the tensor that a slice's gradient is laid into.
        with mode:
            # a lambda, as the arguments of methods are counted wrongly
            graph = make_fx(lambda *traced: function(*traced), select_decomp_table())(*arguments)
        is_used = (True,) * len(inputs) if needed is None else _remove_unused(graph, len(inputs))
        gradients = arguments[: -len(inputs)]
        return _SizedKernel(
            compile_graph(graph, [*gradients, *compress(symbolic, is_used)]), mode.shape_env, symbolic, is_used
        )


def _remove_unused(graph: fx.GraphModule, num_inputs: int) -> tuple[bool, ...]:
    """Removes unneeded inputs of the forward from the end of a backward's inputs; returns whether each one stays.

    One that is needed for its sizes alone isn't kept: they are read from the gradients, which come first.
    """
    graph.graph.eliminate_dead_code()
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"][-num_inputs:]
    is_used = tuple(bool(node.users) for node in inputs)
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return is_used


def _symbolic(each: Tensor, mode: Any) -> Tensor:
    """Returns a tensor without numbers, stored in order, whose sizes that may differ are symbols."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = each.shape if _is_fixed(each) else _free(each)
    kinds = [DimDynamic.DYNAMIC if size is None else DimDynamic.STATIC for size in sizes]
    like = torch.empty(each.shape, dtype=each.dtype, device="meta")
    fake = mode.from_tensor(like, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))
    with mode:
        return torch.empty(fake.shape, dtype=each.dtype, device=each.device)


def _outputs(plain: _Function, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the function's outputs; raises ValueError where one isn't memory of its own, with numbers of its own."""
    outputs: Sequence[Tensor] = plain(*inputs)
    if any(output._is_view() or any(output is other for other in inputs) for output in outputs):
        raise ValueError("an output shares memory with an input")
    return outputs


def _backward(plain: _Function, needed: tuple[bool, ...]) -> _Function:
    """Returns a function of the gradients of the outputs and the inputs: the gradients of the inputs needed."""

    def differentiate(*given: Tensor) -> Any:
        gradients = given[: -len(needed)]
        inputs = given[-len(needed) :]

        def of_needed(*some: Tensor) -> Any:
            chosen = iter(some)
            return tuple(plain(*(next(chosen) if need else x for need, x in zip(needed, inputs, strict=True))))

        pull_back = torch.func.vjp(of_needed, *(x for need, x in zip(needed, inputs, strict=True) if need))[1]
        return pull_back(gradients)

    return differentiate


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> _Function:
    """Returns a graph's kernels as a function that returns a tuple."""
    from torch._inductor.compile_fx import compile_fx_inner

    compiled: Any = compile_fx_inner(graph, [*inputs], is_inference=True)
    direct = getattr(compiled, "current_callable", None) or compiled
    # The first call goes through `compiled`, which ends the compiling. Later ones would cost as much as a kernel.
    first = [compiled]

    def run(*given: Tensor) -> Any:
        return (first.pop() if first else direct)([*given])

    return run
