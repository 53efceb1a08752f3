"""Keeps the steps of one pipeline within its memory limit: rehearses what isn't known, and plans by what is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.pipeline.batch import SplitBatch, WholeBatch
from slipstream.pipeline.families import CausalLMFamily, StageLayout
from slipstream.pipeline.families.model_family import ModelFamily
from slipstream.pipeline.memory.memory_limit import MemoryLimit
from slipstream.pipeline.memory.rehearsal import RehearsedStep
from slipstream.pipeline.memory.row_account import both_backwards, rows_to_rehearse
from slipstream.pipeline.sequences import Sequences
from slipstream.planner.steps import StepMemory, StepPlan, StepProblem, find_plan_within, find_step_plan
from slipstream.schedule import Schedule, SlicedMicrobatch, add_reductions


class LimitedSteps:
    """What the steps of one pipeline hold, and those that its memory limit allows.

    Args:
        limit: knows what the ranks would hold.
        family: splits batches.
        layout: of some step; others differ in their order alone.
        lay_out: returns the layout of another order.
        rehearsal: returns the rehearsal of a step, whose `schedule`, `recompute`, `batch`, `microbatches` and
            `token_ids` it is given: it knows the parts of the pipeline.
        device: of this rank.
    """

    def __init__(
        self,
        limit: MemoryLimit,
        family: ModelFamily,
        layout: StageLayout,
        lay_out: Callable[[Schedule], StageLayout],
        rehearsal: Callable[..., RehearsedStep],
        device: torch.device,
    ) -> None:
        self.limit, self._family, self._device = limit, family, device
        self._layout, self._lay_out, self._rehearsal = layout, lay_out, rehearsal

    def rehearsed(
        self, layout: StageLayout, batch: SplitBatch, microbatches: Sequence[SlicedMicrobatch], token_ids: Tensor
    ) -> RehearsedStep:
        """Returns the rehearsal of a step of these microbatches in this layout."""
        return self._rehearsal(
            schedule=layout.training,
            recompute=layout.recompute,
            batch=batch,
            microbatches=microbatches,
            token_ids=token_ids,
        )

    @property
    def knows_lengths(self) -> bool:
        """Whether steps on sequences of any lengths can be planned: without a limit, or once some were rehearsed."""
        return not self.limit.is_set or self.limit.rows is not None

    def prepare_rows(self, splits: bool) -> None:
        """Makes known what rows of any length hold, where that isn't yet and follows from others. Collective."""
        if not self.knows_lengths and not self._counts_by_shape:
            self._rehearse_rows(splits)

    def _rehearse_rows(self, splits: bool) -> None:
        """Rehearses a few short rows, so that what any rows hold is known; not of a model whose rows can't be cut.
        `splits` is whether weight gradients may be computed apart. Collective."""
        assert isinstance(self._family, CausalLMFamily)  # sequences of layers have no memory limit
        config, device = self._family.config.get_text_config(), self._device
        steps = []
        for slices in rows_to_rehearse(getattr(config, "max_position_embeddings", None)):
            order = both_backwards(self._layout.order.placement, len(slices), splits)
            layout = replace(self._layout, order=order)
            token_ids = torch.zeros((1, sum(slices)), dtype=torch.int64, device=device)
            microbatches = [SlicedMicrobatch(1, slices)]
            try:
                batch = self._family.split(WholeBatch.of(device, token_ids, token_ids), microbatches, 0)
            except SlipstreamError:
                return
            for each in (layout, replace(layout, recompute=None)) if layout.recompute else (layout,):
                every = each.with_all_backwards  # rows of a step may run in any order
                steps.append((slices, self.rehearsed(every, batch, microbatches, token_ids)))
        self.limit.rehearse_rows(steps)

    def check_sequences(
        self, layout: StageLayout, batch: SplitBatch, microbatches: Sequence[SlicedMicrobatch], whole: Sequences
    ) -> None:
        """Raises SlipstreamError where a step on sequences would hold more than the limit. Collective."""
        if self.limit.is_set:
            step = self.rehearsed(layout, batch, microbatches, torch.cat(whole.token_ids)[None])
            self.limit.check(step, [len(each) for each in whole.inputs])

    def find_plan(self, problem: StepProblem) -> StepPlan:
        """Returns the fastest plan that is found for sequences of some lengths; where known rows let it, within the
        limit."""
        rows, limit = self.limit.rows, self.limit.limit
        if rows is None or limit is None:
            return find_step_plan(problem)
        held = rows.activation_bytes(len(problem.placement))
        problem = replace(problem, rates=replace(problem.rates, activation_bytes=held))
        return find_plan_within(problem, StepMemory(limit, rows.state_bytes(problem.placement), self._held_with))

    def _held_with(self, plan: StepPlan) -> list[float]:
        """Returns the bytes that every rank would hold with a step's plan."""
        if self._layout.recompute or self._counts_by_shape:
            return self.limit.held_in(self._lay_out(plan.schedule).with_all_backwards.training, plan.slices)
        order = add_reductions(plan.schedule) if self._layout.reduces else plan.schedule
        return self.limit.held_in(order, plan.slices)

    @property
    def _counts_by_shape(self) -> bool:
        """Whether what rows hold doesn't follow from others."""
        return bool(self._layout.offload) or self._layout.spreads_vocabulary
