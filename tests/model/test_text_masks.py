"""Masks of models of images and text are those of text alone, and a token of an image is never taken for one."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils

from slipstream.errors import SlipstreamError
from slipstream.model.hooks.masks import first_keys, masks_of_text
from support.architectures import llama, tokens
from support.pipelines import make_pipe

CPU = torch.device("cpu")


def causal_or_in_one_image(numbers: list[int]) -> masking_utils.Callable:
    overlay = masking_utils.blockwise_overlay(torch.tensor([numbers]))
    return masking_utils.or_masks(masking_utils.causal_mask_function, overlay)


def test_a_mask_made_for_one_token_holds_for_many() -> None:
    with masks_of_text():
        mask = causal_or_in_one_image([-1])
    assert first_keys(mask, 6, CPU).tolist() == [0] * 6


def test_a_token_of_an_image_is_refused() -> None:
    with masks_of_text(), pytest.raises(RuntimeError, match="a token of an image is in a batch of text"):
        causal_or_in_one_image([-1, 0])


def test_a_step_refuses_it_before_anything_runs() -> None:
    pipe = make_pipe(llama(image_token_id=7), slices=2, num_ranks=2)
    inputs = tokens().masked_fill(tokens() == 7, 8)
    pipe.step(inputs, inputs)
    inputs[1, 30] = 7
    with pytest.raises(SlipstreamError, match=r"token 7, image_token_id of 'llama'.*leave such samples out"):
        pipe.step(inputs, inputs)
    with pytest.raises(SlipstreamError, match=r"token 7, image_token_id"):
        pipe.step([inputs[1]], [inputs[1]])


def test_afterwards_masks_are_transformers_own() -> None:
    with masks_of_text():
        pass
    assert not torch.equal(masking_utils.blockwise_overlay(torch.tensor([[0, 0]]))(0, 0, 0, 1), torch.tensor(False))
