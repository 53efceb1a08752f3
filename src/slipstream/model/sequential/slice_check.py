"""The self-check of token slices: the layers after CutTokens on slices and on the whole, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.attention import ContextStore
from slipstream.errors import SlipstreamError
from slipstream.model.hooks.token_slice import active_forward
from slipstream.model.sequential.layer_context import BatchSlice, LayerContext, LayerValue, as_tuple, as_value
from slipstream.model.sequential.layer_list import SequentialLayer
from slipstream.model.sequential.skip_connections import SkipPop, SkipStash

BOUND = 1e-10  # the largest difference, relative to the largest number
_MOST_TOKENS = 12


def compare_slices(layers: Sequence[SequentialLayer], cut: int, example: LayerValue) -> None:
    """Raises SlipstreamError, naming the first layer whose outputs on slices differ from those on the whole.

    One row of `example` runs in evaluation mode, the layers after `cut` on its first 12 tokens, in three unequal
    slices. Each layer is copied to float64 while it runs.
    """
    device = next((parameter.device for layer in layers for parameter in layer.module.parameters()), None)
    rows = (tensor[:1].to(device) for tensor in as_tuple(example))
    row = tuple(each.double() if each.is_floating_point() else each for each in rows)
    with torch.no_grad(), torch.random.fork_rng():
        run = _SliceComparison(as_value(row, isinstance(example, tuple)))
        for layer in layers[:cut]:
            run.whole = run.call(layer, run.whole, run.skips)
        run.cut(layers[cut])
        for layer in layers[cut + 1 :]:
            run.step(layer)
        run.check_outputs(layers[-1])


@dataclass
class _SliceComparison:
    """The values of the whole and of every slice, from layer to layer."""

    whole: LayerValue
    parts: list[LayerValue] = field(default_factory=list)  # each slice's value
    tokens: list[range] = field(default_factory=list)
    skips: dict[str, Tensor] = field(default_factory=dict)
    skips_of_parts: list[dict[str, Tensor]] = field(default_factory=list)

    def cut(self, layer: SequentialLayer) -> None:
        hidden, *others = as_tuple(self.whole)
        if hidden.dim() < 2:
            raise SlipstreamError(f"{layer} is given {tuple(hidden.shape)}. The first must be (rows, tokens, ...).")
        length, is_tuple = min(hidden.shape[1], _MOST_TOKENS), isinstance(self.whole, tuple)
        bounds = [0, length * 2 // 5, length * 3 // 4, length]
        self.tokens = [range(a, b) for a, b in pairwise(bounds) if b > a]
        self.whole = as_value((hidden[:, :length], *others), is_tuple)
        self.parts = [as_value((hidden[:, t.start : t.stop], *others), is_tuple) for t in self.tokens]
        self.skips_of_parts = [{} for _ in self.tokens]
        self._store = ContextStore(length)

    def step(self, layer: SequentialLayer) -> None:
        self.whole = self.call(layer, self.whole, self.skips)
        for number, tokens in enumerate(self.tokens):
            context = LayerContext(BatchSlice(self.parts[number]), self._store, tokens, id(layer))
            with active_forward(context):
                self.parts[number] = self.call(layer, self.parts[number], self.skips_of_parts[number])
        self._store.free()
        if not all(all(_equal(whole, part) for part in parts) or _is_cut(whole, parts) for whole, parts in self._pairs):
            lengths = [len(tokens) for tokens in self.tokens]
            raise SlipstreamError(
                f"{layer} gives other outputs on token slices of {lengths} than on {sum(lengths)} tokens at once: it "
                "looks at other tokens than its own. Attend by slipstream.causal_attention, put the layer before "
                "CutTokens, or leave slices out. (self_check=False leaves this check out.)"
            )

    def call(self, layer: SequentialLayer, value: LayerValue, skips: dict[str, Tensor]) -> LayerValue:
        module = layer.module
        if isinstance(module, SkipStash):
            skips[module.skip.name] = as_tuple(value)[module.index]
            return value
        if isinstance(module, SkipPop):
            return (*as_tuple(value), skips.pop(module.skip.name))
        try:
            output: LayerValue = copy.deepcopy(module).double().eval()(value)
        except Exception as error:  # the layer's own code
            shapes = [tuple(tensor.shape) for tensor in as_tuple(value)]
            raise SlipstreamError(f"{layer} fails on {shapes} in float64: {type(error).__name__}: {error}") from error
        return output

    @property
    def _pairs(self) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """Yields each tensor of the whole with those of the slices."""
        return zip(as_tuple(self.whole), zip(*map(as_tuple, self.parts), strict=True), strict=True)

    def check_outputs(self, last: SequentialLayer) -> None:
        for number, (whole, parts) in enumerate(self._pairs):
            if not _is_cut(whole, parts):
                raise SlipstreamError(
                    f"{last}: output {number} of shape {tuple(whole.shape)} is the same for every token slice, so its "
                    "loss would count once for each. Return what has tokens, or leave slices out."
                )


def _is_cut(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Returns whether each slice has its tokens of it, along whichever dim they are."""
    return any(_fits(whole, parts, dim) and _equal(whole, torch.cat([*parts], dim)) for dim in range(whole.dim()))


def _fits(whole: Tensor, parts: Sequence[Tensor], dim: int) -> bool:
    """Returns whether the slices' shapes equal the whole's, except for one dim."""
    shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    return shapes == {(*whole.shape[:dim], *whole.shape[dim + 1 :])} and {p.dim() for p in parts} == {whole.dim()}


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    largest = float(a.nan_to_num(posinf=0, neginf=0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=BOUND * max(largest, 1e-30), equal_nan=True)
