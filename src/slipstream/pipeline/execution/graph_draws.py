"""Lets CUDA graphs draw random numbers: those that an eager step of the same seed draws.

A kernel that is recorded reads the seed of its generator from memory that a replay fills with the generator's seed of
that moment. So each place of an action that seeds, such as a layer or a tile of an attention with dropout, gets a
generator of its own while the action is recorded, and a replay first seeds these for its step. Layers draw from the
device's default generator, which no code of theirs names: at each place it is given the state of the place's generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slipstream.keyed_draws import EagerDraws, PlaceSeed, drawing


class CountedDraws(EagerDraws):
    """Seeds at once, counts how often, and finds whether code draws on the host, which no graph repeats."""

    def __init__(self, device: torch.device) -> None:
        self.num_seeds = 0
        self.are_on_host = False
        self._watches_host = device.type != "cpu"
        self._seeded: Tensor | None = None  # the host's state after the last seed

    @contextmanager
    def forked(self) -> Iterator[None]:
        """See `Draws`."""
        with super().forked():
            try:
                yield
            finally:
                self._look()
                self._seeded = None

    def seed(self, seed: PlaceSeed) -> None:
        """See `Draws`."""
        self.num_seeds += 1
        self._look()
        super().seed(seed)
        self._seeded = torch.get_rng_state() if self._watches_host else None

    def generator(self, device: torch.device, seed: PlaceSeed) -> torch.Generator:
        """See `Draws`."""
        self.num_seeds += 1
        return super().generator(device, seed)

    def _look(self) -> None:
        if self._seeded is not None and not torch.equal(self._seeded, torch.get_rng_state()):
            self.are_on_host = True


class GraphDraws:
    """Draws from a generator for each place of a graph. The generators serve all graphs, which run one after another.

    The generators of a graph are named before it is recorded, so how many it takes must be known.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generators: list[torch.Generator] = []
        self._seeds: list[PlaceSeed] = []  # of the graph that is being recorded, by generator
        self._num_seeds = 0  # of the same when it is complete

    @contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph, num_seeds: int) -> Iterator[Sequence[PlaceSeed]]:
        """Surrounds the recording of a graph; yields what will be its seeds, for `prepare`."""
        self._generators += [torch.Generator(self._device) for _ in range(num_seeds - len(self._generators))]
        for generator in self._generators[:num_seeds]:
            graph.register_generator_state(generator)
        self._seeds, self._num_seeds = [], num_seeds
        # which the recording takes part in: where it fails, no eager step can draw from that state any more
        default, outside = self._default, self._default.clone_state()
        try:
            with drawing(self):
                yield self._seeds
        except BaseException:
            default.graphsafe_set_state(outside)
            raise

    def prepare(self, seeds: Sequence[PlaceSeed], step_seed: int) -> None:
        """Seeds the places of a graph for its next replay."""
        for generator, seed in zip(self._generators, seeds, strict=False):
            generator.manual_seed(seed.in_step(step_seed).number)

    @contextmanager
    def forked(self) -> Iterator[None]:
        """See `Draws`."""
        default, outside = self._default, self._default.graphsafe_get_state()
        try:
            yield
        finally:
            default.graphsafe_set_state(outside)

    def seed(self, seed: PlaceSeed) -> None:
        """See `Draws`."""
        self._default.graphsafe_set_state(self._next(seed))

    def generator(self, _: torch.device, seed: PlaceSeed) -> torch.Generator:
        """See `Draws`."""
        return self._next(seed)

    @property
    def _default(self) -> torch.Generator:
        found: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]
        return found

    def _next(self, seed: PlaceSeed) -> torch.Generator:
        if len(self._seeds) == self._num_seeds:
            raise RuntimeError("an action seeds random numbers more often than in the step before")
        self._seeds.append(seed)
        return self._generators[len(self._seeds) - 1]
