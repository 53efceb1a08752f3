"""Shows progress: bars and spinners on a terminal, otherwise a line at each change and now and then."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slipstream.errors import printable
from slipstream.terminal import shows
from slipstream.units import long_duration_text, plural

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_WITHOUT_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LONGEST_SILENCE = 60.0  # seconds between lines without a terminal
_NARROWEST_BAR, _WIDEST_BAR = 10, 30
# The time left is estimated over these seconds: rich's 30 don't cover two steps of a minute each.
_SPEED_PERIOD = 3600.0
_TIME_WIDTH = 14  # columns of "1:23:45 left" and the space before it


class Progress:
    """Lines and bars on a console; `Progress(None)` shows nothing, for ranks that don't own the terminal.

    Events and bars are of the level info, below which `--quiet` is; results are always shown.
    """

    def __init__(self, console: Console | None) -> None:
        self.console = console

    def say(self, text: str | Text) -> None:
        """Prints a line on the progress, which stays."""
        if shows("info"):
            self.say_result(text)

    def warn(self, text: str) -> None:
        """Prints a line on a probable problem."""
        if shows("warning"):
            self.say_result(text)

    def say_result(self, text: str | Text) -> None:
        """Prints a line of the command's result, whatever the level."""
        if self.console is None:
            return
        try:
            self.console.print(printable(text) if isinstance(text, str) else text, markup=False)
        except OSError as error:
            if error.errno not in _WITHOUT_ROOM:
                raise
            # A log on a full disk doesn't end a run: the line comes with a later one, once there is room.

    @property
    def _has_bars(self) -> bool:
        return self.console is not None and self.console.is_interactive and shows("info")

    @contextmanager
    def waiting(self, description: str) -> Iterator[None]:
        """Shows a spinner for work of unknown length; without a terminal, a line that it begins."""
        if self.console is None or not self._has_bars:
            self.say(description)
            yield
            return
        with self.console.status(description):
            yield

    @contextmanager
    def counting(self, description: str, total: int) -> Iterator[Callable[[float], None]]:
        """Shows a bar; the caller gets a function of how much of the total is done. Without a terminal, a line at the
        beginning and every minute, with the time left."""
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(_WIDEST_BAR), TextColumn("{task.percentage:>3.0f}%")
        if self.console is not None and not self._has_bars:
            self.say(description)
        with self._bars(*columns, TimeRemainingColumn()) as bars:
            task = bars.add_task(description, total=total)
            began = said = time.monotonic()

            def show(done: float) -> None:
                nonlocal said
                bars.update(task, completed=done)
                now = time.monotonic()
                if bars.disable and now - said > _LONGEST_SILENCE:
                    said = now
                    self.say(f"{description}: {done / total:.0%}" + _time_left(done, total - done, now - began))

            yield show

    @contextmanager
    def training(self, num_steps: int, done: int = 0) -> Iterator[Callable[[int, Sequence[str]], None]]:
        """Shows the bar of the training loop on one line: bar, step, figures and time left.

        The caller gets a function of the step and its figures, those that are watched most first: as many of them are
        shown as the terminal is wide. Without a terminal, a line at the first step, at the last, at every twentieth
        part and every minute, with the time left from the second step on; at the level debug one at each.

        Args:
            num_steps: of the whole run.
            done: the steps before a run that is resumed.
        """
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.text import Text

        class TimeLeft(TimeRemainingColumn):
            def render(self, task: Any) -> Text:
                return Text.assemble(super().render(task), " left")

        columns = BarColumn(None), TextColumn("{task.fields[state]}"), TimeLeft()
        said = time.monotonic()
        latest = ""
        began = 0.0
        with self._bars(*columns) as bars:
            task = bars.add_task("training", total=num_steps, completed=done, state="the first step is the slowest")
            if bars.disable:
                self.say(
                    f"training: {plural(num_steps - done, 'step')}"
                    + (", of which the first is the slowest" if num_steps - done > 1 else "")
                )

            def show(step: int, figures: Sequence[str]) -> None:
                nonlocal said, latest, began
                now = time.monotonic()
                # The first step is the slowest, so the clock starts after it.
                began = began or now
                latest = f"step {step}/{num_steps}: {'  '.join(figures)}"
                state = f"{step}/{num_steps}  {_as_many_as_fit(figures, self._room_beside(step, num_steps))}"
                bars.update(task, completed=step, state=state)
                is_due = step in (done + 1, num_steps) or step % max(1, num_steps // 20) == 0
                if bars.disable and (is_due or shows("debug") or now - said > _LONGEST_SILENCE):
                    said = now
                    self.say(latest + _time_left(step - done - 1, num_steps - step, now - began))

            yield show
        # The bar is gone, or the log level left the lines out.
        if latest and (self._has_bars or not shows("info")):
            self.say_result(latest)

    def _room_beside(self, step: int, num_steps: int) -> int:
        """Returns the columns of the terminal that the narrowest bar, the step and the time left don't need."""
        width = 0 if self.console is None else self.console.width
        return width - _NARROWEST_BAR - len(f" {step}/{num_steps}  ") - _TIME_WIDTH

    def _bars(self, *columns: Any) -> Any:
        from rich.console import Console
        from rich.progress import Progress as Bars

        return Bars(
            *columns,
            console=self.console or Console(quiet=True),
            transient=True,
            disable=not self._has_bars,
            speed_estimate_period=_SPEED_PERIOD,
        )


def _time_left(num_timed: float, num_left: float, seconds: float) -> str:
    """Returns the end of a line on the time of the steps that are left, by the `seconds` of those that were timed."""
    return f"  {long_duration_text(num_left * seconds / num_timed)} left" if num_timed > 0 and num_left > 0 else ""


def _as_many_as_fit(figures: Sequence[str], width: int) -> str:
    """Returns the first of these figures, none of which is cut."""
    text = ""
    for figure in figures:
        longer = f"{text}  {figure}" if text else figure
        if len(longer) > width:
            break
        text = longer
    return text
