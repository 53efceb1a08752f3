"""The documents of the standard library as batches of sequences, padded rows and packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.harness import few
from slipstream.launch import Progress
from slipstream.train.config import DataSection
from slipstream.train.data import read_documents, tokenise, train_tokenizer

VOCABULARY = 8192
IGNORED = -100
Batch = list[Tensor]


def model_config(longest: int, num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
    )


def documents(longest: int) -> Iterator[Tensor]:
    """Yields the source files of the standard library, in a random order, as tokens."""
    texts = few([*read_documents(DataSection(corpus="python-stdlib"), print)], 40)
    tokenised = tokenise(train_tokenizer(texts, VOCABULARY, Progress(None)), texts, Progress(None))
    tokens = [
        torch.from_numpy(tokenised.document(number)[:longest]).long() for number in range(tokenised.num_documents)
    ]
    for number in np.random.default_rng(0).permutation(len(tokens)):
        if len(tokens[number]) > 1:
            yield tokens[number]


def batches_of_documents(number: int, num_tokens: int, longest: int) -> list[Batch]:
    """Returns steps of exactly `num_tokens` tokens: the last document of each is cut where they end."""
    found: list[Batch] = [[]]
    for document in documents(longest):
        left = num_tokens - sum(map(len, found[-1]))
        found[-1].append(document[:left])
        if len(document) >= left:
            if len(found) == number:
                return found
            found.append([])
    raise SystemExit(f"the standard library has too few tokens for {number} steps of {num_tokens}")


def padded(batch: Batch) -> tuple[Tensor, Tensor, None]:
    """Returns rows as long as the longest document; what pads them counts nowhere."""
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(batch, batch_first=True), pad(batch, batch_first=True, padding_value=IGNORED), None


def packed(batch: Batch, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows of one length, the documents' tokens one after the other, and which document each is of."""
    rows = torch.cat(batch).view(-1, length)
    numbers = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor([*map(len, batch)]))
    return rows, rows, numbers.view(-1, length)


def attended(batches: list[Batch], way: str) -> list[int]:
    """Returns the lengths of what attends to itself: documents, padded rows, or parts of documents in packed rows."""
    if way.startswith("documents"):
        return [len(document) for batch in batches for document in batch]
    if way.startswith("padded"):
        return [max(map(len, batch)) for batch in batches for _ in batch]
    length, parts = int(way.partition(" to ")[2].partition(",")[0]), []
    for batch in batches:
        ends = np.cumsum([*map(len, batch)])
        parts += np.diff(np.union1d(ends, np.arange(0, ends[-1] + 1, length))).tolist()
    return parts


def multiplications(lengths: Sequence[int], config: LlamaConfig) -> float:
    """Returns the multiplications of forwards and backwards: three times those with weights, 3.5 times attention's."""
    width, layers = config.hidden_size, config.num_hidden_layers
    linear = layers * (4 * width**2 + 3 * width * config.intermediate_size) + width * config.vocab_size
    scores = 7.0 * layers * width
    return sum(3.0 * linear * each + scores * each * (each + 1) / 2 for each in lengths)
