"""The context of every part of a run: its configuration and folder, its ranks and their device, and its terminal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from slipstream.launch import Progress
from slipstream.parallel import RankGroup
from slipstream.train.config import Config
from slipstream.train.run_folder import RunFolder, TolerantWrites


@dataclass(frozen=True)
class RunContext:
    """A run as one of its ranks has it, made once per rank when all are connected.

    Attributes:
        config: the run's.
        folder: with the run's inputs and results.
        world: all ranks.
        device: this rank's.
        progress: the terminal, which the first rank has.
        writes: those that may fail.
    """

    config: Config
    folder: RunFolder
    world: RankGroup
    device: torch.device
    progress: Progress
    writes: TolerantWrites

    @classmethod
    def of(cls, config: Config, device: torch.device, progress: Progress) -> RunContext:
        """Returns the context of a run whose process group is there."""
        world = RankGroup(dist.group.WORLD)
        return cls(config, config.folder, world, device, progress, TolerantWrites(progress.warn))
