"""Counted models of the measured runs, with the kernels and precisions of the systems that ran them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from slipstream.cost import Amount, ModelCount, PartCount
from slipstream.schedule import Op

# of Megatron-Bridge's recipes for Llama 3 70B, whose adapters are on the product of queries, keys and values alone
LORA_RANK = 16
LORA_MODULES = ["q_proj", "k_proj", "v_proj"]


@cache
def counted(
    kind: str,
    hidden: int,
    heads: int,
    key_heads: int,
    feed_forward: int,
    layers: int,
    vocabulary: int,
    length: int,
    fused: bool = True,
    with_lora: bool = False,
) -> ModelCount:
    """Counts a model of whole layers. But for the first, which may have nothing to train below it, they are alike, so
    that two of them are enough."""
    import torch
    from peft import LoraConfig
    from transformers import GPT2Config, LlamaConfig, NemotronConfig

    from slipstream.model.adapters import Adapter
    from slipstream.model.trained_weights import TrainedWeights
    from slipstream.profile import count_model

    config: Any
    if kind == "gpt":
        sizes = {"n_embd": hidden, "n_head": heads, "n_inner": feed_forward, "n_positions": length, "n_layer": 2}
        sizes |= {"resid_pdrop": 0, "embd_pdrop": 0}
        config = GPT2Config(**sizes, vocab_size=vocabulary, use_cache=False, tie_word_embeddings=False)
    else:
        config = {"llama": LlamaConfig, "nemotron": NemotronConfig}[kind](
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            intermediate_size=feed_forward,
            num_hidden_layers=2,
            vocab_size=vocabulary,
            max_position_embeddings=length,
            use_cache=False,
        )
    lora = Adapter("default", LoraConfig(r=LORA_RANK, target_modules=LORA_MODULES))
    trained = TrainedWeights(adapter=lora if with_lora else None)
    model = count_model(config, length, torch.bfloat16, trained, fused=fused)
    return replace(model, kinds=(model.kinds[0], *model.kinds[1:] * (layers - 1)), halves=())


def with_sums_in_products(model: ModelCount) -> ModelCount:
    """Returns the model whose products of weight gradients add to those that are there, as Megatron's do, where
    Slipstream's are added by kernels of their own: bytes that don't grow with the tokens."""

    def part(layer: PartCount) -> PartCount:
        count = layer.ops[Op.W]
        moved = {name: Amount(0.0, getattr(count, name).per_token) for name in ("wide_bytes", "other_bytes")}
        return replace(layer, ops={**layer.ops, Op.W: replace(count, **moved)})

    return replace(model, layers=tuple(map(part, model.layers)), head=part(model.head))


ADAPTER_PASSES = 3  # over outputs forward, over inputs backward: two read, one written


def with_adapters(plain: ModelCount, adapted: ModelCount) -> ModelCount:
    """Returns the model with adapters, counted with PEFT's, and what Megatron's move: in 16 bits, on the product of
    queries, keys and values, to whose output and to whose input's gradient one kernel each adds."""
    layer = plain.layers[0]
    (call,) = layer.attentions
    written = call.num_heads * call.key_width + call.num_key_value_heads * (call.key_width + call.value_width)
    widths = {Op.F: written, Op.I: plain.hidden_size}

    def part(counted: PartCount) -> PartCount:
        ops = dict(counted.ops)
        for op, width in widths.items():
            own = layer.ops[op]
            moved = own.other_bytes.per_token + ADAPTER_PASSES * width * plain.dtype_bytes
            ops[op] = replace(own, flops=ops[op].flops, other_bytes=Amount(own.other_bytes.constant, moved))
        return replace(counted, ops=ops)

    return replace(adapted, layers=tuple(map(part, adapted.layers)))


ROTATION_PASSES = 10  # t cos + rotated(t) sin, in five kernels


def with_rotations(model: ModelCount) -> ModelCount:
    """Returns the model with rotary embeddings by PyTorch's own kernels, as in Seq1F1B's logs, in place of learned
    positions, with which it was counted."""
    moved = 2 * ROTATION_PASSES * model.hidden_size * model.dtype_bytes  # of queries and keys

    def part(layer: PartCount) -> PartCount:
        ops = dict(layer.ops)
        for op in (Op.F, Op.I):
            other = ops[op].other_bytes
            ops[op] = replace(ops[op], other_bytes=Amount(other.constant, other.per_token + moved))
        return replace(layer, ops=ops)

    embedding = replace(model.embedding, num_parameters=model.head_weight)
    return replace(model, layers=tuple(map(part, model.layers)), embedding=embedding)


def narrowed(model: ModelCount, rate: float, size: float) -> ModelCount:
    """Returns the model whose layers' products are `rate` times as fast and whose operands take `size` times the bytes.

    A cast reads what F and I read of tokens in 16 bits, and writes it by rows and, for W, by columns. Their products
    read one of these and write 16 bits: with as many numbers read as written, (1 + 2 size + size + 1) / 2 of the bytes.
    To 4 bits a cast reads twice, as their scales need the largest of all numbers first (Transformer Engine, NVFP4).
    """
    num_reads = 2 if size < 1 / 2 else 1

    def times(amount: Amount, factor: float) -> Amount:
        return Amount(factor * amount.constant, factor * amount.per_token)

    def part(layer: PartCount) -> PartCount:
        ops = {
            op: replace(
                count,
                flops=times(count.flops, 1 / rate),
                hidden_depth=times(count.hidden_depth, 1 / rate),
                other_depth=times(count.other_depth, 1 / rate),
                matmul_bytes=Amount(
                    size * count.matmul_bytes.constant,
                    (size if op is Op.W else (num_reads + 3 * size + 1) / 2) * count.matmul_bytes.per_token,
                ),
            )
            for op, count in layer.ops.items()
        }
        return replace(layer, ops=ops)

    return replace(model, layers=tuple(map(part, model.layers)))
