"""The public Pipeline: a causal LM split over ranks and slices, with the gradients of one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.anatomy import find_anatomy
from slipstream.model.fused import check_compiler
from slipstream.model.limits import check_length, check_token_ids
from slipstream.model.loading import load_config, pretrained_model, random_model
from slipstream.parallel.group import Group
from slipstream.pipeline.batch import Batch, cut_batch
from slipstream.pipeline.building import (
    check_architecture,
    check_sharding,
    choose_loss,
    count_ranks,
    load_shares,
    make_stages,
    ranks_here,
    tied_ends,
)
from slipstream.pipeline.executor import Executor, LossFunction, run_together
from slipstream.pipeline.export import save_pretrained
from slipstream.pipeline.layout import plan_layout
from slipstream.pipeline.memory_limit import Gauge
from slipstream.pipeline.parameters import Parameters, Piece
from slipstream.pipeline.ranks import Ranks
from slipstream.pipeline.scatter_gather import ScatterGather
from slipstream.pipeline.source import Source, in_memory
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
        mesh: a DeviceMesh with an axis "pp", and "dp" and "tp" where they are used, by `slipstream.make_mesh`; default:
            all ranks on pp. With dp each replica passes its own share of a batch; tp ranks share every layer and pass
            equal batches.
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
        sequence_parallel: with tp, whether its ranks also share the tokens of a slice where they would otherwise
            compute the same: norms, residuals, dropout.
        tensor_plan: with tp, how linear layers are cut where the model doesn't say it itself, such as
            {"model.layers.*.mlp.up_proj": "colwise"}.
        shard_optimizer: with dp, whether each replica updates only its part of every parameter (ZeRO-1): `parameters`
            then yields these parts, so that the optimizer's state is spread too.
        shard_parameters: with dp, whether each replica keeps only its part of every parameter between steps (ZeRO-3, by
            FSDP2): gathered once when a step begins, let go of when a stage's gradients are reduced. `parameters`
            yields these parts. Not with tp, tied weights or master_dtype.
        master_dtype: of what the optimizer updates, such as torch.float32 with dtype=torch.bfloat16: `parameters`
            yields wider copies, in whose dtype gradients are summed up. Default: the parameters themselves.
        fused: whether norms and activations are compiled, each to one kernel: needs a compiler on every machine.
        self_check: whether to compare the architecture at toy size, sliced and whole, before training (a second); with
            tp also cut over its ranks and whole.
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
        sequence_parallel: bool = False,
        tensor_plan: Mapping[str, str] | None = None,
        shard_optimizer: bool = False,
        shard_parameters: bool = False,
        master_dtype: torch.dtype | None = None,
        fused: bool = False,
        self_check: bool = True,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        source = model if isinstance(model, Source) else in_memory(model)
        self.config = source.config
        self._ranks = Ranks(mesh)
        self.device = self._ranks.device if device is None else torch.device(device)
        if fused:
            check_compiler(self.device.type)
        if self_check:
            check_architecture(self.config, self._ranks, tensor_plan, sequence_parallel)
        num_ranks = count_ranks(self._ranks, num_ranks, schedule)
        self._tuner = Tuner(
            schedule, num_ranks, num_microbatches, stages_per_rank, slices, num_flushes, source.compiled, memory_limit
        )
        self._gauge = Gauge(memory_limit)
        self._adopted = self._tuner.schedule
        self.layout = plan_layout(
            self.config,
            find_anatomy(self.config),
            self._tuner.schedule,
            self._tuner.slices,
            num_ranks,
            partition,
            recompute,
            offload,
            seq_len,
            reduces=self._ranks.world.size > self._ranks.size,
        )
        if shard_parameters:
            excluded = {"shard_optimizer": shard_optimizer, "master_dtype": master_dtype}
            check_sharding(self.layout.anatomy, self._ranks, excluded)
        model, tensor = load_shares(source, self.layout, self._ranks, dtype, tensor_plan, sequence_parallel, fused)
        self._stages = make_stages(model, self.layout, self._ranks, self.device, tensor)
        self._parameters = Parameters(
            self._stages,
            self._ranks,
            tensor,
            tied_ends(self.layout, self._ranks),
            shard=shard_optimizer,
            shard_parameters=shard_parameters,
            master_dtype=master_dtype,
        )
        self._num_parts = 1 if sequence_parallel else self._ranks.tensor.size  # of which each rank sends one
        connected = self._ranks.size > 1
        self._transport = self._scattered(
            connect(self.layout.training, self.device, self._ranks, timeout) if connected else LocalTransport()
        )
        self._executors = self._make_executors(choose_loss(loss_fn, self._ranks, tensor))
        self._seed: int = self._ranks.follow(torch.initial_seed())
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
    def replica(self) -> int:
        """This pipeline's place among those that share a batch (dp)."""
        return self._ranks.data.rank

    @property
    def num_replicas(self) -> int:
        """How many pipelines share a batch (dp)."""
        return self._ranks.data.size

    @property
    def leads(self) -> bool:
        """Whether this is the one rank of all that writes and speaks for them."""
        return self._ranks.leads

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
        *,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Forward and backward of one batch: adds to `.grad`, returns the global mean loss, on every rank.

        Args:
            inputs: (batch, sequence) token ids, int64.
            targets: (batch, sequence) labels, unshifted as in transformers; -100 counts nowhere.
            position_ids: (batch, sequence); default: from 0 in every document.
            document_ids: (batch, sequence); tokens attend within runs of equal ids. Without them documents start, as in
                transformers, where position_ids don't count on.
            loss_scale: what the loss is multiplied by on the way, so that small gradients of float16 don't vanish; they
                are divided by it at the end. A power of two changes no digit of them.
        """
        self._parameters.publish()
        self._adopt(self._tuner.begin(inputs.shape[-1]))
        self._find_room(inputs, targets)
        batch = replace(self._cut(inputs, targets, position_ids, document_ids), loss_scale=loss_scale)
        self._parameters.begin(loss_scale)
        loss = self._run(self.layout.training, batch)
        self._parameters.end()
        self._num_steps += 1
        if self._tuner.listens_to(inputs.shape[-1]):
            self._tune(self.timeline)
        return loss

    def evaluate(self, inputs: Tensor, targets: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """The global mean loss of one batch, forward only, in evaluation mode, on every rank."""
        self._parameters.publish()
        batch = self._cut(inputs, targets, None, document_ids)
        modes = {stage: stage.model.training for stage in self._stages.values()}
        self.eval()
        with torch.no_grad():
            loss = self._run(self.layout.evaluation, batch)
        for stage, training in modes.items():
            stage.model.train(training)
        self._parameters.release()
        return loss

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank's optimizer updates, under the unsplit model's names, each once.

        With tp a rank has its share of a weight, with shard_optimizer its rows of that, and with master_dtype copies.
        """
        return self._parameters.named()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def pieces(self) -> Iterator[Piece]:
        """What `named_parameters` yields, each with its place in the unsplit model's parameter: for checkpoints."""
        return self._parameters.pieces()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before.

        A weight counts once, however many ranks have copies of it.
        """
        return self._parameters.clip_(max_norm)

    @property
    def timeline(self) -> Timeline:
        """What ran when in the last step or evaluation, on all ranks. Collective: every rank must ask."""
        mine = [span for executor in self._executors for span in executor.spans]
        spans = [span for spans in self._ranks.gather(mine) for span in spans]
        return Timeline(tuple(spans), self.num_ranks, name=self._ran, measured=True)

    @property
    def random_state(self) -> tuple[int, int]:
        """What dropout depends on beside the batch: the seed, and how many steps there were. May be set."""
        return self._seed, self._num_steps

    @random_state.setter
    def random_state(self, state: tuple[int, int]) -> None:
        self._seed, self._num_steps = state

    @property
    def axes(self) -> dict[str, Group]:
        """The groups of ranks that this one is in, by axis: pp, dp, tp."""
        return {"pp": self._ranks.pipeline, "dp": self._ranks.data, "tp": self._ranks.tensor}

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent to other stages in the last step or evaluation, headers aside."""
        return self._transport.bytes_sent

    def refresh(self) -> None:
        """Call it when what `named_parameters` yields was changed by other means than training: by a checkpoint."""
        self._parameters.refresh()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the whole model as `AutoModelForCausalLM.from_pretrained` reads it. Collective; rank 0 writes."""
        self._parameters.publish()
        save_pretrained(folder, self.config, [*self._stages.values()], self._ranks, self._parameters)

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
        seed = hash((self._seed, self._num_steps, *([self._ranks.data.rank] if self._ranks.data.rank else [])))
        batch = cut_batch(here[0], here[1], lengths, self.layout.training.num_microbatches, here[2], here[3], seed=seed)
        num_valid = self._ranks.data.sum(torch.tensor(batch.num_valid, device=self.device))
        batch = replace(batch, num_valid=int(num_valid))
        if batch.num_valid == 0:
            raise SlipstreamError(
                "no label of this batch counts: after shifting, all are -100. Leave such batches out."
            )
        return batch

    def _tune(self, answer: Answer) -> None:
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

    def _scattered(self, transport: Transport) -> Transport:
        return transport if self._num_parts == 1 else ScatterGather(transport, self._ranks.tensor)

    def _run(self, schedule: Schedule, batch: Batch) -> Tensor:
        self._ran = schedule.name
        self._transport.begin()
        run_together(self._executors, schedule, batch)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for executor in self._executors:
            sums += torch.stack(executor.finish())
        total, count = self._ranks.total(sums)
        if int(count) != batch.num_valid:
            raise SlipstreamError(
                f"loss_fn counted {int(count)} tokens, but {batch.num_valid} targets are not -100. Its second value "
                "must be that number: gradients are divided by it before the loss is known."
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
            for rank in ranks_here(self.layout, self._ranks)
        ]
