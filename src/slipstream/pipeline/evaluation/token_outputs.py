"""What the last stage keeps of a slice's logits, of which tensor ranks each have a part of the vocabulary."""

from __future__ import annotations

from torch import Tensor

from slipstream.model import IGNORED, token_cross_entropy
from slipstream.parallel.tensor import TensorParallel, gather_vocabulary, vocabulary_token_losses
from slipstream.pipeline.execution import TokenOutputs


def gathered_logits(tensor: TensorParallel | None) -> TokenOutputs:
    """Returns the function that keeps logits, (b, T, vocabulary). Calling it is collective over the tensor ranks."""

    def gather(logits: Tensor, targets: Tensor) -> Tensor:
        return logits if tensor is None else gather_vocabulary(logits, tensor.group, tensor.num_ids)

    return gather


def log_probabilities(tensor: TensorParallel | None) -> TokenOutputs:
    """Returns the function that keeps each target's log-probability, (b, T) float64, zero where none counts. Calling it
    is collective over the tensor ranks."""
    losses: TokenOutputs = token_cross_entropy
    if tensor is not None:
        losses = vocabulary_token_losses(tensor.group, tensor.first_id, IGNORED)
    return lambda logits, targets: -losses(logits, targets).double()
