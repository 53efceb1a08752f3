"""The public Pipeline: a causal LM split over ranks and slices, with the gradients of one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.anatomy import Anatomy, find_anatomy
from slipstream.model.limits import check_length, check_token_ids
from slipstream.model.loading import load_config, pretrained_model, random_model
from slipstream.model.self_check import check_sliceable
from slipstream.model.split import share
from slipstream.model.stage import Stage
from slipstream.pipeline.batch import Batch, cut_batch
from slipstream.pipeline.executor import Executor, LossFunction, run_together
from slipstream.pipeline.export import save_pretrained
from slipstream.pipeline.layout import plan_layout
from slipstream.pipeline.loss import causal_cross_entropy
from slipstream.pipeline.memory_limit import Gauge
from slipstream.pipeline.ranks import Ranks
from slipstream.pipeline.source import Source, cast, in_memory
from slipstream.pipeline.tied import TiedGradients
from slipstream.pipeline.transport import LocalTransport, Transport, connect
from slipstream.pipeline.trials import Answer
from slipstream.pipeline.tuning import Tuner
from slipstream.schedule.action import Schedule
from slipstream.timeline import Timeline


class Pipeline:
    """Trains a Hugging Face causal LM whose layers are split over ranks and whose sequences are cut into slices.

    Every rank builds it with an equal model after `init_process_group` and calls `step` with the same batch. Without a
    process group it is a pipeline in this one process, of `num_ranks` ranks. The model is taken over: don't use it
    elsewhere. `step` adds to `.grad`; the loop, the optimizer and `zero_grad` are the caller's.

    Args:
        model: a causal LM of transformers with its weights in memory. `from_config` and `from_pretrained` make one of
            which each rank holds only its own layers.
        schedule: a name (see `slipstream.schedule.GENERATORS`); "auto": the first steps are measured, and the order
            chosen that is best for them; or a Schedule, which says how many microbatches, slices and stages there are.
        num_microbatches: the rows of a batch are spread over them.
        slices: the number of token slices of a sequence, their lengths in tokens, or "auto": the first steps are
            measured, and the lengths chosen that run fastest.
        stages_per_rank: how many stages a schedule by name puts on a rank (v): more than 1 where it interleaves.
        partition: layers per stage, such as [4.5, 3.5]: .5 ends a stage between a layer's attention and its
            feed-forward half. Or "auto": by the multiplications of each layer and of the head; in halves where that
            makes the slowest rank at least 3% cheaper.
        mesh: a DeviceMesh with an axis "pp"; default: all ranks.
        recompute: what of a slice's activations is dropped after its forward and computed again before its backward:
            "none"; "selective", all but the outputs of matrix products and attention; "full", all but keys and values;
            or the number of layers of each stage, its first ones, that are recomputed in full; half a layer counts as
            one.
        loss_fn: (outputs (b, T, ...), shifted targets (b, T)) -> (sum, count), where count is the number of
            targets that are not -100.
        dtype: of the parameters; default: as they are.
        device: default: the CPU, or with NCCL the current GPU.
        num_ranks: without a process group, the ranks in this process (default 1, or as many ranks as a Schedule has).
        offload: the share of each rank's slices, those that wait longest, whose activations are in host memory between
            forward and backward: pinned memory with a GPU, else a file. Keys and values stay.
        num_flushes: how many times the pipeline is filled and drained in a step, so that no more than
            num_microbatches / num_flushes microbatches hold activations at once (gradient accumulation).
        seq_len: tokens of a sequence, from which partition="auto" knows what attention costs. Without it, and without
            the slices' lengths, it counts weights alone. Sequences of other lengths are fine.
        memory_limit: bytes that a rank may hold: parameters, gradients, AdamW's state, messages, activations, keys and
            values. Before the first step on a batch of new shape its parts are measured; a schedule that holds more is
            refused, and schedule="auto" looks for one that doesn't.
        self_check: whether to compare the architecture at toy size, sliced and whole, before training (a second).
        timeout: how long a rank waits for a message before it gives up.

    Raises:
        SlipstreamError: what can't be exact or doesn't fit together, on every rank, before anything runs.
    """

    def __init__(
        self,
        model: PreTrainedModel | Source,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int = 1,
        slices: int | Sequence[int] | Literal["auto"] = 8,
        stages_per_rank: int = 1,
        partition: str | Sequence[float] = "auto",
        mesh: DeviceMesh | None = None,
        recompute: str | int = "none",
        loss_fn: LossFunction | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        num_ranks: int | None = None,
        offload: float = 0.0,
        num_flushes: int = 1,
        memory_limit: float | None = None,
        seq_len: int | None = None,
        self_check: bool = True,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        source = model if isinstance(model, Source) else in_memory(model)
        self.config = source.config
        self._ranks = Ranks(mesh)
        self.device = self._ranks.device if device is None else torch.device(device)
        if self_check:
            self._ranks.agree(_finding(self.config) if self.rank == 0 else None)
        anatomy = find_anatomy(self.config)
        num_ranks = self._num_ranks(num_ranks, schedule)
        self._tuner = Tuner(
            schedule, num_ranks, num_microbatches, stages_per_rank, slices, num_flushes, source.compiled, memory_limit
        )
        self._gauge = Gauge(memory_limit)
        self._adopted = self._tuner.schedule
        self.layout = plan_layout(
            self.config,
            anatomy,
            self._tuner.schedule,
            self._tuner.slices,
            num_ranks,
            partition,
            recompute,
            offload,
            seq_len,
        )
        self._stages = self._make_stages(source, self.layout.anatomy, dtype)
        self._tied = TiedGradients([*self._stages.values()], self._ends() if anatomy.tied else [0])
        self._transport: Transport = LocalTransport()
        if self._ranks.size > 1:
            self._transport = connect(self.layout.training, self.device, self._ranks.global_ranks, timeout)
        self._executors = self._make_executors(loss_fn or causal_cross_entropy)
        self._seed: int = self._ranks.gather(torch.initial_seed())[0]
        self._num_steps = 0
        self._ran = ""  # the schedule of the last step or evaluation
        self.train()

    @classmethod
    def from_config(cls, config: PretrainedConfig, seed: int = 0, **settings: Any) -> Self:
        """Random weights: those of `torch.manual_seed(seed)` and `AutoModelForCausalLM.from_config(config)`, of which
        each rank keeps in memory its own. `settings` are the constructor's."""
        dtype = settings.get("dtype")
        return cls(
            Source(config, lambda anatomy, layers: random_model(config, seed, anatomy, layers, dtype)), **settings
        )

    @classmethod
    def from_pretrained(cls, path: str | Path, **settings: Any) -> Self:
        """A folder of safetensors or a name on the hub; each rank reads its own layers. `settings` are the
        constructor's."""
        config, dtype = load_config(str(path)), settings.get("dtype")
        return cls(
            Source(config, lambda anatomy, layers: pretrained_model(str(path), config, anatomy, layers, dtype)),
            **settings,
        )

    @property
    def rank(self) -> int:
        """This process's place on the pipeline."""
        return self._ranks.rank

    @property
    def num_ranks(self) -> int:
        """How many ranks the pipeline has: each a process, or all of them in this one."""
        return self.layout.num_ranks

    @property
    def is_tuning(self) -> bool:
        """Whether "auto" still measures: the next step may run in another order or in other slices."""
        return self._tuner.is_tuning

    def slices(self, length: int) -> list[int]:
        """The tokens of each slice of such a sequence, as the next step cuts it."""
        return self._tuner.lengths(length)

    def step(
        self,
        inputs: Tensor,
        targets: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Forward and backward of one batch: adds to `.grad`, returns the global mean loss, on every rank.

        Args:
            inputs: (batch, sequence) token ids, int64.
            targets: (batch, sequence) labels, unshifted as in transformers; -100 counts nowhere.
            position_ids: (batch, sequence); default: from 0 in every document.
            document_ids: (batch, sequence); tokens attend within runs of equal ids. Without them documents start, as in
                transformers, where position_ids don't count on.
        """
        self._adopt(self._tuner.begin(inputs.shape[-1]))
        self._find_room(inputs, targets)
        batch = self._cut(inputs, targets, position_ids, document_ids)
        self._tied.begin()
        loss = self._run(self.layout.training, batch)
        self._tied.end()
        self._num_steps += 1
        if self._tuner.listens_to(inputs.shape[-1]):
            self._tune(self.timeline)
        return loss

    def evaluate(self, inputs: Tensor, targets: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """The global mean loss of one batch, forward only, in evaluation mode, on every rank."""
        batch = self._cut(inputs, targets, None, document_ids)
        modes = {stage: stage.model.training for stage in self._stages.values()}
        self.eval()
        with torch.no_grad():
            loss = self._run(self.layout.evaluation, batch)
        for stage, training in modes.items():
            stage.model.train(training)
        return loss

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the unsplit model's names, each once."""
        seen: set[int] = set()
        for stage in self._stages.values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before.

        A weight tied across ranks counts once.
        """
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        counted = [p.grad for p in self.parameters() if p.grad is not None and id(p) not in self._tied.copies]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in counted:
            square += gradient.double().square().sum()
        norm = self._ranks.sum(square).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
        return norm

    @property
    def timeline(self) -> Timeline:
        """What ran when in the last step or evaluation, on all ranks. Collective: every rank must ask."""
        mine = [span for executor in self._executors for span in executor.spans]
        spans = [span for spans in self._ranks.gather(mine) for span in spans]
        return Timeline(tuple(spans), self.num_ranks, name=self._ran, measured=True)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the whole model as `AutoModelForCausalLM.from_pretrained` reads it. Collective; rank 0 writes."""
        save_pretrained(folder, self.config, [*self._stages.values()], self._ranks)

    def train(self) -> Self:
        """Training mode: dropout is on."""
        for stage in self._stages.values():
            stage.model.train()
        return self

    def eval(self) -> Self:
        """Evaluation mode: dropout is off."""
        for stage in self._stages.values():
            stage.model.eval()
        return self

    def _cut(self, inputs: Tensor, targets: Tensor, position_ids: Tensor | None, document_ids: Tensor | None) -> Batch:
        check_length(self.config, inputs.shape[-1])
        check_token_ids(self.config, int(inputs.min()), int(max(inputs.max(), targets.max())))
        tensors = (inputs, targets, position_ids, document_ids)
        here = [None if tensor is None else tensor.to(self.device) for tensor in tensors]
        assert here[0] is not None
        assert here[1] is not None
        lengths = self.slices(inputs.shape[-1])
        seed = hash((self._seed, self._num_steps))
        batch = cut_batch(here[0], here[1], lengths, self.layout.training.num_microbatches, here[2], here[3], seed=seed)
        if batch.num_valid == 0:
            raise SlipstreamError(
                "no label of this batch counts: after shifting, all are -100. Leave such batches out."
            )
        return batch

    def _tune(self, answer: Answer) -> None:
        """Rank 0 learns from the step that ran, or from what it would hold, and all follow."""
        decision, error = None, None
        if self.rank == 0:
            try:
                decision = self._tuner.decide(answer)
            except SlipstreamError as found:
                error = found
        try:
            self._ranks.agree(error)
        except SlipstreamError:
            self._tuner.forget()
            raise
        self._adopt(self._tuner.follow(self._ranks.gather(decision)[0]))

    def _find_room(self, inputs: Tensor, targets: Tensor) -> None:
        """Until the next step is one to run that keeps to the memory limit, if there is one."""
        while self._tuner.asks_what_it_holds and self._tuner.listens_to(inputs.shape[-1]):
            self._tune(self._gauge.holdings(self, inputs, targets))
        self._gauge.check(self, inputs, targets)

    def _adopt(self, schedule: Schedule) -> None:
        """From now on run this schedule, whose placement is that of the one before."""
        if schedule is not self._adopted:
            self._adopted = schedule
            self.layout = self.layout.with_schedule(schedule)
            self._transport.expect(self.layout.training)

    def _run(self, schedule: Schedule, batch: Batch) -> Tensor:
        self._ran = schedule.name
        self._transport.begin()
        run_together(self._executors, schedule, batch)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for executor in self._executors:
            sums += torch.stack(executor.finish())
        total, count = self._ranks.sum(sums)
        if int(count) != batch.num_valid:
            raise SlipstreamError(
                f"loss_fn counted {int(count)} tokens, but {batch.num_valid} targets are not -100. Its second value "
                "must be that number: gradients are divided by it before the loss is known."
            )
        mean: Tensor = total / count
        return mean

    def _num_ranks(self, num_ranks: int | None, schedule: str | Schedule) -> int:
        if self._ranks.size == 1:
            return num_ranks or (schedule.num_ranks if isinstance(schedule, Schedule) else 1)
        if num_ranks not in (None, self._ranks.size):
            raise SlipstreamError(
                f"num_ranks={num_ranks}, but {self._ranks.size} processes run: leave it out, each is a rank."
            )
        return self._ranks.size

    def _make_stages(self, source: Source, anatomy: Anatomy, dtype: torch.dtype | None) -> dict[int, Stage]:
        here = self.layout.stages_of([self.rank] if self._ranks.size > 1 else range(self.layout.num_ranks))
        model = source.load(anatomy, [layer for stage in here for layer in self.layout.layers[stage]])
        if dtype is not None:
            cast(model, dtype)
        return {stage: Stage(share(model), anatomy, self.layout.layers[stage], self.device) for stage in here}

    def _ends(self) -> list[int]:
        """The global ranks of the first and the last stage."""
        placement = self.layout.training.placement
        ends = (placement[0], placement[-1]) if self._ranks.size > 1 else (0, 0)
        return [self._ranks.global_ranks[rank] for rank in ends]

    def _make_executors(self, loss_function: LossFunction) -> list[Executor]:
        ranks = [self.rank] if self._ranks.size > 1 else list(range(self.layout.num_ranks))
        return [
            Executor(
                rank,
                {stage: self._stages[stage] for stage in self.layout.stages_of([rank])},
                self._transport,
                loss_function,
                self.device,
                self.layout.recompute,
            )
            for rank in ranks
        ]


def _finding(config: PretrainedConfig) -> SlipstreamError | None:
    try:
        check_sliceable(config)
    except SlipstreamError as error:
        return error
    return None
