"""Fuses norms and activations into one kernel each, and rotary embeddings: torch.compile of a model's code between its
linear layers.

    x ─ [to float32, square, mean, rsqrt, mul, mul] ─ q, k, v ─ attention ─ ...          a norm
    x ─ gate, up ─ [act(gate) * up] ─ down ─ ...                                          a gated feed-forward

Only the code in brackets is compiled. Linear layers, dropout and attention run as before, called one by one: hooks on
them, gradients added in place, and the split of a backward into I and W stay the same. PTD-P section 4.2 fuses bias,
GeLU, dropout and residual by hand; here the bias is in the matrix product, and dropout stays outside, so that it draws
the same numbers with and without fusion.

For rotary embeddings transformers' attention calls a function of its own file, whose operations run one by one:

    q, k, v ─ views ─ [q * cos + rotate_half(q) * sin, and the same of k] ─ attention

It becomes one kernel for queries and one for keys. The function is traced, so none of its code is copied, whichever
numbers it pairs and whatever part of a head it rotates. It is called with tokens before heads, as they are in memory.
"""

from __future__ import annotations

import dis
import operator
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from inspect import Parameter, isfunction, signature
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from slipstream.errors import SlipstreamError
from slipstream.model.compiled_region import compiled_region
from slipstream.model.own_code import has_own_code, runs_class_code
from slipstream.model.weight_gradients import uncompiled_modules

_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
# operations that need no kernel
_FREE = frozenset({getattr, operator.getitem, "chunk", "split", "view", "reshape", "size", "dim"})
_CHANGES = frozenset({operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv})
_RANDOM = ("dropout", "rand", "bernoulli", "noise")
_PRODUCTS = ("mm", "matmul", "linear", "einsum", "conv", "attention")
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_LEAVE_OUT = "or leave fused out (runtime.fused: false)."
_Kernel = Callable[..., Any]
_Copies = dict[fx.Node, fx.Node]  # node of the traced graph -> its place in another


def fuse_kernels(model: nn.Module) -> list[str]:
    """Replaces, in place, the forwards of the norms and activations in `model`, and of the attention that calls rotary
    embeddings; each compiles when it first runs.

    A norm is a module without children whose class name contains "Norm"; an activation is one of transformers' or
    PyTorch's, in a module with linear layers. They are traced, so none of their code is copied, and run for slices of
    any length without being compiled again. Modules that can't be traced stay as they are, as do those that are already
    one kernel, such as `nn.LayerNorm`. Equal modules are compiled once, however many layers have them. Rotary
    embeddings are functions of the model's file: the forward that calls them is given fused ones, and others call its
    own.

    Returns:
        The names of the modules whose forwards are fused.
    """
    kernels: dict[object, _Kernel] = {}
    uncompiled = [*uncompiled_modules(model)]
    return [name for name, module in uncompiled if fuse_rotary_embeddings(module) or _fuse_module(module, kernels)]


