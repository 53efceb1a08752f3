"""Pairs of answers, and what DPO of them is by the unsplit model, one answer at a time."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slipstream.train.config import PreferenceSection
from slipstream.train.data import TokenisedText
from support.architectures import gradients, no_rounding_inside
from support.preferences import log_probabilities
from support.ragged_batches import MODELS

NAME = "llama, tied"
SECTION = PreferenceSection(beta=0.3, label_smoothing=0.1)


def pairs(number: int = 6) -> TokenisedText:
    """Pairs with one prompt and answers of unequal lengths, and their log-probabilities by another model."""
    random = np.random.default_rng(0)
    tokens, labels = [], []
    for pair in range(number):
        prompt = random.integers(1, 61, 2 + pair)
        for length in random.integers(1, 14, 2):
            answer = random.integers(1, 61, length)
            tokens.append(np.concatenate([prompt, answer]).astype(np.int32))
            labels.append(np.concatenate([np.full(len(prompt), -100), answer]).astype(np.int32))
    reference = -3.0 * np.array([len(each) for each in tokens]) - np.arange(2.0 * number) ** 2 / 9
    return replace(TokenisedText.join(tokens, labels, group_size=2), values=reference)


def expected_of_dpo() -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Returns loss, mean rewards and gradients of all pairs, by the formula with the sigmoid written out."""
    model, text = copy.deepcopy(MODELS[NAME]), pairs()
    assert text.values is not None
    losses, rewards, smoothing = [], [], SECTION.label_smoothing
    with no_rounding_inside():
        for first in range(0, text.num_documents, 2):
            both = []
            for document in (first, first + 1):
                ids, labels = (
                    torch.from_numpy(each.astype(np.int64))[None]
                    for each in (text.document(document), text.labels_of(document))
                )
                ratio = log_probabilities(model, ids, labels)[0] - float(text.values[document])
                both.append(SECTION.beta * ratio)
            sure = 1 / (1 + torch.exp(both[1] - both[0]))
            losses.append(-(1 - smoothing) * torch.log(sure) - smoothing * torch.log(1 - sure))
            rewards.append([each.item() for each in both])
        loss = torch.stack(losses).mean()
        loss.backward()
    chosen, rejected = np.array(rewards).T
    means = {"chosen": chosen.mean(), "rejected": rejected.mean(), "margin": (chosen - rejected).mean()}
    accuracy = float((chosen > rejected).mean())
    assert 0 < accuracy < 1
    return (
        loss.item(),
        {**{name: float(each) for name, each in means.items()}, "accuracy": accuracy},
        gradients(model),
    )
