"""Causal LMs of transformers, whose batches are split into microbatches and token slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model import check_compiler, check_length, check_token_ids, find_anatomy
from slipstream.parallel.tensor import TensorParallel
from slipstream.pipeline.batch import SplitBatch, WholeBatch, cut_batch
from slipstream.pipeline.families.causal_lm_layout import plan_layout
from slipstream.pipeline.families.causal_lm_stages import (
    check_architecture,
    choose_loss,
    load_shares,
    make_stages,
)
from slipstream.pipeline.families.export import save_pretrained
from slipstream.pipeline.families.stage_layout import StageLayout
from slipstream.pipeline.families.weight_source import WeightSource
from slipstream.pipeline.pipeline_options import LossFunction, PipelineOptions
from slipstream.pipeline.ranks import Ranks
from slipstream.pipeline.stage import Stage
from slipstream.schedule import Schedule


class CausalLMFamily:
    """The Family of causal LMs."""

    default_slices = 8

    def __init__(self, source: WeightSource, options: PipelineOptions, ranks: Ranks, device: torch.device) -> None:
        """Collective: the architecture is checked at toy size."""
        for name in sorted(options.layers.model_fields_set):
            raise SlipstreamError(
                f"layers.{name}=...: an option of nn.Sequential models, but the model is a causal LM. Leave it out."
            )
        self.config: PretrainedConfig = source.config
        self.compiled = source.compiled
        self._source: WeightSource | None = source  # until the stages are made: it may hold layers of other ranks
        self._options, self._ranks = options, ranks
        if options.runtime.fused:
            check_compiler(device.type)
        if options.runtime.self_check:
            check_architecture(self.config, ranks, options.parallel)
        self._anatomy = find_anatomy(self.config)

    def check_slices(self, slices: object) -> None:
        pass  # the Tuner has

    def length(self, batch: WholeBatch) -> int:
        if batch.is_tuple:
            raise SlipstreamError(
                f"inputs are a tuple of {len(batch.inputs)}; a causal LM takes token ids, (batch, sequence) int64."
            )
        return batch.inputs[0].shape[-1]

    def lay_out(self, schedule: Schedule, slices: int | Sequence[int]) -> StageLayout:
        reduces, tensor_ranks = self._ranks.world.size > self._ranks.size, self._ranks.tensor.size
        layout, self._anatomy = plan_layout(
            self.config, self._anatomy, schedule, slices, self._options, tensor_ranks, reduces
        )
        return layout

    def make_stages(
        self, layout: StageLayout, device: torch.device
    ) -> tuple[Mapping[int, Stage], TensorParallel | None]:
        source = self._source
        assert source is not None
        self._source = None
        model, tensor = load_shares(
            source,
            self._anatomy,
            layout,
            self._ranks,
            self._options,
        )
        return make_stages(model, self._anatomy, layout, self._ranks, device, tensor), tensor

    def loss_function(self, tensor: TensorParallel | None) -> LossFunction:
        return choose_loss(self._options.loss_fn, self._ranks, tensor)

    def tied_ends(self, layout: StageLayout) -> tuple[int, int]:
        placement = layout.training.placement
        return (placement[0], placement[-1]) if self._ranks.size > 1 and self._anatomy.tied else (0, 0)

    def routes(self, layout: StageLayout) -> list[tuple[int, int]]:
        return []

    def split(self, batch: WholeBatch, lengths: Sequence[int], num_microbatches: int, seed: int) -> SplitBatch:
        (inputs,) = batch.inputs
        check_length(self.config, inputs.shape[-1])
        check_token_ids(self.config, int(inputs.min()), int(max(inputs.max(), batch.targets.max())))
        documents = batch.position_ids, batch.document_ids
        return cut_batch(inputs, batch.targets, lengths, num_microbatches, *documents, seed=seed)

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def save_pretrained(self, folder: str | Path, state: Mapping[str, Tensor]) -> None:
        """Writes the whole model's state, which the leader has, as transformers does. Collective."""
        save_pretrained(folder, self.config, state, self._ranks)
