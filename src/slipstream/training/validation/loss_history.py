"""The best validation loss so far, and how many validations ago that was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.checkpoint import Improvement


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
