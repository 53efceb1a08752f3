"""A trace on meta tensors counts the attention of grouped heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.sequential import BatchSlice, ShapeTracer, flatten_layers

ROWS, TOKENS, HEADS, GROUPS, WIDTH = 2, 8, 4, 2, 16


class Grouped(nn.Module):
    """Attention of grouped heads, and nothing else."""

    def forward(self, hidden: Tensor) -> Tensor:
        query = hidden.view(ROWS, TOKENS, HEADS, WIDTH).transpose(1, 2)
        key = query[:, :GROUPS]
        mixed = nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(ROWS, TOKENS, HEADS * WIDTH)


def test_attention_of_grouped_heads_is_counted() -> None:
    """Queries by keys and weights by values: two products of (tokens, width) and (width, tokens) a head."""
    layers = flatten_layers(nn.Sequential(Grouped(), nn.Linear(HEADS * WIDTH, 10, bias=False)))
    tracer = ShapeTracer(layers, torch.device("cpu"))
    trace = tracer.trace(BatchSlice(torch.zeros(ROWS, TOKENS, HEADS * WIDTH)), training=True)
    assert [work.flops for work in trace.work] == [
        ROWS * HEADS * 2 * (2 * TOKENS * TOKENS * WIDTH),
        2 * ROWS * TOKENS * HEADS * WIDTH * 10,
    ]
