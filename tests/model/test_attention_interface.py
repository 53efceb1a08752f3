"""What a model adds to attention's scores by itself is never left out silently."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream import SlipstreamError
from slipstream.attention import KeyRanges
from slipstream.model.hooks.attention import POSITION_BIAS, sliced_attention


def test_a_bias_of_the_models_own_is_refused() -> None:
    states, mask = torch.zeros(1, 2, 3, 4), KeyRanges(torch.zeros(1, 3, dtype=torch.int64), start=0)
    with pytest.raises(SlipstreamError, match="Identity adds a bias of its own to scores"):
        sliced_attention(nn.Identity(), states, states, states, mask, **{POSITION_BIAS: torch.zeros(1, 2, 3, 3)})
