"""What a Pipeline says of itself: how it is cut, where it runs, and what ran when."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig

from slipstream.model.adapters import ALL_WEIGHTS, Adapter, TrainedWeights
from slipstream.parallel import RankGroup
from slipstream.pipeline.batch import WholeBatch
from slipstream.pipeline.engine import Engine
from slipstream.pipeline.families import Balance, ExecutedStep, StageLayout
from slipstream.pipeline.families.model_family import causal_lm, layer_sequence
from slipstream.pipeline.memory import rehearse
from slipstream.planner.joint import JointPlan
from slipstream.planner.steps import StageRates
from slipstream.schedule import Schedule
from slipstream.simulator import MemoryTable
from slipstream.timeline import Timeline


class PipelineFacts:
    """The part of a Pipeline that describes it."""

    _engine: Engine

    @property
    def config(self) -> PretrainedConfig:
        """The model's configuration. Raises SlipstreamError for an nn.Sequential, which has none."""
        return causal_lm(self._engine.family, "config").config

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        return self._engine.device

    @property
    def rank(self) -> int:
        """This process's place on the pipeline."""
        return self._engine.ranks.pipeline.rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the pipeline: each a process, or all of them in this one."""
        return self.layout.num_ranks

    @property
    def replica(self) -> int:
        """This pipeline's place among those that share a batch (dp)."""
        return self._engine.ranks.data.rank

    @property
    def num_replicas(self) -> int:
        """The number of pipelines that share a batch (dp)."""
        return self._engine.ranks.data.size

    @property
    def leads(self) -> bool:
        """Whether this is the one rank of all that writes and speaks for them."""
        return self._engine.ranks.leads

    @property
    def has_own_loss(self) -> bool:
        """Whether a `loss_fn` was given, so that a step's loss isn't cross-entropy."""
        return self._engine.has_own_loss

    @property
    def plan(self) -> JointPlan | None:
        """The plan of schedule, slices and partition, where all were "auto"; `plan.table()` says what was compared."""
        return self._engine.plan

    @property
    def rates(self) -> StageRates | None:
        """What the stages cost, by which steps on sequences of different lengths are planned: in seconds where it was
        measured, else in multiplications. None for an nn.Sequential."""
        return self._engine.rates

    @property
    def is_tuning(self) -> bool:
        """Whether "auto" is still to be planned: the next step may run in another order or in other slices."""
        return self._engine.settings.is_tuning

    @property
    def layout(self) -> StageLayout:
        """The layers of every stage, and the lowered schedules of the next step and of an evaluation."""
        return self._engine.layout

    @property
    def order(self) -> Schedule:
        """The schedule of the next step as it was given or found: `layout.training` without what lowering added."""
        return self.layout.order

    @property
    def last_step(self) -> ExecutedStep:
        """The layout and the slices of the last step; "auto" may have other plans for the next."""
        return self._engine.last_step

    @property
    def axes(self) -> dict[str, RankGroup]:
        """The groups of ranks that this one is in, by the axes of the mesh, such as pp, dp, tp."""
        return {axis.name: group for axis, group in self._engine.ranks.groups.items()}

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank sent to other stages in the last step or evaluation, without headers."""
        return self._engine.runner.transport.bytes_sent

    @property
    def random_state(self) -> tuple[int, int]:
        """The seed, and the number of steps so far, on which dropout depends. May be set."""
        return self._engine.random_state

    @random_state.setter
    def random_state(self, state: tuple[int, int]) -> None:
        self._engine.random_state = state

    @property
    def balance(self) -> Balance:
        """The balance of the layers of an nn.Sequential over the ranks, and the layer that limits it.

        Raises SlipstreamError for a causal LM, and where costs aren't known: give `layers` an example or costs.
        """
        return layer_sequence(self._engine.family, "balance").balance(self.layout)

    def slices(self, length: int) -> list[int]:
        """Returns the tokens of each slice of a sequence of `length` tokens, as the next step cuts it; with
        `microbatches`, in the one with the most slices."""
        return self._engine.settings.lengths(length)

    def timeline(self) -> Timeline:
        """Returns what ran when in the last step or evaluation, in seconds, on all ranks. Collective."""
        self._engine.calls.begin("timeline")
        return self._engine.runner.timeline()

    def memory_table(self, inputs: Tensor, targets: Tensor, microbatch: int = 0) -> MemoryTable:
        """Measures the bytes that this process's stages of a causal LM hold in a step on such a batch. Collective. For
        `slipstream.simulator.memory_of`, which adds the parts up by a schedule; where microbatches differ, of one."""
        return rehearse(self._engine.rehearsed_step(WholeBatch.of(self.device, inputs, targets)), microbatch)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of PEFT that is trained, its name and configuration; None where the model has none."""
        return self.trained_weights.adapter

    @property
    def trained_weights(self) -> TrainedWeights:
        """What was trained of a causal LM when the pipeline was made: all weights, all but some, or an adapter."""
        return getattr(self._engine.family, "trained", ALL_WEIGHTS)
