"""Makes masks that models of images and text build be those of text, which depend on no token.

Such a model lets the tokens of one image see each other, and asks for each pair of tokens whether both are of one
image, by the numbers of images of the tokens it was run on. Masks here are evaluated once, for all pairs of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import masking_utils

_BUILDER = "blockwise_overlay"


@contextmanager
def masks_of_text() -> Iterator[None]:
    """Lets no two tokens be of one image, for one forward; raises RuntimeError in it where a token is of one."""
    if not hasattr(masking_utils, _BUILDER):  # of an older transformers
        yield
        return
    original = getattr(masking_utils, _BUILDER)
    setattr(masking_utils, _BUILDER, _of_text)  # unittest's patch takes ten times as long, for every slice
    try:
        yield
    finally:
        setattr(masking_utils, _BUILDER, original)


def _of_text(block_sequence_ids: Tensor) -> Callable[..., Tensor]:
    """Returns what stands for transformers' function, given the number of each token's image, -1 for text."""
    # on a GPU this doesn't wait
    torch._assert_async((block_sequence_ids < 0).all(), "a token of an image is in a batch of text")

    def is_in_one_image(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.bool, device=query.device)

    return is_in_one_image
