"""An executor's observer that notes what a step holds before some of its actions."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.pipeline.execution import StepState
from slipstream.schedule import Action


class BeforeEach:
    """Calls a function before every action."""

    def __init__(self, note: Callable[[Action, StepState], None]) -> None:
        self._note = note

    def before(self, action: Action, state: StepState) -> None:
        self._note(action, state)

    def after(self, action: Action, state: StepState) -> None:
        pass
