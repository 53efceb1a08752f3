"""A Pipeline's model as a sequence of any layers: an nn.Sequential (GPipe section 2.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, chain, pairwise
from typing import Never

import torch
from torch import Tensor, nn

from slipstream.cost import Cluster, MeasuredLink, typical_cluster
from slipstream.errors import SlipstreamError
from slipstream.model import (
    LayerRange,
    NamedWeights,
    RecomputePolicy,
    Tensors,
    compiled_modules,
    cross_entropy,
    torch_dtype,
)
from slipstream.options import SHARED_WORK, Parallelism, host_share
from slipstream.parallel import Ranks
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.cut_batch import SlicedValues, SplitBatch, check_rows, counted, cut_groups
from slipstream.pipeline.execution.given_losses import GivenLosses, StageWeights
from slipstream.pipeline.execution.losses import Losses, OutputForms, SliceLosses
from slipstream.pipeline.families.model_family import Balance, ModelFamily
from slipstream.pipeline.families.sequence_costs import (
    MeasuredLayers,
    SequenceCosts,
    bytes_between,
    measure_layers,
    runs_between,
)
from slipstream.pipeline.families.stage_layout import StageLayout, check_lengths, given_counts
from slipstream.pipeline.loss_sequences import NO_FUNCTION_OF_VALUES
from slipstream.pipeline.pipeline_options import PipelineOptions, SequenceLoss
from slipstream.pipeline.planning import CountedPlans, LayerUnits, is_free, may_split
from slipstream.pipeline.token_values import DOCUMENTS, INPUTS, LABELS, POSITIONS
from slipstream.planner.cuts import Cuts
from slipstream.planner.find_plan import find_plan
from slipstream.planner.joint import JointPlan, JointProblem
from slipstream.planner.partition import partition_layers
from slipstream.profile.link_measurement import measure_link
from slipstream.schedule import Op, Schedule, SlicedMicrobatch, StageSkip
from slipstream.sequential import (
    BatchSlice,
    LayerBoundary,
    SequentialLayer,
    SequentialStage,
    ShapeTrace,
    ShapeTracer,
    as_value,
    check_cut,
    check_reads_on_one_stage,
    check_runs_as_written,
    check_runs_its_children,
    check_weights_on_one_stage,
    compare_slices,
    find_cut,
    find_skip_routes,
    flatten_layers,
    nested_sequences,
)

_SAVE = "Save a sequence by torch.save(pipe.state_dict(), path), which rank 0 has as a whole."


class SequenceFamily(ModelFamily):
    """The family of sequences. A batch is split into microbatches, rows of the inputs; and these into token slices
    from a layer CutTokens on, if there is one."""

    name = "an nn.Sequential"

    def __init__(self, model: nn.Sequential, options: PipelineOptions, ranks: Ranks, device: torch.device) -> None:
        check_runs_its_children(model)
        check_options(model, options, ranks)
        self._options = options
        self._ranks = ranks
        self._has_segments = options.memory.recompute == "segments"
        self._layers = flatten_layers(model)
        self._sequences = nested_sequences(model)
        self._routes = find_skip_routes(self._layers)
        self._cut = find_cut(self._layers)
        self._is_sliced = False
        self._check_count(options.slices if options.microbatches is None else "of microbatches")
        self.compiled = tuple(compiled_modules(model))
        model.to(torch_dtype(options.precision.dtype))
        self._tracer = ShapeTracer(self._layers, device)
        self._costs = self._find_costs()
        self._stages: dict[int, SequentialStage] = {}
        self._elsewhere = NamedWeights()  # weights outside the last stage

    def _check_count(self, slices: object) -> None:
        if slices is None or slices == 1:
            return
        if self._cut is None:
            raise SlipstreamError(
                f"slices={slices!r}: the layers of this nn.Sequential take whole microbatches. Put "
                "slipstream.CutTokens() before those that work token by token or attend by "
                "slipstream.causal_attention; or leave slices out, and raise num_microbatches instead."
            )

    def check_has(self, wanted: str, instead: str = _SAVE) -> Never:
        raise SlipstreamError(
            f"{wanted} is for models of transformers, but this pipeline's is an nn.Sequential. {instead}"
        )

    def is_open(self, options: PipelineOptions) -> bool:
        """Returns whether a plan is to decide where to cut, and can: by an example, of layers that aren't compiled."""
        return is_free(options, None, 1, "auto") and not self.compiled and len(self._layers) > 1

    def plan(self, num_ranks: int, say: Callable[[str], None]) -> tuple[JointPlan, None]:
        """Returns the plan of schedule, slices and partition, from the layers' times on the example. Collective."""
        options = self._options
        whole = BatchSlice(options.layers.example)
        trace = self._tracer.trace(whole, training=True)
        length = 1
        cut = None
        if options.slices == "auto":
            assert self._cut is not None
            cut = self._cut
            length = self._tokens_at_cut(whole, training=True)
            whole = replace(whole, tokens=range(length), length=length)
            trace = self._tracer.trace(whole, training=True)
        say(f"measuring what {len(self._layers)} layers cost")
        link = measure_link(self._tracer.device, self._ranks)
        measure = partial(measure_layers, self._layers, whole, trace, cut, self._tracer.device)
        measured: MeasuredLayers = self._ranks.broadcast(self._ranks.world.all_or_none(measure))
        units = runs_between(len(self._layers), self._may_end_at)
        costs = SequenceCosts(measured, units, bytes_between(trace, cut), link)
        problem = JointProblem(
            costs=costs,
            seq_len=length,
            num_ranks=num_ranks,
            num_microbatches=options.num_microbatches,
            cuts=Cuts.of_rows(length),
        )

        def of_layers(plan: JointPlan) -> JointPlan:
            exact = None if plan.exact is None else of_layers(plan.exact)
            rejected = tuple(map(of_layers, plan.rejected))
            partition = costs.layers_of(plan.partition)
            return replace(plan.cut_as(partition), exact=exact, rejected=rejected, costs=costs)

        found: JointPlan = self._ranks.run_on_leader(lambda: of_layers(find_plan(problem)))
        return found, None

    def counted_plans(self, options: PipelineOptions, num_ranks: int) -> CountedPlans:
        """Returns the plans by the operations that the example takes, or by the costs that are given: of whole
        microbatches, or of as many slices after CutTokens as are given."""
        if self._costs is None:
            raise SlipstreamError("the layers' costs aren't known. Give layers=slipstream.Layers(example=...) or costs")
        may_end = self._may_end_at if self._ranks.leads else lambda place: False
        units = runs_between(len(self._layers), may_end)
        device = self._tracer.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        cluster = typical_cluster(name, num_ranks)
        in_flush = max(1, options.num_microbatches // options.memory.num_flushes)

        @cache
        def costs() -> SequenceCosts:
            return self._counted_costs(units, cluster, options.slices != 1)

        def problem(length: int, num_rows: int) -> JointProblem:
            return JointProblem(
                costs=costs(),
                seq_len=length,
                num_ranks=num_ranks,
                num_microbatches=in_flush,
                cuts=Cuts.of_rows(length),
                split=may_split(options, self.compiled),
            )

        length = 1
        if options.slices != 1 and options.layers.example is not None and self._cut is not None:
            length = self._tokens_at_cut(BatchSlice(options.layers.example), training=True)
        sizes = [len(run) for run in self._ranks.run_on_leader(lambda: units)]
        return CountedPlans(options, num_ranks, self._ranks, problem, length, LayerUnits(sizes))

    def _counted_costs(self, units: Sequence[range], cluster: Cluster, is_cut: bool) -> SequenceCosts:
        """Returns the costs on a typical cluster: of all layers on the example and, where rows are cut, of those after
        CutTokens on slices of it; or in proportion to the costs that are given."""
        example = self._options.layers.example
        rate = cluster.device.matmul_flops("float32")
        cut = self._cut if is_cut and example is not None else None
        if example is None:
            assert self._costs is not None
            seconds = [[cost / sum(self._costs)] for cost in self._costs]
            return SequenceCosts(_times_of(self._layers, seconds, [(1, 0)], cut), tuple(units), 0.0)
        whole = BatchSlice(example)
        trace = self._tracer.trace(whole, training=True)
        points = [(1, 0)]
        least_of_a_layer = cluster.device.kernel_seconds
        every = [[least_of_a_layer + work / rate] for work in counted_costs(trace)]
        if cut is not None:
            length = self._tokens_at_cut(whole, training=True)
            points = [(end - begin, begin) for begin, end in _spans(length)]
            traces = [
                self._tracer.trace(BatchSlice(example, tokens=range(begin, begin + tokens), length=length), True)
                for tokens, begin in points
            ]
            every = [
                [least_of_a_layer + work / rate for work in works]
                for works in zip(*map(counted_costs, traces), strict=True)
            ]
        link = MeasuredLink(cluster.inside.latency, cluster.inside.rate(), "typical", ())
        return SequenceCosts(_times_of(self._layers, every, points, cut), tuple(units), bytes_between(trace, cut), link)

    def completed(self, options: PipelineOptions) -> PipelineOptions:
        """Returns the options with whole microbatches where nothing is said about slices: only the user knows whether
        layers may see a part of a row."""
        if options.slices is None and options.microbatches is None and not isinstance(options.schedule, Schedule):
            return replace(options, slices=1)
        return options

    def _may_end_at(self, place: int) -> bool:
        """Returns whether a stage may end before this layer: not between layers that share a weight or a tensor."""
        stages = range(place), range(place, len(self._layers))
        try:
            check_weights_on_one_stage(self._layers, stages)
            check_reads_on_one_stage(self._layers, stages)
        except SlipstreamError:
            return False
        return True

    def lengths(self, batch: Batch) -> list[int]:
        """Returns the number of tokens of each row that reach CutTokens, where they are cut into slices."""
        if batch.sequence_values is not None:
            raise SlipstreamError(NO_FUNCTION_OF_VALUES)
        if POSITIONS.name in batch.companions or DOCUMENTS.name in batch.companions:
            raise SlipstreamError("position_ids and document_ids are for causal LMs: give a sequence's as its inputs.")
        if not batch.is_ragged:
            return [self._length(batch)] * batch.num_sequences
        if self._cut is None:
            raise SlipstreamError(
                f"a list of {batch.num_sequences} sequences: the layers of this nn.Sequential take whole microbatches "
                "of one shape. Give tensors whose dim 0 is the batch, or put slipstream.CutTokens() before the layers "
                "that work token by token."
            )
        for number, tensors in enumerate(zip(*(values.rows for values in batch.every), strict=True)):
            if not all(tensor.dim() for tensor in tensors):
                raise SlipstreamError(
                    f"inputs[{number}] or targets[{number}] is a number: give a tensor for each sequence."
                )
        return [self._length(row) for row in batch.packed([[row] for row in range(batch.num_sequences)])]

    def _length(self, rows: Batch) -> int:
        if not self._is_sliced:
            return 1
        return self._tokens_at_cut(BatchSlice(as_value(rows.tensors, rows.is_tuple)), self._is_training())

    def _tokens_at_cut(self, microbatch: BatchSlice, training: bool) -> int:
        assert self._cut is not None
        shape = self._tracer.trace(microbatch, training).boundaries[self._cut].specs[0].shape
        return shape[1] if len(shape) > 1 else 1

    def place_context(self, options: PipelineOptions, num_ranks: int) -> Never:
        raise SlipstreamError(
            "memory.context='auto': an option of causal LMs, but the model is an nn.Sequential. Give 'device', or "
            "'host'."
        )

    def lay_out(self, schedule: Schedule, slices: int | Sequence[int]) -> StageLayout:
        self._check_slices(schedule, slices)
        memory = self._options.memory
        if memory.loss_tokens is not None:
            raise SlipstreamError(
                f"memory.loss_tokens={memory.loss_tokens}: an option of causal LMs, but the model is an nn.Sequential. "
                "Leave it out."
            )
        stages = divide(self._layers, self._options.partition, self._costs, schedule.placement)
        check_weights_on_one_stage(self._layers, stages)
        check_reads_on_one_stage(self._layers, stages)
        ranges = tuple(LayerRange(stage.start, stage.stop) for stage in stages)
        what = "none" if self._has_segments else memory.recompute
        most = max(map(len, stages))
        checked = memory.check_recompute
        recompute = RecomputePolicy.parse(what, most, besides="'segments', ", is_checked=checked)
        reduces = self._options.reduces_gradients(self._ranks.share_gradients)
        skips = self._skips(ranges)
        return StageLayout(
            schedule,
            ranges,
            recompute,
            memory.offload,
            reduces,
            skips=skips,
            context_on_host=host_share(memory.context),
            has_wide_sums=memory.context_gradients == "wide",
        )

    def make_stages(self, layout: StageLayout) -> tuple[dict[int, SequentialStage], None]:
        what = layout.recompute
        if self._has_segments:
            what = RecomputePolicy(is_checked=self._options.memory.check_recompute)
        model = _ranges(layout), self._routes, self._tracer, self._has_segments, what
        self._elsewhere = NamedWeights(
            (f"{layer.name}.{name}", parameter)
            for stage in _ranges(layout)[:-1]
            for layer in self._layers[stage.start : stage.stop]
            for name, parameter in layer.module.named_parameters()
        )
        here = layout.stages_of(self._ranks.here(layout.num_ranks))
        self._stages = {stage_index: SequentialStage(stage_index, *model) for stage_index in here}
        held = {module for stage in self._stages.values() for layer in stage.layers for module in layer.modules()}
        for module in {module for layer in self._layers for module in layer.module.modules()} - held:
            # Another rank has its weights.
            nn.Module._apply(module, partial(torch.Tensor.to, device="meta"), recurse=False)  # type: ignore[no-untyped-call]
        return self._stages, None

    def losses(self, tensor: object) -> Losses:
        loss_fn = self._options.loss_fn
        assert not isinstance(loss_fn, SequenceLoss)
        if loss_fn is None:
            return SliceLosses(cross_entropy)
        stages = self._stages.values()
        here = (pair for stage in stages if stage.has_loss for pair in stage.named_parameters())
        weights = StageWeights(NamedWeights(here), self._elsewhere)
        return GivenLosses(loss_fn, weights, self._ranks.data.size)

    def _skips(self, ranges: Sequence[LayerRange]) -> tuple[StageSkip, ...]:
        """Returns the skips past stages; one that begins before the tokens are cut goes with the first slice alone."""
        cut = len(self._layers) if self._cut is None else self._cut
        place = {i: g for g, owned in enumerate(ranges) for i in range(int(owned.start), int(owned.stop))}
        ends = {StageSkip(place[route.stash], place[route.pop], route.stash <= cut) for route in self._routes}
        return tuple(sorted(skip for skip in ends if skip.pop > skip.stash + 1))

    def balance(self, layout: StageLayout) -> Balance:
        if self._costs is None:
            raise SlipstreamError(
                "the costs of the layers aren't known: give layers=slipstream.Layers(example=...) or costs=[...]."
            )
        return balance_of(self._costs, _ranges(layout), layout.training.placement, self._layers)

    def split(
        self, batch: Batch, microbatches: Sequence[SlicedMicrobatch], seed: int, groups: Sequence[Sequence[int]] = ()
    ) -> SplitBatch:
        """Splits rows into microbatches and their tokens into slices, and traces each part. Sequences of different
        lengths are a microbatch each."""
        if not groups:
            return self._split_rows(batch, microbatches, seed)
        for group in groups:
            if len(group) > 1:
                raise SlipstreamError(
                    f"the plan packs the sequences {[*group]} into one row, but the layers of an nn.Sequential may "
                    "look at anything in it. Make a microbatch of each."
                )
        return cut_groups(batch, microbatches, seed, groups, self._split_rows)

    def _split_rows(
        self, batch: Batch, microbatches: Sequence[SlicedMicrobatch], seed: int, first: int = 0
    ) -> SplitBatch:
        """Splits rows of one length into microbatches, which are numbered from `first` on."""
        inputs, targets = batch.tensors, batch.labels
        assert isinstance(targets, Tensor)
        if self._options.loss_fn is None and not (targets.is_floating_point() or targets.is_complex()):
            # cross_entropy takes class numbers in int64 only.
            targets = targets.long()
        check_batch(inputs, targets, len(microbatches))
        length = sum(microbatches[0].slices)
        if self._is_sliced:
            check_sliced_targets(targets, length)
        rows = [SlicedValues.of(INPUTS, tensor, microbatches, by_tokens=False).slices for tensor in inputs]
        pieces = []
        for row, microbatch in enumerate(microbatches):
            value = as_value(tuple(tensors[row][0] for tensors in rows), batch.is_tuple)
            cuts = enumerate(self._tokens_of(microbatch))
            pieces.append([BatchSlice(value, first + row, index, seed, tokens, length) for index, tokens in cuts])
        values = {}
        for name, companion in batch.companions.items():
            given = targets if companion.rule == LABELS else companion.rows
            assert isinstance(given, Tensor)
            values[name] = SlicedValues.of(companion.rule, given, microbatches, self._is_sliced)
        cut = SplitBatch(pieces, values, counted(targets), microbatches)
        for piece, label in zip(chain(*pieces), chain(*cut.targets), strict=True):
            outputs = self._tracer.trace(piece, self._is_training()).boundaries[-1]
            if self._options.loss_fn is None:
                check_default_loss(outputs, label)
        return cut

    def output_forms(self, piece: BatchSlice, targets: Tensor) -> OutputForms:
        """Returns the last layer's outputs for a slice. The dims that depend on its length are those of its tokens."""
        traced = [self._tracer.trace(piece, self._is_training()).boundaries[-1]]
        if piece.tokens is not None and len(piece.tokens) > 1:
            shorter = replace(piece, tokens=piece.tokens[:-1])
            traced.append(self._tracer.trace(shorter, self._is_training()).boundaries[-1])
        shapes, *others = [[spec.shape for spec in boundary.specs] for boundary in traced]
        dims = [
            next((dim for dim, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b), None)
            for shape, other in zip(shapes, *(others or [shapes]), strict=True)
        ]
        return OutputForms(shapes, [spec.dtype for spec in traced[0].specs], dims, traced[0].is_tuple)

    def groups(self, lengths: Sequence[int], num_microbatches: int) -> tuple[tuple[int, ...], ...]:
        """Returns each sequence as a microbatch: layers may look at anything in a row."""
        return tuple((index,) for index in range(len(lengths)))

    def _tokens_of(self, microbatch: SlicedMicrobatch) -> list[range] | list[None]:
        """Returns the tokens of each slice; None for the one slice of a sequence that isn't cut."""
        if not self._is_sliced:
            return [None]
        return [range(a, b) for a, b in pairwise(accumulate(microbatch.slices, initial=0))]

    def begin_step(self) -> None:
        """Raises SlipstreamError where a sequence has got hooks since the pipeline was made."""
        for sequence in self._sequences:
            check_runs_its_children(sequence)
        for stage in self._stages.values():
            stage.statistics.begin()

    def end_step(self) -> None:
        """Updates every batch norm's moving averages with the whole mini-batch. Collective."""
        over = self._ranks.copies
        for stage in self._stages.values():
            stage.statistics.update(
                over.all_gather if self._options.layers.batch_norm_over_replicas else lambda sums: sums[None]
            )

    def _is_training(self) -> bool:
        return next(iter(self._stages.values())).model.training

    def _check_slices(self, schedule: Schedule, slices: int | Sequence[int]) -> None:
        """Raises SlipstreamError where not all slices of the schedule that runs are exact."""
        self._check_count(slices)
        self._is_sliced = slices != 1
        if not self._is_sliced:
            return
        assert self._cut is not None
        check_lengths(schedule, slices)
        if schedule.reach is not None:
            raise SlipstreamError(
                f"the schedule {schedule.name!r} has a reach, but slices of an nn.Sequential attend to all before "
                "them. Leave it out."
            )
        check_cut(self._layers, self._routes, self._cut)
        check_runs_as_written(self._layers[self._cut], "slices begin there")
        if self._options.runtime.self_check:
            if self._options.layers.example is None:
                raise SlipstreamError(
                    f"slices={slices!r} of an nn.Sequential are compared with the whole before training. Give "
                    "example=inputs like those of a microbatch, or self_check=False."
                )
            compare_slices(self._layers, self._cut, self._options.layers.example)

    def _find_costs(self) -> list[float] | None:
        layers = self._options.layers
        if layers.costs is not None:
            check_costs(layers.costs, self._layers)
            return list(layers.costs)
        if layers.example is None:
            return None
        return counted_costs(self._tracer.trace(BatchSlice(layers.example), training=True))


def _spans(length: int) -> list[tuple[int, int]]:
    """Returns the bounds of slices that tell a layer's cost of tokens and of their context."""
    half, quarter = max(1, length // 2), max(1, length // 4)
    spans = [(0, length), (0, half), (min(half, length - 1), length), (0, quarter)]
    return [*dict.fromkeys(spans)]


def _times_of(
    layers: Sequence[SequentialLayer],
    seconds: Sequence[Sequence[float]],
    points: list[tuple[int, int]],
    cut: int | None,
) -> MeasuredLayers:
    """Returns the times of layers by those of their forwards: the gradients of inputs and of weights take as long each,
    where there are weights."""
    times = []
    for layer, forward in zip(layers, seconds, strict=True):
        has_weights = any(parameter.requires_grad for parameter in layer.module.parameters())
        of_weights = [time * has_weights for time in forward]
        both = [a + b for a, b in zip(forward, of_weights, strict=True)]
        times.append({Op.F: [*forward], Op.I: [*forward], Op.W: of_weights, Op.B: both})
    return MeasuredLayers(tuple(times), points, len(layers) if cut is None else cut + 1)


def _ranges(layout: StageLayout) -> list[range]:
    return [stage.layers for stage in layout.layers]


# A layer with fewer FLOPs per byte is bound by memory; a CPU core has about this ratio.
FLOPS_PER_BYTE = 10


def counted_costs(trace: ShapeTrace) -> list[float]:
    """Returns every layer's cost: operations of matrix products, convolutions and attention, and memory traffic."""
    return [1.0 + work.flops + FLOPS_PER_BYTE * work.num_bytes for work in trace.work]


def check_costs(costs: Sequence[float], layers: Sequence[SequentialLayer]) -> None:
    if len(costs) != len(layers):
        names = ", ".join(map(str, layers[:3]))
        raise SlipstreamError(
            f"costs has {len(costs)} numbers, but the sequence has {len(layers)} layers, nested ones counted one by "
            f"one: {names}{', ...' if len(layers) > 3 else ''}. Give {len(layers)} costs."
        )
    for layer, cost in zip(layers, costs, strict=True):
        if not 0 < cost < float("inf"):
            raise SlipstreamError(f"costs: {layer} costs {cost}, but a cost is above 0 and finite.")


def divide(
    layers: Sequence[SequentialLayer],
    partition: str | Sequence[float],
    costs: Sequence[float] | None,
    placement: Sequence[int],
) -> tuple[range, ...]:
    """Returns the layers of every stage. Raises SlipstreamError for an invalid partition, or too many stages."""
    num_stages = len(placement)
    if num_stages > len(layers):
        raise SlipstreamError(
            f"{num_stages} stages, but the sequence has {len(layers)} layers, nested ones counted one by one. Use "
            f"{len(layers)} stages or fewer."
        )
    allowed = "at least one layer, nested ones counted one by one"
    counts = given_counts(partition, num_stages, len(layers), _are_whole, allowed)
    if counts is None and num_stages == 1:
        counts = [len(layers)]
    elif counts is None:
        if costs is None:
            raise SlipstreamError(
                "partition='auto' must know what the layers cost. Give example=inputs like those of a microbatch, from "
                f"which operations are counted, costs=[...] of {len(layers)} layers, or partition=[...] of "
                f"{num_stages} stages."
            )
        counts = partition_layers(costs, num_stages, placement=placement)
    return tuple(range(a, b) for a, b in pairwise(accumulate(counts, initial=0)))


def _are_whole(counts: Sequence[float]) -> bool:
    return all(count == int(count) >= 1 for count in counts)


def balance_of(
    costs: Sequence[float], stages: Sequence[range], placement: Sequence[int], layers: Sequence[SequentialLayer]
) -> Balance:
    ranks = sorted(set(placement))
    owned = {
        rank: [i for stage, owner in zip(stages, placement, strict=True) if owner == rank for i in stage]
        for rank in ranks
    }
    totals = {rank: sum(costs[index] for index in indices) for rank, indices in owned.items()}
    mean = sum(totals.values()) / len(ranks)
    slowest = max(ranks, key=totals.__getitem__)
    dearest = max(owned[slowest], key=costs.__getitem__)
    return Balance(totals[slowest] / mean, slowest, str(layers[dearest]), costs[dearest] / mean)


def check_options(model: nn.Sequential, options: PipelineOptions, ranks: Ranks) -> None:
    """Raises SlipstreamError for options that an nn.Sequential doesn't have, and for a model without weights."""
    _check_options_of_causal_lms(options)
    for way in SHARED_WORK:
        if (size := getattr(ranks.degrees, way.degree)) > 1:
            raise SlipstreamError(
                f"an nn.Sequential on a mesh with {way.axis}={size}, {way.meaning}: its layers don't say how. Use "
                f"{way.axis}=1; CutTokens() cuts sequences into slices, and dp gives ranks other rows."
            )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise SlipstreamError("the nn.Sequential is on the meta device, so it has no weights. Build it in memory.")
    if options.memory.recompute == "segments" and options.memory.offload:
        raise SlipstreamError(
            f"memory.recompute='segments' with memory.offload={options.memory.offload}: leave one of the two out."
        )


def _check_options_of_causal_lms(options: PipelineOptions) -> None:
    theirs = "an option of causal LMs, but the model is an nn.Sequential."
    if options.seq_len is not None:
        raise SlipstreamError(f"seq_len={options.seq_len}: {theirs} Leave it out.")
    options.parallel.refuse([name for name in Parallelism.model_fields if name != "shard"], theirs)
    options.runtime.refuse(("fused",), theirs)
    options.memory.refuse(("limit",), "not for an nn.Sequential.")
    if options.parallel.shard == "parameters":
        raise SlipstreamError("parallel.shard='parameters': not for an nn.Sequential. Use parallel.shard='optimizer'.")
    if options.router_loss != "none":
        raise SlipstreamError(f"router_loss={options.router_loss!r}: an option of causal LMs. Leave it out.")
    if options.vocabulary == "spread":
        raise SlipstreamError("vocabulary='spread': an nn.Sequential has no head that is known. Leave it out.")
    if isinstance(options.loss_fn, SequenceLoss):
        raise SlipstreamError("loss_fn=SequenceLoss(...): a loss of token sequences, for causal LMs. Leave it out.")
    if options.rates is not None:
        raise SlipstreamError("rates=...: of an nn.Sequential each sequence is a microbatch. Leave it out.")


def check_batch(inputs: Tensors, targets: Tensor, num_microbatches: int) -> None:
    """Raises SlipstreamError where not all tensors have the same rows, or these don't divide into microbatches."""
    named = [("targets", targets), *(("inputs", tensor) for tensor in inputs)]
    rows = inputs[0].shape[0] if inputs[0].dim() else 0
    for name, tensor in named:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise SlipstreamError(
                f"{name} of shape {tuple(tensor.shape)} for a batch of {rows} rows: dim 0 of every tensor is the batch."
            )
    check_rows(rows, num_microbatches, "rows")


def check_sliced_targets(targets: Tensor, length: int) -> None:
    """Raises SlipstreamError where targets (rows, `length`, ...) can't be cut into slices as the inputs are."""
    if targets.is_floating_point():
        raise SlipstreamError(
            f"targets of {targets.dtype} in token slices: such a loss is a mean over rows, and every slice has a part "
            "of each. Leave slices out."
        )
    if targets.dim() < 2 or targets.shape[1] != length:
        raise SlipstreamError(
            f"targets of shape {tuple(targets.shape)} for {length} tokens in slices: give (rows, {length}, ...)."
        )


def check_default_loss(outputs: LayerBoundary, targets: Tensor) -> None:
    """Raises SlipstreamError where the default loss isn't for these outputs and targets."""
    shapes = [tuple(spec.shape) for spec in outputs.specs]
    fits = not outputs.is_tuple and len(shapes[0]) > 1 and (shapes[0][0], *shapes[0][2:]) == tuple(targets.shape)
    if not fits or targets.is_floating_point():
        raise SlipstreamError(
            f"the sequence returns {' and '.join(map(str, shapes))} for targets of {tuple(targets.shape)} "
            f"{targets.dtype}, but the default loss is the cross-entropy of (rows, classes, ...) with class numbers "
            "(rows, ...). Give a loss_fn."
        )
