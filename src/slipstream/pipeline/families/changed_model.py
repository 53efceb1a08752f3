"""What can't be done with a causal LM that its user changed, told by name before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import ModelAnatomy, SelfCheck
from slipstream.model.given_model import GivenModel
from slipstream.model.self_check.instance_trial import TrialResult, try_changes
from slipstream.parallel import Ranks
from slipstream.pipeline.batch import SplitBatch
from slipstream.pipeline.families.stage_layout import StageLayout
from slipstream.pipeline.pipeline_options import PipelineOptions

_ONE_STAGE = "Train it on one rank with one stage, or make the change inside of its layers"


@dataclass(frozen=True)
class ChangedModel:
    """How a model was changed, and what its changes keep from being computed apart."""

    given: GivenModel
    result: TrialResult
    layers: str  # the name of the list of layers
    num_replicas: int

    @classmethod
    def tried(
        cls,
        given: GivenModel,
        model: PreTrainedModel,
        anatomy: ModelAnatomy,
        check: SelfCheck | None,
        ranks: Ranks,
        options: PipelineOptions,
    ) -> ChangedModel:
        """Tries the changes on the leader, unless self-checks are off. Collective.

        Raises SlipstreamError for a mesh or an option that no changed model can have.
        """
        result = TrialResult()
        if given.changes:
            first = given.changes[0]
            if ranks.tensor.size > 1:
                raise SlipstreamError(
                    f"{first}: tensor parallelism cuts the weights that the configuration describes, by code of its "
                    "own. Use tp=1, or undo the change."
                )
            if options.parallel.shard_parameters:
                raise SlipstreamError(
                    f"{first}, which hasn't been shown to be exact with parallel.shard_parameters=True. Use "
                    "parallel.shard_optimizer=True."
                )
            if check is not None:
                result = ranks.decided(lambda: try_changes(given, model, anatomy, check.packs_any_length))
        return cls(given, result, anatomy.layers, ranks.data.size)

    def outlined(self, anatomy: ModelAnatomy) -> ModelAnatomy:
        """Returns the anatomy with the weights that layers share, and with what mustn't be cut in this model."""
        inside = self.given.changes_within(anatomy.layers)
        shared = [name for names in self.given.shared for name in names if name.startswith(f"{anatomy.layers}.")]
        whole_layers = str(inside[0]) if inside else f"{shared[0]} is a weight of several layers" if shared else ""
        outside = self.given.changes_within(*anatomy.before, *anatomy.after)
        others = [name for names in self.given.shared for name in names if name not in shared]
        whole_head = str(outside[0]) if outside else f"{others[0]} is a weight of several modules" if others else ""
        return replace(anatomy, shared=self.given.shared, whole_layers=whole_layers, whole_head=whole_head)

    def check_layout(self, layout: StageLayout, options: PipelineOptions) -> None:
        """Raises SlipstreamError where the stages can't be exact, or a schedule always cuts what can't be."""
        around = self.given.changes_around(self.layers)
        if len(layout.layers) > 1 and around:
            raise SlipstreamError(
                f"{around[0]}, and contains all layers, so each of {len(layout.layers)} stages would run it on its own "
                f"part. {_ONE_STAGE}."
            )
        if len(layout.layers) > 1 and self.result.layers:
            raise SlipstreamError(f"{self.result.layers}, so layers can't run on several stages. {_ONE_STAGE}.")
        if self.result.again and layout.recompute is not None:
            raise SlipstreamError(f"{self.result.again}, so it can't be recomputed. Give memory.recompute='none'.")
        if options.parallel.shard_parameters and self.given.shared:
            raise SlipstreamError(
                f"parallel.shard_parameters=True with {' and '.join(self.given.shared[0])}, which are one weight: its "
                "shards would be updated separately. Use parallel.shard_optimizer=True."
            )
        schedule = layout.training
        self._check_pieces(schedule.num_slices, schedule.num_microbatches)

    def check_batch(self, batch: SplitBatch, is_ragged: bool = False) -> None:
        """Raises SlipstreamError where slices, documents or microbatches of this batch can't be exact."""
        has_documents = any(each.document_start is not None for slices in batch.slices for each in slices)
        cut = is_ragged or has_documents or any(len(slices) > 1 for slices in batch.slices)
        self._check_pieces(2 if cut else 1, 2 if is_ragged else len(batch.slices))

    def _check_pieces(self, num_slices: int, num_microbatches: int) -> None:
        if self.result.tokens and num_slices > 1:
            raise SlipstreamError(
                f"{self.result.tokens}, so token slices, packed documents and sequences of different lengths wouldn't "
                "be exact. Give whole sequences of one length: slices=1."
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
                "num_microbatches=1 without dp."
            )
