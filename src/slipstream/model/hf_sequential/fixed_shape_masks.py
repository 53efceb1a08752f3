"""Makes attention masks of one shape whatever is padded, so that a pipeline knows its messages in advance.

transformers omits the mask of a batch without padding. In a pipeline only some microbatches may have padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from slipstream.errors import SlipstreamError

_PREFIX = "slipstream_whole_"


def always_build_masks(model: PreTrainedModel) -> None:
    """Makes `model`'s own code build a mask whenever it is given an attention mask. Its attention stays the same.

    Raises SlipstreamError for attention implementations whose masks aren't tensors of one shape.
    """
    configs = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    for config in configs.values():
        name = str(config._attn_implementation or "eager")
        if "flash" in name or "flex" in name:
            raise SlipstreamError(
                f"attn_implementation={name!r} builds masks that aren't tensors of one shape. Use 'sdpa' or 'eager'."
            )
        AttentionMaskInterface.register(_PREFIX + name, _never_skipping(ALL_MASK_ATTENTION_FUNCTIONS[name]))
        config._attn_implementation_internal = _PREFIX + name


def _never_skipping(build: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        if attention_mask is not None:
            kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return build(*args, attention_mask=attention_mask, **kwargs)

    return mask
