"""The parts of a Pipeline on this rank, and how they run a batch."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, Never

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import keyed_seed
from slipstream.parallel import Ranks, check_transport, join_launched_group, watch_group
from slipstream.pipeline.agreement import BatchAgreement, CallAgreement
from slipstream.pipeline.batch import SplitBatch, Stage, WholeBatch
from slipstream.pipeline.execution import GivenLosses, Losses, TokenOutputs
from slipstream.pipeline.families import CausalLMFamily, ExecutedStep, StageLayout, family_of
from slipstream.pipeline.families.stage_layout import FrozenStages
from slipstream.pipeline.memory import LimitedSteps, MemoryLimit, RehearsedStep
from slipstream.pipeline.parameters import Parameters
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.sequences import Sequences
from slipstream.pipeline.step_planning import DifferentLengthsError, StepPlanning
from slipstream.pipeline.step_runner import StepRunner
from slipstream.pipeline.tuning import FirstSteps, HeldBytes, StepSettings, measure_rates, rates_of_rows, with_plan
from slipstream.pipeline.weights import gather_state
from slipstream.planner.joint import JointPlan, OutOfMemoryError
from slipstream.planner.steps import StageRates, StepPlan
from slipstream.schedule import Schedule, SlicedMicrobatch
from slipstream.watchdog import board, counted_off

_log = logging.getLogger(__name__)
_MOST_LAYOUTS = 32  # lowered schedules that are kept


class Engine:
    """Ranks, stages, parameters and messages of a pipeline. Every rank makes it and calls `step` and `evaluate`, which
    are collective, in the same order."""

    def __init__(self, model: object, options: PipelineOptions) -> None:
        """Builds this rank's part of the pipeline. Collective."""
        join_launched_group(options.device, options.runtime.stall_limit, transport=options.runtime.transport)
        self.ranks = Ranks.of(options.mesh)
        # A mesh that is kept would keep its groups alive, with their threads, when the interpreter ends.
        options = replace(options, mesh=None)
        self.device = self.ranks.device if options.device is None else torch.device(options.device)
        if self.ranks.world.size > 1:
            check_transport(options.runtime.transport, self.device, self.ranks.world.gpu_backend)
        self.calls = CallAgreement(self.ranks)
        self._agreement = BatchAgreement(self.ranks, self.calls, options.memory.limit is not None)
        watch_group(self.ranks.world, options.runtime.stall_limit)
        with counted_off("loading and checking the model"):
            self.family = family_of(model, options, self.ranks, self.device)
        num_ranks = self.ranks.count(options.num_ranks, options.schedule)
        self.plan: JointPlan | None = None
        self._given_rates: StageRates | None = options.rates
        self.has_own_loss = options.loss_fn is not None
        self._adds_router_loss = options.router_loss != "none"
        if num_ranks > 1 and self.family.is_open(options):
            options = self._plan_start(options, num_ranks)
        self.settings = StepSettings(options, num_ranks, self.family.default_slices, self.family.compiled)
        self.layout = self.family.lay_out(self.settings.schedule, self.settings.slices)  # of the next step
        self.stages: Mapping[int, Stage]
        with counted_off("loading the model", uses_disk=True):
            self.stages, tensor = self.family.make_stages(self.layout)
        self._frozen = FrozenStages(self.stages, self.ranks, self.layout.order)
        if isinstance(self.family, CausalLMFamily) and self._frozen.may_be_left_out(self.layout, options.schedule):
            self.layout = replace(self.layout, num_frozen_stages=self._frozen.number)
        self._laid_out = lru_cache(_MOST_LAYOUTS)(partial(_with_order, self.layout))
        self.step_planning = StepPlanning(self._plan_step, self._check_and_lay_out, self.ranks, self.calls)
        holders = self.family.weight_holders(self.layout) if self.ranks.pipeline.size > 1 else {}
        self.tensor_parallel = tensor
        self.parameters = Parameters(self.stages, self.ranks, tensor, holders, options)
        self._losses = losses = self.family.losses(tensor)
        own = self.stages, self.parameters, losses
        self.runner = StepRunner(self.layout, *own, self.ranks, self.device, self.family.routes(self.layout), options)
        limit = MemoryLimit(options.memory.limit, self.ranks, self.runner.records)
        rehearsal = self._rehearsal_with(losses)
        self._first_steps = FirstSteps(self.settings, self.ranks, self._measured_rates, options.memory.limit)
        self.limited_steps = LimitedSteps(limit, self.family, self.layout, self._laid_out, rehearsal, self.device)
        self.random_state: tuple[int, int] = self.ranks.decided(torch.initial_seed), 0  # the seed, and steps so far
        self.last_step = ExecutedStep(self.layout, [])

    def _plan_start(self, options: PipelineOptions, num_ranks: int) -> PipelineOptions:
        """Returns the options with what a plan from measured costs chooses; without one, where they can't be measured,
        order and slices stay open until steps ran. Collective.

        Raises OutOfMemoryError where nothing fits the memory limit.
        """
        expected = options.expected
        say = _log.info if expected is None or expected.say is None else expected.say
        try:
            with counted_off("measuring what layers cost"):
                self.plan, self._given_rates = self.family.plan(num_ranks, say)
        except OutOfMemoryError:
            raise
        except SlipstreamError as error:
            say(f"no plan can be made before the first step: {error}")
            return options
        options = with_plan(options, self.plan)
        self.family.adopt(options)
        return options

    def _rehearsal_with(self, losses: Losses) -> partial[RehearsedStep]:
        """Returns what makes the rehearsal of a step of this pipeline's parts."""
        return partial(
            RehearsedStep,
            stages=self.stages,
            parameters=self.parameters,
            losses=losses,
            device=self.device,
            scatter=self.runner.scattered,
            num_parts=self.runner.num_parts,
        )

    def split_to_evaluate(
        self, whole: WholeBatch | Sequences, plan: StepPlan | None = None, needs_targets: bool = True
    ) -> tuple[SplitBatch, StepPlan | None]:
        """Returns the batch as an evaluation splits it, and the plan of sequences; where it needs no targets, also of a
        batch in which none counts. Collective. `plan` is for sequences alone."""
        if isinstance(whole, Sequences):
            batch, plan = self._split_sequences(whole, plan, needs_targets)
        else:
            length = self.family.length(whole)
            self.settings.fit(length)
            self._adopt(self.settings.schedule)
            batch = self._split(whole, length, needs_targets)
        self.parameters.publish()
        return batch, plan

    def run_forward(self, batch: SplitBatch, num_targets: float | None = None) -> Tensor:
        """Runs forwards alone, and returns the global mean loss, or the sum over `num_targets`. Collective."""
        batch = replace(batch, num_targets=checked_num_targets(batch, num_targets))
        return self.runner.run(self.layout.evaluation, batch, self._agreement.finish)

    def keep_outputs(self, function: TokenOutputs, batch: SplitBatch) -> Mapping[tuple[int, int], Tensor]:
        """Runs forwards alone; returns what `function` gives of each slice's logits and targets, as `StepRunner.keep`.
        Collective."""
        return self.runner.keep(function, self.layout.evaluation, batch, self._agreement.finish)

    def step(
        self,
        whole: WholeBatch | Sequences,
        loss_scale: float,
        plan: StepPlan | None = None,
        num_targets: float | None = None,
    ) -> Tensor:
        """Adds the batch's gradients, and returns the global mean loss, or the sum over `num_targets`. Collective.
        `plan` is for sequences alone."""
        if (mine := board()) is not None:
            mine.set_step(self.random_state[1] + 1)
        self.calls.name = "step"
        length = 0
        microbatches: Sequence[SlicedMicrobatch]
        if isinstance(whole, Sequences):
            if not self.limited_steps.knows_lengths:  # the ranks exchange what rows hold before they plan
                self.calls.start((), of_list=True)
                self.calls.finish()
            self.limited_steps.prepare_rows(self.settings.splits)
            batch, plan = self._split_sequences(whole, plan, num_targets is None, has_backward=True)
            microbatches = plan.microbatches
            self.limited_steps.check_sequences(self.layout, batch, microbatches, whole)
        else:
            length = self.family.length(whole)
            self.settings.wake()
            self.settings.fit(length)
            self._adopt(self.settings.schedule)
            batch = self._planned(whole, length, num_targets is None)
            microbatches = self._microbatches(whole, length)
        self.parameters.publish()
        batch = replace(batch, loss_scale=loss_scale, num_targets=checked_num_targets(batch, num_targets))
        if self._adds_router_loss:
            batch = batch.with_loss_shares()
        self.last_step = ExecutedStep(self.layout, microbatches)
        self.parameters.begin(loss_scale, self.runner.may_say_divisor)
        self.family.begin()
        is_compiling = self.family.compiled and self.random_state[1] == 0
        with counted_off("compiling") if is_compiling else nullcontext():
            loss = self.runner.run(self.layout.training, batch, self._agreement.finish)
        self.parameters.end(self.runner.found_divisor)
        self.family.end()
        seed, num_steps = self.random_state
        self.random_state = seed, num_steps + 1
        if self._first_steps.listens and not isinstance(whole, Sequences):
            self._first_steps.observe(self.runner.timeline())
        return StepLoss.of(loss)

    def sequence_log_probabilities(self) -> Tensor:
        """Returns that of each sequence of the last step or evaluation, (n,). Collective."""
        self.calls.begin("sequence_log_probabilities")
        found = self.runner.sequence_log_probabilities()
        if not len(found):
            raise SlipstreamError(
                "no log-probabilities of sequences are known: they are those of the last step or evaluation of a "
                "Pipeline with loss_fn=slipstream.SequenceLoss(function)."
            )
        return found

    def state_dict(self, call: str = "state_dict") -> dict[str, Tensor]:
        """Returns the whole model's state on rank 0, an empty dict on the others; `call` is the method that asks.
        Collective."""
        self.calls.begin(call)
        self.parameters.publish()
        return gather_state(self.stages.values(), self.ranks, self.parameters)

    def train(self, training: bool) -> None:
        """Sets the mode of all stages of this process."""
        for stage in self.stages.values():
            stage.model.train(training)

    def rehearsed_step(self, whole: WholeBatch) -> RehearsedStep:
        """Returns what a rehearsal of the next step needs, were the step on this batch. Collective."""
        self.calls.name = "memory_table"
        length = self.family.length(whole)
        batch = self._split(whole, length)
        self._agreement.finish()
        return self._to_rehearse(whole, length, batch)

    def _planned(self, whole: WholeBatch, length: int, needs_targets: bool) -> SplitBatch:
        """Returns the batch as the next step splits it, once what is open is planned.

        Raises SlipstreamError where the next step would hold more than the memory limit.
        """
        batch = self._split(whole, length, needs_targets, has_backward=True)
        if self._first_steps.are_due:
            num_rows = max(each.num_sequences for each in self._microbatches(whole, length))

            def holds() -> HeldBytes:
                self._adopt(self.settings.schedule)
                batch = self._split(whole, length, needs_targets)
                return self.limited_steps.limit.held_by(self._to_rehearse(whole, length, batch))

            with counted_off("planning the first step"):
                self._first_steps.begin(length, num_rows, holds)
            self._adopt(self.settings.schedule)
            batch = self._split(whole, length, needs_targets)
        self.limited_steps.limit.check(self._to_rehearse(whole, length, batch))
        return batch

    def _measured_rates(self, length: int, num_rows: int) -> StageRates | None:
        """Returns what the stages cost on rows of so many tokens, so many in a microbatch; None where that can't be
        measured beside the model. Collective."""
        if self._given_rates is not None:
            return rates_of_rows(self._given_rates, num_rows)
        if not isinstance(self.family, CausalLMFamily) or self.family.compiled:
            return None
        request = self.family.start_request(self.layout.num_ranks, length, num_rows)
        partition = [stage.stop - stage.start for stage in self.layout.layers]
        again = self.layout.recompute is not None and self.layout.recompute.setting == "full"
        return measure_rates(self.family.config, request, partition, self.ranks, self.device, _log.info, again)

    def _split(
        self, whole: WholeBatch, length: int, needs_targets: bool = True, has_backward: bool = False
    ) -> SplitBatch:
        """Splits the batch, and counts the valid targets of all replicas."""

        def split() -> SplitBatch:
            return self.family.split(whole, self._microbatches(whole, length), self._seed())

        return self._agreed(whole, split, needs_targets, has_backward)

    def _agreed(
        self, whole: WholeBatch | Sequences, split: Callable[[], SplitBatch], needs_targets: bool, has_backward: bool
    ) -> SplitBatch:
        """Returns what `split` makes of the batch, once all ranks know that each can run it. Collective. With
        `has_backward` some rank must train something."""

        def checked() -> SplitBatch:
            self._frozen.check(self.layout)
            batch = split()
            if isinstance(self._losses, GivenLosses) and len(self.layout.layers) - 1 in self.stages:
                self._losses.try_on(batch, self.family.output_forms, has_backward)
            return batch

        trains = self._frozen.trains_here or not has_backward
        agreed = self._agreement.on(whole, checked, needs_targets, trains)
        batch: SplitBatch = self.ranks.part_of(agreed)
        return batch

    def _split_sequences(
        self, whole: Sequences, given: StepPlan | None, needs_targets: bool = True, has_backward: bool = False
    ) -> tuple[SplitBatch, StepPlan]:
        """Packs and splits the batch as it was planned, and adopts the plan's schedule."""
        try:
            plan = self.step_planning.take(lambda: self.family.lengths(whole), given)
        except DifferentLengthsError:
            self._agreement.compare(whole)  # raises, and names the ranks
            raise
        self.settings.rest()
        seed = self._seed()
        batch = self._agreed(whole, lambda: self.family.split_sequences(whole, plan, seed), needs_targets, has_backward)
        self._adopt(plan.schedule)
        return batch, plan

    def _plan_step(self, lengths: Sequence[int]) -> StepPlan:
        is_by_cost = self._given_rates is not None or not self.settings.is_given
        if is_by_cost and self.rates is not None:
            return self.limited_steps.find_plan(self.settings.step_problem(tuple(lengths), self.rates))
        groups = self.family.groups(lengths, self.settings.schedule.num_microbatches)
        return self.settings.plan_step(lengths, groups)

    def prepare(self, lengths: Sequence[int]) -> None:
        """Starts to plan a step in a thread; with a memory limit, only once a step has rehearsed some rows."""
        if self.limited_steps.knows_lengths:
            self.step_planning.prepare(self.family.planned_lengths(lengths))

    @cached_property
    def rates(self) -> StageRates | None:
        """What the stages cost: as it was given or measured for the plan, else by their multiplications."""
        return self.family.rates(self.layout) if self._given_rates is None else self._given_rates

    def _check_and_lay_out(self, schedule: Schedule) -> None:
        self.settings.check(schedule)
        self._laid_out(schedule)

    def _seed(self) -> int:
        return keyed_seed(*self.random_state, self.ranks.copies.rank)

    def _microbatches(self, whole: WholeBatch, length: int) -> list[SlicedMicrobatch]:
        rows = whole.inputs[0]
        return self.settings.microbatches(rows.shape[0] if rows.dim() else 0, length)

    def _to_rehearse(self, whole: WholeBatch, length: int, batch: SplitBatch) -> RehearsedStep:
        microbatches = self._microbatches(whole, length)
        chosen = microbatches[:1] if self.settings.are_microbatches_alike else microbatches
        return self.limited_steps.rehearsed(self.layout, batch, chosen, whole.inputs[0])

    def _adopt(self, schedule: Schedule) -> None:
        """Lets the next step run this schedule, whose placement is that of the one before."""
        if schedule is not self.layout.order:
            self.layout = self._laid_out(schedule)
            self.runner.transport.expect(self.layout.training)