def check_compiler(device_type: str) -> None:
    """Raises SlipstreamError where torch.compile can't make kernels here for a device type, "cpu" or "cuda"."""
    if device_type == "cuda" and find_spec("triton") is None:
        raise SlipstreamError(
            f"fused: kernels for CUDA are made by Triton. Install it: pip install triton, {_LEAVE_OUT}"
        )
    cxx = "clang++" if sys.platform == "darwin" else "g++"  # PyTorch's default
    variable, candidates = ("CC", ("gcc", "clang", "cc")) if device_type == "cuda" else ("CXX", (cxx,))
    named = os.environ.get(variable, "").split()[:1] or candidates
    if not any(map(shutil.which, named)):
        raise SlipstreamError(
            f"fused: torch.compile needs a compiler, but {' or '.join(named)} is not on the PATH. Install it, as with "
            f"apt-get install g++, name one you have in {variable}, {_LEAVE_OUT}"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise SlipstreamError(
            f"fused: torch.compile needs Python's headers, but {header} is not there. Install them, as with "
            f"apt-get install python3-dev, {_LEAVE_OUT}"
        )


def _fuse_module(module: nn.Module, kernels: dict[object, _Kernel]) -> bool:
    """Fuses the forward of a norm or of a module with an activation; returns whether anything is fused."""
    is_norm = "Norm" in type(module).__name__ and not any(module.children())
    if not runs_class_code(module) or any(has_own_code(child) for child in module.children() if _is_activation(child)):
        # A trace would show the class's code and not what this instance runs.
        return False
    if not (is_norm or any(map(_is_activation, module.children()))) or not _takes_one(module):
        return False
    graph = _trace(module)
    parts = None if graph is None else _fuse_regions(module, graph, kernels)
    if parts is None:
        return False
    # bound to the module itself, whose parameters and children may be replaced or moved later
    module.forward = MethodType(type(fx.GraphModule(module, parts)).forward, module)
    return True


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ in _ACTIVATIONS and not any(module.children())


def _takes_one(module: nn.Module) -> bool:
    """Returns whether the forward takes one tensor and nothing else: a trace sees only one case of an optional
    argument."""
    parameters = [*signature(module.forward).parameters.values()]
    return len(parameters) == 1 and parameters[0].default is Parameter.empty and parameters[0].kind not in _VARIADIC


class _Tracer(fx.Tracer):
    """Traces through activations and calls all other children as modules."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not _is_activation(m)


def _trace(module: nn.Module) -> fx.Graph | None:
    """Returns the graph of the module's forward; None where fusing it could change results.

    That is where it depends on the input or the mode, is random, or changes something, and where matrices are
    multiplied: W and recomputation have to see that.
    """
    was_training = module.training
    codes = set()
    try:
        for training in (False, True):
            module.training = training
            graph = _Tracer().trace(module)
            codes.add(graph.python_code("self").src)
    # A model's code may fail in any way on a proxy of a tensor.
    except Exception:
        return None
    finally:
        module.training = was_training
    return graph if len(codes) == 1 and all(map(_is_pure, graph.nodes)) else None


def _is_pure(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op not in ("call_function", "call_method"):
        return True
    changes = node.target in _CHANGES or (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace")
    return not changes and not any(word in name for word in (*_RANDOM, *_PRODUCTS))


def _fuse_regions(module: nn.Module, graph: fx.Graph, kernels: dict[object, _Kernel]) -> fx.Graph | None:
    """Returns the same graph with one call for every region; None if no region has more than one kernel.

    The operations between the same modules form a region: those that need the same number of modules, one after the
    other, before them. So everything that needs both gate and up comes after both.
    """
    levels = _levels(graph)
    fused = fx.Graph()
    num_kernels = 0
    copies = {node: fused.node_copy(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    for level in range(max(levels.values(), default=-1) + 1):
        here = [node for node, at in levels.items() if at == level]
        region = [node for node in here if node.op != "call_module"]
        if sum(node.target not in _FREE for node in region) > 1:
            _call_kernel(module, region, fused, copies, kernels)
            num_kernels += 1
            here = [node for node in here if node.op == "call_module"]
        for node in here:
            copies[node] = fused.node_copy(node, copies.__getitem__)
    fused.output(fx.map_arg(graph.output_node().args[0], copies.__getitem__))
    return fused if num_kernels else None


def _levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """Returns for every call the number of modules that must be called before it, one after the other."""
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op.startswith("call"):
            before = [levels[n] + (n.op == "call_module") for n in node.all_input_nodes if n in levels]
            levels[node] = max(before, default=0)
    return levels


def _call_kernel(
    module: nn.Module, region: list[fx.Node], fused: fx.Graph, copies: _Copies, kernels: dict[object, _Kernel]
) -> None:
    """Replaces `region` by one call. Regions with equal code and equally large parameters share a kernel."""
    inside = {*region}
    inputs = [*dict.fromkeys(before for node in region for before in node.all_input_nodes if before not in inside)]
    outputs = [node for node in region if any(user not in inside for user in node.users)]
    region_graph = fx.Graph()
    places = {node: region_graph.placeholder(f"input_{index}") for index, node in enumerate(inputs)}
    for node in region:
        places[node] = region_graph.node_copy(node, places.__getitem__)
    region_graph.output(tuple(places[node] for node in outputs))
    key = region_graph.python_code("self").src, tuple(_shape(module, node) for node in inputs)
    if key not in kernels:
        kernels[key] = compiled_region(fx.GraphModule(nn.Module(), region_graph).forward)
    results = fused.call_function(kernels[key], tuple(copies[node] for node in inputs))
    copies |= {node: fused.call_function(operator.getitem, (results, i)) for i, node in enumerate(outputs)}


def _shape(module: nn.Module, node: fx.Node) -> torch.Size | None:
    """Returns the shape of a parameter or buffer; None for one that is only known when it runs."""
    value = operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None
    return value.shape if isinstance(value, Tensor) else None


_Rotate = Callable[..., Any]  # queries, keys (B,H,T,D), cosines, sines (B or 1,T,d) -> both rotated
_ARGUMENTS = ["q", "k", "cos", "sin"]
_PLACE_OF_HEADS = "unsqueeze_dim"  # 1: (B,H,T,D); 2: (B,T,H,D)
_WIDTH = 8  # width of the heads in trials


def fuse_rotary_embeddings(module: nn.Module) -> bool:
    """Replaces the rotary embeddings that this module's forward calls; returns whether there are any.

    The functions stay as they are in their file, for other models. Only this module's forward, in which nothing else is
    changed, calls fused ones, and these only for tensors that they can take: all else is left to the model's own.
    """
    forward = module.forward
    if not isinstance(forward, MethodType) or not isfunction(forward.__func__):
        return False
    function = forward.__func__
    names = {name: f"_slipstream_fused_{name}" for name in _rotations(function)}
    for name, fused in names.items():
        # beside the model's: the forward must see later replacements in its file, such as position biases
        function.__globals__[fused] = fused_rotation(function.__globals__[name])
    if names:
        module.forward = MethodType(_renamed(function, names), module)
    return bool(names)


@cache  # models of one family share kernels
def fused_rotation(function: _Rotate) -> _Rotate:
    """Returns a function with the arguments and results of `function`, by few kernels where it can."""
    kernel = compiled_region(lambda q, k, cos, sin: tuple(function(q, k, cos, sin, **{_PLACE_OF_HEADS: 2})))

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **settings: Any) -> Any:
        if more or settings or not _are_usual(q, k, cos, sin):
            return function(q, k, cos, sin, *more, **settings)
        tables = cos.contiguous(), sin.contiguous()
        query, key = kernel(q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous(), *tables)
        return query.transpose(1, 2), key.transpose(1, 2)

    return rotate


def _are_usual(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Returns whether the shapes are like those that functions are tried on: angles of every token, queries and keys.

    A lone token isn't fused: its sizes of 1 would need separate code.
    """
    usual = q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3
    return usual and q.shape[2] == k.shape[2] == cos.shape[1] == sin.shape[1] > 1


def _rotations(forward: FunctionType) -> Iterator[str]:
    """Yields the names by which a forward calls rotary embeddings that can be fused."""
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        uses = {step.opname for step in dis.get_instructions(forward.__code__) if step.argval == name}
        if isfunction(function) and uses == {"LOAD_GLOBAL"} and is_rotation(function):
            yield name


@cache
def is_rotation(function: _Rotate) -> bool:
    """Returns whether a function rotates queries and keys, and does the same with tokens before heads.

    It is tried in float64, on tables that are as wide as a head and half as wide, of one row and of as many as there
    are: some functions rotate a part of each head. Inputs that one of its tries refuses, it would refuse in a model.
    """
    parameters = [*signature(function).parameters]
    if parameters[:4] != _ARGUMENTS or _PLACE_OF_HEADS not in parameters:
        return False
    tries = [_agrees(function, rows, width) for rows in (1, 2) for width in (_WIDTH, _WIDTH // 2)]
    return True in tries and False not in tries


@torch.no_grad()
def _agrees(function: _Rotate, rows: int, width: int) -> bool | None:
    """Returns whether both orders of tokens and heads give the same, and the inputs stay; None where it fails."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 5, _WIDTH), (2, 1, 5, _WIDTH), (rows, 5, width), (rows, 5, width)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes]
    q, k, *tables = (tensor.clone() for tensor in inputs)
    try:
        expected = function(q, k, *tables)
        rotated = function(q.transpose(1, 2), k.transpose(1, 2), *tables, **{_PLACE_OF_HEADS: 2})
        same = [_same(a, b.transpose(1, 2), c) for a, b, c in zip(expected, rotated, inputs[:2], strict=True)]
        unchanged = all(map(torch.equal, inputs, (q, k, *tables)))
    # A model's function may fail in any way on other shapes.
    except Exception:
        return None
    return unchanged and all(same)


def _same(expected: Tensor, found: Tensor, given: Tensor) -> bool:
    kind = expected.shape == found.shape == given.shape and expected.dtype == found.dtype == given.dtype
    return kind and torch.allclose(expected, found, rtol=0, atol=1e-12)


def _renamed(function: FunctionType, names: dict[str, str]) -> FunctionType:
    """Returns a function that reads other global variables, by names."""
    code = function.__code__.replace(co_names=tuple(names.get(name, name) for name in function.__code__.co_names))
    renamed = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    renamed.__kwdefaults__, renamed.__annotations__ = function.__kwdefaults__, function.__annotations__
    return renamed
