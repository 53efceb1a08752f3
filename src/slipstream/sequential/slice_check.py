"""The self-check of token slices: the layers after CutTokens, on slices and on the whole, in float64.

Each layer is tried by itself, on the output of the layers before it: its outputs, and the gradients of its inputs and
parameters. Its present weights show little where branches begin at zero, so it is tried with random ones too, on tokens
that differ, in training as in evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from slipstream.attention import ContextStore
from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import kept_random_states
from slipstream.model import Tensors, copy_modules
from slipstream.model.hooks import active_forward
from slipstream.sequential.layer_list import (
    BatchSlice,
    LayerContext,
    LayerValue,
    SequentialLayer,
    SkipPop,
    SkipStash,
    as_tuple,
    as_value,
)

BOUND = 1e-10  # the largest difference, relative to the largest number
_MOST_TOKENS, _FEWEST_TOKENS = 512, 32  # limits on the tokens of an example, which is cut to them if longer
# Limits the duration of the check: parameters times tokens.
_MOST_PRODUCTS = 2**30
_LEFT_OUT = "(runtime.self_check=False leaves this check out.)"


def compare_slices(layers: Sequence[SequentialLayer], cut: int, example: LayerValue) -> None:
    """Raises SlipstreamError, naming the first layer that does something else on slices than on the whole.

    One row of `example` runs, the layers after `cut` on its first 512 tokens, or fewer where they have many
    parameters, in three unequal slices. Each layer is copied to float64 while it runs.
    """
    device = next((parameter.device for layer in layers for parameter in layer.module.parameters()), None)
    rows = tuple(tensor[:1].to(device) for tensor in as_tuple(example))
    row = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in rows)
    value = as_value(row, isinstance(example, tuple))
    with kept_random_states(), torch.random.fork_rng(enabled=device is not None and device.type == "cuda"):
        torch.manual_seed(0)
        check = _SliceComparison()
        for layer in layers[:cut]:
            value = check.before(layer, value)
        check.cut(layers[cut], value, sum(p.numel() for other in layers[cut:] for p in other.module.parameters()))
        for layer in layers[cut + 1 :]:
            check.step(layer)
        check.check_outputs(layers[-1])


@dataclass(frozen=True)
class _Trial:
    """The mode in which a layer runs, and whether its weights, and the tokens that it is given, are random."""

    training: bool
    is_random: bool = True
    is_positive: bool = False  # True: random weights above zero, and tokens as they are


@dataclass(frozen=True)
class _Run:
    """A layer's forward on the whole or on slices, one after the other."""

    module: nn.Module
    leaves: list[list[Tensor]]  # the inputs of each slice
    outputs: list[Tensors]
    is_tuple: bool
    draws: list[list[int]]  # how many random numbers each call draws, by slice
    is_opaque: bool  # True if some draws can't be made the same everywhere
    bound: float
    store: ContextStore

    def gradients(self, begun: Sequence[Tensors]) -> list[list[Tensor]]:
        """Returns, by slice, the gradients of its inputs and of the parameters; the backwards run in reverse."""
        by_slice: list[list[Tensor]] = []
        for entered, outputs, gradients in reversed([*zip(self.leaves, self.outputs, begun, strict=True)]):
            wanted = [leaf for leaf in (*entered, *self.module.parameters()) if leaf.requires_grad]
            for leaf in wanted:
                leaf.grad = None
            roots = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
            if roots:
                torch.autograd.backward([output for output, _ in roots], [gradient for _, gradient in roots])
            grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.to_dense() for leaf in wanted]
            by_slice.insert(0, [gradient.detach().clone() for gradient in grads])
        self.store.free()
        return by_slice


