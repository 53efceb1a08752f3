"""Keys random numbers by the place that draws them, so that whoever repeats the place draws the same (rule 10)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch


def keyed_seed(*key: object) -> int:
    """Returns a seed of 56 bits that is the same for equal keys on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True)
class PlaceSeed:
    """The seed of a place that draws, which every step has another of."""

    step: int  # the step's seed
    place: tuple[object, ...] = ()

    @property
    def number(self) -> int:
        return keyed_seed(self.step, *self.place)

    def part(self, *place: object) -> PlaceSeed:
        """Returns the seed of a part of the place."""
        return replace(self, place=(*self.place, *place))

    def in_step(self, step: int) -> PlaceSeed:
        """Returns the seed of the same place in another step."""
        return replace(self, step=step)


NO_PLACE = PlaceSeed(0)  # of code that draws nothing


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Surrounds a trial, which draws nothing from the random numbers of PyTorch, NumPy and Python."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


class Draws(Protocol):
    """A way to seed the draws from here on: at once, or at every repetition of a recording."""

    def forked(self) -> AbstractContextManager[None]:
        """Surrounds calls of `seed`; afterwards the random state is the caller's."""

    def seed(self, seed: PlaceSeed) -> None:
        """Seeds the draws of code that names no generator."""

    def generator(self, device: torch.device, seed: PlaceSeed) -> torch.Generator:
        """Returns a generator that is seeded."""


class EagerDraws:
    """Seeds at once."""

    def forked(self) -> AbstractContextManager[None]:
        """See `Draws`."""
        return torch.random.fork_rng()

    def seed(self, seed: PlaceSeed) -> None:
        """See `Draws`."""
        # `torch.manual_seed` also notes the call, with the stack, for each kind of device that may be found later.
        set_seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
        set_seed(seed.number)

    def generator(self, device: torch.device, seed: PlaceSeed) -> torch.Generator:
        """See `Draws`."""
        return torch.Generator(device).manual_seed(seed.number)


_current: ContextVar[Draws | None] = ContextVar("slipstream_draws", default=None)
EAGER = EagerDraws()


def current_draws() -> Draws:
    """Returns how whatever runs now draws. A backward may run in a thread that can't ask: it keeps its forward's."""
    return _current.get() or EAGER


@contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """Makes `draws` the current ones."""
    token = _current.set(draws)
    try:
        yield
    finally:
        _current.reset(token)
