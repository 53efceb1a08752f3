"""One counter says what code computes: of a causal LM, of an nn.Sequential, and of weights without running anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from slipstream.cost import AttentionCall, AttentionWindow
from slipstream.model import find_anatomy
from slipstream.model.operation_counter import OperationCounter
from slipstream.pipeline.families.flop_estimate import FlopEstimate
from slipstream.profile import count_model
from slipstream.schedule import Op
from slipstream.sequential.layer_list import BatchSlice, flatten_layers
from slipstream.sequential.shape_trace import ShapeTracer
from support.architectures import ARCHITECTURES


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2_moe", "mixtral", "gemma2", "qwen3"])
def test_what_runs_has_as_many_products_as_the_weights_have_elements(name: str) -> None:
    """Two FLOPs for a multiplication: in the forward, for the gradient of the input and for that of the weights."""
    config = ARCHITECTURES[name]
    estimate = FlopEstimate(config, find_anatomy(config), seq_len=None)
    counted = count_model(config, 64, halves=False)
    parts = [*(counted.layers[kind] for kind in counted.kinds), counted.head]
    for part, products in zip(parts, estimate.products(), strict=True):
        found = [part.ops[op].flops.per_token for op in (Op.F, Op.I, Op.W)]
        assert found == pytest.approx([2 * each for each in products], rel=0.02)  # a router isn't sent to experts
    call = AttentionCall(2, 2, 8, 8, AttentionWindow(), True)
    assert call.step_flops(1) == 3 * 2 * (8 + 8)


def test_layers_of_ones_own_are_counted_as_a_models_are() -> None:
    layers = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    tokens = torch.zeros(2, 5, dtype=torch.long)
    tracer = ShapeTracer(flatten_layers(layers), torch.device("cpu"))
    work = tracer.trace(BatchSlice(tokens), training=True).work
    value: torch.Tensor = tokens
    for layer, found in zip(layers, work, strict=True):
        with OperationCounter() as counter:
            value = layer(value)
        assert (found.flops, found.num_bytes) == (counter.tally.flops, counter.tally.num_bytes)
    assert [each.flops for each in work] == [0, 2 * 10 * 16 * 32, 0, 2 * 10 * 32 * 16]
    assert work[0].num_bytes == 2 * 10 * 16 * 4  # the rows that are looked up, not the whole table


@pytest.mark.parametrize("key_heads", [4, 2])
def test_pytorchs_attention_is_counted(key_heads: int) -> None:
    query, key, value = (torch.zeros(2, heads, 7, 8) for heads in (4, key_heads, key_heads))
    with OperationCounter() as counter:
        functional.scaled_dot_product_attention(query, key, value, enable_gqa=key_heads < 4)
    assert counter.tally.flops == 2 * 4 * 7 * 7 * 2 * (8 + 8)
