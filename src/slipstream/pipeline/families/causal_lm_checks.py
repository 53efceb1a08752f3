"""Refuses before training all that can't be done with a model that was changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import (
    GivenModel,
    ModelAnatomy,
    NamedWeights,
    SelfCheck,
    TrialResult,
    check_runs_every_layer,
    held_weights,
    result_by_kind,
    try_changes,
    try_dispatched,
)
from slipstream.options import SHARED_WORK
from slipstream.parallel import Ranks
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.families.stage_layout import StageLayout
from slipstream.pipeline.pipeline_options import PipelineOptions

_ONE_STAGE = "Train it on one rank with one stage, or make the change inside of its layers"


@dataclass(frozen=True)
class ChangedModel:
    """The changes of a model, and the parts that they keep from being computed apart."""

    given: GivenModel
    result: TrialResult
    layers: str  # the name of the list of layers
    num_replicas: int
    shares_slices: bool  # slices shared with ranks that have their other tokens
    weights: NamedWeights  # weights of a model in memory, else empty

    @classmethod
    def tried(
        cls,
        given: GivenModel,
        model: PreTrainedModel | None,
        anatomy: ModelAnatomy,
        check: SelfCheck | None,
        ranks: Ranks,
        options: PipelineOptions,
    ) -> ChangedModel:
        """Tries the changes on the leader, unless self-checks are off. Collective.

        Raises SlipstreamError for a mesh or an option that no changed model can have. `model` is one in memory.
        """
        own = given.dispatched
        if own.loss and options.loss_fn is None:
            raise SlipstreamError(
                f"the model's {own.loss}, but a Pipeline trains on the cross-entropy of the next token. Give its loss "
                "as loss_fn=..., a function of (logits, targets) that returns (sum, count). To train on "
                "cross-entropy set model.loss_function = transformers.loss.loss_utils.ForCausalLMLoss."
            )
        result = result_by_kind(own)
        is_shared = [f"{' and '.join(names[:2])} are one weight" for names in given.shared]
        if changed := [*given.changes, *is_shared, *own]:
            first = changed[0]
            for way in SHARED_WORK:
                if way.splits_weights and getattr(ranks.degrees, way.degree) > 1:
                    raise SlipstreamError(
                        f"{first}: {way.meaning} cut the weights that the configuration describes, by code of their "
                        f"own. Use {way.axis}=1, or undo the change."
                    )
            if options.parallel.shard == "parameters":
                raise SlipstreamError(
                    f"{first}, which hasn't been shown to be exact with parallel.shard='parameters'. Use "
                    "parallel.shard='optimizer'."
                )
            if check is not None and any(own):
                result = ranks.run_on_leader(lambda: try_dispatched(given.config, anatomy, own))
            if check is not None and given.changes and model is not None:
                tried = ranks.run_on_leader(lambda: try_changes(given, model, anatomy, check.packs_any_length))
                result = result.joined(tried)
        if model is not None:
            check_runs_every_layer(model)
            names = [f"{anatomy.layers}.{index}" for index in range(len(anatomy.layers_of(model)))]
            parts = {name: model.get_submodule(name) for name in (*anatomy.before, *names, *anatomy.after)}
            result = replace(result, reached=(*result.reached, *held_weights(model, parts, is_tried=check is not None)))
        if given.renumbered and (anatomy.attends_itself or (check is not None and check.carries_states)):
            raise SlipstreamError(
                f"{given.renumbered[0]} has another layer_idx than its place in {anatomy.layers}, by which layers of "
                "this architecture find what earlier tokens left. Set layer_idx to the place, in every layer."
            )
        weights = NamedWeights(() if model is None else model.named_parameters(remove_duplicate=False))
        return cls(given, result, anatomy.layers, ranks.data.size, bool(ranks.token_axes), weights)

    def outlined(self, anatomy: ModelAnatomy) -> ModelAnatomy:
        """Returns the anatomy with the weights that layers share, and the parts that mustn't be cut in this model."""
        whole_parts: dict[str, str] = {}
        for change in self.given.changes:
            child = change.module.removeprefix(f"{anatomy.layers}.").split(".")
            is_inside = len(child) > 2 or (len(child) == 2 and not change.replaces)
            if change.module.startswith(f"{anatomy.layers}."):
                if self.result.halves or not is_inside:
                    whole_parts.setdefault(f"{anatomy.layers}.{child[0]}", self.result.halves or str(change))
            else:
                whole_parts.setdefault(change.module, str(change))
        for name in (name for names in self.given.shared for name in names):
            module = name.rpartition(".")[0]
            if module.startswith(f"{anatomy.layers}."):
                module = f"{anatomy.layers}.{module.removeprefix(f'{anatomy.layers}.').partition('.')[0]}"
            whole_parts.setdefault(module, f"{name} is a weight of several modules")
        return replace(anatomy, shared=self.given.shared, kept_whole=tuple(whole_parts.items()))

    def check_layout(self, layout: StageLayout, anatomy: ModelAnatomy) -> None:
        """Raises SlipstreamError where the stages can't be exact, or a schedule always cuts a part that can't be."""
        around = self.given.changes_around(self.layers)
        if len(layout.layers) > 1 and around:
            raise SlipstreamError(
                f"{around[0]}, and contains all layers, so each of {len(layout.layers)} stages would run it on its own "
                f"part. {_ONE_STAGE}."
            )
        if len(layout.layers) > 1 and self.result.layers:
            raise SlipstreamError(f"{self.result.layers}, so layers can't run on several stages. {_ONE_STAGE}.")
        for part, names in self.result.reached:
            stages = set[int]().union(*(anatomy.stages_of(name, layout.layers) for name in (f"{part}.", *names)))
            if len(stages) > 1:
                raise SlipstreamError(
                    f"code of {part} reads {names[0]}, a weight of another stage, where its gradient would be lost and "
                    "its updates not be seen. Give a partition that has both on one stage, or train on one stage."
                )
        if self.result.runs_again:
            raise SlipstreamError(
                f"{self.result.runs_again}, as torch.utils.checkpoint does. Remove it: "
                "memory=slipstream.Memory(recompute='full') computes layers again."
            )
        if self.result.again:
            raise SlipstreamError(
                f"{self.result.again}, and forwards run more often here than in the model by itself, as a stage learns "
                "its masks from a first token. Remove it, or let what it computes follow from its input alone."
            )
        schedule = layout.training
        self._check_pieces(schedule.num_slices, schedule.num_microbatches)

    @property
    def restricts_pieces(self) -> bool:
        """Whether some slices or microbatches can't be exact."""
        return bool(self.result.tokens or self.result.rows or self.given.gradient_hooks)

    def check_batch(self, batch: SplitBatch) -> None:
        """Raises SlipstreamError where slices, documents or microbatches of this batch can't be exact."""
        has_documents = any(piece.document_start is not None for slices in batch.slices for piece in slices)
        cut = batch.groups or has_documents or any(len(slices) > 1 for slices in batch.slices)
        self._check_pieces(2 if cut else 1, 2 if batch.groups else len(batch.slices))

    def _check_pieces(self, num_slices: int, num_microbatches: int) -> None:
        num_slices = max(num_slices, 1 + self.shares_slices)
        if self.result.tokens and num_slices > 1:
            raise SlipstreamError(
                f"{self.result.tokens}, so token slices, packed documents and sequences of different lengths wouldn't "
                "be exact. Give whole sequences of one length: slices=1, on a mesh of pp and dp."
            )
        if self.result.rows and (num_microbatches > 1 or self.num_replicas > 1):
            raise SlipstreamError(
                f"{self.result.rows}, so microbatches and replicas wouldn't be exact. Give num_microbatches=1 and a "
                "mesh without dp."
            )
        if self.given.gradient_hooks and (num_slices > 1 or num_microbatches > 1 or self.num_replicas > 1):
            raise SlipstreamError(
                f"{self.given.gradient_hooks[0]} has a hook on its gradient, which would run once for each slice and "
                "microbatch, on a part of the gradient. Change .grad after step instead, or give slices=1 and "
                "num_microbatches=1, on a mesh of pp alone."
            )
