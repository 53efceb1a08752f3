"""Attention masks whose shape doesn't depend on what is padded, so that a pipeline knows its messages beforehand.

transformers leaves a mask out where no token of the batch is padding. In a pipeline some microbatches have padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from slipstream.errors import SlipstreamError

_PREFIX = "slipstream_whole_"


def always_build_masks(model: PreTrainedModel) -> None:
    """Let `model`'s own code build a mask wherever it is given what is padding. It attends as before elsewhere.

    Raises SlipstreamError for attention whose masks are no tensors of one shape.
    """
    configs = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    for config in configs.values():
        config._attn_implementation_internal = _whole(config)


def _whole(config: PretrainedConfig) -> str:
    name = str(config._attn_implementation or "eager")
    if "flash" in name or "flex" in name:
        raise SlipstreamError(f"attn_implementation={name!r} has masks of its own kind. Use 'sdpa' or 'eager'.")
    AttentionMaskInterface.register(_PREFIX + name, _never_skipping(ALL_MASK_ATTENTION_FUNCTIONS[name]))
    return _PREFIX + name


def _never_skipping(build: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        if attention_mask is not None:
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return build(*args, attention_mask=attention_mask, **kwargs)

    return mask
