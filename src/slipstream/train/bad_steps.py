"""Decides how to go on after a step whose numbers aren't finite, or far above those of the steps before."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from slipstream.checkpoint import describe_non_finite
from slipstream.errors import NonFiniteError
from slipstream.number_format import PRECISIONS
from slipstream.train.run_context import RunContext

# Of several ranks the largest counts.
_FINE, _SPIKE, _NON_FINITE = range(3)
_REASONS = {_SPIKE: "spike", _NON_FINITE: "not finite"}
_REMEMBERED = 64  # good steps in the median of their values
_FEWEST = 10  # good steps before a spike can be told
_MOST_IN_A_ROW = 10  # bad steps in a row before the run ends, whatever the policy


class BadSteps:
    """Judges every step before it changes the weights, alike on all ranks where any may go on after a bad one, and acts
    on one as configured.

    Args:
        run: whose configuration has `training.bad_numbers` and `training.spike_factor`.
        find_non_finite: returns the name of a weight that isn't finite, if there is one. Collective.
        has_copies: whether ranks of the same work exist, as replicas and tensor ranks are. Without any, loss and norm
            are sums over all ranks, on which these needn't agree.
    """

    def __init__(self, run: RunContext, find_non_finite: Callable[[], str | None], has_copies: bool) -> None:
        training = run.config.training
        self._find_non_finite = find_non_finite
        # Where every rank would stop, one that does so alone ends the run for the others, too.
        may_go_on = training.bad_numbers != "stop" or PRECISIONS[training.precision].scales_loss
        self._agrees = has_copies and (may_go_on or training.spike_factor is not None)
        self._run = run
        self._config = run.config
        self._values: dict[str, deque[float]] = {
            name: deque(maxlen=_REMEMBERED) for name in ("loss", "norm of its gradient")
        }
        self._verdict = _FINE
        self._num_in_a_row = 0
        self.steps: list[int] = []  # numbers of bad steps

    def accepts(self, loss: float, norm: float) -> bool:
        """Returns whether the optimizer may update with this loss and this norm of the gradient. Collective."""
        values = dict(zip(self._values, (loss, norm), strict=True))
        mine = _SPIKE if self._describe_spikes(values) else _FINE
        if not all(map(math.isfinite, values.values())):
            mine = _NON_FINITE
        if self._agrees:
            mine = int(self._run.world.max(torch.tensor([mine], dtype=torch.int32, device=self._run.device)))
        self._verdict = mine
        if self._verdict == _FINE:
            for name, value in values.items():
                self._values[name].append(value)
        return self._verdict == _FINE

    def act(
        self, step: int, loss: float, norm: float, samples: tuple[int, int], roll_back: Callable[[], int | None]
    ) -> dict[str, Any] | None:
        """Acts as configured after a step; returns a bad one's entry in the metrics. Collective.

        `roll_back` loads the last good checkpoint and returns its step; None where there is none. Raises
        NonFiniteError, on all ranks, where the run is to stop.
        """
        if self._verdict == _FINE:
            self._num_in_a_row = 0
            return None
        training = self._config.training
        record = {"why": _REASONS[self._verdict], "samples": list(samples)}
        self.steps.append(step)
        # A loss is a sum over all ranks, which therefore look for the weight together.
        weight = None if math.isfinite(loss) else self._find_non_finite()
        # Without an update since, the weight would be as bad in every step.
        if weight and (training.bad_numbers != "rollback" or not self._has_updated):
            raise NonFiniteError(self._describe_weight(weight, step, loss))
        # The loss scale looks for the largest.
        if PRECISIONS[training.precision].scales_loss and self._verdict == _NON_FINITE:
            return record | {"done": "skipped, with a smaller loss scale after it"}
        self._num_in_a_row += 1
        if training.bad_numbers == "stop" or self._num_in_a_row == _MOST_IN_A_ROW:
            raise NonFiniteError(self._describe(step, loss, norm))
        earlier = roll_back() if training.bad_numbers == "rollback" else None
        return record | {"done": "skipped" if earlier is None else f"rolled back to step {earlier}"}

    @property
    def _has_updated(self) -> bool:
        return bool(self._values["loss"])

    def facts(self) -> dict[str, list[float]]:
        """Returns the facts for a checkpoint, so that a resumed run judges alike."""
        return {name: list(values) for name, values in self._values.items()}

    def restore(self, facts: dict[str, list[float]]) -> None:
        """Goes on from the result of `facts`."""
        for name, values in facts.items():
            self._values[name].extend(values)

    def _describe_spikes(self, values: dict[str, float]) -> str:
        factor = self._config.training.spike_factor
        spikes = []
        for name, value in values.items():
            before = self._values[name]
            if factor is not None and len(before) >= _FEWEST and value > factor * statistics.median(before):
                spikes.append(
                    f"the {name} is {value / statistics.median(before):.3g} times the median of the last steps"
                )
        return " and ".join(spikes)

    def _describe_weight(self, name: str, step: int, loss: float) -> str:
        model = self._config.model
        lora = self._config.lora
        said = f"the loss of step {step} is {loss}, as {describe_non_finite(name)}"
        if self._has_updated:
            return f"{said}, after an update; {self._gentler}"
        if model.pretrained:
            source = lora.path if lora is not None and lora.path is not None and "lora_" in name else model.path
            return f"{said}, before any update: they come from {source}; copy or download its weights again"
        return f"{said}, before any update: check the initialisation that model.config asks for"

    @property
    def _gentler(self) -> str:
        lr = self._config.optimizer.lr or "the default of its class"
        return f"lower optimizer.lr (now {lr}), lengthen optimizer.warmup_steps, or clip with optimizer.clip_norm"

    def _describe(self, step: int, loss: float, norm: float) -> str:
        values = dict(zip(self._values, (loss, norm), strict=True))
        in_a_row = f"{self._num_in_a_row} steps in a row were bad; " if self._num_in_a_row > 1 else ""
        spikes = f" ({text})" if (text := self._describe_spikes(values)) and self._verdict == _SPIKE else ""
        return (
            f"{in_a_row}the loss of step {step} is {loss}, the norm of its gradient {norm}{spikes}; "
            f"{self._gentler}; training.bad_numbers=skip or rollback goes on"
        )