class _SliceComparison:
    """The values of the whole, from layer to layer, and along which dim each is cut into slices, None: not at all."""

    def __init__(self) -> None:
        self._whole: Tensors = ()
        self._is_tuple = False
        self._dims: list[int | None] = []
        self._tokens: list[range] = []
        self._skips: dict[str, tuple[Tensor, int | None]] = {}

    def before(self, layer: SequentialLayer, value: LayerValue) -> LayerValue:
        """Returns the output of a layer before the cut, in evaluation."""
        module = layer.module
        if isinstance(module, SkipStash | SkipPop):
            return module(value)  # type: ignore[no-any-return]
        with torch.no_grad():
            return _called(layer, _copy(module, training=False), value)

    def cut(self, layer: SequentialLayer, value: LayerValue, num_parameters: int) -> None:
        hidden, *others = as_tuple(value)
        if hidden.dim() < 2:
            raise SlipstreamError(f"{layer} is given {tuple(hidden.shape)}. The first must be (rows, tokens, ...).")
        most = max(_FEWEST_TOKENS, min(_MOST_TOKENS, _MOST_PRODUCTS // max(num_parameters, 1)))
        length = min(hidden.shape[1], most)
        bounds = [0, length * 2 // 5, length * 3 // 4, length]
        self._tokens = [range(a, b) for a, b in pairwise(bounds) if b > a]
        self._whole, self._is_tuple = (hidden[:, :length], *others), isinstance(value, tuple)
        self._dims = [1, *(None for _ in others)]

    def step(self, layer: SequentialLayer) -> None:
        module = layer.module
        if isinstance(module, SkipStash):
            index = module.index % len(self._whole)
            self._skips[module.skip.name] = self._whole[index], self._dims[index]
            return
        if isinstance(module, SkipPop):
            tensor, dim = self._skips.pop(module.skip.name)
            self._whole = (*self._whole, tensor)
            self._dims = [*self._dims, dim]
            self._is_tuple = True
            return
        outputs, is_tuple, dims = self._tried(layer, _Trial(training=False, is_random=False))
        for training in (True, False):
            for trial in (_Trial(training), _Trial(training, is_positive=True), _Trial(training, is_random=False)):
                if self._tried(layer, trial)[0]:
                    break
        self._whole = outputs
        self._is_tuple = is_tuple
        self._dims = dims

    def _tried(self, layer: SequentialLayer, trial: _Trial) -> tuple[Tensors, bool, list[int | None]]:
        """Returns the layer's output and how it is cut, or nothing where it gives no numbers with random weights.

        Raises SlipstreamError where slices give something else.
        """
        module = _copy(layer.module, trial.training)
        given = self._whole
        if trial.is_random:
            _randomize(module, trial.is_positive)
            given = given if trial.is_positive else tuple(map(self._varied, given, self._dims))
        again = _copy(module, trial.training)
        try:
            whole = self._run(layer, module, [given])
        except SlipstreamError:
            if trial.is_random:
                return (), False, []
            raise
        (outputs,) = whole.outputs
        if trial.is_random and not all(map(_is_finite, outputs)):
            return (), False, []
        if not trial.is_random:
            self._check_repetition(layer, whole, given)
        slices = [tuple(map(_part, given, self._dims, [tokens] * len(given))) for tokens in self._tokens]
        parts = self._run(layer, again, slices, self._tokens)
        bound = max(whole.bound, parts.bound)
        self._check_draws(layer, whole, parts)
        by_output = zip(outputs, zip(*parts.outputs, strict=True), strict=True)
        dims = [_cut_dim(tensor, of_slices, bound) for tensor, of_slices in by_output]
        known = [None if dim is False else dim for dim in dims]
        what = "outputs" if False in dims else "" if self._same_gradients(whole, parts, known, bound) else "gradients"
        if what and not (parts.is_opaque and trial.training):
            lengths = [len(tokens) for tokens in self._tokens]
            how = f"in {'training' if trial.training else 'evaluation'}"
            raise SlipstreamError(
                f"{layer} gives other {what} on token slices of {lengths} than on {sum(lengths)} tokens at once, "
                f"{how}{' with random weights' if trial.is_random else ''}: it looks at other tokens than its own. "
                "Attend by slipstream.causal_attention, put the layer before CutTokens, or leave slices out. "
                f"{_LEFT_OUT}"
            )
        return tuple(tensor.detach() for tensor in outputs), whole.is_tuple, known

    def _run(
        self, layer: SequentialLayer, module: nn.Module, given: Sequence[Tensors], slices: Sequence[range] | None = None
    ) -> _Run:
        """Runs the layer's forward on each slice's input; without slices, on the whole."""
        store = ContextStore(sum(map(len, self._tokens)))
        leaves = []
        outputs = []
        draws = []
        eps = 0.0
        is_tuple = False
        is_opaque = False
        places: Sequence[range | None] = slices or [None]
        for slice_inputs, tokens in zip(given, places, strict=True):
            entered = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in slice_inputs]
            value = as_value(_cloned(entered), self._is_tuple)
            with ExitStack() as stack:
                if tokens is not None:
                    context = LayerContext(BatchSlice(value), store, tokens, id(layer))
                    stack.enter_context(active_forward(context))
                stack.enter_context(torch.enable_grad())
                mode = stack.enter_context(_FixedDraws())
                output = _called(layer, module, value)
            is_tuple = isinstance(output, tuple)
            is_opaque = is_opaque or mode.is_opaque
            eps = max(eps, mode.eps)
            leaves.append(entered)
            outputs.append(as_tuple(output))
            draws.append(mode.draws)
        return _Run(module, leaves, outputs, is_tuple, draws, is_opaque, max(BOUND, 16 * eps), store)

    def _same_gradients(self, whole: _Run, parts: _Run, dims: Sequence[int | None], bound: float) -> bool:
        """Returns whether the slices' gradients, side by side or added up, are the whole's."""
        begun = tuple(map(_pattern, whole.outputs[0]))
        shares = [
            tuple(
                gradient / len(self._tokens) if dim is None else gradient.narrow(dim, tokens.start, len(tokens))
                for gradient, dim in zip(begun, dims, strict=True)
            )
            for tokens in self._tokens
        ]
        if any(
            s.shape != o.shape
            for share, out in zip(shares, parts.outputs, strict=True)
            for s, o in zip(share, out, strict=True)
        ):
            return False
        (expected,) = whole.gradients([begun])
        inputs = [dim for leaf, dim in zip(whole.leaves[0], self._dims, strict=True) if leaf.requires_grad]
        cut = [*inputs, *[None] * (len(expected) - len(inputs))]
        by_leaf = zip(*parts.gradients(shares), strict=True)
        joined = [_joined(dim, slices) for dim, slices in zip(cut, by_leaf, strict=True)]
        return _are_equal(expected, joined, bound)

    def _check_repetition(self, layer: SequentialLayer, whole: _Run, given: Tensors) -> None:
        """Raises SlipstreamError where the layer returns something else the second time."""
        with torch.no_grad(), _FixedDraws():
            again = as_tuple(_called(layer, whole.module, as_value(_cloned(given), self._is_tuple)))
        if not _are_equal(whole.outputs[0], again, whole.bound):
            raise SlipstreamError(
                f"{layer} returns something else when it is called again with the same input: it draws random numbers "
                "that aren't PyTorch's, or keeps a state, which slices would change. Put it before CutTokens, or leave "
                f"slices out. {_LEFT_OUT}"
            )

    def _varied(self, tensor: Tensor, dim: int | None) -> Tensor:
        """Returns a tensor with other values, where it is cut: numbers near its own, ids of those that it has."""
        if dim is None or tensor.dtype == torch.bool or tensor.is_complex():
            return tensor
        if tensor.is_floating_point():
            spread = float(tensor.std()) if tensor.numel() > 1 else 0.0
            return tensor + (spread if 0 < spread < float("inf") else 1.0) * torch.randn_like(tensor)
        most = max(int(tensor.max()), 1) if tensor.numel() else 1
        return torch.randint_like(tensor, min(int(tensor.min()), 0), most + 1)

    def _check_draws(self, layer: SequentialLayer, whole: _Run, parts: _Run) -> None:
        """Raises SlipstreamError where slices draw as many random numbers as the whole does."""
        for drawn, tokens in zip(parts.draws, self._tokens, strict=True):
            shorter = len(tokens) < sum(map(len, self._tokens))
            if shorter and any(a == b or not a for a, b in zip(drawn, whole.draws[0], strict=False)):
                raise SlipstreamError(
                    f"{layer} draws random numbers that all tokens share, but each slice would draw its own. Draw them "
                    f"for every token, put the layer before CutTokens, or leave slices out. {_LEFT_OUT}"
                )

    def check_outputs(self, last: SequentialLayer) -> None:
        for index, (tensor, dim) in enumerate(zip(self._whole, self._dims, strict=True)):
            if dim is None and len(self._tokens) > 1:
                raise SlipstreamError(
                    f"{last}: output {index} of shape {tuple(tensor.shape)} is the same for every token slice, so its "
                    "loss would count once for each. Return what has tokens, or leave slices out."
                )


class _FixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers by the same number everywhere, counts them, and notes the widest rounding."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[int] = []  # numbers drawn by each call; 0: numbers that depend on each other
        self.is_opaque = False
        self.eps = 0.0  # eps of the narrowest dtype below float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            result = self._fixed(func.overloadpacket, result, args)
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64:
                self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        return result

    def _fixed(self, op: Any, result: Any, args: Any) -> Any:
        drawn = next(tensor for tensor in tree_iter(result) if isinstance(tensor, Tensor))
        self.draws.append(0 if op in _DEPENDENT else drawn.numel())
        if op is torch.ops.aten.native_dropout:
            return args[0].clone(), torch.ones_like(result[1])
        if op in _DRAWS:
            return drawn.fill_(_DRAWS[op] if drawn.is_floating_point() else 0)
        self.is_opaque = True
        return result


_DEPENDENT = {torch.ops.aten.randperm, torch.ops.aten.multinomial}
_DRAWS = {
    getattr(torch.ops.aten, name): value
    for names, value in (
        (("bernoulli", "bernoulli_"), 1.0),
        (("rand", "rand_like", "uniform", "uniform_", "randn", "randn_like", "normal", "normal_"), 0.5),
        (("exponential_", "log_normal_", "cauchy_", "geometric_"), 0.5),
        (("randint", "randint_like", "random_", "random", "randperm", "multinomial"), 0.0),
    )
    for name in names
    if hasattr(torch.ops.aten, name)
}


def _called(layer: SequentialLayer, module: nn.Module, value: LayerValue) -> LayerValue:
    try:
        output: LayerValue = module(value)
    except Exception as error:  # the layer's own code
        shapes = [tuple(tensor.shape) for tensor in as_tuple(value)]
        raise SlipstreamError(f"{layer} fails on {shapes} in float64: {type(error).__name__}: {error}") from error
    return output


def _copy(module: nn.Module, training: bool) -> nn.Module:
    def copied(tensor: Tensor) -> Tensor:
        clone = tensor.detach().clone()
        clone = clone.double() if clone.is_floating_point() else clone
        return nn.Parameter(clone, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else clone

    return copy_modules([module], {}, copied)[0].train(training)


@torch.no_grad()
def _randomize(module: nn.Module, is_positive: bool) -> None:
    """Gives parameters random values, and buffers that are zero."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.numel():
            scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 1.0
            parameter.normal_(std=scale)
            if is_positive:
                parameter.abs_()
    for buffer in module.buffers():
        if buffer.is_floating_point() and not buffer.any():
            buffer.normal_()


def _cut_dim(whole: Tensor, parts: Sequence[Tensor], bound: float) -> int | bool | None:
    """Returns along which dim slices have their tokens of the whole, None where each has all of it, and False where
    neither is true."""
    if all(_are_equal([whole], [part], bound) for part in parts):
        return None
    fitting = (dim for dim in range(1, whole.dim()) if _fits(whole, parts, dim))
    return next((dim for dim in fitting if _are_equal([whole], [torch.cat([*parts], dim)], bound)), False)


def _pattern(like: Tensor) -> Tensor:
    """Returns a gradient of a layer's output, whose numbers differ from place to place."""
    places = torch.arange(like.numel(), dtype=torch.float64, device=like.device).view(like.shape)
    return ((places * 1.7).sin() + 0.1).to(like.dtype)


def _joined(dim: int | None, parts: Sequence[Tensor]) -> Tensor:
    """Returns slices' parts side by side, where the tensor is cut, otherwise their sum."""
    return torch.stack([*parts]).sum(0) if dim is None else torch.cat([*parts], dim)


def _part(tensor: Tensor, dim: int | None, tokens: range) -> Tensor:
    return tensor if dim is None else tensor.narrow(dim, tokens.start, len(tokens)).contiguous()


def _cloned(tensors: Sequence[Tensor]) -> Tensors:
    return tuple(tensor.clone() for tensor in tensors)


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _fits(whole: Tensor, parts: Sequence[Tensor], dim: int) -> bool:
    """Returns whether the slices' shapes equal the whole's, except for one dim."""
    shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    return shapes == {(*whole.shape[:dim], *whole.shape[dim + 1 :])} and {p.dim() for p in parts} == {whole.dim()}


def _are_equal(wholes: Sequence[Tensor], found: Sequence[Tensor], bound: float) -> bool:
    """Returns whether tensors are equal, apart from roundings in proportion to each one's largest number."""
    floor = 1e-3 * max((_largest(tensor) for tensor in wholes), default=0.0)
    return len(wholes) == len(found) and all(
        _equal(whole, other, bound * max(_largest(whole), floor, 1e-30))
        for whole, other in zip(wholes, found, strict=True)
    )


def _largest(tensor: Tensor) -> float:
    if not tensor.numel() or tensor.dtype == torch.bool or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return float(tensor.detach().abs().nan_to_num(posinf=0, neginf=0).max())


def _equal(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True)
