"""Counted models of the measured runs, with the kernels and precisions of the systems that ran them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from slipstream.cost import Amount, ModelCount, PartCount
from slipstream.schedule import Op

# of Megatron-Bridge's recipes for Llama 3 70B, whose adapters are on the product of queries, keys and values alone
LORA_RANK = 16
MEGATRON_LORA = ("q_proj", "k_proj", "v_proj")
ALL_LORA = (*MEGATRON_LORA, "o_proj", "gate_proj", "up_proj", "down_proj")


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
    lora_modules: tuple[str, ...] = (),
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
    lora = Adapter("default", LoraConfig(r=LORA_RANK, target_modules=[*lora_modules])) if lora_modules else None
    trained = TrainedWeights(adapter=lora)
    model = count_model(config, length, torch.bfloat16, trained, fused=fused)
    return replace(model, kinds=(model.kinds[0], *model.kinds[1:] * (layers - 1)), halves=())


ADAPTER_PASSES = 3  # over outputs forward, over inputs backward: two read, one written


def with_adapters(plain: ModelCount, adapted: ModelCount, feed_forward: int = 0) -> ModelCount:
    """Returns the model with adapters, counted with PEFT's, and what fused kernels move: in 16 bits, to the output of
    each product and to its input's gradient one kernel adds.

    Args:
        plain: the model without adapters.
        adapted: with them.
        feed_forward: the width between the products of the feed-forward half, where all products have adapters; 0 where
            only that of queries, keys and values has one.
    """
    (call,) = plain.layers[0].attentions
    hidden, queries = plain.hidden_size, call.num_heads * call.key_width
    written = queries + call.num_key_value_heads * (call.key_width + call.value_width)
    read = hidden
    if feed_forward:
        written += 2 * hidden + 2 * feed_forward
        read += queries + hidden + feed_forward

    def part(layer: PartCount, own: PartCount) -> PartCount:
        ops = dict(layer.ops)
        for op, width in {Op.F: written, Op.I: read}.items():
            count = own.ops[op]
            moved = count.other_bytes.per_token + ADAPTER_PASSES * width * plain.dtype_bytes
            more = Amount(count.other_bytes.constant, moved)
            ops[op] = replace(count, flops=ops[op].flops, other_bytes=more)
        return replace(layer, ops=ops)

    return replace(adapted, layers=tuple(part(layer, plain.layers[0]) for layer in adapted.layers))


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


def with_own_activation(model: ModelCount, feed_forward: int) -> ModelCount:
    """Returns the model whose activation and its product with the other half are two kernels each way, as in nanotron:
    the activation's result is written, read and kept, and so is its gradient, but for keeping it."""
    moved = 2 * feed_forward * model.dtype_bytes

    def part(layer: PartCount) -> PartCount:
        ops = dict(layer.ops)
        for op in (Op.F, Op.I):
            other = ops[op].other_bytes
            ops[op] = replace(ops[op], other_bytes=Amount(other.constant, other.per_token + moved))
        return replace(layer, ops=ops, activation_bytes=layer.activation_bytes + feed_forward * model.dtype_bytes)

    return replace(model, layers=tuple(map(part, model.layers)))
