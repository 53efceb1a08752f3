"""The self-check accepts what is exact and names what isn't; masks and biases of a model's own are exact or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import OpenAIGPTConfig, PretrainedConfig, masking_utils

import slipstream
from slipstream import SlipstreamError
from slipstream.attention import KeyRanges
from slipstream.model import check_sliceable
from slipstream.model.hooks import length_dependent_rope
from slipstream.model.hooks.attention import POSITION_BIAS, sliced_attention
from slipstream.model.hooks.masks import first_keys, masks_of_text
from support.architectures import ARCHITECTURES, llama, tokens
from support.parameters import first_of
from support.pipelines import make_pipe


@pytest.mark.parametrize("name", first_of(ARCHITECTURES, 5))
def test_accepts(name: str) -> None:
    found = check_sliceable(ARCHITECTURES[name])
    assert found.output_error < 1e-10
    assert found.gradient_error < 1e-6


@pytest.mark.parametrize(
    ("config", "reason"),
    [(OpenAIGPTConfig(), r"'openai-gpt'.*layer 0 \(Block\) never attends through.* nor to keys and values from")],
)
def test_refuses_by_name(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(SlipstreamError, match=reason):
        check_sliceable(config)


def test_runs_before_the_pipeline_is_built() -> None:
    with pytest.raises(SlipstreamError, match="layer 0 \\(Block\\)"):
        slipstream.Pipeline.from_config(OpenAIGPTConfig())


def test_catches_a_feature_that_slices_get_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fix for dynamic rope the slices below the threshold get other frequencies: layer 0 differs first."""

    def no_fix(model: nn.Module) -> None:
        pass

    monkeypatch.setattr("slipstream.model.causal_lm_stage.fix_length_dependent_rope", no_fix)
    assert length_dependent_rope.fix_length_dependent_rope is not no_fix
    dynamic = llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(SlipstreamError, match="differs from the whole one in layer 0"):
        check_sliceable(dynamic)


def test_a_bias_of_the_models_own_is_refused() -> None:
    states, mask = torch.zeros(1, 2, 3, 4), KeyRanges(torch.zeros(1, 3, dtype=torch.int64), start=0)
    with pytest.raises(SlipstreamError, match="Identity adds a bias of its own to scores"):
        sliced_attention(nn.Identity(), states, states, states, mask, **{POSITION_BIAS: torch.zeros(1, 2, 3, 3)})


CPU = torch.device("cpu")


def causal_or_in_one_image(numbers: list[int]) -> masking_utils.Callable:
    overlay = masking_utils.blockwise_overlay(torch.tensor([numbers]))
    return masking_utils.or_masks(masking_utils.causal_mask_function, overlay)


def test_a_mask_made_for_one_token_holds_for_many() -> None:
    with masks_of_text():
        mask = causal_or_in_one_image([-1])
    assert first_keys(mask, 6, CPU).tolist() == [0] * 6


@pytest.mark.parametrize("width", [1, 3, 7, 20])
def test_a_window_of_transformers_is_known_without_its_pairs(width: int) -> None:
    """As its pairs have it; a function that only looks like one is evaluated."""
    window = masking_utils.sliding_window_causal_mask_function(width)
    evaluated = first_keys(lambda *pair: window(*pair), 13, CPU)
    assert torch.equal(first_keys(window, 13, CPU), evaluated)
    narrower = masking_utils.and_masks(window, masking_utils.sliding_window_overlay(2))
    assert torch.equal(first_keys(narrower, 13, CPU), first_keys(lambda *pair: narrower(*pair), 13, CPU))
    # All pairs of so many tokens would take minutes.
    assert first_keys(window, 1 << 20, CPU)[-1] == (1 << 20) - width


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
