"""What a Pipeline is told that depends on the kind of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.model import Tensors
from slipstream.pipeline.execution import LossFunction


@dataclass(frozen=True)
class Settings:
    """As the Pipeline's arguments, which say what they mean; here with the values they have when not given."""

    partition: str | Sequence[float] = "auto"
    recompute: str | int = "none"
    loss_fn: LossFunction | None = None
    dtype: torch.dtype | None = None
    offload: float = 0.0
    memory_limit: float | None = None
    seq_len: int | None = None
    sequence_parallel: bool = False
    tensor_plan: Mapping[str, str] | None = None
    shard_optimizer: bool = False
    shard_parameters: bool = False
    master_dtype: torch.dtype | None = None
    fused: bool = False
    self_check: bool = True
    costs: Sequence[float] | None = None
    example: Tensor | Tensors | None = None
    batch_norm_over_replicas: bool = False

    def refuse(self, names: Sequence[str], reason: str) -> None:
        """Raises SlipstreamError where one of these is given."""
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            value = getattr(self, name)
            if value is not defaults[name] and value != defaults[name]:
                shown = "..." if isinstance(value, (Tensor, tuple)) else repr(value)
                raise SlipstreamError(f"{name}={shown}: {reason} Leave it out.")
