"""A counted model's parts on one rank: what is counted of them, and their bytes, which need no hardware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.cost.costs import Costs
from slipstream.cost.operation_counts import ModelCount, PartCount
from slipstream.cost.sharing import Divided, Sharing
from slipstream.cost.update import Numbers
from slipstream.cost.work import Stage, Work
from slipstream.options import Degrees


class CountedParts(Costs):
    """The costs of a counted model's parts, as far as they are counted; what they take in seconds is the subclass's."""

    model: ModelCount
    degrees: Degrees
    microbatch_size: int
    sequence_parallel: bool

    @property
    def parts(self) -> Sequence[int]:
        return self.model.parts

    @property
    def units_per_layer(self) -> int:
        return self.model.units_per_layer

    @property
    def num_frozen_parts(self) -> int:
        return self.model.num_frozen_parts

    @property
    def dtype_bytes(self) -> int:
        return self.model.dtype_bytes

    @property
    def vocab_size(self) -> int:
        return self.model.head_weight // self.model.hidden_size

    @property
    def num_head_weights(self) -> int:
        return self.model.head_weight

    @property
    def is_tied(self) -> bool:
        return self.model.tied

    @cached_property
    def sharing(self) -> Sharing:
        """What one of the ranks that share a stage has of the work."""
        return Sharing(
            self.model, self.degrees, self.microbatch_size, self.sequence_parallel, self.system.keeps_gathered
        )

    @property
    def divided(self) -> Divided:
        return self.sharing.divided

    # --- what is counted ---------------------------------------------------------------------------------------------

    def _rows(self, value: Callable[[PartCount], Any], work: Work) -> Floats:
        """Returns the values of a part of each kind, (kinds, slices)."""
        shape = np.shape(work.lengths)
        return np.stack([np.broadcast_to(np.asarray(value(part), float), shape) for part in self.model.of_kind])

    def _each(self, value: Callable[[PartCount], float]) -> Floats:
        """Returns a number of a part of each kind, (kinds,)."""
        return np.array([value(part) for part in self.model.of_kind], float)

    # --- bytes of one rank -------------------------------------------------------------------------------------------

    @cached_property
    def each_number(self) -> Numbers:
        own = self.sharing
        return Numbers(*map(self._each, (own.num_parameters, own.num_trained, own.num_trained_in_experts)))

    def each_weight(self, each: float) -> Floats:
        return super().each_weight(each) - self._each(lambda part: part.saved_bytes(each)) / self.divided.width

    def each_activation(self, lengths: Any) -> Floats:
        per_token = self._each(self.sharing.activation_bytes)
        return np.outer(per_token, self.sharing.tokens(lengths)) + self.each_state[:, None]

    def each_product(self, lengths: Any) -> Floats:
        per_token = self._each(lambda part: part.product_bytes)
        return np.outer(per_token, self.sharing.tokens(lengths)) / self.divided.width

    @cached_property
    def each_state(self) -> Floats:
        return self.microbatch_size * self._each(lambda part: part.state_bytes if part.has_backward else 0.0)

    def passing_bytes(self, stage: Stage) -> float:
        return max((part.dequantised_bytes for _, part in self.model.counted(stage)), default=0.0)

    @cached_property
    def each_context(self) -> Floats:
        return self.microbatch_size * self._each(self.sharing.keys_bytes)

    @cached_property
    def each_context_gradient(self) -> Floats:
        has_gradient = self._each(lambda part: part.has_context_gradient)
        return self.each_context * has_gradient * 4 / self.model.dtype_bytes

    def each_reach(self, contexts: Ints) -> Floats:
        rows = []
        for part in self.model.of_kind:
            sizes = np.array([self.sharing.call_keys_bytes(call) for call in part.attentions])
            reached = np.array([call.window.context_keys(contexts) for call in part.attentions], float)
            rows.append(sizes @ reached / sizes.sum() if len(sizes) else np.zeros(len(contexts)))
        return np.stack(rows)

    def logits_gradient_bytes(self, layers: Stage, length: int) -> float:
        """Returns the gradient of a slice's logits in float32, made before any activation is freed; 0 without the
        head."""
        if not self.has_head(layers):
            return 0.0
        vocabulary = self.model.head_weight / self.model.hidden_size
        return float(4 * self.sharing.tokens(length) * vocabulary / self.divided.width)

    def message_bytes(self, length: Any) -> Any:
        return self.sharing.message_bytes(length)
