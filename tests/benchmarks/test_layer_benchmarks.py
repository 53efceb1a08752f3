"""The benchmarks of single layers count the operations PyTorch counts, and the GPU's one runs on a CPU at toy size."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from support.paths import ROOT


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no package that is installed."""
    monkeypatch.syspath_prepend(str(ROOT))


def toy(num_layers: int) -> LlamaConfig:
    from benchmarks.gpu_layers import TOY

    return LlamaConfig(**TOY, num_hidden_layers=num_layers, max_position_embeddings=64)


def test_operations_are_those_that_pytorch_counts() -> None:
    """Of eager attention, whose two products compute all pairs of a query and a key instead of those before it."""
    from benchmarks.gpu_layers import training_flops

    def counted(num_layers: int) -> int:
        model = AutoModelForCausalLM.from_config(toy(num_layers), attn_implementation="eager")
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, length, dtype=torch.int64)).logits.sum().backward()
        return counter.get_total_flops()

    config, length = toy(5), 24
    all_pairs = 12 * config.num_attention_heads * config.head_dim * length * (length - 1) / 2
    assert counted(5) - counted(3) == training_flops(config, 2, length) + 2 * all_pairs


def test_a_layer_has_llama_3_8bs_parameters() -> None:
    from benchmarks.gpu_layers import LLAMA_3_8B, training_flops

    config = LlamaConfig(**LLAMA_3_8B, num_hidden_layers=32, max_position_embeddings=8192)
    attention = 12 * 4096 * 8192 * 8193 / 2
    weights = (training_flops(config, 1, 8192) - attention) / 6 / 8192
    assert weights == 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336
    assert 32 * weights + 2 * 128256 * 4096 == pytest.approx(8.03e9, rel=1e-3)  # as Meta gives it


def test_a_layer_and_slice_call_few_functions() -> None:
    """Slipstream's, with what a slice costs besides, against transformers' own, forward and backward."""
    from benchmarks.host_time import measure, verdicts

    found = measure(torch.device("cpu"), 2, repeats=1, with_fused=False)
    assert found["transformers"]["calls"] < found["eager"]["calls"] < 3.5 * found["transformers"]["calls"]
    slow, fast = {"microseconds": 130.0, "calls": 3.0}, {"microseconds": 100.0, "calls": 1.0}
    assert [*verdicts({"eager": slow, "fused": fast}).values()] == [True]
    assert [*verdicts({"eager": fast, "fused": slow}).values()] == [False]
