"""The systems whose steps others published: one record each, of what their code or their authors say they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from benchmarks.papers.megatron_experts import Recipe
from slipstream.cost import ExpertRuns, ReplicaExchange, StateBytes, System

# FlashAttention-2's time over that of cuDNN's attention, on a Hopper from 32,768 tokens on (the record gpu_attention)
FLASH_2 = 1.65
# Seconds in which a host starts a layer's kernels where there are experts, forward and backward each, by what CUDA
# graphs replay, and those of an expert; and how much longer it takes where two microbatches run beside each other.
LAUNCH_SECONDS = {"none": 3.6e-3, "router": 3.0e-3, "attention": 2.0e-3}
EXPERT_LAUNCH_SECONDS = 8e-5
LAUNCHES_OF_OVERLAP = 1.55
_ROWS = 64  # half a tile, which each expert's rows don't fill

# Gradients travel in 16 bits beside the last microbatch's backward, weights beside the first one's forward.
_BESIDE = ReplicaExchange(gradient_bytes=2.0, beside_passes=True)
_MEGATRON = System("Megatron", adds_in_products=True, whole_backwards=True, replicas=_BESIDE)
_TRANSFORMER_ENGINE = replace(_MEGATRON, name="Megatron with Transformer Engine", tensor_beside="products")

SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        # Attention wrote its scores, which alone were computed again; in a backward the sums of input gradients ran
        # beside the products of weight gradients.
        "Korthikanti 2022": System(
            "Megatron of 2022",
            writes_scores=True,
            adds_in_products=True,
            selective="scores",
            whole_backwards=True,
            replays_in_backward=True,
            tensor_beside="weights",
        ),
        "MLPerf": _TRANSFORMER_ENGINE,
        "DGX Cloud": _TRANSFORMER_ENGINE,
        "Megatron-Bridge": _TRANSFORMER_ENGINE,
        # FlashAttention-2 was the only kernel that torchtitan took on a Hopper (its pull request 1196); selective
        # recomputation computes every second product again.
        "torchtitan": System(
            "torchtitan",
            attention_time=FLASH_2,
            selective="half",
            whole_backwards=True,
            replicas=replace(_BESIDE, gradient_bytes=4.0),
        ),
        # Its timers wait for the device before and after each action: the host starts no kernel ahead. Inputs of
        # products are gathered again in the backward.
        "Seq1F1B": replace(
            _MEGATRON,
            name="Seq1F1B",
            keeps_gathered=False,
            runs_ahead=False,
            replicas=replace(_BESIDE, gradient_bytes=4.0),
        ),
        "Vocabulary Parallelism": _MEGATRON,
        # Buckets of 512 MiB. Each rank updates some whole parameters; where a node's ranks share the optimizer's state,
        # nodes sum gradients besides.
        "InternEvo": System(
            "InternEvo",
            whole_backwards=True,
            replicas=replace(_BESIDE, bucket_bytes=512 * 2**20),
        ),
        # Gradients of all weights in 16 bits are there before they are added to those in 32.
        "nanotron": System(
            "nanotron",
            attention_time=FLASH_2,
            whole_backwards=True,
            replicas=ReplicaExchange(gradient_bytes=4.0),
            state=StateBytes(2.0, 2.0 + 4.0, 12.0),
        ),
        "NeMo Automodel": System(
            "NeMo Automodel",
            whole_backwards=True,
            replicas=replace(_BESIDE, gradient_bytes=4.0),
        ),
        "TRL": System("TRL", whole_backwards=True, replicas=replace(_BESIDE, gradient_bytes=4.0)),
        "Llama 3": _MEGATRON,
    }
)
"""By the source of a row."""


def with_recipe(system: System, recipe: Recipe) -> System:
    """Returns a system that runs a model with experts by a recipe."""
    launches = LAUNCHES_OF_OVERLAP if recipe.overlap else 1.0
    is_graph = recipe.graphs == "step"
    experts = ExpertRuns(
        sends="devices" if recipe.dispatcher == "flex" else "rows",
        beside_passes=recipe.overlap,
        launches=0.0 if is_graph else launches * LAUNCH_SECONDS[recipe.graphs],
        launches_of_expert=0.0 if is_graph else launches * EXPERT_LAUNCH_SECONDS,
        part_of_tile=_ROWS,
    )
    return replace(system, attention_bits=recipe.attention_bits, experts=experts)
