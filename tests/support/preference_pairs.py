"""Pairs of answers and rated answers, how a run reads them, and what DPO is by the unsplit model, one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from slipstream.train.config import PreferenceSection, SourceSection
from slipstream.train.data import TokenisedText
from slipstream.train.data.samples import SampleReader, tokenise_samples
from support.architectures import gradients, no_rounding_inside
from support.preferences import log_probabilities
from support.ragged_batches import MODELS

NAME = "llama, tied"
SECTION = PreferenceSection(beta=0.3, label_smoothing=0.1)
WORDS = ["<end>", "<pad>", "say", "it", "yes", "no", "a", "b", "c", "user", "assistant"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
RATED = [
    {"prompt": "say a", "completion": " a b c a a c b a c", "label": True},
    {"prompt": "say b b b", "completion": " b", "label": False},
    {"prompt": "say", "completion": " b a c c c b a b a b a c", "label": False},
    {"prompt": "say c", "completion": " c c c c", "label": True},
    {"prompt": "say a a", "completion": " a", "label": True},
]


def word_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each of a few words."""
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    made.chat_template = template
    return made


def read(rows: Sequence[dict[str, Any]], form: str = "pairs", seq_len: int = 9) -> tuple[TokenisedText, list[str]]:
    """Rows of answers as a run reads them, and what it says of them."""
    said: list[str] = []
    reader = SampleReader(SourceSection(dataset="pairs.jsonl"), form, "completion", word_tokenizer(TEMPLATE), None)
    return tokenise_samples(rows, reader, "pairs", seq_len, said.append), said


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
    rewards_of_all = {**{name: float(each) for name, each in means.items()}, "accuracy": accuracy}
    return loss.item(), rewards_of_all, gradients(model)
