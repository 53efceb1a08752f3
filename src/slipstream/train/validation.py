"""Validations of a run: the loss on held-out text, which of them was the best, and whether the run should end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from slipstream.checkpoint import Improvement
from slipstream.pipeline import Pipeline
from slipstream.train.data import BatchSize, HeldOutBatches, TokenisedText, sequences_of, unigram_entropy
from slipstream.train.metrics import ValidationRecord
from slipstream.train.preferences import describe_rewards, mean_rewards, reward_sums, with_reference_point
from slipstream.train.run_context import RunContext
from slipstream.train.training_step import Evaluator


class Validator:
    """Validates as configured, and keeps the history of the losses. Every rank makes one."""

    def __init__(self, run: RunContext, pipe: Pipeline, texts: Sequence[TokenisedText]) -> None:
        """Takes the held-out text of every source, of which some may be empty."""
        self._run = run
        self._config = run.config
        self._pipe = pipe
        self._texts = [text for text in texts if text.num_documents]
        config = run.config
        training = run.config.training
        self._batch_size = BatchSize.of(training)
        unit = "nats per token" if config.preference is None else "per pair"
        self.history = LossHistory(config.checkpoint.keep_best, training.patience, unit)

    def is_due(self, step: int, last: int) -> bool:
        """Returns whether there is a validation after a step, and it hasn't been; `last` is the run's last step, whose
        validation takes the place of one that is nearer than half of `training.eval_every` before it."""
        every = self._config.training.eval_every
        if every == 0 or self.history.has(step):
            return False
        return step == last or (step % every == 0 and 2 * (last - step) >= every)

    def validate(self, step: int) -> tuple[ValidationRecord, bool]:
        """Measures the model after a step; returns its record, and whether no validation before was as good.

        Collective. All ranks judge by the loss of rank 0.
        """
        loss, rewards = self._measure()
        loss = float(self._run.world.gather(loss)[0])
        is_best = self.history.add(step, loss)
        if rewards is not None:
            self._run.progress.say(f"step {step}: validation loss {loss:.3f} per pair, {describe_rewards(rewards)}")
            return ValidationRecord(step, loss, rewards=rewards), is_best
        entropy = unigram_entropy(np.concatenate([text.counted() for text in self._texts]))
        below = entropy - loss
        perplexity = math.exp(loss)
        self._run.progress.say(
            f"step {step}: validation loss {loss:.3f} nats per token, perplexity {perplexity:.1f}; "
            f"{abs(below):.2f} {'below' if below > 0 else 'above'} the text's unigram entropy"
        )
        return ValidationRecord(step, loss, perplexity), is_best

    def _measure(self) -> tuple[float, dict[str, float] | None]:
        """Returns the mean loss on the held-out text, and of preferences the mean rewards."""
        training = self._config.training
        preference = self._config.preference
        pipe = self._pipe
        sequences = sequences_of(self._texts, self._config.data.packing, training.seq_len, seed=None, pads=True)
        held_out = HeldOutBatches(sequences, self._batch_size)
        replica = (pipe.replica, pipe.num_replicas)
        chosen = held_out.chosen(training.eval_batches)
        evaluator = Evaluator(pipe, self._config)
        if preference is None:
            batches = ((held_out.batch(batch, *replica), held_out.batch(batch).num_predicted) for batch in chosen)
            total, count = evaluator.sum_losses(batches)
            return total / count, None
        sums = torch.zeros(7, dtype=torch.float64)
        for batch in chosen:
            mine = held_out.batch(batch, *replica)
            counts = held_out.counts(batch, *replica)
            if preference.is_rated:
                mine = with_reference_point(evaluator, mine, counts)
            evaluator.loss(mine)
            assert mine.sequence_values is not None
            sums += reward_sums(pipe, mine.sequence_values, preference, counts).cpu()
        return float(sums[4] / sums[0]), mean_rewards(sums)


class LossHistory:
    """The validations so far that count. Every rank has one, which gets the same losses.

    Args:
        keeps_best: whether the checkpoints of improvements are kept; they are listed then.
        patience: validations in a row without an improvement after which the run ends; None for never.
        unit: the unit of a loss.
    """

    def __init__(self, keeps_best: bool = False, patience: int | None = None, unit: str = "nats per token") -> None:
        self._keeps_best = keeps_best
        self._patience = patience
        self._unit = unit
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
        self.best = Improvement(step, loss)
        self._num_without = 0
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
        """Returns the facts for a checkpoint, so that a resumed run judges alike."""
        return {
            "improvements": [list(improvement) for improvement in self._improvements],
            "best": None if self.best is None else list(self.best),
            "num_without_improvement": self._num_without,
            "last_step": self._last_step,
        }

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Goes on from the result of `facts`."""
        self.best = None if facts["best"] is None else Improvement(*facts["best"])
        self._num_without = facts["num_without_improvement"]
        self._last_step = facts["last_step"]
        if self._keeps_best:
            self._improvements = [Improvement(*improvement) for improvement in facts["improvements"]]

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
    return patience is not None and facts["num_without_improvement"] >= patience
