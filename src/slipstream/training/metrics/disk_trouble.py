"""Says that something can't be written, and lets the run go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class DiskTrouble:
    """What can't be written just now. `say` gets a line when that begins, and none while it lasts."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._unwritten: set[str] = set()

    @contextmanager
    def tolerated(self, what: str) -> Iterator[None]:
        """Lets an OSError of the block pass, such as that of a full disk; `what` is named."""
        try:
            yield
        except OSError as error:
            if what not in self._unwritten:
                self._say(f"{what} can't be written: {error}. Training goes on")
            self._unwritten.add(what)
        else:
            self._unwritten.discard(what)
