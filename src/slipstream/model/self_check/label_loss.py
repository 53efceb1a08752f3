"""Finds out what transformers' own loss compares a token's logits with, where it is given labels."""

from __future__ import annotations

import inspect
from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig

from slipstream.model.toy.toy_comparison import full_precision
from slipstream.model.toy.toy_model import perturb_parameters, toy_model, toy_tokens

_TOLERANCE = 1e-5  # transformers forms the sum in float32


class LabelLoss(Enum):
    """What transformers' mean loss is, as far as a toy shows."""

    NEXT = "the label of the next token"  # what slipstream computes
    SAME = "the label at the same place"  # labels that the caller has shifted: BART, Marian, Whisper
    OTHER = "something else"
    NONE = "nothing"  # it takes no labels, or fails with them


def find_label_loss(config: PretrainedConfig) -> LabelLoss:
    """Returns what the architecture's own loss is, by running a toy of it. Raises no error of the model's code."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), full_precision():
            return _find(config)
    except Exception:  # the model's own code
        return LabelLoss.NONE


def _find(config: PretrainedConfig) -> LabelLoss:
    model = toy_model(config)
    if "labels" not in inspect.signature(type(model).forward).parameters:
        return LabelLoss.NONE
    perturb_parameters(model)
    tokens = toy_tokens(config)  # (b, T)
    output = model(input_ids=tokens, labels=tokens, use_cache=False)
    candidates = {
        LabelLoss.NEXT: _mean(output.logits[:, :-1], tokens[:, 1:]),
        LabelLoss.SAME: _mean(output.logits, tokens),
    }
    found = (kind for kind, each in candidates.items() if abs(each - output.loss) < _TOLERANCE * each)
    return next(found, LabelLoss.OTHER)


def _mean(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).double(), labels.flatten())
