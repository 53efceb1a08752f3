"""The context of every part of a run: its configuration, ranks and terminal, and what is made of its inputs once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from slipstream.launch import Progress
from slipstream.parallel import RankGroup, Ranks
from slipstream.pipeline import CausalLMFamily, PipelineOptions, WeightSource
from slipstream.train.config import Config
from slipstream.train.configured_pipeline import RunModel, source_of
from slipstream.train.data import TrainingSequences
from slipstream.train.data.streams import load_sequences
from slipstream.train.run_folder import RunFolder, TolerantWrites


@dataclass
class RunContext:
    """A run as one of its ranks has it, made first and once per rank, when all are connected.

    The training data, the model's files and its family are read and made when they are first asked for. None of them
    depends on the mesh, so that all meshes that are compared, and the training, have the same.

    Every rank reads the inputs in the run's folder, also the one that has prepared them under a launcher: there they
    are mapped from the disk, and the same for all.

    Attributes:
        config: the run's; its mesh may be chosen later.
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
    _family: CausalLMFamily | None = None

    @classmethod
    def of(cls, config: Config, device: torch.device, progress: Progress) -> RunContext:
        """Returns the context of a run whose process group is there."""
        world = RankGroup(dist.group.WORLD)
        return cls(config, config.folder, world, device, progress, TolerantWrites(progress.warn))

    @cached_property
    def sequences(self) -> TrainingSequences:
        """The training data, as the run's inputs have it; of a stream its first block is read."""
        return load_sequences(self.config, self.folder.inputs, self.progress.warn)

    @cached_property
    def source(self) -> WeightSource:
        """The weights that the run begins with."""
        return source_of(self.config, RunModel.read(self.config))

    @property
    def model(self) -> WeightSource | CausalLMFamily:
        """The model for a Pipeline: its family, where a plan has made that already."""
        return self.source if self._family is None else self._family

    def family_on(self, options: PipelineOptions, ranks: Ranks) -> CausalLMFamily:
        """Returns the model's family on these ranks: the same for all meshes. Collective.

        Raises SlipstreamError where the model can't be trained so.
        """
        if self._family is None:
            self._family = CausalLMFamily(self.source, options, ranks, self.device)
        else:
            self._family.move_to(options, ranks, self.device)
        return self._family
