"""Causal LMs of transformers, whose batches are split into microbatches and token slices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from math import inf
from typing import Never

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.cost import Costs, CountedOperations, CountedSource, ModelCount, typical_cluster, with_exchange
from slipstream.errors import SlipstreamError
from slipstream.model import (
    IGNORED,
    CausalLMStage,
    GivenModel,
    HeadNames,
    NamedWeights,
    RecomputePolicy,
    SelfCheck,
    add_embedding_noise,
    causal_cross_entropy,
    check_carried_state,
    check_compiler,
    check_counted_positions,
    check_length,
    check_packed,
    check_trainable,
    copy_with_shared_weights,
    find_anatomy,
    find_spreadable_head,
    longest_packed_sequence,
    longest_sequence,
    meta_model,
    separate_modules,
    tied_names,
    token_cross_entropy,
    torch_dtype,
)
from slipstream.model.hooks import TokenSlice
from slipstream.number_format import AUTOCAST, BFLOAT16
from slipstream.parallel import Ranks, SharedStages, check_sharing, check_tensor_parallel, room_of_rank
from slipstream.parallel.tensor import TensorParallel, vocabulary_cross_entropy, vocabulary_token_losses
from slipstream.pipeline.batch import Batch, places
from slipstream.pipeline.cut_batch import SplitBatch, consecutive_groups, cut_batch, rows_of
from slipstream.pipeline.execution.given_losses import GivenLosses, StageWeights
from slipstream.pipeline.execution.losses import Losses, OutputForms, SliceLosses
from slipstream.pipeline.execution.sequence_losses import SequenceLosses
from slipstream.pipeline.families.causal_lm_checks import ChangedModel
from slipstream.pipeline.families.causal_lm_layout import (
    check_context,
    find_router_loss,
    host_context_refusal,
    load_layers,
    plan_layout,
    planned_vocabulary,
    spread_heads,
)
from slipstream.pipeline.families.counted_step import CountedStep
from slipstream.pipeline.families.flop_estimate import FlopEstimate, flop_rates
from slipstream.pipeline.families.model_family import ModelFamily
from slipstream.pipeline.families.stage_layout import StageLayout
from slipstream.pipeline.loss_sequences import (
    NO_FUNCTION_OF_VALUES,
    check_groups,
    check_sequences,
    grouped_lengths,
    ungrouped,
    with_sequences,
)
from slipstream.pipeline.pipeline_options import ExpectedBatch, PipelineOptions, SequenceLoss
from slipstream.pipeline.planning import (
    NOMINAL_LENGTH,
    ContextPlace,
    CountedPlans,
    LoneRankPlans,
    RankRoom,
    StartRequest,
    StepSettings,
    context_place,
    is_free,
    may_split,
    measure_rates,
    plan_start,
)
from slipstream.pipeline.token_values import LABELS
from slipstream.pipeline.weight_source import WeightSource
from slipstream.planner import Plan
from slipstream.planner.joint import JointPlan, JointProblem
from slipstream.planner.ragged import StageRates
from slipstream.profile import count_model
from slipstream.schedule import USUAL_SLICES, Schedule, SlicedMicrobatch, slice_lengths
from slipstream.units import bytes_text

# Entries of configurations that are the token id in whose place a model puts an image, a sound or a video.
_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")


class CausalLMFamily(ModelFamily):
    """Makes a rank's part of a causal LM: its stages, cut over the ranks that share them, and their loss."""

    default_slices = USUAL_SLICES
    leaves_out_frozen = True

    def __init__(self, source: WeightSource, options: PipelineOptions, ranks: Ranks, device: torch.device) -> None:
        """Takes the model that a source describes, and moves it to these ranks. Collective. Raises as `move_to`."""
        self.config: PretrainedConfig = source.config
        self.name = str(self.config.model_type)
        self.beside = source.beside
        self.compiled = source.compiled
        self.trained = source.trained
        self.adapter = source.trained.adapter
        # The source is dropped once the stages are made, as it may have other ranks' layers.
        self._source: WeightSource | None = source
        self.move_to(options, ranks, device)

    def move_to(self, options: PipelineOptions, ranks: Ranks, device: torch.device) -> None:
        """Takes other options and ranks, as long as no stages are made; nothing of the model is read again. Collective:
        a toy of the architecture is compared sliced and whole, and cut over the ranks that share layers and whole.

        Raises SlipstreamError where the model can't be trained so.
        """
        for name in sorted(options.layers.model_fields_set):
            raise SlipstreamError(
                f"layers.{name}=...: an option of nn.Sequential models, but the model is a causal LM. Leave it out."
            )
        self._sequence_loss = options.loss_fn if isinstance(options.loss_fn, SequenceLoss) else None
        if options.loss_fn is not self._sequence_loss and ranks.tensor.size > 1:
            raise SlipstreamError(
                "loss_fn with tensor parallelism: no rank has all logits, only those of its part of the vocabulary. "
                "Leave it out for cross-entropy, or use a mesh with tp=1."
            )
        if self._sequence_loss is not None and options.router_loss != "none":
            raise SlipstreamError(
                f"router_loss={options.router_loss!r} with a SequenceLoss: its share of a loss of sequences isn't "
                "defined. Leave router_loss out."
            )
        self._router_loss = ranks.run_on_leader(
            lambda: find_router_loss(self.config, options.router_loss, ranks.tensor.size)
        )
        self._options = options
        self._ranks = ranks
        self._device = device
        if options.runtime.fused:
            check_compiler(device.type)
        self._self_check: SelfCheck | None = None
        # This cached length depends on the self-check, which is made anew.
        vars(self).pop("_longest_packed", None)
        if options.runtime.self_check:
            is_cut = options.slices != 1 or bool(ranks.token_axes)
            self._self_check = ranks.run_on_leader(lambda: check_trainable(self.config, is_cut))
        parallel, degrees = options.parallel, ranks.degrees
        ranks.run_on_leader(lambda: check_sharing(self.config, degrees, parallel, self.adapter))
        if options.runtime.self_check and degrees.tensor > 1:
            cut = parallel.tensor_plan, ranks.tensor, parallel.sequence_parallel, degrees.experts == 1
            check_tensor_parallel(self.config, *cut)
        self._anatomy = find_anatomy(self.config)
        self._check_compiled_parts()
        self._changed: ChangedModel | None = None
        assert self._source is not None
        if (given := self._source.given or GivenModel.of_config(self.config)) is not None:
            self._changed = self._tried(self._source, given)
            self._anatomy = self._changed.outlined(self._anatomy)
        self._restricts_pieces = self._changed is not None and self._changed.restricts_pieces
        self._head_names: HeadNames | None = None  # None unless the head is spread
        # whether no layer carries state that slices don't
        self._may_cut = self._self_check is not None and not self._self_check.refusal
        self._longest = longest_sequence(self.config) or inf
        self._stages: dict[int, CausalLMStage] = {}
        self._elsewhere = NamedWeights()  # weights outside the last stage, of a model in memory

    def _tried(self, source: WeightSource, given: GivenModel) -> ChangedModel:
        """Returns the parts that the changes of a model in memory keep from being computed apart. Collective."""
        model = None if source.given is None else source.load(self._anatomy, [], None)
        if model is not None and given.shared:
            layers = model.get_submodule(self._anatomy.layers)
            separate_modules([(layers, name, layer) for name, layer in layers._modules.items() if layer is not None])
        parts = given, model, self._anatomy, self._self_check
        return ChangedModel.tried(*parts, self._ranks, self._options)

    @cached_property
    def _longest_packed(self) -> float:
        """The longest sequence of several documents, in tokens, with a self-check or without."""
        return longest_packed_sequence(self.config) if self._self_check is None else self._self_check.longest_packed

    @cached_property
    def _outline(self) -> PreTrainedModel | None:
        """The whole model on the meta device, with its adapter and frozen parameters; None where all is trained."""
        return None if self.trained.are_all else self.trained.apply(meta_model(self.config))

    def balance(self, layout: StageLayout) -> Never:
        raise SlipstreamError(
            "balance is for an nn.Sequential, but this pipeline's model is a causal LM: `slipstream plan` says how "
            "even its ranks are."
        )

    @property
    def is_tied(self) -> bool:
        """Whether the head's weight embeds too."""
        return bool(self._anatomy.tied)

    def planned_vocabulary(self, num_ranks: int) -> str:
        """Returns where a plan has the head's rows, OPEN where it may choose. Raises SlipstreamError for a head that
        can't be as the options say."""
        asked = self.config, self._anatomy, num_ranks, self._ranks.tensor.size, self._options
        vocabulary: str = self._ranks.run_on_leader(lambda: planned_vocabulary(*asked))
        return vocabulary

    def start_request(self, num_ranks: int, expected: ExpectedBatch) -> StartRequest:
        """Returns the request for a plan for such batches. Collective, as `planned_vocabulary`."""
        options = self._options
        is_autocast = torch.is_autocast_enabled(self._device.type)
        wide = AUTOCAST if is_autocast else str(self.config.dtype or torch.float32).removeprefix("torch.")
        open_fields = {
            "num_microbatches": expected.num_microbatches or options.num_microbatches,
            "dtype": expected.dtype or options.precision.dtype or wide,
        }
        return StartRequest(
            **vars(expected) | open_fields,
            num_ranks=num_ranks,
            replicas=self._ranks.data.size,
            memory_limit=options.memory.limit,
            host_limit=options.memory.host_limit,
            vocabulary=self.planned_vocabulary(num_ranks),
            parallel=options.parallel,
            context=options.memory.context,
            context_gradients=options.memory.context_gradients,
            optimizer=options.memory.optimizer,
            loss_tokens=options.memory.loss_tokens or 0,
            tied=self.is_tied,
            trained=self.trained,
        )

    def place_context(self, options: PipelineOptions, num_ranks: int) -> ContextPlace:
        length = options.row_length
        if length is None and isinstance(options.slices, Sequence) and not isinstance(options.slices, str):
            length = sum(options.slices)
        if length is None and options.expected is not None:
            length = options.expected.longest
        if length is None:
            raise SlipstreamError(
                "memory.context='auto' is decided by the tokens of a sequence: give seq_len=..., or "
                "memory.context='device' or 'host'."
            )
        expected = options.expected or ExpectedBatch(length)
        memory = options.memory
        asked = self.start_request(num_ranks, replace(expected, seq_len=length))
        request = replace(asked, context="device", offload=memory.offload)
        usual = StepSettings(options, num_ranks, self.default_slices, self.compiled).usual
        slices = slice_lengths(usual.slices, length) if isinstance(usual.slices, int) else usual.slices
        degrees = options.parallel.shared_by(self._ranks.degrees)

        def held() -> float:
            count = self._count(length, request.dtype)
            shared = with_exchange(count, degrees, is_whole=len(slices) == 1)
            costs = CountedOperations(count, shared, request.microbatch_size, options.parallel.sequence_parallel)
            plan = Plan(schedule=usual.schedule, slices=tuple(slices), recompute=str(memory.recompute))
            peaks = request.usual_peaks(costs, plan)
            # Ranks of one process share its device.
            return max(peaks) if memory.limit is not None or self._ranks.pipeline.size > 1 else sum(peaks)

        def decide() -> ContextPlace:
            room = memory.limit if memory.limit is not None else min(rooms)
            return context_place(
                held, room, host_context_refusal(self._anatomy, f"model_type {self.config.model_type!r}")
            )

        rooms = self._ranks.world.gather(room_of_rank(self._device, self._ranks.world.size))
        place: ContextPlace = self._ranks.run_on_leader(decide)
        return place

    def is_open(self, options: PipelineOptions) -> bool:
        """Returns whether a plan is to decide where to cut, and can: compiled layers aren't measured."""
        return is_free(options) and not self.compiled

    def plan(self, num_ranks: int, say: Callable[[str], None]) -> tuple[JointPlan, StageRates]:
        assert self._options.expected is not None
        request = self.start_request(num_ranks, self._options.expected)
        return plan_start(self.config, request, self._ranks, self._device, say)

    def counted_plans(self, options: PipelineOptions, num_ranks: int) -> CountedPlans | LoneRankPlans:
        expected = options.expected
        num_microbatches = (expected and expected.num_microbatches) or options.num_microbatches
        in_flush = max(1, num_microbatches // options.memory.num_flushes)
        longest = int(min(self._longest, max(NOMINAL_LENGTH, 0 if expected is None else expected.seq_len)))
        dtype = None if expected is None else expected.dtype
        request = self.start_request(num_ranks, ExpectedBatch(longest, num_microbatches=in_flush, dtype=dtype))
        degrees = options.parallel.shared_by(self._ranks.degrees)
        stays_whole = bool(self._anatomy.kept_whole) or self._restricts_pieces
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None

        @cache
        def source(seq_len: int) -> CountedSource:
            count = self._count(seq_len, request.dtype, halves=not stays_whole)
            if not count.num_trained:
                raise SlipstreamError("nothing is trained")
            cluster = typical_cluster(device, self._ranks.world.size * (num_ranks // self._ranks.pipeline.size))
            return CountedSource(count, cluster, self.name, options.parallel.sequence_parallel, options.runtime.fused)

        def costs(seq_len: int, num_rows: int) -> Costs:
            counted = source(seq_len)
            return counted.costs(with_exchange(counted.model, degrees, is_whole=False), num_rows)

        if num_ranks == 1:
            # Windows longer than a sequence are none.
            account = CountedStep(
                options, self.compiled, request, lambda length, rows: costs(max(length, longest), rows), self._whole
            )
            return LoneRankPlans(options, self._ranks, account, self._room(options), longest, self._useless(options))

        def problem(length: int, num_rows: int) -> JointProblem:
            asked = replace(request, seq_len=length, microbatch_size=num_rows)
            return replace(asked.problem(costs(longest, num_rows), length), split=may_split(options, self.compiled))

        return CountedPlans(options, num_ranks, self._ranks, problem, longest)

    def _count(self, seq_len: int, dtype: str, halves: bool = True) -> ModelCount:
        """Returns the model's operations on a sequence, of halves of layers each where they may be cut."""
        computed = torch_dtype(BFLOAT16.name if dtype == AUTOCAST else dtype)
        assert computed is not None
        return count_model(self.config, seq_len, computed, self.trained, self._options.runtime.fused, halves=halves)

    def _whole(self) -> PreTrainedModel:
        """Returns the whole model on the meta device, as it is trained."""
        return meta_model(self.config) if self._outline is None else self._outline

    def _room(self, options: PipelineOptions) -> RankRoom:
        """Returns the memory that a rank may fill."""
        if options.memory.limit is not None:
            return RankRoom(options.memory.limit, f"memory.limit is {bytes_text(options.memory.limit)}")
        size = None if options.expected is None else options.expected.device_memory
        size = room_of_rank(self._device, self._ranks.world.size) if size is None else size
        here = "this GPU" if self._device.type == "cuda" else "this machine"
        return RankRoom(size, f"{here} has room for {bytes_text(size)}")

    def _useless(self, options: PipelineOptions) -> set[str]:
        """Returns settings of `memory` that save nothing here, or are refused."""
        useless = set[str]()
        if self._device.type != "cuda" or options.parallel.shard == "parameters":
            useless.add("optimizer")
        if self._anatomy.attends_itself or options.runtime.cuda_graphs:
            useless.add("context")
        return useless

    def completed(self, options: PipelineOptions) -> PipelineOptions:
        return options.measured()

    def measured_rates(
        self, layout: StageLayout, length: int, num_rows: int, say: Callable[[str], None]
    ) -> StageRates | None:
        if self.compiled:
            return None
        request = self.start_request(layout.num_ranks, ExpectedBatch(length, num_rows))
        partition = [stage.stop - stage.start for stage in layout.layers]
        setting = "none" if layout.recompute is None else str(layout.recompute.setting)
        again = setting if setting in ("full", "stage", "stage+full") else "none"
        return measure_rates(self.config, request, partition, self._ranks, self._device, say, again)

    def begin_step(self) -> None:
        """Does nothing: a causal LM has no statistics of a mini-batch."""

    def end_step(self) -> None:
        """Does nothing, as `begin_step`."""

    def lay_out(self, schedule: Schedule, slices: int | Sequence[int]) -> StageLayout:
        if (slices != 1 or self._ranks.token_axes) and not self._may_cut:
            self._check_cut()
        shared = self._ranks.tensor.size, self._options.reduces_gradients(self._ranks.share_gradients)
        draws = self.adapter is not None and self.adapter.draws
        layout, self._anatomy = plan_layout(
            self.config, self._anatomy, schedule, slices, self._options, *shared, draws, self._outline
        )
        if self._changed is not None:
            self._changed.check_layout(layout, self._anatomy)
        if layout.recompute is not None and layout.recompute.num_layers:
            self._check_layers_run_alone(layout.recompute)
        if layout.spreads_vocabulary:
            self._head_names = find_spreadable_head(self.config, self._anatomy)
        return layout

    def _check_compiled_parts(self) -> None:
        """Raises SlipstreamError, the same on every rank, for a part that torch.compile runs and that has all
        layers."""
        for name in self.compiled:
            if name == "the model" or f"{self._anatomy.layers}.".startswith(f"{name}."):
                raise SlipstreamError(
                    f"torch.compile runs {name}, which has all layers, but each stage runs some of them. Leave its "
                    "compile() out: call layer.compile() on each of its layers, or give "
                    "runtime=slipstream.Runtime(fused=True)."
                )

    def _check_layers_run_alone(self, recompute: RecomputePolicy) -> None:
        """Raises SlipstreamError, the same on every rank, for whole layers that torch.compile runs: the hooks that keep
        a layer's input would be compiled with it."""
        for name in self.compiled:
            inside = name.removeprefix(self._anatomy.layers).lstrip(".")
            if name == "the model" or "." not in inside:
                raise SlipstreamError(
                    f"memory.recompute={recompute.setting!r} with {name}, which torch.compile runs as a whole: compile "
                    "parts of its layers, or give memory.recompute='stage'."
                )

    def make_stages(self, layout: StageLayout) -> tuple[dict[int, CausalLMStage], TensorParallel | None]:
        here = layout.stages_of(self._ranks.here(layout.num_ranks))
        parts = [layer for stage in here for layer in layout.layers[stage]]
        model = load_layers(self._taken_source(), self._anatomy, parts, self._options, layout.spreads_vocabulary)
        shared = SharedStages.of(self.config, self._anatomy, self._ranks, self._options.parallel, self.adapter)
        shared.shard(model)
        if self._changed is not None:
            last = len(layout.layers) - 1
            self._elsewhere = self._changed.weights.of(
                lambda name: self._anatomy.stages_of(name, layout.layers) != {last}
            )
        names = self._head_names if layout.spreads_vocabulary else None
        heads = {} if names is None else spread_heads(model, names, layout.training, here)

        anatomy = self._anatomy
        if self._changed is not None and self._changed.given.dispatched.attention is not None:
            # The user's attention function is kept, so no other is chosen.
            anatomy = replace(anatomy, attends_itself=True)
            check_context(anatomy, self._options, "the attention function that was given")

        def made() -> dict[int, CausalLMStage]:
            stages = {}
            for g in here:
                stages[g] = CausalLMStage(
                    *(copy_with_shared_weights(model), anatomy, layout.layers[g], self._device),
                    head=heads.get(g),
                    router_loss=self._router_loss,
                    recompute=layout.recompute,
                    loss_tokens=self._options.memory.loss_tokens,
                    # Graphs repeat kernels on fixed memory.
                    inputs_on_host=0.0 if self._options.runtime.cuda_graphs else layout.offload,
                    **vars(shared),
                )
            return stages

        # a stage's own layers may have heads that can't be spread over the ranks that share its slices
        self._stages = made() if shared.exchange is None else self._ranks.world.all_or_none(made)
        return self._stages, shared.tensor

    def add_embedding_noise(self, alpha: float, length: int) -> None:
        if self._ranks.tensor.size > 1 or any(stage.embeds_by_parts for stage in self._stages.values()):
            raise SlipstreamError(
                "noise on embeddings with an embedding that ranks share (tensor parallelism, or a tied one in a "
                "vocabulary that is spread): it hasn't been shown to be exact. Use tp=1 and vocabulary='whole'."
            )
        for stage in self._stages.values():
            if stage.is_first:
                add_embedding_noise(stage, alpha, length)

    def _taken_source(self) -> WeightSource:
        """Returns the source and drops it here, as it may have layers of other ranks."""
        assert self._source is not None
        source, self._source = self._source, None
        return source

    def losses(self, tensor: TensorParallel | None) -> Losses:
        """Returns how the last stage computes its loss: the one given, or cross-entropy over the whole vocabulary, of
        which a rank may have a part."""
        loss_fn = self._options.loss_fn
        part = None if tensor is None else (self._ranks.tensor, tensor.first_id, IGNORED)
        if isinstance(loss_fn, SequenceLoss):
            of_tokens = token_cross_entropy if part is None else vocabulary_token_losses(*part)
            return SequenceLosses(loss_fn, of_tokens, self._ranks.sharing)
        if part is not None:
            return SliceLosses(vocabulary_cross_entropy(*part))
        if loss_fn is not None:
            num_replicas, num_sharing = self._ranks.data.size, self._ranks.sharing.size
            here = (pair for stage in self._stages.values() if stage.has_loss for pair in stage.named_parameters())
            weights = StageWeights(NamedWeights(here), self._elsewhere)
            return GivenLosses(loss_fn, weights, num_replicas, self._options.router_loss != "none", num_sharing)
        return SliceLosses(causal_cross_entropy)

    def with_every_name(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        names_of_each = tied_names(self._outline or meta_model(self.config)) if state else []
        present = ((names, next((name for name in names if name in state), None)) for names in names_of_each)
        named = {name: state[first] for names, first in present if first is not None for name in names}
        return state | named

    def output_forms(self, piece: TokenSlice, targets: Tensor) -> OutputForms:
        """Returns the logits of a slice with these targets (b, T)."""
        config = self.config.get_text_config()
        # A configuration's dtype may be a name or a torch dtype.
        named = str(self._options.precision.dtype or config.dtype or "float32")
        dtype = torch_dtype(named.removeprefix("torch.")) or torch.float32
        return OutputForms([(*targets.shape, config.vocab_size)], [dtype], [1])

    def weight_holders(self, layout: StageLayout) -> dict[str, list[int]]:
        placement = layout.training.placement
        tied = () if layout.spreads_embedding else self._anatomy.tied
        holders = {embedding: [placement[0], placement[-1]] for _, embedding in tied}
        for names in self._anatomy.shared:
            stages = sorted(set[int]().union(*(self._anatomy.stages_of(name, layout.layers) for name in names)))
            holders[names[0]] = [placement[stage] for stage in stages]
        return holders

    def lengths(self, batch: Batch) -> list[int]:
        """Returns the tokens of each sequence. Raises SlipstreamError for tensors that don't fit the model."""
        batch.check_form()
        lengths: list[int] = []
        labels = batch.companions[LABELS.name]
        for (place, inputs), (_, targets) in zip(places(batch.inputs[0]), places(labels), strict=True):
            if inputs.shape[-1] > self._longest:
                check_length(self.config, inputs.shape[-1], f"the length of inputs{place}" if place else "")
            check_token_ids(self.config, inputs, targets, place)
            if self._anatomy.skips_padding:
                self._check_positions(inputs if inputs.dim() > 1 else inputs[None])
            lengths += [inputs.shape[-1]] * (1 if place else len(inputs))
        if labels.rows is not batch.inputs[0].rows:
            batch.check_labels_are_unshifted()
        if self._sequence_loss is not None:
            check_sequences(self._sequence_loss, batch)
        elif batch.sequence_values is not None:
            raise SlipstreamError(NO_FUNCTION_OF_VALUES)
        return lengths

    def split(
        self, batch: Batch, microbatches: Sequence[SlicedMicrobatch], seed: int, groups: Sequence[Sequence[int]] = ()
    ) -> SplitBatch:
        """Returns the microbatches and slices of a batch; where its sequences differ in length, each of these groups is
        a row, of sequences planned as one. Raises SlipstreamError where slices or documents can't be exact."""
        loss = self._sequence_loss
        groups = ungrouped(loss, groups) if groups else ()
        cut = cut_batch(batch, microbatches, seed, groups)
        if self._changed is not None and self._restricts_pieces:
            self._changed.check_batch(cut)
        for first, *others in cut.slices:
            has_documents = first.document_start is not None
            if not self._may_cut and (others or has_documents):
                self._check_cut()
            if has_documents:
                check_packed(self.config, self._longest_packed, first.length)
        if loss is None:
            return cut
        if not groups:
            check_groups(loss, microbatches)
        return with_sequences(cut, loss, batch, groups or rows_of(microbatches))

    def planned_lengths(self, lengths: Sequence[int]) -> list[int]:
        """Returns the tokens of sequences that a step plans as one: those that have one loss together."""
        return grouped_lengths(self._sequence_loss, lengths)

    def groups(self, lengths: Sequence[int], num_microbatches: int) -> tuple[tuple[int, ...], ...]:
        return consecutive_groups(lengths, num_microbatches)

    def rates(self, layout: StageLayout) -> StageRates:
        has_head = not layout.spreads_vocabulary
        model = FlopEstimate(self.config, self._anatomy, None, has_head, self._outline)
        return flop_rates(model, self._anatomy.halves, layout.layers, layout.recompute)

    def _check_positions(self, inputs: Tensor) -> None:
        # Of tokens (b, T): a slice may not know their positions.
        check_counted_positions(self.config, inputs, self._anatomy.first_position(self.config))

    def _check_cut(self) -> None:
        """Raises SlipstreamError where a layer carries state that slices and documents don't, self-check or not."""
        if self._self_check is not None:
            raise SlipstreamError(self._self_check.refusal)
        check_carried_state(self.config, self._anatomy)
        self._may_cut = True


def check_token_ids(config: PretrainedConfig, inputs: Tensor, labels: Tensor, place: str = "") -> None:
    """Raises SlipstreamError for a token id outside the model's vocabulary, and for one that stands for an image, a
    sound or a video: the pipeline runs a model on text alone.

    `inputs` and `labels` are (batch, sequence), or (tokens,) each of the sequence at `place` of a list, such as [3].
    """
    size = config.get_text_config().vocab_size
    if not inputs.numel() or not labels.numel():
        raise SlipstreamError(
            f"the batch has no tokens: inputs are {tuple(inputs.shape)}, labels {tuple(labels.shape)}. Give at least "
            "one sequence."
        )
    not_ids = (inputs < 0) | (inputs >= size)
    not_labels = (labels != IGNORED) & ((labels < 0) | (labels >= size))
    # A single message from the device says that both are fine.
    if bool((not_ids | not_labels).any()):
        _raise_outside("inputs", inputs, not_ids, size, place)
        _raise_outside("labels", labels, not_labels, size, place)
    for name, token in vars(config).items():
        if _PLACEHOLDER.fullmatch(name) and isinstance(token, int) and bool((inputs == token).any()):
            raise SlipstreamError(
                f"the inputs have token {token}, {name} of {config.model_type!r}, which the model replaces by what "
                "isn't text. Only text is trained here: leave such samples out."
            )


def _raise_outside(name: str, ids: Tensor, is_outside: Tensor, size: int, place: str) -> None:
    """Raises SlipstreamError that names the first id outside of the vocabulary, if there is one."""
    indices = is_outside.nonzero()
    if not len(indices):
        return
    index = indices[0].tolist()
    where = f"{name}{place}[{', '.join(map(str, index))}]"
    allowed = "-100 where a label counts nowhere, " if name == "labels" else ""
    advice = "Use the tokenizer the model was made for, or a config with a larger vocab_size."
    if name == "labels" and int(ids[tuple(index)]) < 0:
        advice = "Type labels = labels.masked_fill(labels < 0, -100)."
    raise SlipstreamError(
        f"{where} is {int(ids[tuple(index)])}, but the model has a vocabulary of {size} ({allowed}ids 0 to "
        f"{size - 1}). {advice}"
    )
