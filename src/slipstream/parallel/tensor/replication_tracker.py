"""Notes where the ranks that share a layer compute different things, and where all compute the same."""

from __future__ import annotations

from collections.abc import Callable


class ReplicationTracker:
    """Calls `enter` where the ranks begin to compute different things, and `leave` where they compute the same again.

    Each change is reported once. Before the first region the ranks' work is different if it `is_own`, as it is where
    tokens are spread.
    """

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None], is_own: bool) -> None:
        self._enter, self._leave, self._is_own = enter, leave, is_own

    @property
    def is_own(self) -> bool:
        """Whether the ranks compute different things now."""
        return self._is_own

    def switch(self, is_own: bool) -> None:
        """Notes whether from here on the ranks compute different things or the same."""
        if is_own != self._is_own:
            self._is_own = is_own
            (self._enter if is_own else self._leave)()
