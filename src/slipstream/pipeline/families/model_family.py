"""The interface of a kind of model that a Pipeline trains: causal LMs, or sequences of any layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from slipstream.parallel.tensor import TensorParallel
from slipstream.pipeline.batch import SplitBatch, WholeBatch
from slipstream.pipeline.families.stage_layout import StageLayout
from slipstream.pipeline.pipeline_options import LossFunction
from slipstream.pipeline.stage import Stage
from slipstream.schedule import Schedule


class ModelFamily(Protocol):
    """Makes the stages, splits every batch, and is called at both ends of a step.

    Every rank calls what is collective. What can't be exact raises SlipstreamError before anything runs.
    """

    @property
    def default_slices(self) -> int: ...

    @property
    def compiled(self) -> Sequence[str]:
        """Modules that torch.compile runs."""
        ...

    def check_slices(self, slices: object) -> None:
        """Raises SlipstreamError for slices that models of this family can't have."""
        ...

    def length(self, batch: WholeBatch) -> int:
        """The number that the slices' lengths add up to: the tokens of a sequence."""
        ...

    def lay_out(self, schedule: Schedule, slices: int | Sequence[int]) -> StageLayout: ...

    def make_stages(
        self, layout: StageLayout, device: torch.device
    ) -> tuple[Mapping[int, Stage], TensorParallel | None]:
        """Makes the stages of this process. Collective."""
        ...

    def loss_function(self, tensor: TensorParallel | None) -> LossFunction: ...

    def tied_ends(self, layout: StageLayout) -> tuple[int, int]:
        """The pipeline's ranks that hold a tied weight, equal where one has both ends."""
        ...

    def routes(self, layout: StageLayout) -> Sequence[tuple[int, int]]:
        """The pairs of stages that skips go between past others."""
        ...

    def split(self, batch: WholeBatch, lengths: Sequence[int], num_microbatches: int, seed: int) -> SplitBatch:
        """The microbatches and slices of a batch. Raises SlipstreamError for tensors that don't fit."""
        ...

    def begin(self) -> None:
        """Called before a step's forwards."""
        ...

    def end(self) -> None:
        """Called after a step's last action. Collective."""
        ...
