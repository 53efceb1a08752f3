"""What the self-check calls exact is exact at another length too, in a sample of transformers' families."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream import Pipeline
from slipstream.model.toy import perturb_parameters, toy_config
from support.architectures import gradient_error, gradients, no_rounding_inside, tokens, unsplit_step
from support.parameters import first_of

FAMILIES = {  # each with a feature that the others don't have
    "cohere2": "windows and layers without rotary embedding, both branches from one norm",
    "mbart": "positions from the cache's length, norms before",
    "granite_swa": "windows, rotary bases of layers",
    "pegasus": "positions from the cache's length, sinusoidal",
    "smollm3": "some layers without rotary embedding",
    "gpt_bigcode": "one head of keys and values",
    "afmoe": "gated attention in windows, experts",
    "ministral3": "queries scaled by position",
}
BOUND = 1e-9  # of sums that models form in float32 inside


@pytest.mark.parametrize("family", first_of(FAMILIES, 2))
def test_families_are_exact_beyond_the_toys_length(family: str) -> None:
    config = toy_config(AutoConfig.for_model(family, is_decoder=True))
    for name in [name for name, value in vars(config).items() if "drop" in name and isinstance(value, float)]:
        setattr(config, name, 0.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    perturb_parameters(model)
    whole, inputs = copy.deepcopy(model), tokens(length=96)
    with no_rounding_inside():
        expected = unsplit_step(whole, inputs, inputs)
        pipe = Pipeline(model, slices=[5, 1, 46, 44], num_ranks=2)
        loss = pipe.step(inputs, inputs)
    assert abs(loss - expected) < BOUND * expected
    assert gradient_error(gradients(whole.named_parameters()), gradients(pipe.named_parameters())) < BOUND
