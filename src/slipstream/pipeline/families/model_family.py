"""The protocol of a model's family in a Pipeline: of a causal LM, or of a sequence of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.model import ALL_WEIGHTS, Adapter, PipelineStage, TrainedWeights
from slipstream.parallel.tensor import TensorParallel
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.execution.losses import Losses, OutputForms
from slipstream.pipeline.families.stage_layout import StageLayout
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.planning import ContextPlace, CountedPlans, LoneRankPlans
from slipstream.planner.joint import JointPlan
from slipstream.planner.ragged import StageRates
from slipstream.schedule import Schedule, SlicedMicrobatch


class ModelFamily(ABC):
    """Makes the stages of a rank and their loss, and cuts every batch.

    Attributes:
        name: by which a Pipeline of it is called.
        compiled: the modules that torch.compile runs.
        default_slices: the number of slices where the options have none.
        leaves_out_frozen: whether stages whose parameters are all frozen may have no backwards.
        config: the configuration; None of a sequence of layers.
        beside: the folder of files beside the weights.
        trained: its trained weights.
        adapter: the adapter that is trained.
    """

    name: str
    compiled: Sequence[str]
    default_slices = 1
    leaves_out_frozen = False
    config: Any = None
    beside: Path | None = None
    trained: TrainedWeights = ALL_WEIGHTS
    adapter: Adapter | None = None
    _options: PipelineOptions

    def check_has(self, wanted: str, instead: str = "") -> None:
        """Raises SlipstreamError for a feature that is `wanted` and only causal LMs have, with the remedy `instead`."""
        return

    def add_embedding_noise(self, alpha: float, length: int) -> None:
        """Adds noise to the embedding's output, as `Pipeline.add_embedding_noise` says. Only causal LMs have one."""
        self.check_has("noise on embeddings", "Let your first layer add it.")

    @abstractmethod
    def place_context(self, options: PipelineOptions, num_ranks: int) -> ContextPlace:
        """Returns where keys and values lie, of options that leave it to the account. Collective.

        Raises SlipstreamError where that can't be decided.
        """

    @abstractmethod
    def is_open(self, options: PipelineOptions) -> bool:
        """Returns whether a plan is to decide where to cut, and can."""

    @abstractmethod
    def plan(self, num_ranks: int, say: Callable[[str], None]) -> tuple[JointPlan, StageRates | None]:
        """Returns the plan of schedule, slices and partition, and its stages' rates. Collective."""

    @abstractmethod
    def counted_plans(self, options: PipelineOptions, num_ranks: int) -> CountedPlans | LoneRankPlans:
        """Returns the plans of what the options leave open, by counted operations. Collective.

        Raises SlipstreamError where these can't be known.
        """

    def completed(self, options: PipelineOptions) -> PipelineOptions:
        """Returns the options in which all that is open beside "auto" is found as that is."""
        return options

    def adopt(self, options: PipelineOptions) -> None:
        """Lays out and makes stages by these options from now on: those given, with a plan's choices."""
        self._options = options

    @abstractmethod
    def begin_step(self) -> None:
        """Is called before the forwards of a step."""

    @abstractmethod
    def end_step(self) -> None:
        """Is called after the last action of a step. Collective."""

    def measured_rates(
        self, layout: StageLayout, length: int, num_rows: int, say: Callable[[str], None]
    ) -> StageRates | None:
        """Returns the stages' rates for microbatches of `num_rows` rows of `length` tokens; None where they can't be
        measured beside the model. Collective."""
        return None

    def rates(self, layout: StageLayout) -> StageRates | None:
        """Returns the stages' rates, by their multiplications; None where those of slices aren't known."""
        return None

    @abstractmethod
    def balance(self, layout: StageLayout) -> Balance:
        """Returns how even the ranks are. Raises SlipstreamError for a causal LM, and where costs aren't known."""

    @abstractmethod
    def lay_out(self, schedule: Schedule, slices: int | Sequence[int]) -> StageLayout:
        """Returns which layers each stage has. Raises SlipstreamError for a layout that can't be exact."""

    @abstractmethod
    def make_stages(self, layout: StageLayout) -> tuple[Mapping[int, PipelineStage], TensorParallel | None]:
        """Returns the stages of this process, of every weight this rank's share, and how they share. Collective."""

    def weight_holders(self, layout: StageLayout) -> dict[str, list[int]]:
        """Returns the pipeline's ranks that hold each weight of several, in the order of its stages."""
        return {}

    def with_every_name(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns a whole model's state with tied weights under each of their names."""
        return state

    @abstractmethod
    def losses(self, tensor: TensorParallel | None) -> Losses:
        """Returns how the last stage computes its loss."""

    @abstractmethod
    def output_forms(self, piece: Any, targets: Tensor) -> OutputForms:
        """Returns the form of the last layer's outputs for a slice with these targets."""

    @abstractmethod
    def lengths(self, batch: Batch) -> list[int]:
        """Returns the tokens of each sequence. Raises SlipstreamError for tensors that don't fit the model."""

    def planned_lengths(self, lengths: Sequence[int]) -> list[int]:
        """Returns the tokens of sequences that a step plans as one, of the tokens of each."""
        return [*lengths]

    @abstractmethod
    def groups(self, lengths: Sequence[int], num_microbatches: int) -> tuple[tuple[int, ...], ...]:
        """Returns the numbers of the sequences in each microbatch, which has them in one row."""

    @abstractmethod
    def split(
        self, batch: Batch, microbatches: Sequence[SlicedMicrobatch], seed: int, groups: Sequence[Sequence[int]] = ()
    ) -> SplitBatch:
        """Returns the microbatches and slices of a batch, whose `lengths` were checked; where these differ, `groups`
        has the numbers of sequences planned as one that are packed into each microbatch's row."""


@dataclass(frozen=True)
class Balance:
    """How evenly the ranks are loaded: an imbalance of 1.0 means that all cost the same."""

    imbalance: float  # the slowest rank's cost over the mean
    rank: int  # the slowest
    layer: str  # the costliest uncut layer of that rank
    share: float  # cost of the dearest layer over the mean rank's

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is the slowest, {self.imbalance:.2f} times the mean; of its layers {self.layer} costs "
            f"most, {self.share:.2f} of what a rank does on average"
        )
