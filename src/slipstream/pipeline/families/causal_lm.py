"""A Pipeline's model as a causal LM of transformers, whose pieces are token slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model import check_compiler, check_length, check_token_ids, find_anatomy
from slipstream.parallel.tensor import TensorParallel
from slipstream.pipeline.batch import SplitBatch, cut_batch
from slipstream.pipeline.execution import LossFunction
from slipstream.pipeline.families.causal_lm_stages import (
    check_architecture,
    check_sharding,
    choose_loss,
    load_shares,
    make_stages,
)
from slipstream.pipeline.families.export import save_pretrained
from slipstream.pipeline.families.sequence_partition import Balance
from slipstream.pipeline.families.settings import Settings
from slipstream.pipeline.families.stage_layout import StageLayout, plan_layout
from slipstream.pipeline.families.weight_source import WeightSource
from slipstream.pipeline.parameters import Parameters
from slipstream.pipeline.ranks import Ranks
from slipstream.pipeline.stage import Stage
from slipstream.schedule import Schedule

_OF_SEQUENCES = ("costs", "example", "batch_norm_over_replicas")


class CausalLMFamily:
    """The Family of causal LMs."""

    default_slices = 8

    def __init__(self, source: WeightSource, settings: Settings, ranks: Ranks, device: torch.device) -> None:
        """Collective: the architecture is checked at toy size."""
        settings.refuse(_OF_SEQUENCES, "a setting of nn.Sequential models, but the model is a causal LM.")
        self.config: PretrainedConfig = source.config
        self.compiled = source.compiled
        self._source: WeightSource | None = source  # until the stages are made: it may hold layers of other ranks
        self._settings, self._ranks = settings, ranks
        if settings.fused:
            check_compiler(device.type)
        if settings.self_check:
            check_architecture(self.config, ranks, settings.tensor_plan, settings.sequence_parallel)
        self._anatomy = find_anatomy(self.config)

    def check_slices(self, slices: object) -> None:
        pass  # the Tuner has

    def length(self, inputs: Tensor | tuple[Tensor, ...]) -> int:
        if isinstance(inputs, tuple):
            raise SlipstreamError(
                f"inputs are a tuple of {len(inputs)}; a causal LM takes token ids, (batch, sequence) int64."
            )
        return inputs.shape[-1]

    def lay_out(self, schedule: Schedule, slices: int | Sequence[int]) -> StageLayout:
        given, reduces = self._settings, self._ranks.world.size > self._ranks.size
        layout, self._anatomy = plan_layout(
            self.config,
            self._anatomy,
            schedule,
            slices,
            given.partition,
            given.recompute,
            given.offload,
            given.seq_len,
            reduces=reduces,
        )
        if given.shard_parameters:
            excluded = {"shard_optimizer": given.shard_optimizer, "master_dtype": given.master_dtype}
            check_sharding(self._anatomy, self._ranks.tensor.size, excluded)
        return layout

    def make_stages(
        self, layout: StageLayout, device: torch.device
    ) -> tuple[Mapping[int, Stage], TensorParallel | None]:
        given, source = self._settings, self._source
        assert source is not None
        self._source = None
        model, tensor = load_shares(
            source,
            self._anatomy,
            layout,
            self._ranks,
            given.dtype,
            given.tensor_plan,
            given.sequence_parallel,
            given.fused,
        )
        return make_stages(model, self._anatomy, layout, self._ranks, device, tensor), tensor

    def loss_function(self, tensor: TensorParallel | None) -> LossFunction:
        return choose_loss(self._settings.loss_fn, self._ranks, tensor)

    def tied_ends(self, layout: StageLayout) -> tuple[int, int]:
        placement = layout.training.placement
        return (placement[0], placement[-1]) if self._ranks.size > 1 and self._anatomy.tied else (0, 0)

    def routes(self, layout: StageLayout) -> list[tuple[int, int]]:
        return []

    def balance(self, layout: StageLayout) -> Balance:
        raise SlipstreamError(
            "the balance of a causal LM's ranks is in `slipstream plan`; here it is an nn.Sequential's."
        )

    def cut(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        targets: Tensor,
        lengths: Sequence[int],
        num_microbatches: int,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        seed: int,
    ) -> SplitBatch:
        assert isinstance(inputs, Tensor)
        check_length(self.config, inputs.shape[-1])
        check_token_ids(self.config, int(inputs.min()), int(max(inputs.max(), targets.max())))
        return cut_batch(inputs, targets, lengths, num_microbatches, position_ids, document_ids, seed=seed)

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def save_pretrained(self, folder: str | Path, stages: Mapping[int, Stage], parameters: Parameters) -> None:
        save_pretrained(folder, self.config, [*stages.values()], self._ranks, parameters)
