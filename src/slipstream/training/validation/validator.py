"""Measures the loss on the held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from slipstream.parallel import RankGroup
from slipstream.pipeline import Pipeline
from slipstream.training.config import Config
from slipstream.training.data import BatchSize, HeldOutBatches, TokenBatch, TokenisedText, sequences_of, unigram_entropy
from slipstream.training.metrics import ValidationRecord
from slipstream.training.preferences import describe_rewards, mean_rewards, reward_sums
from slipstream.training.training_step import autocast
from slipstream.training.validation.loss_history import LossHistory


class Validator:
    """Validates as configured, and keeps the history of the losses. Every rank makes one."""

    def __init__(
        self,
        config: Config,
        texts: Sequence[TokenisedText],
        pipe: Pipeline,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        """Takes the held-out text of every source, of which some may be empty."""
        self._config, self._pipe, self._device, self._say = config, pipe, device, say
        self._texts = [text for text in texts if text.num_documents]
        training = config.training
        self._batch_size = BatchSize(training.batch_size, training.batch_tokens)
        unit = "nats per token" if config.preference is None else "per pair"
        self.history = LossHistory(config.checkpoint.keep_best, training.patience, unit)

    def is_due(self, step: int, last: int) -> bool:
        """Returns whether there is a validation after a step, and it hasn't been; `last` is the run's last step."""
        every = self._config.training.eval_every
        return every > 0 and (step % every == 0 or step == last) and not self.history.has(step)

    def validate(self, step: int) -> tuple[ValidationRecord, bool]:
        """Measures the model after a step; returns what was found, and whether no validation before was as good.

        Collective. All ranks judge by the loss of rank 0.
        """
        loss, rewards = self._measure()
        loss = float(RankGroup(dist.group.WORLD).gather(loss)[0])
        is_best = self.history.add(step, loss)
        if rewards is not None:
            self._say(f"step {step}: validation loss {loss:.3f} per pair, {describe_rewards(rewards)}")
            return ValidationRecord(step, loss, rewards=rewards), is_best
        below, perplexity = self._entropy() - loss, math.exp(loss)
        self._say(
            f"step {step}: validation loss {loss:.3f} nats per token, perplexity {perplexity:.1f}; "
            f"{abs(below):.2f} {'below' if below > 0 else 'above'} the text's unigram entropy"
        )
        return ValidationRecord(step, loss, perplexity), is_best

    def _entropy(self) -> float:
        return unigram_entropy(np.concatenate([text.counted() for text in self._texts]))

    def _measure(self) -> tuple[float, dict[str, float] | None]:
        """Returns the mean loss on the held-out text, and of preferences the mean rewards."""
        training, preference, pipe = self._config.training, self._config.preference, self._pipe
        sequences = sequences_of(self._texts, self._config.data.packing, training.seq_len, seed=None, pads=True)
        held_out, replica = HeldOutBatches(sequences, self._batch_size), (pipe.replica, pipe.num_replicas)
        total, count, sums = 0.0, 0, torch.zeros(5, dtype=torch.float64)
        for batch in held_out.chosen(training.eval_batches):
            mine, number = held_out.batch(batch, *replica), held_out.batch(batch).num_predicted
            if not number:
                continue
            loss = self._evaluate(mine)
            total, count = total + loss * number, count + number
            if preference is not None and mine.sequence_values is not None:
                counts = held_out.counts(batch, *replica)
                sums += reward_sums(pipe, mine.sequence_values, preference, counts).cpu()
        if preference is None:
            return total / count, None
        return float(sums[4] / sums[0]), mean_rewards(sums)

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
