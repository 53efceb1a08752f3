"""The stage of either kind of model; it works on a TokenSlice of a causal LM, or a BatchSlice of a sequence."""

from __future__ import annotations

from slipstream.model import CausalLMStage
from slipstream.model.sequential import SequentialStage

Stage = CausalLMStage | SequentialStage
