"""Shows progress: bars on a terminal, otherwise a line now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def make_console() -> Console:
    """Returns a console on standard output."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


class Progress:
    """Bars on a console; `Progress(None)` shows nothing, for ranks that don't own the terminal."""

    def __init__(self, console: Console | None) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        if self.console is not None:
            self.console.print(text, markup=False)

    def waiting(self, description: str) -> AbstractContextManager[object]:
        """Shows a spinner for work of unknown length."""
        return nullcontext() if self.console is None else self.console.status(description)

    @contextmanager
    def counting(self, description: str, total: int) -> Iterator[Callable[[float], None]]:
        """Shows a bar; the caller gets a function of how much of the total is done."""
        with self._bars("{task.percentage:>3.0f}%") as bars:
            task = bars.add_task(description, total=total)
            yield lambda done: bars.update(task, completed=done)

    @contextmanager
    def training(self, num_steps: int) -> Iterator[Callable[[int, str], None]]:
        """Shows the bar of the training loop; the caller gets a function of the step and a text to show next to it."""
        with self._bars("{task.completed}/{task.total} steps", "{task.fields[state]}") as bars:
            task = bars.add_task("training", total=num_steps, state="")

            def show(step: int, state: str) -> None:
                bars.update(task, completed=step, state=state)
                if bars.disable and step % max(1, num_steps // 20) == 0:
                    self.say(f"step {step}/{num_steps}: {state}")

            yield show

    def _bars(self, *columns: str) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        return Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            *(TextColumn(column) for column in columns),
            TimeRemainingColumn(),
            console=self.console or Console(quiet=True),
            transient=True,
            disable=self.console is None or not self.console.is_terminal,
        )
