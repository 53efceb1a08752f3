"""The room for activations within a memory limit, which is learned from the plans that hold too much."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from slipstream.array_types import Floats
from slipstream.errors import SlipstreamError


class OutOfMemoryError(SlipstreamError):
    """No plan that was searched keeps to the memory limit; the message has the remedy."""


Try = TypeVar("Try")
Found = TypeVar("Found")


@dataclass
class Room:
    """The bytes that ranks have for activations within a limit.

    A search chooses by activations alone. A rank's other memory, such as messages, depends on the order and the slices,
    so it is taken from one plan that was accounted for, and grows by what any other holds too much.

    Args:
        limit: bytes of each rank.
        besides: bytes of each rank that aren't activations, (ranks,).
        spared: bytes by which every rank has less room after a plan that held too much.
    """

    limit: float
    besides: Floats
    spared: float = 0.0

    @property
    def bytes(self) -> Floats:
        """The bytes of each rank for activations, (ranks,)."""
        room: Floats = self.limit - self.besides
        return room

    def has_space(self, peaks: Floats) -> bool:
        """Returns whether a plan with these peaks, (ranks,), keeps to the limit; where it doesn't, there is less room
        from now on."""
        excess = peaks - self.limit
        if (excess <= 0).all():
            return True
        self.besides = self.besides + np.maximum(excess, 0.0) + self.spared
        return False


def first_within(
    tries: Iterable[Try], find: Callable[[Try], Found | None], fits: Callable[[Found], bool]
) -> Found | None:
    """Returns the first of the tries' plans that fits, each found with less room than the one before; None where a try
    finds none, or none fits.

    Args:
        tries: what `find` takes, such as an effort.
        find: searches within the room that is left.
        fits: accounts for a plan, and leaves less room where it holds too much (`Room.has_space`).
    """
    for each in tries:
        found = find(each)
        if found is None or fits(found):
            return found
    return None
