"""Measures the model on held-out text while it trains."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from slipstream.pipeline import Pipeline
from slipstream.training.config import Config
from slipstream.training.data import BatchSize, TokenBatch, TokenisedText, sequences_of, spread_batches, unigram_entropy
from slipstream.training.metrics import ValidationRecord
from slipstream.training.preferences import describe_rewards, mean_rewards, reward_sums
from slipstream.training.training_step import autocast


class Validation:
    """The held-out text of a run, and how its model is measured on it. Every rank makes one."""

    def __init__(self, config: Config, texts: Sequence[TokenisedText], pipe: Pipeline, device: torch.device) -> None:
        """Takes the held-out text of every source, of which some may be empty."""
        self._config, self._pipe, self._device = config, pipe, device
        self._texts = [text for text in texts if text.num_documents]
        self._batch_size = BatchSize(config.training.batch_size, config.training.batch_tokens)

    def measure(self, step: int) -> tuple[ValidationRecord, str]:
        """Returns the record of the model after a step, and a line about it. Collective."""
        training, preference, pipe = self._config.training, self._config.preference, self._pipe
        sequences = sequences_of(self._texts, self._config.data.packing, training.seq_len, seed=None)
        total, count, sums = 0.0, 0, torch.zeros(4, dtype=torch.float64)
        batches = [*self._batch_size.batches(sequences, sequences.num_sequences)]
        for first, size in spread_batches(batches, training.eval_batches):
            mine = sequences.batch(first, size, pipe.replica, pipe.num_replicas)
            loss = self._evaluate(mine)
            # The loss is a mean over tokens, or over pairs.
            number = size if preference is not None else sequences.batch(first, size).num_predicted
            total, count = total + loss * number, count + number
            if preference is not None and mine.sequence_values is not None:
                sums += reward_sums(pipe, mine.sequence_values, preference).cpu()
        mean = total / count
        if preference is not None:
            rewards = mean_rewards(sums)
            record = ValidationRecord(step, mean, rewards=rewards)
            return record, f"step {step}: validation loss {mean:.3f} per pair, {describe_rewards(rewards)}"
        below = unigram_entropy(np.concatenate([text.counted() for text in self._texts])) - mean
        return ValidationRecord(step, mean, math.exp(mean)), (
            f"step {step}: validation loss {mean:.3f} nats per token, perplexity {math.exp(mean):.1f}; "
            f"{abs(below):.2f} {'below' if below > 0 else 'above'} the text's unigram entropy"
        )

    def _evaluate(self, batch: TokenBatch) -> float:
        with autocast(self._config, self._device):
            return float(
                self._pipe.evaluate(
                    batch.input_ids,
                    batch.labels,
                    document_ids=batch.document_ids,
                    sequence_values=batch.sequence_values,
                )
            )
