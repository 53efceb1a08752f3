"""Runs lowered schedules on the pipeline's ranks of this process, connected with the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from slipstream.comm import (
    LocalTransport,
    ScatterGather,
    Transport,
    connect_transport,
    skip_channels,
    vocabulary_channels,
)
from slipstream.errors import SlipstreamError
from slipstream.model.autograd_memory import take_differing_layers
from slipstream.parallel import Ranks
from slipstream.pipeline.batch import MicrobatchSequences, SplitBatch, Stage
from slipstream.pipeline.execution import (
    Executor,
    GivenLosses,
    KeptOutputs,
    Losses,
    StepGraphs,
    TokenOutputs,
    run_together,
)
from slipstream.pipeline.execution.losses import miscounted, no_divisor
from slipstream.pipeline.families import StageLayout
from slipstream.pipeline.parameters import Parameters
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.schedule import Schedule, send_windows
from slipstream.timeline import Timeline


class StepRunner:
    """The executors of this process's ranks and their transport. Every rank makes it, and calls its methods in the same
    order: they are collective."""

    def __init__(
        self,
        layout: StageLayout,
        stages: Mapping[int, Stage],
        parameters: Parameters,
        losses: Losses,
        ranks: Ranks,
        device: torch.device,
        routes: Sequence[tuple[int, int]],
        options: PipelineOptions,
    ) -> None:
        """Connects the ranks.

        Args:
            layout: of the first step.
            stages: of this process.
            parameters: whose gradients are reduced.
            losses: of the last stage.
            ranks: of the mesh.
            device: on which they compute.
            routes: the pairs of stages that skips go between past others.
            options: of the pipeline.
        """
        self._ranks, self._device, self._num_ranks = ranks, device, layout.num_ranks
        self.num_parts = (
            1 if options.parallel.sequence_parallel else ranks.tensor.size
        )  # of a message: a rank sends one
        self.transport = self.scattered(self._connect(layout.training, routes))
        self.schedule_name = ""  # of the last step or evaluation
        self.found_divisor = 1.0  # by which gradients of the last step are still to be divided
        self._given = losses if isinstance(losses, GivenLosses) else None
        self._says_divisor: bool | None = None  # whether counts of losses are divisors of the function's own
        self._sequences: Sequence[MicrobatchSequences] = ()  # of that
        self._here = ranks.here(layout.num_ranks)

        def executor(
            rank: int, transport: Transport, reduce: Callable[[int], None], losses: Losses = losses
        ) -> Executor:
            own = {stage: stages[stage] for stage in layout.stages_of([rank])}
            return Executor(rank, own, transport, losses, device, layout.recompute, reduce)

        def executors(losses: Losses) -> list[Executor]:
            return [executor(rank, self.transport, self._reduce, losses) for rank in self._here]

        self._reduce_gradients, self._drop_gradients = parameters.reduce, parameters.drop
        self._make_executors = executors
        self.executors = executors(losses)
        self.graphs: StepGraphs | None = None
        if options.runtime.cuda_graphs:
            self.graphs = StepGraphs(stages, executor, device, _graph_refusal(ranks, options))
            parameters.keep_clear_of(self.graphs.gradients)

    @property
    def records(self) -> bool:
        """Whether steps may be recorded as graphs, on all ranks alike."""
        return self.graphs is not None and self.graphs.may_record

    @property
    def may_say_divisor(self) -> bool:
        """Whether a step may find what its gradients are to be divided by, on all ranks alike."""
        return self._given is not None and self._says_divisor is not False

    def run(self, schedule: Schedule, batch: SplitBatch, agree: Callable[[], object]) -> Tensor:
        """Returns the global mean loss of a step or an evaluation; calls `agree`, which may refuse the batch, before it
        sends anything.

        Raises SlipstreamError, and drops all gradients, for what is known only once all of it has run: where the loss
        function counts other tokens than the batch does, or says a divisor that none can be, and where what was
        computed again isn't what it was.
        """
        self.schedule_name, self._sequences = schedule.name, batch.sequences
        self.transport.begin(agree)
        take_differing_layers()  # of a step that failed
        self._run(schedule, batch)
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        for executor in self.executors:
            sums[:2] += torch.stack(executor.finish())
        sums[2] = self._given is not None and self._given.says_divisor
        differing = take_differing_layers()
        sums[3] = len(differing)
        sums = self._ranks.copies.sum(self._ranks.pipeline.sum(sums))  # tensor ranks have it all alike
        _, count, says_divisor, num_differing = sums.tolist()
        try:
            _check_recomputed(int(num_differing), differing)
            mean: Tensor = sums[0] / self._divisor(count, bool(says_divisor), batch)
        except SlipstreamError:
            if schedule.has_backward:
                self._drop_gradients()
            raise
        return mean

    def _divisor(self, count: float, says_divisor: bool, batch: SplitBatch) -> float:
        """Returns what the sum of losses is divided by, and keeps what gradients are still to be divided by."""
        if not says_divisor and int(count) != batch.num_valid:
            raise SlipstreamError(miscounted(int(count), batch.num_valid))
        if says_divisor:
            self._check_divisor(count, batch)
        self._says_divisor = says_divisor if self._given is not None else None
        if batch.num_targets is not None or not says_divisor:
            self.found_divisor = 1.0
            return batch.divisor
        self.found_divisor = count / batch.divisor
        return count

    def _check_divisor(self, count: float, batch: SplitBatch) -> None:
        """Raises SlipstreamError for a divisor of the loss function's own that none can be."""
        if self._says_divisor is False:
            raise SlipstreamError(
                "the second value of loss_fn was an integer in earlier steps, and is a floating-point number now: a "
                "divisor of the function's own must be one from the first step on."
            )
        given = batch.num_targets
        if given is None:
            if not 0 < count < math.inf:
                raise SlipstreamError(no_divisor(count))
        elif isinstance(given, int) and count != batch.num_valid:
            raise SlipstreamError(
                f"num_targets={given} with a loss_fn that says its own divisor, {count:.6g} for the "
                f"{batch.num_valid} targets of this batch: give the sum of its second values over all batches, as a "
                "float. A SlipstreamTrainer can't: give gradient_accumulation_steps=1."
            )
        elif not -math.inf < count <= given * (1 + 1e-5):
            raise SlipstreamError(
                f"num_targets={given}, but loss_fn's second values add up to {count:.6g} in this batch alone: give "
                "their sum over all batches whose gradients add up."
            )

    def _run(self, schedule: Schedule, batch: SplitBatch) -> None:
        """Runs a step or an evaluation, the step as graphs where it is recorded."""
        if self.graphs is None or not schedule.has_backward:
            run_together(self.executors, schedule, batch)
            return
        with self.graphs.running():
            run_together(self.executors, schedule, batch, self.graphs.of_step(self._here, schedule, batch))
            self.graphs.note_gradients()

    def _reduce(self, stage: int) -> None:
        if self.graphs is not None:
            self.graphs.note_gradients()
        self._reduce_gradients(stage)

    def sequence_log_probabilities(self) -> Tensor:
        """Returns that of each sequence of the last step or evaluation, (n,) float64, in the order of the batch; (0,)
        where the loss isn't one of whole sequences."""
        found = torch.zeros(sum(each.count for each in self._sequences), dtype=torch.float64, device=self._device)
        for executor in self.executors:
            for m, sums in executor.log_probabilities.items():
                found[self._sequences[m].places] = sums
        return self._ranks.pipeline.sum(found)

    def keep(
        self, function: TokenOutputs, schedule: Schedule, batch: SplitBatch, agree: Callable[[], object]
    ) -> Mapping[tuple[int, int], Tensor]:
        """Returns what `function` gives of each slice's logits and targets by (microbatch, slice), nothing on ranks
        without the last stage; calls `agree` before it sends anything. The schedule has forwards alone."""
        kept = KeptOutputs(function)
        executors = self._make_executors(kept)
        self.transport.begin(agree)
        run_together(executors, schedule, batch)
        for executor in executors:
            executor.finish()
        return kept.outputs

    def timeline(self) -> Timeline:
        """Returns what ran when in the last step or evaluation, on all ranks."""
        mine = [span for executor in self.executors for span in executor.spans]
        spans = [span for spans in self._ranks.pipeline.gather(mine) for span in spans]
        return Timeline(tuple(spans), self._num_ranks, name=self.schedule_name, measured=True)

    def scattered(self, transport: Transport) -> Transport:
        """Returns the transport by which each of the tensor ranks sends its part of a message."""
        return transport if self.num_parts == 1 else ScatterGather(transport, self._ranks.tensor)

    def _connect(self, training: Schedule, routes: Sequence[tuple[int, int]]) -> Transport:
        """Returns the transport between the ranks."""
        if self._ranks.pipeline.size == 1:
            return LocalTransport()
        skips = skip_channels(routes, training) + vocabulary_channels(training)
        return connect_transport(send_windows(training), self._device, self._ranks, skips)


def _check_recomputed(number: int, differing: Sequence[str]) -> None:
    """Raises SlipstreamError where layers, those of this rank, gave something else when they were computed again."""
    if number:
        raise SlipstreamError(
            f"{', '.join(differing) or 'a layer of another rank'}: the output differs when it is computed again for "
            "the backward (memory.recompute), so gradients would be wrong: it draws random numbers that aren't "
            "PyTorch's own, or reads what it has changed. Use recompute='none'; or memory.check_recompute=False where "
            "only the rounding differs, as kernels of a GPU may add in any order."
        )


def _graph_refusal(ranks: Ranks, options: PipelineOptions) -> str | None:
    """Returns why the steps of a pipeline can't be recorded as CUDA graphs; None where they may."""
    if ranks.tensor.size > 1:
        return "ranks of the tensor axis exchange tensors inside of layers"
    if options.parallel.shard_parameters:
        return "sharded parameters lie elsewhere in every step"
    if options.loss_fn is not None:
        return "loss_fn may be any code"
    return "routers add to the loss" if options.router_loss != "none" else None
