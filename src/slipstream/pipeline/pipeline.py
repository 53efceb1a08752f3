"""The public Pipeline: a model split over ranks and slices, with the gradients of one device."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import random_model
from slipstream.number_format import BasePrecision
from slipstream.options import Layers, Memory, Parallelism, Precision, Runtime
from slipstream.parallel import ParameterShard
from slipstream.pipeline.batch import Inputs, Lengths
from slipstream.pipeline.evaluation import PipelineEvaluation
from slipstream.pipeline.families.causal_lm import CausalLMFamily
from slipstream.pipeline.introspection import (
    ASKED_BY_COMPILE,
    CHECKPOINTING,
    COPIES,
    UNSUPPORTED_CALLS,
    refuse_arguments,
    refuse_foreign_norm,
    summarise,
)
from slipstream.pipeline.pipeline_options import ExpectedBatch, LossFunction, PipelineOptions, SequenceLoss
from slipstream.pipeline.runtime import PipelineRuntime
from slipstream.pipeline.saving import PipelineSaving
from slipstream.pipeline.token_values import Rows
from slipstream.pipeline.weight_source import WeightSource, pretrained_source, with_frozen
from slipstream.planner.ragged import StageRates, StepPlan
from slipstream.planner.slicing import BatchSlicing
from slipstream.schedule import Schedule, SlicedMicrobatch


class Pipeline(PipelineEvaluation, PipelineSaving):
    """Trains a Hugging Face causal LM whose layers are split over ranks and whose sequences are cut into slices.

    Every rank constructs it with an equal model and calls `step` with the same batch. Under torchrun it makes the
    process group where there is none; a process alone is a pipeline by itself, of `num_ranks` ranks. It takes the model
    over: don't use the model elsewhere. `step` adds to `.grad`; the loop, the optimizer and `zero_grad` are the
    caller's.

    The constructor, and each method whose description says "collective", must be called by every rank, in the same
    order; properties never communicate.

    Args:
        model: a causal LM of transformers with its weights in memory; with `from_config` and `from_pretrained` each
            rank holds only its own layers. Or an nn.Sequential of any layers that take and return a tensor or a tuple
            of tensors (GPipe): see docs/sequences.md.
        schedule: a name (see `slipstream.schedule.SCHEDULES`); "auto": the best order that is found, by measured
            costs, before the first step or, where these can't be had, after a few; "auto-v": the same in a V-shaped
            placement, where each rank has two stages and the first rank the first and the last; or a Schedule, which
            says how many microbatches, slices and stages there are. Default: planned by counted operations, as slices,
            partition and stages_per_rank are where they are left out; 1f1b for one rank (see docs/auto.md).
        num_microbatches: the number of parts into which the rows of a batch are divided.
        slices: the number of token slices of a sequence, their lengths in tokens, or "auto": those that are
            found as the order is, by measured costs. Default: planned, or 8 for one rank; of an nn.Sequential 1, or
            any number for its layers after `CutTokens`.
        partition: layers per stage, such as [4.5, 3.5]: .5 ends a stage between a layer's attention and its
            feed-forward half, 0 at an end makes the embedding or the head a stage by itself. Or "auto": as planned
            where the order or the slices are; else by the multiplications of each layer and of the head, in halves
            where that makes the slowest rank at least 3% cheaper.
        stages_per_rank: how many stages a schedule by name puts on a rank (v): more than 1 where it interleaves.
            Default: planned.
        seq_len: tokens of a sequence, from which partition="auto" knows attention's cost. Without it, and without
            the slices' lengths, it counts weights alone. Sequences of other lengths are fine. With it, and schedule,
            slices and partition "auto", all three are planned from measured costs (see `plan`): for one sequence in a
            microbatch, or for an `ExpectedBatch` in its place.
        loss_fn: (outputs (b, T, ...), shifted targets (b, T)) -> (sum, count), where count is the number of
            targets that are not -100, or a floating-point number of the function's own, such as the sum of the weights
            of classes: the sum over all ranks and microbatches is divided by that of all counts. Or a SequenceLoss, a
            function of the probability of whole sequences.
        mesh: a DeviceMesh, by `slipstream.make_mesh`, which says what the ranks of each axis share; default: all ranks
            on pp. Each replica passes its own share of a batch; the ranks of one replica pass equal batches.
        num_ranks: without a process group, the ranks in this process (default 1, or as many ranks as a Schedule has).
        device: default: the CPU, or with NCCL the current GPU.
        memory: recomputation, offloading, and the most that a rank may hold.
        parallel: how ranks share more than the layers: tokens, the optimizer's state, parameters.
        precision: the dtypes of parameters, and of the optimizer's copies.
        runtime: fused kernels, the self-check, and how long a rank waits for a message.
        microbatches: in place of `num_microbatches` and `slices`, the rows of each microbatch and the tokens of its
            slices, such as [[2, [704, 688, 656]], [1, [2048]]] for batches of 3 rows of 2048 tokens; or
            the result of `slice_batch`. Not with schedule="auto".
        vocabulary: "whole": the last stage has the head and the loss; "spread": every rank computes the logits of an
            equal number of the head's rows, and their part of the loss, for a head that weighs several layers (see
            docs/slicing.md). "auto": as planned where schedule, slices and partition are, else whole.
        router_loss: "per_layer": the load-balancing loss of a mixture of experts (Fedus et al. 2021, equations 4 to 6),
            of each layer by itself and averaged over layers, with the configuration's router_aux_loss_coef. Its
            gradients are added; the loss that `step` returns is without it.
        layers: of an nn.Sequential, the costs of its layers and an example of its inputs.
        rates: those of a causal LM's stages, by which steps on sequences of different lengths are planned, from
            another pipeline with the same cut. Default: as measured for a plan made here, else multiplications.

    Raises:
        SlipstreamError: what can't be exact or doesn't fit together, on every rank, before anything runs.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Sequential | WeightSource | CausalLMFamily,
        schedule: str | Schedule | None = None,
        num_microbatches: int = 1,
        slices: int | Sequence[int] | Literal["auto"] | None = None,
        *,
        partition: Sequence[float] | Literal["auto"] = "auto",
        stages_per_rank: int | None = None,
        seq_len: int | ExpectedBatch | None = None,
        loss_fn: LossFunction | SequenceLoss | None = None,
        mesh: DeviceMesh | None = None,
        num_ranks: int | None = None,
        device: torch.device | str | None = None,
        memory: Memory = Memory(),
        parallel: Parallelism = Parallelism(),
        precision: Precision = Precision(),
        runtime: Runtime = Runtime(),
        layers: Layers = Layers(),
        microbatches: BatchSlicing | Sequence[SlicedMicrobatch | Sequence[Any]] | None = None,
        vocabulary: Literal["auto", "whole", "spread"] = "auto",
        router_loss: Literal["none", "per_layer"] = "none",
        rates: StageRates | None = None,
    ) -> None:
        order = schedule, num_microbatches, slices, stages_per_rank, partition, seq_len
        records = memory, parallel, precision, runtime, layers
        place = mesh, num_ranks, device
        options = PipelineOptions(*order, loss_fn, *records, *place, microbatches, vocabulary, router_loss, rates)
        if torch.is_inference_mode_enabled():
            raise SlipstreamError(
                "a Pipeline within torch.inference_mode() couldn't be trained: make it outside of that."
            )
        # Checks and self-checks compute gradients, whatever the caller's grad mode.
        with torch.enable_grad():
            self._runtime = PipelineRuntime(model, options)
        self.train()

    @classmethod
    def from_config(
        cls, config: PretrainedConfig, seed: int = 0, *, freeze: Sequence[str] = (), **options: Any
    ) -> Self:
        """Returns a pipeline with the weights of `torch.manual_seed(seed)` and
        `AutoModelForCausalLM.from_config(config)`, of which each rank holds only its part. `options` are the
        constructor's; `freeze` is as in `from_pretrained`. Collective."""
        return cls(with_frozen(WeightSource(config, partial(random_model, config, seed)), freeze), **options)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        freeze: Sequence[str] = (),
        lora: Any = None,
        lora_seed: int = 0,
        lora_base_precision: BasePrecision = "full",
        **options: Any,
    ) -> Self:
        """Returns a pipeline with the weights of a folder of safetensors, or of a name on the hub, of which each rank
        reads only its part. `options` are the constructor's. Collective.

        With `lora`, a `peft.LoraConfig`, an adapter is added and the weights are frozen. It is drawn by `lora_seed` and
        the modules' names, so it is the same however the model is cut. Or `lora` is the folder of an adapter by LoRA
        that PEFT has saved, which is trained further. With `lora_base_precision="nf4"` the weights of all linear layers
        but the head are kept in 4 bits (QLoRA), which needs bitsandbytes.

        `freeze` has patterns of parameters' names, as `fnmatch` has them, such as `model.layers.0.*`: these aren't
        trained. Raises SlipstreamError for one that matches nothing, and where nothing is left to train.
        """
        source = pretrained_source(str(path), freeze, lora, lora_seed, base_precision=lora_base_precision)
        return cls(source, **options)

    def step(
        self,
        inputs: Inputs | None = None,
        labels: Rows | None = None,
        position_ids: Tensor | None = None,
        document_ids: Rows | None = None,
        *,
        targets: Rows | None = None,
        lengths: Lengths = None,
        sequence_values: Tensor | None = None,
        plan: StepPlan | None = None,
        loss_scale: float = 1.0,
        num_targets: float | None = None,
        **others: object,
    ) -> Tensor:
        """Runs forward and backward of one batch: adds to `.grad` and returns the global mean loss. Collective.

        Args:
            inputs: (batch, sequence) token ids, int64; of an nn.Sequential its first layer's inputs, rows first. Or a
                list of (tokens,) tensors, with lists of labels and document_ids: sequences of different lengths, which
                are packed into `num_microbatches` rows of about equal cost; the row that takes longest has `slices`
                slices, others accordingly. Of an nn.Sequential with CutTokens each sequence is a microbatch. Or a
                mapping as a data collator of transformers makes it, with input_ids, labels and, if any, attention_mask
                and position_ids, (batch, sequence) each. Padding at the right is left out as with `lengths`.
            labels: (batch, sequence), unshifted as in transformers: `labels[:, t]` is the token at t, not the one
                after it; -100 counts nowhere. Of an nn.Sequential the loss function's targets, rows first. Leave it
                out beside a mapping.
            position_ids: (batch, sequence); default: from 0 in every document.
            document_ids: (batch, sequence); tokens attend within runs of equal ids. Without them documents start, as in
                transformers, where position_ids don't count on.
            targets: another name of `labels`.
            lengths: the tokens of each row where sequences of different lengths are padded to one.
            sequence_values: (sequences, ...), the second argument of a SequenceLoss's function.
            plan: which sequences of a list form which microbatch, the slices of each, and the order; default: see
                `inputs`.
            loss_scale: a factor of the loss, so that small gradients of float16 don't vanish; they are divided by it at
                the end. A power of two changes none of their digits.
            others: none; a batch that is given as `step(**batch)` is refused, with what to type.
            num_targets: the divisor of the sum of the losses, where several steps add up one update's gradients:
                the targets that count in all of their batches, on all replicas; of a `loss_fn` with a divisor of its
                own the sum of that over them, as a float. Default: those of this batch. A batch in which no target
                counts then adds nothing.

        Returns:
            A float64 scalar, equal on every rank.

        Raises:
            SlipstreamError: the tensors don't fit the pipeline, no target counts, nothing is trained, or a rank would
                hold more than the memory limit, or what `loss_fn` returns can't be added up; before anything runs. What
                all parts' counts add up to can't be divided by, or what was recomputed isn't what it was; after it has
                run, and then all gradients are dropped.
        """
        if inputs is None or others:
            refuse_arguments("step", inputs, labels, others)
        whole = self._runtime.read_batch(
            inputs,
            labels,
            position_ids=position_ids,
            document_ids=document_ids,
            lengths=lengths,
            sequence_values=sequence_values,
            is_planned=plan is not None,
            targets=targets,
        )
        return self._runtime.step(whole, loss_scale, plan, num_targets)

    def prepare(self, lengths: Sequence[int]) -> None:
        """Starts to plan a step on sequences of these lengths, in tokens, and returns at once; `step` on such sequences
        then finds its plan. Call it before the step before, on every rank; where it isn't called, and with a memory
        limit before the first step, `step` plans."""
        self._runtime.plans.prepare([int(length) for length in lengths])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that this rank's optimizer updates, under the unsplit model's names, each once: with tp
        its share of a weight, with parallel.shard its rows of that, with master_dtype copies, and with memory.optimizer
        "host" copies on the CPU, whose `.grad` is there too."""
        return self._runtime.parameters.named()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields this rank's parameters, for an optimizer. Raises SlipstreamError where `clip_grad_norm_` of torch asks
        for a part of the model's."""
        if self._runtime.parameters.are_a_part:
            refuse_foreign_norm(sys._getframe(1))
        for _, parameter in self.named_parameters():
            yield parameter

    def parameter_shards(self) -> Iterator[ParameterShard]:
        """Yields the parameters of `named_parameters`, each with its place in the unsplit parameter, for
        checkpoints."""
        return self._runtime.parameters.shards()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before, a
        float64 scalar. A weight counts once, however many ranks have copies of it. Collective."""
        return self._runtime.parameters.clip_(max_norm, self._runtime.calls)

    def refresh(self) -> None:
        """Takes over changes of `named_parameters` that training didn't make: of a loaded checkpoint."""
        self._runtime.parameters.refresh()

    def add_embedding_noise(self, alpha: float, length: int) -> None:
        """Adds noise to the embedding's output in training: uniform, of up to alpha over the square root of `length`
        times the model's width, where `length` is the tokens of a sequence (NEFTune, Jain et al. 2023). It is the same
        for every slicing and every split of the layers, and another in every step.

        Raises SlipstreamError for layers of your own, tensor parallelism, and rows of an embedding that are spread.
        """
        self._runtime.family.add_embedding_noise(alpha, length)

    def train(self) -> Self:
        """Sets training mode: dropout is on, but in parts that were in evaluation mode when the pipeline took a model
        in training mode."""
        self._runtime.train(True)
        return self

    def eval(self) -> Self:
        """Sets evaluation mode: dropout is off."""
        self._runtime.train(False)
        return self

    def __repr__(self) -> str:
        """Returns a few lines: the layers of every stage, the schedule, the slices, the mesh and the parameters here,
        those that `named_parameters` yields."""
        return summarise(self._runtime)

    def __deepcopy__(self, memo: dict[int, Any]) -> Never:
        raise SlipstreamError(COPIES)

    def __reduce_ex__(self, protocol: Any) -> Never:
        raise SlipstreamError(COPIES)

    if not TYPE_CHECKING:

        def __call__(self, *inputs: Any, **options: Any) -> Never:
            raise SlipstreamError(UNSUPPORTED_CALLS["__call__"])

        def __getattr__(self, name: str) -> Any:
            answer = UNSUPPORTED_CALLS.get(name)
            if name == ASKED_BY_COMPILE:
                raise SlipstreamError(f"torch.compile of a Pipeline: {UNSUPPORTED_CALLS['compile']}.")
            runtime = self.__dict__.get("_runtime")
            if name in CHECKPOINTING and runtime is not None and (what := runtime.layout.recompute) is not None:
                answer = f"leave it out, memory.recompute={what.setting!r} recomputes activations already"
            raise AttributeError(f"a Pipeline has no attribute {name!r}{f': {answer}' if answer else ''}")
