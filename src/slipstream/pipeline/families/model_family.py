"""What a Pipeline asks of the kind of model that it trains: a causal LM, or a sequence of any layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from slipstream.model import Tensors
from slipstream.parallel.tensor import TensorParallel
from slipstream.pipeline.batch import SplitBatch
from slipstream.pipeline.execution import LossFunction
from slipstream.pipeline.families.sequence_partition import Balance
from slipstream.pipeline.families.stage_layout import StageLayout
from slipstream.pipeline.parameters import Parameters
from slipstream.pipeline.stage import Stage
from slipstream.schedule import Schedule

ModelInputs = Tensor | Tensors


class ModelFamily(Protocol):
    """Made before the stages, then asked for them, for every batch's pieces, and at both ends of a step.

    All that is collective is called by every rank. What can't be exact raises SlipstreamError, before anything runs.
    """

    @property
    def default_slices(self) -> int: ...

    @property
    def compiled(self) -> Sequence[str]:
        """Modules that torch.compile runs."""
        ...

    @property
    def config(self) -> PretrainedConfig:
        """Of transformers, where the model has one."""
        ...

    def check_slices(self, slices: object) -> None: ...

    def length(self, inputs: ModelInputs) -> int:
        """What slices are lengths of: the tokens of a sequence."""
        ...

    def lay_out(self, schedule: Schedule, slices: int | Sequence[int]) -> StageLayout: ...

    def make_stages(
        self, layout: StageLayout, device: torch.device
    ) -> tuple[Mapping[int, Stage], TensorParallel | None]:
        """Those of this process. Collective."""
        ...

    def loss_function(self, tensor: TensorParallel | None) -> LossFunction: ...

    def tied_ends(self, layout: StageLayout) -> tuple[int, int]:
        """The pipeline's ranks that hold a tied weight, equal where one has both ends."""
        ...

    def routes(self, layout: StageLayout) -> Sequence[tuple[int, int]]:
        """The pairs of stages that skips go between past others."""
        ...

    def balance(self, layout: StageLayout) -> Balance: ...

    def cut(
        self,
        inputs: ModelInputs,
        targets: Tensor,
        lengths: Sequence[int],
        num_microbatches: int,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        seed: int,
    ) -> SplitBatch:
        """The pieces of a batch on this device, checked."""
        ...

    def begin(self) -> None:
        """A step's forwards come next."""
        ...

    def end(self) -> None:
        """They have all run. Collective."""
        ...

    def save_pretrained(self, folder: str | Path, stages: Mapping[int, Stage], parameters: Parameters) -> None: ...
