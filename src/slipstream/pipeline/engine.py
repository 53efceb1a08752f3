"""What runs under a Pipeline: its ranks, stages and messages, and what the next step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slipstream.errors import SlipstreamError
from slipstream.model.hooks import keyed_seed
from slipstream.pipeline.batch import SplitBatch
from slipstream.pipeline.execution import Executor, LossFunction, run_together
from slipstream.pipeline.families import ExecutedStep, ModelInputs, Settings, check_ranks, family_of
from slipstream.pipeline.memory import MemoryLimit
from slipstream.pipeline.messages import LocalTransport, ScatterGather, Transport, connect, skip_channels
from slipstream.pipeline.parameters import Parameters
from slipstream.pipeline.ranks import Ranks
from slipstream.pipeline.tuning import TrialResult, Tuner
from slipstream.schedule import Schedule

Order = tuple[str | Schedule, int, int | Sequence[int] | str | None, int, int]


class Engine:
    """All that a Pipeline is made of, and how it runs a batch.

    Every rank makes it, and calls what is collective, in the same order.
    """

    def __init__(
        self,
        model: object,
        settings: Settings,
        order: Order,
        num_ranks: int | None,
        mesh: DeviceMesh | None,
        device: torch.device | str | None,
        timeout: timedelta,
    ) -> None:
        """Collective. `order` is the schedule, the numbers of microbatches, slices and stages of a rank, and of
        flushes; the rest as the Pipeline's."""
        schedule, num_microbatches, slices, stages_per_rank, num_flushes = order
        self._ranks = Ranks(mesh)
        self.device = self._ranks.device if device is None else torch.device(device)
        family = self._family = family_of(model, settings, self._ranks, self.device)
        slices = family.default_slices if slices is None else slices
        family.check_slices(slices)
        num_ranks = self._ranks.count(num_ranks, schedule)
        self._tuner = Tuner(
            schedule,
            num_ranks,
            num_microbatches,
            stages_per_rank,
            slices,
            num_flushes,
            family.compiled,
            settings.memory_limit,
            splits=settings.recompute != "checkpoints",  # W would hold what all segments recompute
        )
        check_ranks(self._tuner.schedule, num_ranks)
        self._gauge = MemoryLimit(settings.memory_limit)
        self._adopted = self._tuner.schedule
        self.layout = family.lay_out(self._adopted, self._tuner.slices)
        self._stages, tensor = family.make_stages(self.layout, self.device)
        self._parameters = Parameters(
            self._stages,
            self._ranks,
            tensor,
            family.tied_ends(self.layout),
            shard=settings.shard_optimizer,
            shard_parameters=settings.shard_parameters,
            master_dtype=settings.master_dtype,
        )
        self._num_parts = 1 if settings.sequence_parallel else self._ranks.tensor.size  # of which each rank sends one
        self._transport = self._scattered(self._connect(timeout))
        self._executors = self._make_executors(family.loss_function(tensor))
        self._seed: int = self._ranks.follow(torch.initial_seed())
        self._num_steps = 0
        self.last_step = ExecutedStep(self.layout, [])  # in the last step; "auto" may have other plans for the next
        self._name = ""  # of the schedule of the last step or evaluation

    @property
    def order(self) -> Schedule:
        """The schedule of the next step as it was given or found: `layout.training` without what lowering added."""
        return self._adopted

    def slices(self, length: int) -> list[int]:
        """The tokens of each slice of such a sequence, as the next step cuts it."""
        return self._tuner.lengths(length)

    def _cut(
        self, inputs: ModelInputs, targets: Tensor, position_ids: Tensor | None, document_ids: Tensor | None
    ) -> SplitBatch:
        lengths = self.slices(self._family.length(inputs))
        seed = keyed_seed(self._seed, self._num_steps, self._ranks.data.rank)
        position_ids, document_ids = (None if t is None else t.to(self.device) for t in (position_ids, document_ids))
        here = tuple(t.to(self.device) for t in inputs) if isinstance(inputs, tuple) else inputs.to(self.device)
        num_microbatches = self.layout.training.num_microbatches
        labels = targets.to(self.device)
        batch = self._family.cut(here, labels, lengths, num_microbatches, position_ids, document_ids, seed)
        num_valid = self._ranks.data.sum(torch.tensor(batch.num_valid, device=self.device))
        batch = replace(batch, num_valid=int(num_valid))
        if batch.num_valid == 0:
            raise SlipstreamError(
                "no label of this batch counts: all are -100, a causal LM's after shifting. Leave such batches out."
            )
        return batch

    def _tune(self, answer: TrialResult) -> None:
        """The leader learns from the step that ran, or from what it would hold, and all follow."""
        decision, error = None, None
        if self._ranks.leads:
            try:
                decision = self._tuner.decide(answer)
            except SlipstreamError as found:
                error = found
        try:
            self._ranks.agree(error)
        except SlipstreamError:
            self._tuner.forget()
            raise
        self._adopt(self._tuner.follow(self._ranks.follow(decision)))

    def _find_room(self, inputs: ModelInputs, targets: Tensor) -> None:
        """Until the next step is one to run that keeps to the memory limit, if there is one."""
        if isinstance(inputs, tuple):
            return  # of a sequence, for which there is no limit
        while self._tuner.asks_what_it_holds and self._tuner.listens_to(inputs.shape[-1]):
            self._tune(self._gauge.holdings(self, inputs, targets))
        self._gauge.check(self, inputs, targets)

    def _adopt(self, schedule: Schedule) -> None:
        """From now on run this schedule, whose placement is that of the one before."""
        if schedule is not self._adopted:
            self._adopted = schedule
            self.layout = self.layout.with_schedule(schedule)
            self._transport.expect(self.layout.training)

    def _connect(self, timeout: timedelta) -> Transport:
        """Collective."""
        if self._ranks.size == 1:
            return LocalTransport()
        training = self.layout.training
        skips = skip_channels(self._family.routes(self.layout), training)
        return connect(training, self.device, self._ranks, timeout, skips)

    def _scattered(self, transport: Transport) -> Transport:
        return transport if self._num_parts == 1 else ScatterGather(transport, self._ranks.tensor)

    def _run(self, schedule: Schedule, batch: SplitBatch) -> Tensor:
        self._name = schedule.name
        self._transport.begin()
        run_together(self._executors, schedule, batch)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for executor in self._executors:
            sums += torch.stack(executor.finish())
        total, count = self._ranks.total(sums)
        if int(count) != batch.num_valid:
            raise SlipstreamError(
                f"loss_fn counted {int(count)} tokens, but {batch.num_valid} targets are not -100. Its second value "
                "must be that number (of float targets, that of the rows): gradients are divided by it before the loss "
                "is known."
            )
        mean: Tensor = total / count
        return mean

    def _make_executors(self, loss_function: LossFunction) -> list[Executor]:
        return [
            Executor(
                rank,
                {stage: self._stages[stage] for stage in self.layout.stages_of([rank])},
                self._transport,
                loss_function,
                self.device,
                self.layout.recompute,
                self._parameters.reduce,
            )
            for rank in self._ranks.here(self.layout.num_ranks)
        ]
