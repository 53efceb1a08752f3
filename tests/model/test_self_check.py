"""The self-check accepts what is exact and refuses the rest by the name of the layer or feature."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import OpenAIGPTConfig, PretrainedConfig

import slipstream
from slipstream import SlipstreamError
from slipstream.model import check_sliceable
from slipstream.model.hooks import length_dependent_rope
from support.architectures import ARCHITECTURES, llama
from support.parameters import first_of


@pytest.mark.parametrize("name", first_of(ARCHITECTURES, 5))
def test_accepts(name: str) -> None:
    found = check_sliceable(ARCHITECTURES[name])
    assert found.output_error < 1e-10
    assert found.gradient_error < 1e-6


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (OpenAIGPTConfig(), r"'openai-gpt'.*layer 0 \(Block\) never attends through.* nor to keys and values from"),
    ],
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