def _with_order(layout: StageLayout, schedule: Schedule) -> StageLayout:
    """Returns the layout of the same stages for another schedule."""
    return layout if schedule is layout.order else replace(layout, order=schedule)


_SCALERS = "torch.amp.grad_scaler"


class StepLoss(Tensor):
    """A scalar without a graph, that answers what would be done to a loss whose backward is still to come.

    What is computed from it is a StepLoss too, as scaled or averaged losses must be refused likewise; whatever needs a
    gradient of its own may have its backward.
    """

    @classmethod
    def of(cls, loss: Tensor) -> StepLoss:
        """Returns the loss, on the same memory."""
        return loss.detach().as_subclass(cls)

    def backward(self, *args: Any, **options: Any) -> None:
        """Raises SlipstreamError, unless something was added to the loss that needs a gradient."""
        if self.requires_grad:
            super().backward(*args, **options)  # type: ignore[no-untyped-call]
            return
        raise SlipstreamError(
            "pipe.step has already run the backward, and its gradients are in .grad: leave out loss.backward(), also "
            "accelerator.backward(loss)."
        )

    def __mul__(self, other: Any) -> Tensor:
        """Multiplies. Raises SlipstreamError where a GradScaler does it: it would only divide the gradients."""
        if sys._getframe(1).f_globals.get("__name__") == _SCALERS:
            _refuse_scaler()
        return super().__mul__(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a plain tensor, so that what is saved needs no Slipstream."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))


def checked_num_targets(batch: SplitBatch, num_targets: Any) -> float | None:
    """Returns the number of targets in all batches whose gradients add up, where it is given. A float is the sum of
    divisors of a loss function's own, which a step knows only in the end.

    Raises SlipstreamError where it can't be that number, and for a loss of whole sequences.
    """
    if num_targets is None:
        return None
    if batch.sequences:
        raise SlipstreamError("num_targets with a SequenceLoss, which is a mean over sequences: leave it out.")
    found: float = num_targets.item() if hasattr(num_targets, "item") else num_targets  # of a tensor
    if not 0 < found < math.inf:
        raise SlipstreamError(
            f"num_targets={found}: give the number of all batches' labels that count. Where none does in any, leave "
            "these batches out."
        )
    if isinstance(found, int) and found < batch.num_valid:
        raise SlipstreamError(
            f"num_targets={found}, but {batch.num_valid} targets of this batch alone count: give the number of "
            "all batches' labels that aren't -100, of a causal LM without each row's first, on all replicas."
        )
    return found


def _refuse_scaler() -> Never:
    raise SlipstreamError(
        "a GradScaler around pipe.step would divide the gradients by a scale that they never had: leave it out. For "
        "float16 give step(..., loss_scale=2.0**16), which scales the loss and its gradients back; bfloat16 needs none."
    )
