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

from slipstream.model import load_config, pretrained_model, random_model
from slipstream.parallel import RankGroup
from slipstream.pipeline.engine import Engine
from slipstream.pipeline.execution import LossFunction
from slipstream.pipeline.families import Balance, ExecutedStep, ModelInputs, Settings, WeightSource, gather_state
from slipstream.pipeline.parameters import ParameterShard
from slipstream.schedule import Schedule
from slipstream.timeline import Timeline


class Pipeline(Engine):
    """Trains a Hugging Face causal LM whose layers are split over ranks and whose sequences are cut into slices.

    Every rank builds it with an equal model after `init_process_group` and calls `step` with the same batch. Without a
    process group it is a pipeline in this one process, of `num_ranks` ranks. The model is taken over: don't use it
    elsewhere. `step` adds to `.grad`; the loop, the optimizer and `zero_grad` are the caller's.

    Args:
        model: a causal LM of transformers with its weights in memory; `from_config` and `from_pretrained` make one of
            which each rank holds only its own layers. Or an nn.Sequential of any layers that take and return a tensor
            or a tuple of tensors (GPipe): see docs/sequences.md.
        schedule: a name (see `slipstream.schedule.GENERATORS`); "auto": the first steps are measured, and the order
            chosen that is best for them; "auto-v": the same on a V, where each rank has two stages and the first rank
            the first and the last; or a Schedule, which says how many microbatches, slices and stages there are.
        num_microbatches: the rows of a batch are spread over them.
        slices: the number of token slices of a sequence, their lengths in tokens, or "auto": the first steps are
            measured, and the lengths chosen that run fastest. Default: 8; of an nn.Sequential 1, or with `CutTokens`
            in it any number, of what follows that layer.
        stages_per_rank: how many stages a schedule by name puts on a rank (v): more than 1 where it interleaves.
        partition: layers per stage, such as [4.5, 3.5]: .5 ends a stage between a layer's attention and its
            feed-forward half, 0 at an end makes the embedding or the head a stage of its own. Or "auto": by the
            multiplications of each layer and of the head; in halves where that makes the slowest rank at least 3%
            cheaper.
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
        costs: of an nn.Sequential, what each of its flattened layers costs, for partition="auto".
        example: of an nn.Sequential, inputs like those of a microbatch, from which costs are counted where they aren't
            given; needed with slices, whose self-check runs on it.
        batch_norm_over_replicas: of an nn.Sequential, whether the moving averages of batch norms are of all replicas.
        timeout: how long a rank waits for a message before it gives up.

    Raises:
        SlipstreamError: what can't be exact or doesn't fit together, on every rank, before anything runs.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Sequential | WeightSource,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int = 1,
        slices: int | Sequence[int] | Literal["auto"] | None = None,
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
        costs: Sequence[float] | None = None,
        example: ModelInputs | None = None,
        batch_norm_over_replicas: bool = False,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        settings = Settings(
            partition=partition,
            recompute=recompute,
            loss_fn=loss_fn,
            dtype=dtype,
            offload=offload,
            memory_limit=memory_limit,
            seq_len=seq_len,
            sequence_parallel=sequence_parallel,
            tensor_plan=tensor_plan,
            shard_optimizer=shard_optimizer,
            shard_parameters=shard_parameters,
            master_dtype=master_dtype,
            fused=fused,
            self_check=self_check,
            costs=costs,
            example=example,
            batch_norm_over_replicas=batch_norm_over_replicas,
        )
        order = schedule, num_microbatches, slices, stages_per_rank, num_flushes
        super().__init__(model, settings, order, num_ranks, mesh, device, timeout)
        self.train()

    @classmethod
    def from_config(cls, config: PretrainedConfig, seed: int = 0, **settings: Any) -> Self:
        """Random weights: those of `torch.manual_seed(seed)` and `AutoModelForCausalLM.from_config(config)`, of which
        each rank keeps in memory its own. `settings` are the constructor's."""
        dtype = settings.get("dtype")
        return cls(
            WeightSource(config, lambda anatomy, layers: random_model(config, seed, anatomy, layers, dtype)), **settings
        )

    @classmethod
    def from_pretrained(cls, path: str | Path, **settings: Any) -> Self:
        """A folder of safetensors or a name on the hub; each rank reads its own layers. `settings` are the
        constructor's."""
        config, dtype = load_config(str(path)), settings.get("dtype")
        return cls(
            WeightSource(config, lambda anatomy, layers: pretrained_model(str(path), config, anatomy, layers, dtype)),
            **settings,
        )

    @property
    def config(self) -> PretrainedConfig:
        """Of a model of transformers; a sequence has none."""
        return self._family.config

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

    def step(
        self,
        inputs: ModelInputs,
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
        length = self._family.length(inputs)
        self._adopt(self._tuner.begin(length))
        self._find_room(inputs, targets)
        batch = replace(self._cut(inputs, targets, position_ids, document_ids), loss_scale=loss_scale)
        self.last_step = ExecutedStep(self.layout, self.slices(length))
        self._parameters.begin(loss_scale)
        self._family.begin()
        loss = self._run(self.layout.training, batch)
        self._parameters.end()
        self._family.end()
        self._num_steps += 1
        if self._tuner.listens_to(length):
            self._tune(self.timeline)
        return loss

    def evaluate(self, inputs: ModelInputs, targets: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """The global mean loss of one batch, forward only, in evaluation mode, on every rank."""
        self._parameters.publish()
        modes = {stage: stage.model.training for stage in self._stages.values()}
        self.eval()
        try:
            batch = self._cut(inputs, targets, None, document_ids)
            with torch.no_grad():
                loss = self._run(self.layout.evaluation, batch)
        finally:
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

    def parameter_shards(self) -> Iterator[ParameterShard]:
        """What `named_parameters` yields, each with its place in the unsplit model's parameter: for checkpoints."""
        return self._parameters.shards()

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
        return Timeline(tuple(spans), self.num_ranks, name=self._name, measured=True)

    @property
    def random_state(self) -> tuple[int, int]:
        """What dropout depends on beside the batch: the seed, and how many steps there were. May be set."""
        return self._seed, self._num_steps

    @random_state.setter
    def random_state(self, state: tuple[int, int]) -> None:
        self._seed, self._num_steps = state

    @property
    def axes(self) -> dict[str, RankGroup]:
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
        self._family.save_pretrained(folder, self._stages, self._parameters)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's state by the unsplit model's names, in host memory on rank 0, which leads; empty on the
        others. Collective."""
        self._parameters.publish()
        return gather_state([*self._stages.values()], self._ranks, self._parameters)

    @property
    def balance(self) -> Balance:
        """How evenly the layers of an nn.Sequential are spread over the ranks, and which layer is the reason.

        Raises SlipstreamError where costs aren't known: give `example` or `costs`.
        """
        return self._family.balance(self.layout)

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
