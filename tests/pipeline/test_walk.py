"""A step is easy to follow: few calls of ours down to a layer's forward, in few files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import slipstream
from slipstream import Pipeline, Runtime

SOURCES = str(Path(slipstream.__file__).parent)
MOST_FRAMES, MOST_FILES, MOST_FUNCTIONS = 9, 32, 220


class Walk:
    """Collects which of our functions run, and through which of them the first layer is reached."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()  # file and name
        self.to_a_layer: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if frame.f_code.co_filename.startswith(SOURCES):
            self.functions.add((frame.f_code.co_filename, frame.f_code.co_qualname))
        elif frame.f_code is LlamaDecoderLayer.forward.__code__ and not self.to_a_layer:
            self.to_a_layer = self._callers(frame)

    def _callers(self, frame: FrameType) -> list[str]:
        names: list[str] = []
        outer: FrameType | None = frame
        while outer is not None and names[-1:] != ["Pipeline.step"]:
            if outer.f_code.co_filename.startswith(SOURCES):
                names.append(outer.f_code.co_qualname)
            outer = outer.f_back
        return names[::-1]


def test_a_step_comes_to_a_layer_through_few_functions() -> None:
    """Llama of four layers, two ranks in this process, four slices; comprehensions count as functions do."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 97}
    config = LlamaConfig(**sizes, num_hidden_layers=4, max_position_embeddings=64)
    pipe = Pipeline.from_config(config, num_ranks=2, slices=4, runtime=Runtime(self_check=False))
    inputs = torch.randint(0, 97, (1, 32), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        pipe.step(inputs, inputs)
    walk = Walk()
    before = sys.getprofile()
    sys.setprofile(walk)
    try:
        pipe.step(inputs, inputs)
    finally:
        sys.setprofile(before)
    assert walk.to_a_layer[0] == "Pipeline.step"
    assert walk.to_a_layer[-1] == "CausalLMStage.compute"
    assert len(walk.to_a_layer) <= MOST_FRAMES, walk.to_a_layer
    files = sorted({file.removeprefix(SOURCES) for file, _ in walk.functions})
    assert len(files) <= MOST_FILES, files
    assert len(walk.functions) <= MOST_FUNCTIONS, sorted(walk.functions)
