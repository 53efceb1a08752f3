"""Weighs the layers of a causal LM by multiplications where nobody has measured: its cut, its stages' rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.array_types import Floats
from slipstream.cost import AttentionWindow
from slipstream.model import (
    LayerHalf,
    LayerPart,
    LayerRange,
    ModelAnatomy,
    RecomputePolicy,
    meta_model,
    units_of,
    uses_randomness,
    weight_multiplications,
)
from slipstream.planner.ragged import StageRates
from slipstream.schedule import Op

_WITHOUT_SCORES = ("linear_attention", "conv", "mlp", "moe")  # kinds of layers by transformers' names


class FlopEstimate:
    """A model without weights, each layer weighed by its multiplications for a token.

    These are the products with weights and, where `seq_len` is known, those of attention in sequences of that length.
    Where all weights are trained, backwards have twice as many and count nothing; else a third of all is the weight:
    below the lowest trained parameter of the forward alone, above it of the gradients that are computed, too.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        anatomy: ModelAnatomy,
        seq_len: int | None,
        has_head: bool = True,
        whole: PreTrainedModel | None = None,
    ) -> None:
        self.config = config
        self.anatomy = anatomy
        self.trains_all = whole is None
        self._module = meta_model(config) if whole is None else whole
        self.layers = anatomy.layers_of(self._module)
        self.uses_randomness = uses_randomness(self._module)
        self._seq_len = seq_len
        self._text = config.get_text_config()
        self._has_head = has_head  # last stage with a head

    def costs(self, halves: Sequence[LayerPart] = ()) -> list[float]:
        """Returns the multiplications of each layer, or of both halves of each where `halves` are given.

        The last one's include those of the head, unless that is spread over all ranks.
        """
        costs = []
        for index, half, parts in self._units(halves):
            attended = 0.0 if half is LayerHalf.FEED_FORWARD else self._attended(index)
            costs.append(self._step_share(parts, attended))
        if self._has_head:
            costs[-1] += self._step_share(self._after, 0.0)
        return costs

    def products(self, halves: Sequence[LayerPart] = ()) -> list[tuple[float, float, float]]:
        """Returns the multiplications of a token with the weights of each layer, or of both halves of each, and of the
        head: those of the forward, and those that lead to the gradients of inputs and of weights."""
        head = self._products(self._after) if self._has_head else (0.0, 0.0, 0.0)
        return [*(self._products(parts) for _, _, parts in self._units(halves)), head]

    def _units(self, halves: Sequence[LayerPart]) -> Iterator[tuple[int, LayerHalf | None, list[nn.Module]]]:
        """Yields the modules of each layer, or of both halves of each where `halves` are given."""
        for index, layer in enumerate(self.layers):
            for half, modules in zip(LayerHalf if halves else (None,), units_of(layer, halves), strict=True):
                yield index, half, modules

    @property
    def _after(self) -> list[nn.Module]:
        return [self._module.get_submodule(name) for name in self.anatomy.after]

    def _products(self, parts: Sequence[nn.Module]) -> tuple[float, float, float]:
        share = self._experts_share
        forward = sum(weight_multiplications(part, share) for part in parts)
        if self.trains_all:
            return forward, forward, forward
        trained = sum(weight_multiplications(part, share, trained=True) for part in parts)
        return forward, forward if self.has_gradient(parts) else 0.0, trained

    def _step_share(self, parts: Sequence[nn.Module], attended: float) -> float:
        """Returns a third of a step's multiplications of a token, with these modules and in attention."""
        forward, inputs, weights = self._products(parts)
        return (forward + inputs + weights + attended * (3 if inputs or weights else 1)) / 3

    def has_backward(self, layer: int) -> bool:
        """Returns whether gradients go through a layer's queries, keys and values."""
        return self.trains_all or any(self._products([self.layers[layer]])[1:])

    def has_gradient(self, parts: Sequence[nn.Module]) -> bool:
        """Returns whether anything before a layer, or these parts of it, is trained."""
        ids = {id(parameter) for part in parts for parameter in part.parameters()}
        ends = [self._module.get_submodule(name) for name in self.anatomy.before]
        if any(parameter.requires_grad for end in ends for parameter in end.parameters()):
            return True
        inside = (parameter for layer in self.layers for parameter in layer.parameters())
        before = takewhile(lambda parameter: id(parameter) not in ids, inside)
        return any(parameter.requires_grad for parameter in before)

    def score_products(self, layer: int) -> float:
        """The multiplications of a token with a key and a value that it sees, in a layer; 0 where it has none."""
        text = self._of_layer(layer)
        kinds = getattr(text, "layer_types", None)
        if not hasattr(text, "num_attention_heads") or (kinds is not None and kinds[layer] in _WITHOUT_SCORES):
            return 0.0
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return float(2 * text.num_attention_heads * width)

    def window(self, layer: int) -> AttentionWindow:
        """Returns the keys that a layer's attention sees."""
        text = self._of_layer(layer)
        kinds, width = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
        slides = width is not None and (kinds is None or "sliding" in kinds[layer])
        return AttentionWindow("sliding", width) if slides else AttentionWindow()

    def _of_layer(self, layer: int) -> PretrainedConfig:
        """Returns the layer's own configuration where sizes vary from layer to layer."""
        is_varied = getattr(self._text, "is_heterogeneous", False)
        return self._text.per_layer_config[layer] if is_varied else self._text

    def _attended(self, layer: int) -> float:
        """Returns the multiplications of a token with the keys and the values that it sees on average."""
        length = self._seq_len
        window = self.window(layer).width
        if length is None:
            return 0.0
        keys = length / 2
        if window is not None and window < length:
            keys = window - window**2 / (2 * length)
        return self.score_products(layer) * keys

    @property
    def _experts_share(self) -> float:
        """The share of a layer's experts that a token is sent to."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next(filter(None, (getattr(self._text, name, None) for name in names)), 1)
        return min(1.0, (getattr(self._text, "num_experts_per_tok", None) or 1) / experts)


_FIXED = 32  # constant cost of a slice, such as launches and messages, in tokens' work
# Backward over forward products of attention: the backward computes the scores again.
_AGAIN = 2.5


def flop_rates(
    model: FlopEstimate,
    halves: Sequence[LayerPart],
    layers: Sequence[LayerRange],
    recompute: RecomputePolicy | None = None,
) -> StageRates:
    """Returns the rates of stages, in multiplications for seconds and in tokens for bytes: they say which slice takes
    longer, but not how long.

    Gradients of inputs and of weights each take as many products with weights as a forward, where they are computed.
    Recomputed parts are computed once more before a backward.

    Args:
        model: whose layers are weighed, without the length of a sequence; with the head where one stage has it.
        halves: the parts of half a layer, where stages end inside layers.
        layers: of each stage.
        recompute: the policy of backwards.
    """
    windows = tuple(dict.fromkeys(map(model.window, range(len(model.layers)))))
    per_layer = 2 if halves else 1
    units = np.array(model.products(halves))
    last = len(layers) - 1

    def rates(begin: float, end: float, has_head: bool) -> Floats:
        """Returns the rates of layers in the forward, and for gradients of inputs and of weights, (3, 2 + windows)."""
        products = units[int(per_layer * begin) : int(per_layer * end)].sum(axis=0)
        products += units[-1] if has_head else 0
        scores = np.zeros((3, len(windows)))
        # A stage that ends in the middle of a layer has its first half, which has the attention.
        for layer in range(int(begin + 0.5), int(end + 0.5)):
            attended = model.score_products(layer)
            scores[:2, windows.index(model.window(layer))] += attended, _AGAIN * attended * model.has_backward(layer)
        return np.concatenate([np.stack([_FIXED * products, products], axis=1), scores], axis=1)

    operations = np.array([rates(r.start, r.stop, stage == last) for stage, r in enumerate(layers)])
    forward, inputs, weights = operations.swapaxes(0, 1)
    if recompute is not None and not recompute.keeps_products:
        ends = [min(r.stop, int(r.start) + recompute.num_layers) for r in layers]
        again = np.array([rates(r.start, end, False)[0] for r, end in zip(layers, ends, strict=True)])
        again *= recompute.num_layers > 0
        again += forward * recompute.by_stage
        inputs = inputs + again * (inputs + weights).any(axis=1, keepdims=True)
    seconds = {Op.F: forward, Op.B: inputs + weights, Op.I: inputs, Op.W: weights}
    return StageRates(seconds, np.tile([0.0, 1.0], (len(layers), 1)), windows=windows)
