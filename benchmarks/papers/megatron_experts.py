"""Models with experts as Megatron runs them: their published shapes, the recipes of the measured runs, and kernels.

Megatron-Bridge publishes with its measurements what its recipes set, for each release: whether the host starts every
kernel or replays CUDA graphs, how tokens travel to their experts, and what runs beside that
(`tables/megatron_bridge_recipes.csv`). Its kernels around experts move less than those of transformers, which
`count_model` counts: here they are written down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from benchmarks.papers.tables import read
from slipstream.cost import Amount, ModelCount, OpCount, PartCount
from slipstream.schedule import Op

_QWEN3 = {"head_dim": 128, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
_GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4}
_GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
_DEEPSEEK = {"hidden_size": 7168, "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "first_k_dense_replace": 1}
_DEEPSEEK |= {"intermediate_size": 18432, "n_shared_experts": 1}
_V3 = {"num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "vocab_size": 129280}
_K2 = {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "vocab_size": 163840}
_K2 |= {"n_group": 1, "topk_group": 1}
# By how the table's names begin: a model's type in transformers, which of two layers each layer is like, and the sizes
# of its published configuration.
EXPERTS: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "Qwen3_30B": (
        "qwen3_moe", (0,) * 48, _QWEN3 | {"hidden_size": 2048, "num_attention_heads": 32, "moe_intermediate_size": 768}
    ),
    "Qwen3_235B": (
        "qwen3_moe", (0,) * 94, _QWEN3 | {"hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536}
    ),
    "GPT OSS 120B": ("gpt_oss", (0, 1) * 18, _GPT_OSS),
    "DeepSeekV3": ("deepseek_v3", (0,) * 3 + (1,) * 58, _DEEPSEEK | _V3),
    "Kimi_K2": ("deepseek_v3", (0,) + (1,) * 60, _DEEPSEEK | _K2),
}  # fmt: skip
BIASED = ("GPT OSS 120B",)  # whose experts have biases, and activations that are clamped
# A step that is one graph has buffers for more rows than come on average, which kernels but products run over: the
# recipes' moe_expert_rank_capacity_factor.
CAPACITY = 1.5
ROWS_SHARE = 0.4  # of the bandwidth of copies, of kernels that gather and scatter rows: fitted


@dataclass(frozen=True)
class Recipe:
    """What a run of Megatron-Bridge sets.

    Args:
        graphs: what CUDA graphs replay: "none", the "router", "attention" and router, or the whole "step".
        dispatcher: "alltoall" sends a row for every expert that a token chose, "flex" a token once to every device.
        overlap: whether exchanges run beside the products of another microbatch.
        fused: whether experts' products, activation and casts are one kernel.
        attention_bits: of attention's products.
        recompute: the parts of a layer that are computed again in the backward.
    """

    graphs: str = "none"
    dispatcher: str = "alltoall"
    overlap: bool = False
    fused: bool = False
    attention_bits: int = 16
    recompute: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: str, device: str, bits: int, release: str) -> Recipe:
        """Returns the recipe of a model on a device, as the release, such as 26.02.01, has it."""
        (found,) = (
            each
            for each in read("megatron_bridge_recipes")
            if each["first"] <= release <= each["last"]
            and model == each["model"]
            and device in each["gpus"].split()
            and bits == int(each["bits"])
        )
        return cls(
            found["graphs"],
            found["dispatcher"],
            found["overlap"] == "1",
            found["fused"] == "1",
            int(found["attention_bits"]),
            tuple(found["recompute"].split()),
        )


EAGER = Recipe()


@cache
def counted_experts(name: str, length: int, recipe: Recipe, predicts_second: bool) -> ModelCount:
    """Counts a model of EXPERTS, of whole layers, with Megatron's kernels.

    Args:
        predicts_second: whether one more layer, and the head once more, predict the token after the next.
    """
    import torch
    from transformers import AutoConfig

    from slipstream.profile import count_model

    model_type, kinds, sizes = EXPERTS[name]
    sizes = sizes | {"num_hidden_layers": 2, "max_position_embeddings": length}
    config = AutoConfig.for_model(model_type, **sizes, use_cache=False, tie_word_embeddings=False)
    model = count_model(config, length, torch.bfloat16, fused=True)
    layers = list(model.layers)
    for kind, (attention, rest) in enumerate(model.halves):
        if rest.experts_per_token:
            ops = {op: _with_kernels(name, model, attention.ops[op], rest, op, recipe) for op in (Op.F, Op.I, Op.W)}
            layers[kind] = replace(layers[kind], ops=ops)
    if "mla_up_proj" in recipe.recompute:
        widths = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        up = config.q_lora_rank * widths
        up += config.kv_lora_rank * config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
        layers = [_with_flops(layer, Op.I, 2 * up) for layer in layers]
    kinds = tuple(model.kinds[kind] for kind in (*kinds, kinds[-1])[: len(kinds) + predicts_second])
    head = model.head
    if predicts_second:
        for op in head.ops:
            head = _with_flops(head, op, head.ops[op].flops.per_token)
    return replace(model, kinds=kinds, layers=tuple(layers), head=head, halves=())


def _with_flops(part: PartCount, op: Op, per_token: float) -> PartCount:
    count = replace(part.ops[op], flops=_more(part.ops[op].flops, per_token))
    return replace(part, ops={**part.ops, op: count})


def _with_kernels(name: str, model: ModelCount, attention: OpCount, rest: PartCount, op: Op, recipe: Recipe) -> OpCount:
    """Returns the count of a layer whose experts' half moves what Megatron's kernels do: norm and residual, the router,
    the rows that tokens send to experts and get back, and their activations between two products."""
    counted = _sum(attention, rest.ops[op])
    if op is Op.W:
        return replace(counted, wide_bytes=attention.wide_bytes, other_bytes=attention.other_bytes)
    first = op is Op.F
    token = model.hidden_size * model.dtype_bytes
    inner = model.dtype_bytes * rest.num_in_experts / rest.num_experts / (3 * model.hidden_size)
    rows = rest.experts_per_token * (CAPACITY if recipe.graphs == "step" else 1.0)
    # without "flex" rows are sorted before they travel and after, there and back
    moved = (2 if recipe.dispatcher == "flex" else 6) * token
    moved += 0 if recipe.fused else (3 if first else 5) * inner
    moved += 3 * inner if "moe_act" in recipe.recompute and not first else 0
    if name in BIASED and not recipe.fused:
        # clamped halves are put together, and products of biases and probabilities added in float32, by experts
        moved += (8 * inner + 14 * token) if first else (10 * inner + 18 * token)
    moved /= ROWS_SHARE
    read = rest.ops[op].matmul_bytes.per_token * (rows / rest.experts_per_token - 1)
    return replace(
        counted,
        matmul_bytes=_more(counted.matmul_bytes, read),
        wide_bytes=_more(attention.wide_bytes, (5 if first else 6) * token),
        other_bytes=_more(attention.other_bytes, 12 * rest.num_experts + rows * moved),
    )


def _more(amount: Amount, per_token: float) -> Amount:
    return Amount(amount.constant, amount.per_token + per_token)


def _sum(a: OpCount, b: OpCount) -> OpCount:
    def both(name: str) -> Amount:
        first, second = getattr(a, name), getattr(b, name)
        return Amount(first.constant + second.constant, first.per_token + second.per_token)

    amounts = {name: both(name) for name in ("flops", "unaligned_flops", "matmul_bytes", "hidden_depth", "other_depth")}
    return OpCount(**amounts, num_matmuls=a.num_matmuls + b.num_matmuls, num_kernels=a.num_kernels + b.num_kernels)
