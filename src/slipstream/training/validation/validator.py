"""Measures the loss on the held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from slipstream.parallel import RankGroup
from slipstream.pipeline import Pipeline
from slipstream.training.config import Config
from slipstream.training.data import BatchSize, load_texts, sequences_of, spread_batches, unigram_entropy
from slipstream.training.metrics import ValidationRecord
from slipstream.training.run_folder import RunFolder
from slipstream.training.training_step import autocast
from slipstream.training.validation.loss_history import LossHistory


class Validator:
    """Validates as configured, and keeps the history of the losses. Every rank makes one."""

    def __init__(self, config: Config, pipe: Pipeline, device: torch.device, say: Callable[[str], None]) -> None:
        self._config, self._pipe, self._device, self._say = config, pipe, device, say
        training = config.training
        self._batch_size = BatchSize(training.batch_size, training.batch_tokens)
        self.history = LossHistory(config.checkpoint.keep_best, training.patience)

    def is_due(self, step: int, last: int) -> bool:
        """Returns whether there is a validation after a step, and it hasn't been; `last` is the run's last step."""
        every = self._config.training.eval_every
        return every > 0 and (step % every == 0 or step == last) and not self.history.has(step)

    def validate(self, step: int) -> tuple[ValidationRecord, bool]:
        """Measures loss and perplexity after a step; returns them, and whether no validation before was as good.

        Collective. All ranks judge by the loss of rank 0.
        """
        loss, entropy = self._measure()
        loss = float(RankGroup(dist.group.WORLD).gather(loss)[0])
        is_best, below, perplexity = self.history.add(step, loss), entropy - loss, math.exp(loss)
        self._say(
            f"step {step}: validation loss {loss:.3f} nats per token, perplexity {perplexity:.1f}; "
            f"{abs(below):.2f} {'below' if below > 0 else 'above'} the text's unigram entropy"
        )
        return ValidationRecord(step, loss, perplexity), is_best

    def _measure(self) -> tuple[float, float]:
        """Returns the mean loss on the held-out text, and the text's unigram entropy."""
        training, pipe = self._config.training, self._pipe
        texts = [text for text in load_texts(RunFolder(training.output).inputs, "validation") if text.num_documents]
        sequences = sequences_of(texts, self._config.data.packing, training.seq_len, seed=None)
        total, count = 0.0, 0
        batches = [*self._batch_size.batches(sequences, sequences.num_sequences)]
        for first, size in spread_batches(batches, training.eval_batches):
            mine = sequences.batch(first, size, pipe.replica, pipe.num_replicas)
            with autocast(self._config, self._device):
                loss = pipe.evaluate(mine.input_ids, mine.labels, document_ids=mine.document_ids)
            tokens = sequences.batch(first, size).num_predicted
            total, count = total + float(loss) * tokens, count + tokens
        return total / count, unigram_entropy(np.concatenate([text.counted() for text in texts]))
