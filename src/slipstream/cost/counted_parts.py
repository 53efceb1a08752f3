"""A counted model's parts on one rank: what is counted of them, and their bytes, which need no hardware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost.costs import Costs, Numbers
from slipstream.cost.operation_counts import AttentionCall, ModelCount, PartCount
from slipstream.cost.work import Stage, Work
from slipstream.options import Degrees
from slipstream.schedule import Op

_HEAD_WIDTHS = 32  # FlashAttention computes with heads as wide as the next multiple


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

    # --- what is counted ---------------------------------------------------------------------------------------------

    def _rows(self, value: Callable[[PartCount], Any], work: Work) -> Floats:
        """Returns the values of a part of each kind, (kinds, slices)."""
        shape = np.shape(work.lengths)
        return np.stack([np.broadcast_to(np.asarray(value(part), float), shape) for part in self.model.of_kind])

    def _each(self, value: Callable[[PartCount], float]) -> Floats:
        """Returns a number of a part of each kind, (kinds,)."""
        return np.array([value(part) for part in self.model.of_kind], float)

    def _tokens(self, length: Any) -> Any:
        return self.microbatch_size * length / self.degrees.context

    @property
    def _token_parts(self) -> int:
        return self.degrees.tensor if self.sequence_parallel else 1

    @property
    def _gathers_keys(self) -> bool:
        return self.degrees.context > 1 and self.degrees.exchange == "keys"

    @property
    def _head_ranks(self) -> int:
        return self.degrees.tensor * (1 if self._gathers_keys else self.degrees.context)

    @staticmethod
    def _num_regions(part: PartCount) -> int:
        return 1 if part.is_half else 2 if part.attentions else 0

    def attention_operations(self, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
        """Returns the operations of an attention call's scores in F or I, on the rank with the last queries."""
        heads = call.num_heads / self._head_ranks
        queries = self._queries(length)
        num_scores = call.window.scores(context + length) - call.window.scores(context + length - queries)
        scores = heads * (self.microbatch_size * num_scores)
        keys, values = (-(-width // _HEAD_WIDTHS) * _HEAD_WIDTHS for width in (call.key_width, call.value_width))
        width = keys + values if op is Op.F else 3 * keys + 2 * values  # backward: S, dP, dV, dQ, dK
        return 2 * scores * width

    def _queries(self, length: Any) -> Any:
        """Returns the queries of a slice that a rank has."""
        return -(-length // self.degrees.context) if self._gathers_keys else length

    def _key_heads(self, call: AttentionCall) -> int:
        return call.key_heads_of_rank(self._head_ranks)

    # --- bytes of one rank -------------------------------------------------------------------------------------------

    @cached_property
    def each_number(self) -> Numbers:
        ranks = self.degrees.experts
        in_experts = self._each(lambda part: part.num_trained_in_experts) if ranks > 1 else 0.0
        trained = self._each(lambda part: part.num_trained)
        held = self._each(lambda part: self.degrees.held(part.num_parameters, part.num_in_experts))
        spread = in_experts / ranks + np.zeros(len(held))
        return Numbers(held, (trained - in_experts) / self.degrees.tensor + spread, spread)

    def each_weight(self, each: float) -> Floats:
        return super().each_weight(each) - self._each(lambda part: part.saved_bytes(each)) / self.degrees.tensor

    def each_activation(self, lengths: Any) -> Floats:
        """Returns the bytes that F of the parts keeps, (kinds, slices).

        Every tensor-parallel rank has the whole of tensors as wide as the hidden state, and a part of all others. Where
        ranks share tokens it has a part of those too, but for the gathered inputs of matrix products.
        """
        per_token = self._each(self._activation_per_token)
        return np.outer(per_token, self._tokens(lengths)) + self.each_state[:, None]

    def _activation_per_token(self, part: PartCount) -> float:
        wide = min(part.wide_activation_bytes, part.activation_bytes)
        per_token = self._wide_bytes(part, wide) + (part.activation_bytes - wide) / self.degrees.tensor
        if self.degrees.context > 1 and part.has_backward and not self._gathers_keys:
            # attention's outputs, before and after their exchange
            outputs = sum(call.num_heads * call.value_width for call in part.attentions)
            per_token += outputs * self.model.dtype_bytes / self.degrees.tensor
        return per_token

    def _wide_bytes(self, part: PartCount, wide: float) -> float:
        """Returns the bytes that a rank keeps of a token's tensors that are as wide as the hidden state."""
        num_gathered = self._num_regions(part) or int(part is self.model.head)
        gathered = min(wide, num_gathered * self.model.hidden_size * self.model.dtype_bytes)
        return gathered + (wide - gathered) / self._token_parts

    def each_product(self, lengths: Any) -> Floats:
        per_token = self._each(lambda part: part.product_bytes)
        return np.outer(per_token, self._tokens(lengths)) / self.degrees.tensor

    @cached_property
    def each_state(self) -> Floats:
        return self.microbatch_size * self._each(lambda part: part.state_bytes if part.has_backward else 0.0)

    def passing_bytes(self, stage: Stage) -> float:
        return max((part.dequantised_bytes for _, part in self.model.counted(stage)), default=0.0)

    @cached_property
    def each_context(self) -> Floats:
        return self.microbatch_size * self._each(self._keys_bytes)

    def _keys_bytes(self, part: PartCount) -> float:
        """Returns a token's keys and values of this rank's heads."""
        widths = ((self._key_heads(call), call.key_width + call.value_width) for call in part.attentions)
        return sum(heads * width for heads, width in widths) * self.model.dtype_bytes

    @cached_property
    def each_context_gradient(self) -> Floats:
        has_gradient = self._each(lambda part: part.has_context_gradient)
        return self.each_context * has_gradient * 4 / self.model.dtype_bytes

    def logits_gradient_bytes(self, layers: Stage, length: int) -> float:
        """Returns the gradient of a slice's logits in float32, made before any activation is freed; 0 without the
        head."""
        if not self.has_head(layers):
            return 0.0
        vocabulary = self.model.head_weight / self.model.hidden_size
        return float(4 * self._tokens(length) * vocabulary / self.degrees.tensor)

    def message_bytes(self, length: Any) -> Any:
        """Returns the message of a slice to the next stage, b T h elements, as large as its gradient back; one rank's
        part of it, where ranks share the tokens."""
        return self._hidden_bytes(length) / self._token_parts

    def _hidden_bytes(self, length: Any) -> Any:
        return self._tokens(length) * self.model.hidden_size * self.model.dtype_bytes
