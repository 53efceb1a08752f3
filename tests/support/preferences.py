"""A loss of pairs of sequences, and what the unsplit model needs for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel


def preference(log_probabilities: Tensor, reference: Tensor) -> Tensor:
    """DPO: pairs of a chosen and a rejected sequence (Rafailov et al. 2023, equation 7)."""
    chosen, rejected = (log_probabilities - reference).view(-1, 2).unbind(1)
    return -logsigmoid(0.3 * (chosen - rejected))


def references(number: int) -> Tensor:
    """Log-probabilities of sequences by another model, no two pairs of which differ alike."""
    return -100 + 5 * torch.arange(number, dtype=torch.float64).square().sin()


def log_probabilities(model: PreTrainedModel, inputs: Tensor, labels: Tensor) -> Tensor:
    """Of each row, the sum over the targets that count."""
    logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    targets = labels[:, 1:]
    each = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return each.masked_fill(targets == -100, 0).sum(1)
