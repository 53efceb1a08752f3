"""What stages cost by their multiplications: rates for the plans of steps where nobody has measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.array_types import Floats
from slipstream.model import LayerPart, LayerRange
from slipstream.model.saving import RecomputePolicy
from slipstream.pipeline.families.weighed_model import WeighedModel
from slipstream.planner.steps import StageRates
from slipstream.schedule import Op

_FIXED = 32  # tokens' work: what a slice costs besides its own, such as launches and messages
_AGAIN = 2.5  # attention's products in the backward, which computes scores again, over those in the forward


def weighed_rates(
    model: WeighedModel,
    halves: Sequence[LayerPart],
    layers: Sequence[LayerRange],
    recompute: RecomputePolicy | None = None,
) -> StageRates:
    """Returns the rates of stages, in multiplications for seconds and in tokens for bytes: they say which slice takes
    longer, but not how long.

    Gradients of inputs and of weights each take as many products with weights as a forward, where they are computed.
    What is recomputed is computed once more before a backward.

    Args:
        model: whose layers are weighed, without the length of a sequence; with the head where one stage has it.
        halves: the parts of half a layer, where stages end inside layers.
        layers: of each stage.
        recompute: what a backward recomputes.
    """
    windows = tuple(dict.fromkeys(map(model.window, range(len(model.layers)))))
    per_layer, units = 2 if halves else 1, np.array(model.products(halves))
    last = len(layers) - 1

    def rates(begin: float, end: float, has_head: bool) -> Floats:
        """Returns the rates of layers in the forward, and for gradients of inputs and of weights, (3, 2 + windows)."""
        products = units[int(per_layer * begin) : int(per_layer * end)].sum(axis=0)
        products += units[-1] if has_head else 0
        scores = np.zeros((3, len(windows)))
        for layer in range(int(begin + 0.5), int(end + 0.5)):  # whose first half, with attention, is there
            attended = model.score_products(layer)
            scores[:2, windows.index(model.window(layer))] += attended, _AGAIN * attended * model.has_backward(layer)
        return np.concatenate([np.stack([_FIXED * products, products], axis=1), scores], axis=1)

    found = np.array([rates(each.start, each.stop, stage == last) for stage, each in enumerate(layers)])
    forward, inputs, weights = found.swapaxes(0, 1)
    if recompute is not None and not recompute.keeps_products:
        number = recompute.num_layers
        ends = [each.stop if number is None else min(each.stop, int(each.start) + number) for each in layers]
        again = [
            rates(each.start, end, number is None and stage == last)[0]
            for stage, (each, end) in enumerate(zip(layers, ends, strict=True))
        ]
        inputs = inputs + np.array(again) * (inputs + weights).any(axis=1, keepdims=True)
    seconds = {Op.F: forward, Op.B: inputs + weights, Op.I: inputs, Op.W: weights}
    return StageRates(seconds, np.tile([0.0, 1.0], (len(layers), 1)), windows=windows)
