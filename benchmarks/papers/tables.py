"""The papers' tables as data, and the model configurations they are about."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path

from slipstream.cost import Amount, ModelCount, PartCount
from slipstream.schedule import Op

TABLES = Path(__file__).parent / "tables"


def read(name: str) -> list[dict[str, str]]:
    """Reads the rows of a table, whose first line says what it is and where it is from."""
    lines = (TABLES / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def slice_lengths(text: str) -> tuple[int, ...]:
    """Parses slices as the TeraPipe tables write them: 776+640+632, or 64*26+56*6+48."""
    lengths: list[int] = []
    for term in text.split("+"):
        length, _, count = term.partition("*")
        lengths += [int(length)] * int(count or 1)
    return tuple(lengths)


@cache
def gpt(hidden_size: int, num_heads: int, num_layers: int, vocab_size: int = 51200) -> ModelCount:
    """Counts a GPT of whole layers in float16, with Megatron's fused kernels. They are alike, so that two of them are
    enough."""
    import torch
    from transformers import GPT2Config

    from slipstream.profile import count_model

    config = GPT2Config(
        n_embd=hidden_size,
        n_layer=2,
        n_head=num_heads,
        vocab_size=vocab_size,
        n_positions=2048,
        resid_pdrop=0,
        embd_pdrop=0,
        use_cache=False,
    )
    model = count_model(config, 2048, torch.float16, fused=True)
    return with_dropout(replace(model, kinds=(0,) * num_layers, halves=()))


# Bytes of a number of both residuals: forward writes a mask, backward reads it and a gradient, and writes one
_DROPOUT = {Op.F: 2 * 1.0, Op.I: 2 * (1.0 + 2 + 2)}


def with_dropout(model: ModelCount) -> ModelCount:
    """Returns the model, counted without dropout, with it in the kernels that add residuals (PTD-P section 4.2)."""

    def part(layer: PartCount) -> PartCount:
        ops, kept = dict(layer.ops), 2 * 1.0 * model.hidden_size
        for op, each in _DROPOUT.items():
            wide = ops[op].wide_bytes
            wide = Amount(wide.constant, wide.per_token + each * model.hidden_size)
            ops[op] = replace(ops[op], wide_bytes=wide)
        return replace(
            layer,
            ops=ops,
            activation_bytes=layer.activation_bytes + kept,
            wide_activation_bytes=layer.wide_activation_bytes + kept,
        )

    return replace(model, layers=tuple(map(part, model.layers)))


def errors(rows: list[dict[str, object]], name: str = "error") -> dict[str, float]:
    """Returns the mean and the worst relative error of rows."""
    found = [abs(float(str(row[name]))) for row in rows]
    return {"mean": sum(found) / len(found), "worst": max(found)}
