"""What a Pipeline asks of the family of the model that it was given: of a causal LM, or of a sequence of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.model import PipelineStage
from slipstream.model.adapters import Adapter, TrainedWeights
from slipstream.parallel import Ranks
from slipstream.parallel.tensor import TensorParallel
from slipstream.pipeline.batch import Sequences, WholeBatch
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.execution.losses import Losses, OutputForms
from slipstream.pipeline.families.causal_lm import CausalLMFamily
from slipstream.pipeline.families.layer_sequence import Balance, SequenceFamily
from slipstream.pipeline.families.stage_layout import StageLayout
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.weights import WeightSource, in_memory
from slipstream.planner.joint import JointPlan
from slipstream.planner.steps import StageRates, StepPlan
from slipstream.schedule import Schedule, SlicedMicrobatch


class ModelFamily(Protocol):
    """Makes the stages of a rank and their loss, and cuts every batch."""

    @property
    def name(self) -> str:
        """What a Pipeline of it is called."""

    @property
    def config(self) -> Any:
        """The configuration; None of a sequence of layers."""

    @property
    def beside(self) -> Path | None:
        """The folder of what lies beside the weights."""

    @property
    def trained(self) -> TrainedWeights:
        """What of it is trained."""

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is trained."""

    @property
    def compiled(self) -> Sequence[str]:
        """The modules that torch.compile runs."""

    @property
    def default_slices(self) -> int:
        """The number of slices where the options have none."""

    @property
    def leaves_out_frozen(self) -> bool:
        """Whether stages of which nothing is trained may have no backwards."""

    @property
    def on_begin(self) -> Callable[[], None] | None:
        """Called before the forwards of a step."""

    @property
    def on_end(self) -> Callable[[], None] | None:
        """Called after the last action of a step."""

    def check_has(self, wanted: str, instead: str = ...) -> None:
        """Raises SlipstreamError for what is `wanted` and only causal LMs have, with what to do `instead`."""

    def is_open(self, options: PipelineOptions) -> bool:
        """Returns whether a plan is to decide where to cut, and can."""

    def plan(self, num_ranks: int, say: Callable[[str], None]) -> tuple[JointPlan, StageRates | None]:
        """Returns the plan of schedule, slices and partition, and what its stages cost. Collective."""

    def adopt(self, options: PipelineOptions) -> None:
        """Lays out and makes stages by these options from now on."""

    def measured_rates(
        self, layout: StageLayout, length: int, num_rows: int, say: Callable[[str], None]
    ) -> StageRates | None:
        """Returns what the stages cost on such rows, None where that can't be measured beside them. Collective."""

    def rates(self, layout: StageLayout) -> StageRates | None:
        """Returns what the stages cost, by their multiplications."""

    def balance(self, layout: StageLayout) -> Balance:
        """Returns how even the ranks are."""

    def lay_out(self, schedule: Schedule, slices: int | Sequence[int]) -> StageLayout:
        """Returns which layers each stage has. Raises SlipstreamError for what can't be exact."""

    def make_stages(self, layout: StageLayout) -> tuple[Mapping[int, PipelineStage], TensorParallel | None]:
        """Returns the stages of this process, and how ranks share them. Collective."""

    def weight_holders(self, layout: StageLayout) -> dict[str, list[int]]:
        """Returns the pipeline's ranks that hold each weight of several, in the order of its stages."""

    def routes(self, layout: StageLayout) -> list[tuple[int, int]]:
        """Returns the pairs of stages that skips go between past others."""

    def losses(self, tensor: TensorParallel | None) -> Losses:
        """Returns how the last stage computes its loss."""

    def output_forms(self, piece: Any, targets: Tensor) -> OutputForms:
        """Returns the form of the last layer's outputs for a slice."""

    def length(self, batch: WholeBatch) -> int:
        """Returns the tokens of a row."""

    def split(self, batch: WholeBatch, microbatches: Sequence[SlicedMicrobatch], seed: int) -> SplitBatch:
        """Returns the microbatches and slices of a batch. Raises SlipstreamError for tensors that don't fit."""

    def lengths(self, sequences: Sequences) -> list[int]:
        """Returns the tokens of what a step plans as one sequence. Raises SlipstreamError for one that doesn't fit."""

    def planned_lengths(self, lengths: Sequence[int]) -> list[int]:
        """Returns the same, of the tokens of each sequence."""

    def groups(self, lengths: Sequence[int], num_microbatches: int) -> tuple[tuple[int, ...], ...]:
        """Returns the numbers of the sequences in each microbatch."""

    def sequences_of(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the sequences of each microbatch, of those that a step plans as one."""

    def split_sequences(self, sequences: Sequences, plan: StepPlan, seed: int) -> SplitBatch:
        """Returns the slices of sequences of different lengths, packed into the plan's microbatches."""


def family_of(model: object, options: PipelineOptions, ranks: Ranks, device: torch.device) -> ModelFamily:
    """Returns the model's family; raises SlipstreamError unless it is a causal LM or an nn.Sequential. Collective."""
    if isinstance(model, nn.Sequential):
        return SequenceFamily(model, options, ranks, device)
    return CausalLMFamily(model if isinstance(model, WeightSource) else in_memory(model), options, ranks, device)
