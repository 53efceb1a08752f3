"""The public Pipeline: a model split over ranks and slices, with the gradients of one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Never, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import load_config, pretrained_model, random_model
from slipstream.model.adapters import ALL_WEIGHTS, Adapter, TrainedWeights
from slipstream.options import Layers, Memory, Parallelism, Precision, Runtime, refuse_old_arguments
from slipstream.parallel import ParameterShard, RankGroup
from slipstream.pipeline.answers import ANSWERS, summarise
from slipstream.pipeline.arguments import Inputs, given_batch, padded_as
from slipstream.pipeline.batch import WholeBatch
from slipstream.pipeline.engine import Engine
from slipstream.pipeline.families import Balance, ExecutedStep, StageLayout
from slipstream.pipeline.families.model_family import causal_lm, layer_sequence
from slipstream.pipeline.memory import rehearse
from slipstream.pipeline.pipeline_options import LossFunction, PipelineOptions, SequenceLoss
from slipstream.pipeline.saving import Scheduler, load_loop, save_loop
from slipstream.pipeline.sequences import Lengths, Rows, Sequences
from slipstream.pipeline.weights import WeightSource, save_on_leader, with_adapter, with_frozen, write_model
from slipstream.pipeline.weights.adapter_export import write_adapter, write_merged
from slipstream.planner.joint import JointPlan
from slipstream.planner.slicing import BatchSlicing
from slipstream.planner.steps import StageRates, StepPlan
from slipstream.schedule import Schedule, SlicedMicrobatch
from slipstream.simulator import MemoryTable
from slipstream.timeline import Timeline


class Pipeline:
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
        schedule: a name (see `slipstream.schedule.GENERATORS`); "auto": the first steps are measured, and the best
            order for them is chosen; "auto-v": the same in a V-shaped placement, where each rank has two stages and
            the first rank the first and the last; or a Schedule, which says how many microbatches, slices and stages
            there are.
        num_microbatches: the number of parts into which the rows of a batch are divided.
        slices: the number of token slices of a sequence, their lengths in tokens, or "auto": the first steps are
            measured, and the lengths chosen that run fastest. Default: 8; of an nn.Sequential 1, or with `CutTokens`
            in it any number, of what follows that layer.
        partition: layers per stage, such as [4.5, 3.5]: .5 ends a stage between a layer's attention and its
            feed-forward half, 0 at an end makes the embedding or the head a stage by itself. Or "auto": by the
            multiplications of each layer and of the head; in halves where that makes the slowest rank at least 3%
            cheaper.
        stages_per_rank: how many stages a schedule by name puts on a rank (v): more than 1 where it interleaves.
        seq_len: tokens of a sequence, from which partition="auto" knows what attention costs. Without it, and without
            the slices' lengths, it counts weights alone. Sequences of other lengths are fine. With it, and schedule,
            slices and partition "auto", all three are planned from measured costs (see `plan`).
        loss_fn: (outputs (b, T, ...), shifted targets (b, T)) -> (sum, count), where count is the number of
            targets that are not -100; or a SequenceLoss, a function of the probability of whole sequences.
        mesh: a DeviceMesh with an axis "pp", and "dp" and "tp" where they are used, by `slipstream.make_mesh`; default:
            all ranks on pp. With dp each replica passes its own share of a batch; tp ranks share every layer and pass
            equal batches.
        num_ranks: without a process group, the ranks in this process (default 1, or as many ranks as a Schedule has).
        device: default: the CPU, or with NCCL the current GPU.
        memory: recomputation, offloading, and the most that a rank may hold.
        parallel: what ranks share in addition to the layers: tokens, the optimizer's state, parameters.
        precision: the dtypes of parameters, and of what the optimizer updates.
        runtime: fused kernels, the self-check, and how long a rank waits for a message.
        microbatches: in place of `num_microbatches` and `slices`, the rows of each microbatch and the tokens of its
            slices, such as [[2, [704, 688, 656]], [1, [2048]]] for batches of 3 rows of 2048 tokens; or what
            `slice_batch` returns. Not with schedule="auto".
        vocabulary: "whole": the last stage has the head and the loss; "spread": every rank computes the logits of an
            equal number of the head's rows, and their part of the loss, for a head that weighs several layers (see
            docs/slicing.md). "auto": as planned where schedule, slices and partition are, else whole.
        router_loss: "per_layer": the load-balancing loss of a mixture of experts (Fedus et al. 2021, equations 4 to 6),
            of each layer by itself and averaged over layers, with the configuration's router_aux_loss_coef. Its
            gradients are added; the loss that `step` returns is without it.
        layers: of an nn.Sequential, the costs of its layers and an example of its inputs.
        rates: what the stages of a causal LM cost, by which steps on sequences of different lengths are planned: those
            of another pipeline with the same cut. Default: as measured for a plan made here, else multiplications.

    Raises:
        SlipstreamError: what can't be exact or doesn't fit together, on every rank, before anything runs.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Sequential | WeightSource,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int = 1,
        slices: int | Sequence[int] | Literal["auto"] | None = None,
        *,
        partition: Sequence[float] | Literal["auto"] = "auto",
        stages_per_rank: int = 1,
        seq_len: int | None = None,
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
        **old_arguments: Never,
    ) -> None:
        refuse_old_arguments(old_arguments)
        order = schedule, num_microbatches, slices, stages_per_rank, partition, seq_len
        records = memory, parallel, precision, runtime, layers
        place = mesh, num_ranks, device
        options = PipelineOptions(*order, loss_fn, *records, *place, microbatches, vocabulary, router_loss, rates)
        self._engine = Engine(model, options)
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
        cls, path: str | Path, *, freeze: Sequence[str] = (), lora: Any = None, lora_seed: int = 0, **options: Any
    ) -> Self:
        """Returns a pipeline with the weights of a folder of safetensors, or of a name on the hub, of which each rank
        reads only its part. `options` are the constructor's. Collective.

        With `lora`, a `peft.LoraConfig`, an adapter is added and the weights are frozen. It is drawn by `lora_seed` and
        the modules' names, so it is the same however the model is cut. Or `lora` is the folder of an adapter by LoRA
        that PEFT has saved, which is trained further.

        `freeze` has patterns of parameters' names, as `fnmatch` has them, such as `model.layers.0.*`: these aren't
        trained. Raises SlipstreamError for one that matches nothing, and where nothing is left to train.
        """
        config = load_config(str(path))
        source = with_frozen(WeightSource(config, partial(pretrained_model, str(path), config)), freeze)
        return cls(source if lora is None else with_adapter(source, lora, lora_seed, str(path)), **options)

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
        """Whether "auto" still measures: the next step may run in another order or in other slices."""
        return self._engine.tuner.is_tuning

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
        """The groups of ranks that this one is in, by axis: pp, dp, tp."""
        ranks = self._engine.ranks
        return {"pp": ranks.pipeline, "dp": ranks.data, "tp": ranks.tensor}

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
        return self._engine.tuner.lengths(length)

    def step(
        self,
        inputs: Inputs,
        targets: Rows | None = None,
        position_ids: Tensor | None = None,
        document_ids: Rows | None = None,
        *,
        lengths: Lengths = None,
        sequence_values: Tensor | None = None,
        plan: StepPlan | None = None,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Runs forward and backward of one batch: adds to `.grad` and returns the global mean loss. Collective.

        Args:
            inputs: (batch, sequence) token ids, int64; of an nn.Sequential what its first layer takes, rows first. Or a
                list of (tokens,) tensors, with lists of targets and document_ids: sequences of different lengths, which
                are packed into `num_microbatches` rows of about equal cost; the row that takes longest has `slices`
                slices, others accordingly. Of an nn.Sequential with CutTokens each sequence is a microbatch. Or a
                mapping as a data collator of transformers makes it, with input_ids, labels and, if any, attention_mask
                and position_ids, (batch, sequence) each. Padding at the right is left out as with `lengths`.
            targets: (batch, sequence) labels, unshifted as in transformers; -100 counts nowhere. Of an nn.Sequential
                what the loss function takes, rows first. Leave it out beside a mapping.
            position_ids: (batch, sequence); default: from 0 in every document.
            document_ids: (batch, sequence); tokens attend within runs of equal ids. Without them documents start, as in
                transformers, where position_ids don't count on.
            lengths: the tokens of each row where sequences of different lengths are padded to one.
            sequence_values: (sequences, ...), what the function of a SequenceLoss takes besides log-probabilities.
            plan: which sequences of a list form which microbatch, the slices of each, and the order; default: see
                `inputs`.
            loss_scale: a factor of the loss, so that small gradients of float16 don't vanish; they are divided by it at
                the end. A power of two changes none of their digits.

        Returns:
            A float64 scalar, equal on every rank.

        Raises:
            SlipstreamError: the tensors don't fit the pipeline, no target counts, or a rank would hold more than the
                memory limit; before anything runs.
        """
        of_rows = position_ids, document_ids, lengths, sequence_values
        whole = self._batch(inputs, targets, *of_rows, plan is not None)
        return self._engine.step(whole, loss_scale, plan)

    def prepare(self, lengths: Sequence[int]) -> None:
        """Starts to plan a step on sequences of these lengths, in tokens, and returns at once; `step` on such sequences
        then finds its plan. Call it before the step before, on every rank; where it isn't called, and with a memory
        limit before the first step, `step` plans."""
        self._engine.prepare([int(length) for length in lengths])

    def evaluate(
        self,
        inputs: Inputs,
        targets: Rows | None = None,
        document_ids: Rows | None = None,
        *,
        lengths: Lengths = None,
        sequence_values: Tensor | None = None,
        plan: StepPlan | None = None,
    ) -> Tensor:
        """Runs one batch forward only, in evaluation mode, and returns the global mean loss. Collective; arguments,
        result and errors are those of `step`."""
        of_rows = None, document_ids, lengths, sequence_values
        whole = self._batch(inputs, targets, *of_rows, plan is not None)
        return self._engine.evaluate(whole, plan)

    def sequence_log_probabilities(self) -> Tensor:
        """Returns the log-probability of each sequence of the last step or evaluation with a SequenceLoss, (sequences,)
        float64, in the order of the batch, on all ranks of a pipeline: what the loss's function was given. Collective.

        Raises SlipstreamError where the loss isn't a SequenceLoss, or nothing has run yet.
        """
        return self._engine.sequence_log_probabilities()

    def logits(
        self,
        inputs: Inputs,
        position_ids: Tensor | None = None,
        document_ids: Rows | None = None,
        *,
        lengths: Lengths = None,
    ) -> Tensor | list[Tensor] | None:
        """Runs a batch of token ids forward, in evaluation mode, and returns the logits of every token. Collective.

        Arguments are those of `step`; labels of a mapping are left alone. All logits of the batch are held at once on
        the rank that has the last stage, twice while they are put together; every other rank holds what `evaluate`
        does. For the log-probabilities of some labels, `log_probabilities` needs a slice's logits at a time.

        Returns:
            (batch, sequence, vocabulary) in the model's dtype, of a list a list of (tokens, vocabulary); zeros at
            padding. Only on ranks that have the last stage, with tp on each of those; None on the others. With dp the
            logits of this replica's own share.

        Raises:
            SlipstreamError: as `step`, and where no rank has all logits, with vocabulary="spread".
        """
        whole = self._batch(inputs, None, position_ids, document_ids, lengths, needs_labels=False)
        outputs = self._engine.logits(whole)
        return None if outputs is None else padded_as(outputs, inputs)

    def log_probabilities(
        self,
        inputs: Inputs,
        labels: Rows | None = None,
        position_ids: Tensor | None = None,
        document_ids: Rows | None = None,
        *,
        lengths: Lengths = None,
    ) -> Tensor | list[Tensor]:
        """Runs a batch forward, in evaluation mode, and returns the log-probability of every label. Collective.

        Arguments are those of `step`. No rank holds more than in `evaluate`, but for the result: the last stage has
        the logits of one slice at a time.

        Returns:
            (batch, sequence) float64, of a list a list of (tokens,), on every rank: of each label, its log-probability
            given the tokens before it. Zero where none counts, at -100 and at the first token of a row or document, so
            that a row's sum is that of the sequence. With dp those of this replica's own share.

        Raises:
            SlipstreamError: as `step`, though a batch without a label that counts is fine, and with
                vocabulary="spread".
        """
        if labels is None and not isinstance(inputs, Mapping):
            raise SlipstreamError("labels are missing: give log_probabilities(tokens, labels), or a mapping with both.")
        whole = self._batch(inputs, labels, position_ids, document_ids, lengths)
        return padded_as(self._engine.log_probabilities(whole), inputs)

    def _batch(self, inputs: Inputs, *others: Any, **options: Any) -> WholeBatch | Sequences:
        if isinstance(inputs, Mapping):
            causal_lm(self._engine.family, "a mapping as a batch", "Give step(inputs, targets).")
        return given_batch(self._engine.ranks, self.device, inputs, *others, **options)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields what this rank's optimizer updates, under the unsplit model's names, each once: with tp its share of a
        weight, with shard_optimizer its rows of that, and with master_dtype copies."""
        return self._engine.parameters.named()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields this rank's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def parameter_shards(self) -> Iterator[ParameterShard]:
        """Yields what `named_parameters` does, each with its place in the unsplit parameter: for checkpoints."""
        return self._engine.parameters.shards()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before, a
        float64 scalar. A weight counts once, however many ranks have copies of it. Collective."""
        return self._engine.parameters.clip_(max_norm)

    def timeline(self) -> Timeline:
        """Returns what ran when in the last step or evaluation, in seconds, on all ranks. Collective."""
        return self._engine.runner.timeline()

    def memory_table(self, inputs: Tensor, targets: Tensor, microbatch: int = 0) -> MemoryTable:
        """Measures the bytes that this process's stages of a causal LM hold in a step on such a batch. Collective. For
        `slipstream.simulator.memory_of`, which adds the parts up by a schedule; where microbatches differ, of one."""
        return rehearse(self._engine.rehearsed_step(WholeBatch.of(self.device, inputs, targets)), microbatch)

    def refresh(self) -> None:
        """Takes over changes of what `named_parameters` yields that training didn't make: of a loaded checkpoint."""
        self._engine.parameters.refresh()

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of PEFT that is trained, its name and configuration; None where the model has none."""
        return self.trained_weights.adapter

    @property
    def trained_weights(self) -> TrainedWeights:
        """What was trained of a causal LM when the pipeline was made: all weights, all but some, or an adapter."""
        return getattr(self._engine.family, "trained", ALL_WEIGHTS)

    def save(
        self,
        folder: str | Path,
        step: int,
        *,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
        facts: Mapping[str, Any] = MappingProxyType({}),
        keep: int = 2,
        replace: bool = False,
    ) -> None:
        """Saves a checkpoint of this step in the folder and returns when it is complete; `load` goes on from it on any
        mesh. Collective. Of a model with an adapter it has the adapter alone.

        Args:
            folder: of checkpoints, on a disk that all ranks share.
            step: the number of steps so far; the checkpoint's name has it.
            optimizer: of any class, over `parameters()`.
            scheduler: of the learning rate.
            facts: anything else that the loop needs to go on: numbers, text, and lists and dicts of them; rank 0's.
            keep: how many of the newest checkpoints stay.
            replace: whether checkpoints of this step and later ones are set aside; else they are an error.

        Raises:
            SlipstreamError: on every rank, where it wasn't saved; earlier checkpoints stay as they are.
            NonFiniteError: on every rank, where something that is to be saved isn't finite.
        """
        save_loop(self._engine, (folder, step), optimizer, scheduler, facts, keep, replace)

    def load(
        self,
        folder: str | Path,
        step: int | Literal["latest", "last-good"] = "latest",
        *,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Loads what `save` saved: this rank's part of the model, the optimizer's state and options, the scheduler and
        the state of dropout; returns the step and the facts. Collective.

        Args:
            folder: of checkpoints.
            step: which one; "last-good": the newest that isn't damaged.
            optimizer: of the class that was saved, with as many parameter groups. None loads weights alone.
            scheduler: of the class that was saved.

        Raises:
            SlipstreamError: on every rank and before anything changes, where there is no checkpoint, it is damaged, or
                it is of another model.
        """
        return load_loop(self._engine, (folder, step), optimizer, scheduler)

    def save_pretrained(self, folder: str | Path, merged: bool = False) -> None:
        """Writes the whole model as `AutoModelForCausalLM.from_pretrained` reads it; rank 0 writes. Collective.

        Of a model with an adapter it writes the adapter alone, as `PeftModel.from_pretrained` reads it, or with
        `merged` the model with the adapter added to its weights. Raises SlipstreamError for an nn.Sequential.
        """
        family = causal_lm(self._engine.family, "save_pretrained")
        state, config, adapter = self._engine.state_dict(), family.config, family.adapter
        if adapter is None:
            save_on_leader(lambda: write_model(folder, config, state), self._engine.ranks)
        else:
            write = write_merged if merged else write_adapter
            save_on_leader(lambda: write(folder, config, adapter, state), self._engine.ranks)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the whole model's state by the unsplit model's names, in host memory, on rank 0; an empty dict on the
        others. Collective."""
        return self._engine.state_dict()

    def train(self) -> Self:
        """Sets training mode: dropout is on."""
        self._engine.train(True)
        return self

    def eval(self) -> Self:
        """Sets evaluation mode: dropout is off."""
        self._engine.train(False)
        return self

    def __repr__(self) -> str:
        """Returns a few lines: the layers of every stage, the schedule, the slices, the mesh and the parameters here,
        those that `named_parameters` yields."""
        return summarise(self._engine)

    if not TYPE_CHECKING:

        def __call__(self, *inputs: Any, **options: Any) -> Never:
            raise SlipstreamError(ANSWERS["__call__"])

        def __getattr__(self, name: str) -> Any:
            answer = ANSWERS.get(name)
            raise AttributeError(f"a Pipeline has no attribute {name!r}{f': {answer}' if answer else ''}")
