"""The parts of a Pipeline on this rank, and how they run a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.attention import context_on_host
from slipstream.comm import LocalTransport, ScatterGather, Transport, connect_transport
from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import keyed_seed
from slipstream.model import PipelineStage, take_differing_layers
from slipstream.parallel import Ranks, check_transport, join_launched_group, watch_group
from slipstream.parallel.tensor import TensorParallel
from slipstream.pipeline.agreement import BatchAgreement, CallAgreement
from slipstream.pipeline.batch import Batch, Inputs, given_batch
from slipstream.pipeline.cut_batch import MicrobatchSequences, SplitBatch
from slipstream.pipeline.execution import (
    CollectedOutputs,
    Executor,
    LossDivisor,
    Losses,
    StepGraphs,
    StepLoss,
    TokenOutputs,
    checked_num_targets,
    graph_refusal,
    run_together,
)
from slipstream.pipeline.families import ExecutedStep, ModelFamily, StageLayout
from slipstream.pipeline.families.causal_lm import CausalLMFamily
from slipstream.pipeline.families.layer_sequence import SequenceFamily
from slipstream.pipeline.families.stage_layout import check_frozen, leave_out_frozen
from slipstream.pipeline.gathered_state import gather_state
from slipstream.pipeline.memory import MemoryLimit, RehearsedStep
from slipstream.pipeline.parameters import Parameters
from slipstream.pipeline.pipeline_options import PipelineOptions, SequenceLoss
from slipstream.pipeline.planned_options import PlannedOptions
from slipstream.pipeline.step_plans import StepPlans
from slipstream.pipeline.token_values import Rows
from slipstream.pipeline.weight_source import WeightSource, in_memory
from slipstream.planner.ragged import StepPlan
from slipstream.schedule import Schedule, far_channels, send_windows
from slipstream.timeline import Timeline
from slipstream.watchdog import board, watchdog_paused

_log = logging.getLogger(__name__)
_MOST_LAYOUTS = 32  # lowered schedules kept


class PipelineRuntime:
    """Ranks, stages, parameters, executors and messages of a pipeline.

    Every rank makes it and calls its methods, which are collective, in the same order.
    """

    def __init__(self, model: object, options: PipelineOptions) -> None:
        """Builds this rank's part of the pipeline. Collective."""
        # 1. The ranks, and how they find out whether they are in one call.
        join_launched_group(options.device, options.runtime.stall_limit, transport=options.runtime.transport)
        self.ranks = Ranks.of(options.mesh)
        # A mesh that is kept would keep its groups alive, with their threads, when the interpreter ends.
        options = replace(options, mesh=None)
        self.device = self.ranks.device if options.device is None else torch.device(options.device)
        if self.ranks.world.size > 1:
            check_transport(options.runtime.transport, self.device, self.ranks.world.gpu_backend)
        self.calls = CallAgreement(self.ranks)
        self._agreement = BatchAgreement(self.ranks, self.calls, options.memory.is_limited)
        watch_group(self.ranks.world, options.runtime.stall_limit)

        # 2. The model's family, and the plan of open options.
        with watchdog_paused("loading and checking the model"):
            self.family = _family_of(model, options, self.ranks, self.device)
        num_ranks = self.ranks.count(options.num_ranks, options.schedule)
        self.has_own_loss = options.loss_fn is not None
        self.has_sequence_loss = isinstance(options.loss_fn, SequenceLoss)
        self._adds_router_loss = options.router_loss != "none"
        self.planned = PlannedOptions.of(self.family, options, num_ranks)
        options = self.planned.options
        self.layout = self.planned.layout
        self._has_limit = options.memory.is_limited
        self._recomputes = options.memory.recompute != "none"

        # 3. The stages of this process, and their parameters.
        self.stages: Mapping[int, PipelineStage]
        self.tensor_parallel: TensorParallel | None
        with watchdog_paused("loading the model", uses_disk=True):
            self.stages, self.tensor_parallel = self.family.make_stages(self.layout)
        self._kept_in_evaluation = [
            module
            for stage in self.stages.values()
            if stage.model.training
            for module in stage.model.modules()
            if not module.training
        ]
        # Backwards of frozen stages are left out, but not where "auto" measures them, nor of a schedule whose messages
        # are given, nor where gradients go past stages.
        settings = self.planned.settings
        is_timed = settings.reorders and not settings.is_counted
        keeps_all = is_timed or self.layout.order.is_lowered or self.layout.spreads_embedding
        keeps_all = keeps_all or not self.family.leaves_out_frozen
        self.layout = leave_out_frozen(self.layout, self.stages, self.ranks, keeps_all)
        lay_out = lru_cache(_MOST_LAYOUTS)(partial(_with_order, self.layout))
        holders = self.family.weight_holders(self.layout) if self.ranks.pipeline.size > 1 else {}
        self.parameters = Parameters(self.stages, self.ranks, self.tensor_parallel, holders, options)

        # 4. The executors of this process's ranks, connected with the others.
        self._losses = self.family.losses(self.tensor_parallel)
        self._divisor = LossDivisor(self._losses)
        self.degrees = options.parallel.shared_by(self.ranks.degrees)
        # The parts of a message, of which a rank sends one.
        self._num_parts = 1 if options.parallel.sequence_parallel else self.ranks.tensor.size
        self.transport = self._scattered(self._connected())
        self._here = self.ranks.here(self.layout.num_ranks)
        self.executors = self._made_executors(self._losses)
        self.graphs: StepGraphs | None = None
        if options.runtime.cuda_graphs:
            refusal = graph_refusal(self.ranks, options)
            self.graphs = StepGraphs(self.stages, self._made_executor, self.device, refusal)
            self.parameters.keep_clear_of(self.graphs.gradients)
        self._last_schedule = ""  # name of the last step's or evaluation's schedule
        self._last_sequences: Sequence[MicrobatchSequences] = ()

        # 5. The memory limit, and the planner of steps.
        # All ranks record, or none.
        records = self.graphs is not None and self.graphs.may_record
        self.memory_limit = MemoryLimit(
            options.memory,
            records,
            self.ranks,
            self.family,
            self.layout,
            lay_out,
            self._rehearsal(),
            self.device,
        )
        self.plans = StepPlans(
            self.planned,
            self.layout,
            self.family,
            self.ranks,
            self.calls,
            self._agreement,
            lay_out,
            self.memory_limit,
            self._cut,
        )
        # The seed, and the steps so far.
        self.random_state: tuple[int, int] = self.ranks.run_on_leader(torch.initial_seed), 0
        self.last_step = ExecutedStep(self.layout, [])

    def _connected(self) -> Transport:
        """Returns the transport between the ranks. Collective."""
        if self.ranks.pipeline.size == 1:
            return LocalTransport()
        training = self.layout.training
        return connect_transport(send_windows(training), self.device, self.ranks, far_channels(training))

    def _scattered(self, transport: Transport) -> Transport:
        """Returns the transport by which each of the tensor ranks sends its part of a message."""
        return transport if self._num_parts == 1 else ScatterGather(transport, self.ranks.tensor)

    def _made_executor(
        self, rank: int, transport: Transport, reduce: Callable[[int], None], losses: Losses | None = None
    ) -> Executor:
        own = {stage: self.stages[stage] for stage in self.layout.stages_of([rank])}
        layout = self.layout
        return Executor(
            rank,
            own,
            transport,
            losses or self._losses,
            self.device,
            layout.recompute,
            reduce,
            context_on_host=context_on_host(self.device, layout.context_on_host),
            has_wide_sums=layout.has_wide_sums,
        )

    def _made_executors(self, losses: Losses) -> list[Executor]:
        return [self._made_executor(rank, self.transport, self._reduce, losses) for rank in self._here]

    def _rehearsal(self) -> partial[RehearsedStep]:
        """Returns a maker of the rehearsals of this pipeline's steps."""
        return partial(
            RehearsedStep,
            stages=self.stages,
            parameters=self.parameters,
            losses=self._losses,
            device=self.device,
            scatter=self._scattered,
            num_parts=self._num_parts,
        )

    def read_batch(self, inputs: Inputs, labels: Rows | None, **others: Any) -> Batch:
        """Returns the batch of a method's arguments, as `given_batch` does. Collective."""
        if isinstance(inputs, Mapping):
            self.family.check_has("a mapping as a batch", "Give step(inputs, labels).")
        return given_batch(self.ranks, self.device, inputs, labels, **others)

    def step(
        self, whole: Batch, loss_scale: float, plan: StepPlan | None = None, num_targets: float | None = None
    ) -> Tensor:
        """Adds the batch's gradients, and returns the global mean loss, or the sum over `num_targets`. Collective.
        `plan` is for sequences alone."""
        if (mine := board()) is not None:
            mine.set_step(self.random_state[1] + 1)
        self.calls.name = "step"

        # 1. Plan which sequences are in each microbatch, in which slices, and the order of their actions.
        needs_targets = num_targets is None
        planned = self.plans.plan_to_train(whole, plan, needs_targets)

        # 2. Cut the batch into what these actions run on.
        batch = self._cut(whole, planned, needs_targets, has_backward=True, loss_scale=loss_scale)
        if self._has_limit:
            lengths = whole.token_counts if whole.is_ragged else ()
            self.memory_limit.check(self.plans.to_rehearse(whole, planned, batch), lengths)
        batch = replace(batch, loss_scale=loss_scale, num_targets=checked_num_targets(batch, num_targets))
        if self._adds_router_loss:
            batch = batch.with_loss_shares()

        # 3. Run all actions of this process's ranks, with gradients of earlier steps set aside.
        self._adopt(planned.layout)
        self.last_step = planned._replace(groups=batch.groups)
        self.parameters.publish()
        self.parameters.begin(loss_scale, self._divisor.may_be_own)
        self.family.begin_step()
        seed, num_steps = self.random_state
        is_compiling = self.family.compiled and num_steps == 0
        with watchdog_paused("compiling") if is_compiling else nullcontext():
            loss = self._run(self.layout.training, batch)

        # 4. Reduce what is left, which completes the gradients.
        self.parameters.end(self._divisor.of_gradients)
        self.family.end_step()
        self.random_state = seed, num_steps + 1
        if self.plans.first_steps.listens and not whole.is_ragged:
            self.plans.first_steps.observe(self._timeline())
        return StepLoss.of(loss)

    def _trains_here(self) -> bool:
        """Returns whether a parameter of this process's stages is trained now."""
        for stage in self.stages.values():
            for _, parameter in stage.named_parameters():
                if parameter.requires_grad:
                    return True
        return False

    def _cut(
        self,
        whole: Batch,
        planned: ExecutedStep,
        needs_targets: bool = True,
        has_backward: bool = False,
        loss_scale: float = 1.0,
    ) -> SplitBatch:
        """Returns this rank's part of the batch, cut as planned, with the valid targets of all replicas. With
        `has_backward` some rank must train something. Collective."""
        with self._agreement.telling_refusals():
            if has_backward and not torch.is_grad_enabled():
                within = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
                raise SlipstreamError(
                    f"step within {within} would give no gradients: call it outside of that. pipe.evaluate gives the "
                    "loss alone."
                )
            if planned.layout.training.num_frozen_stages:
                check_frozen(self.stages, planned.layout.training)
            # Ranks that share slices draw by their part.
            seed = keyed_seed(*self.random_state, self.ranks.data.rank)
            batch: Any = self.family.split(whole, planned.microbatches, seed, planned.groups)
            if self._losses.is_given and len(self.layout.layers) - 1 in self.stages:
                scaled = replace(batch, loss_scale=loss_scale)
                self._losses.try_on(scaled, self.family.output_forms, has_backward)
        trains = not has_backward or self._trains_here()
        batch = self._agreement.agree(whole, batch, planned.layout.order.checksum, needs_targets, trains)
        for axis, group in self.ranks.token_axes:
            assert axis.part_of is not None
            batch = axis.part_of(batch, group.rank, group.size)
        return batch  # type: ignore[no-any-return]

    def _run(self, schedule: Schedule, batch: SplitBatch) -> Tensor:
        """Returns the global mean loss of a step or an evaluation. The batch may be refused before anything is sent.

        Raises SlipstreamError, and drops all gradients, for errors that are known only once all of it has run: where
        the loss function counts other tokens than the batch does, or returns an impossible divisor, and where
        recomputed outputs differ from the first ones.
        """
        self._last_schedule = schedule.name
        self._last_sequences = batch.sequences
        graphs = self.graphs
        self.transport.begin(self._agreement.finish)
        if self._recomputes:
            # A step that failed may have left layers there.
            take_differing_layers()
        if graphs is None or not schedule.has_backward:
            run_together(self.executors, schedule, batch)
        else:
            with graphs.running():
                run_together(self.executors, schedule, batch, graphs.of_step(self._here, schedule, batch))
                graphs.note_gradients()
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        for executor in self.executors:
            sums[:2] += torch.stack(executor.finish())
        sums[2] = self._losses.says_divisor
        differing = take_differing_layers() if self._recomputes else []
        sums[3] = len(differing)
        if self.ranks.world.size > 1:
            # Tensor ranks all have the same sums, so these aren't added over them.
            sums = self.ranks.copies.sum(self.ranks.pipeline.sum(sums))
        _, count, says_divisor, num_differing = sums.tolist()
        try:
            if num_differing:
                raise _differing_error(differing)
            return sums[0] / self._divisor.find(count, bool(says_divisor), batch)
        except SlipstreamError:
            if schedule.has_backward:
                self.parameters.drop()
            raise

    def _reduce(self, stage: int) -> None:
        if self.graphs is not None:
            self.graphs.note_gradients()
        self.parameters.reduce(stage)

    def cut_to_evaluate(self, whole: Batch, plan: StepPlan | None = None, needs_targets: bool = True) -> SplitBatch:
        """Returns the batch as an evaluation cuts it; where it needs no targets, also one in which none counts.
        Collective. `plan` is for sequences of different lengths alone."""
        planned = self.plans.plan_for(whole, plan)
        batch = self._cut(whole, planned, needs_targets)
        self._adopt(planned.layout)
        self.parameters.publish()
        self.parameters.gather()
        return batch

    def run_forward(self, batch: SplitBatch, num_targets: float | None = None) -> Tensor:
        """Runs forwards alone, and returns the global mean loss, or the sum over `num_targets`. Collective."""
        batch = replace(batch, num_targets=checked_num_targets(batch, num_targets))
        return self._run(self.layout.evaluation, batch)

    def collect_outputs(self, function: TokenOutputs, batch: SplitBatch) -> Mapping[tuple[int, int], Tensor]:
        """Runs forwards alone; returns the results of `function` on each slice's logits and targets by (microbatch,
        slice), nothing on ranks without the last stage. Collective."""
        collected = CollectedOutputs(function)
        executors = self._made_executors(collected)
        self.transport.begin(self._agreement.finish)
        run_together(executors, self.layout.evaluation, batch)
        for executor in executors:
            executor.finish()
        if self.ranks.sharing.size == 1:
            return collected.outputs
        return {key: self._gathered(collected.outputs[key], batch, *key) for key in sorted(collected.outputs)}

    def _gathered(self, own: Tensor, batch: SplitBatch, m: int, i: int) -> Tensor:
        """Returns the results on all tokens of a slice that ranks share, from this one's. Collective over these."""
        parts = batch.slices[m][i].parts
        most = max(1, *(end - begin for begin, end in parts))
        padded = own.new_zeros(own.shape[0], most, *own.shape[2:])
        padded[:, : own.shape[1]] = own
        every = zip(self.ranks.sharing.all_gather(padded), parts, strict=True)
        return torch.cat([rows[:, : end - begin] for rows, (begin, end) in every], dim=1)

    def sequence_log_probabilities(self) -> Tensor:
        """Returns the log-probability of each sequence of the last step or evaluation, (n,) float64, in the order of
        the batch; (n, 2) for a loss with separate sums for prompts. Collective."""
        self.calls.begin("sequence_log_probabilities")
        sequences = self._last_sequences
        shape = (2,) if any(own.num_sums > 1 for own in sequences) else ()
        by_sequence = torch.zeros(sum(own.count for own in sequences), *shape, dtype=torch.float64, device=self.device)
        for executor in self.executors:
            for m, sums in executor.log_probabilities.items():
                by_sequence[sequences[m].places] = sums
        by_sequence = self.ranks.pipeline.sum(by_sequence)
        if not len(by_sequence):
            raise SlipstreamError(
                "no log-probabilities of sequences are known: they are those of the last step or evaluation of a "
                "Pipeline with loss_fn=slipstream.SequenceLoss(function)."
            )
        return by_sequence

    def timeline(self) -> Timeline:
        """Returns the timeline of the last step or evaluation, on all ranks. Collective."""
        self.calls.begin("timeline")
        if not self._last_schedule:
            raise SlipstreamError(
                "there is no timeline yet: it is that of the last step or evaluation. Call pipe.step(inputs, labels) "
                "first; slipstream.simulate(pipe.order, cost) has one without a step."
            )
        return self._timeline()

    def _timeline(self) -> Timeline:
        mine = [span for executor in self.executors for span in executor.spans]
        spans = [span for spans in self.ranks.pipeline.gather(mine) for span in spans]
        return Timeline(tuple(spans), self.layout.num_ranks, name=self._last_schedule, measured=True)

    def state_dict(self, call: str = "state_dict") -> dict[str, Tensor]:
        """Returns the whole model's state on rank 0, an empty dict on the others; `call` is the method that asks.
        Collective."""
        self.calls.begin(call)
        self.parameters.publish()
        return gather_state(self.stages.values(), self.ranks, self.parameters)

    def train(self, training: bool) -> None:
        """Sets the mode of all stages of this process, but of parts that were in evaluation mode in a model in training
        mode."""
        for stage in self.stages.values():
            stage.model.train(training)
        for module in self._kept_in_evaluation:
            module.eval()

    def rehearsed_step(self, whole: Batch) -> RehearsedStep:
        """Returns the next step for a rehearsal, were it on this batch. Collective."""
        self.calls.name = "memory_table"
        step = self.plans.rehearsed(whole)
        self._agreement.finish()
        return step

    def _adopt(self, layout: StageLayout) -> None:
        """Lets messages be those of this layout, whose placement is that of the one before."""
        if layout is not self.layout:
            self.layout = layout
            self.transport.expect(layout.training)


def _family_of(model: Any, options: PipelineOptions, ranks: Ranks, device: torch.device) -> ModelFamily:
    """Returns the model's family; raises SlipstreamError unless it is a causal LM or an nn.Sequential. Collective."""
    if isinstance(model, nn.Sequential):
        return SequenceFamily(model, options, ranks, device)
    if isinstance(model, CausalLMFamily):
        model.move_to(options, ranks, device)
        return model
    return CausalLMFamily(model if isinstance(model, WeightSource) else in_memory(model), options, ranks, device)


def _with_order(layout: StageLayout, schedule: Schedule) -> StageLayout:
    return layout if schedule is layout.order else replace(layout, order=schedule)


def _differing_error(differing: Sequence[str]) -> SlipstreamError:
    """Returns the error for layers, those of this rank, that gave something else when they were computed again."""
    return SlipstreamError(
        f"{', '.join(differing) or 'a layer of another rank'}: the output differs when it is computed again for the "
        "backward (memory.recompute), so gradients would be wrong: it draws random numbers that aren't PyTorch's own, "
        "or reads what it has changed. Use recompute='none'; or memory.check_recompute=False where only the rounding "
        "differs, as kernels of a GPU may add in any order."
    )
