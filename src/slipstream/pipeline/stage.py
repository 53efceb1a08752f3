"""The stages of both kinds of model; a part of a batch is a TokenSlice for the one, a BatchSlice for the other."""

from __future__ import annotations

from slipstream.model import CausalLMStage
from slipstream.model.sequential import SequentialStage

Stage = CausalLMStage | SequentialStage
