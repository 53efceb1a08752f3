"""Validations of a run: the loss on held-out text, which of them was the best, and whether the run should end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slipstream.checkpoint import Improvement
from slipstream.parallel import RankGroup
from slipstream.pipeline import Pipeline
from slipstream.train.config import Config
from slipstream.train.data import BatchSize, HeldOutBatches, TokenBatch, TokenisedText, sequences_of, unigram_entropy
from slipstream.train.metrics import ValidationRecord
from slipstream.train.preferences import describe_rewards, mean_rewards, reward_sums
from slipstream.train.training_step import autocast


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


class LossHistory:
    """What counts of the validations so far. Every rank has one, which gets the same losses.

    Args:
        keeps_best: whether the checkpoints of improvements are kept; they are listed then.
        patience: validations in a row without an improvement after which the run ends; None for never.
        unit: what a loss is of.
    """

    def __init__(self, keeps_best: bool = False, patience: int | None = None, unit: str = "nats per token") -> None:
        self._keeps_best, self._patience, self._unit = keeps_best, patience, unit
        self._improvements: list[Improvement] = []
        self._num_without = 0
        self._last_step = 0
        self.best: Improvement | None = None
        """The step and the loss of the best validation; its checkpoint needn't be there."""

    def add(self, step: int, loss: float) -> bool:
        """Notes the loss of a validation; returns whether it is below all before. One that isn't a number never is."""
        self._last_step = step
        if not loss < (float("inf") if self.best is None else self.best.loss):
            self._num_without += 1
            return False
        self.best, self._num_without = Improvement(step, loss), 0
        if self._keeps_best:
            self._improvements.append(self.best)
        return True

    def has(self, step: int) -> bool:
        """Returns whether the validation after a step has been noted."""
        return self._last_step >= step

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the run ends, as its validations don't improve any more."""
        return is_out_of_patience(self.facts(), self._patience)

    def facts(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, so that a resumed run judges alike."""
        return {
            "improvements": [list(each) for each in self._improvements],
            "best": None if self.best is None else list(self.best),
            "num_without_improvement": self._num_without,
            "last_step": self._last_step,
        }

    def restore(self, facts: Mapping[str, Any], step: int) -> None:
        """Goes on from what `facts` returned at a step, or from nothing where a checkpoint of before hasn't that."""
        self.best = Improvement(*facts["best"]) if facts.get("best") else None
        self._num_without = facts.get("num_without_improvement", 0)
        self._last_step = facts.get("last_step", step)
        if self._keeps_best:
            self._improvements = [Improvement(*each) for each in facts.get("improvements", ())]

    def describe_end(self) -> str:
        """Returns why a run that is out of patience ends."""
        since = "none has been a number" if self.best is None else f"the best was {self._describe(self.best)}"
        validations = "1 validation" if self._num_without == 1 else f"{self._num_without} validations"
        return f"no improvement in {validations} (training.patience={self._patience}): {since}"

    def describe_best(self) -> str:
        """Returns which validation was the best; "" where there was none."""
        return "" if self.best is None else f"best validation loss: {self._describe(self.best)}"

    def _describe(self, best: Improvement) -> str:
        return f"{best.loss:.4f} {self._unit}, after step {best.step}"


def is_out_of_patience(facts: Mapping[str, Any], patience: int | None) -> bool:
    """Returns whether a run with the `facts` of a history ends by `training.patience`."""
    return patience is not None and facts.get("num_without_improvement", 0) >= patience
