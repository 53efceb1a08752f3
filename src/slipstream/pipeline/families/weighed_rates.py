"""What stages cost by their multiplications: rates for the plans of steps where nobody has measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.model import LayerPart, LayerRange
from slipstream.pipeline.families.weighed_model import WeighedModel
from slipstream.planner.steps import StageRates
from slipstream.schedule import Op

_FIXED = 32  # tokens' work: what a slice costs besides its own, such as launches and messages
_AGAIN = 2.5  # attention's products in the backward, which computes scores again, over those in the forward


def weighed_rates(model: WeighedModel, halves: Sequence[LayerPart], layers: Sequence[LayerRange]) -> StageRates:
    """Returns the rates of stages, in multiplications for seconds and in tokens for bytes: they say which slice takes
    longer, but not how long.

    Gradients of inputs and of weights each take as many products with weights as a forward.

    Args:
        model: whose layers are weighed, without the length of a sequence.
        halves: the parts of half a layer, where stages end inside layers.
        layers: of each stage.
    """
    windows = tuple(dict.fromkeys(map(model.window, range(len(model.layers)))))
    per_layer, units = 2 if halves else 1, model.costs(halves)
    units[-1] -= model.head_products
    products = np.array([[sum(units[int(per_layer * a.start) : int(per_layer * a.stop)])] for a in layers])
    products[-1] += model.head_products
    scores = np.zeros((len(layers), len(windows)))
    for stage, each in enumerate(layers):
        for layer in range(int(each.start + 0.5), int(each.stop + 0.5)):  # whose first half, with attention, it has
            scores[stage, windows.index(model.window(layer))] += model.score_products(layer)
    linear = np.concatenate([_FIXED * products, products], axis=1)
    forward, inputs, weights = (np.concatenate([linear, times * scores], axis=1) for times in (1.0, _AGAIN, 0.0))
    seconds = {Op.F: forward, Op.B: inputs + weights, Op.I: inputs, Op.W: weights}
    return StageRates(seconds, np.tile([0.0, 1.0], (len(layers), 1)), windows=windows)
