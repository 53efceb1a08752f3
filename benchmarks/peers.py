"""The model of the benchmarks, and torch.distributed.pipelining running it: the same layers, cut the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

NUM_LAYERS = 8
VOCABULARY = 8192
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved 1f1b": ScheduleInterleaved1F1B,
    "interleaved zero-bubble": ScheduleInterleavedZeroBubble,
}


def model_config(max_length: int) -> LlamaConfig:
    """Returns the benchmarks' Llama: 8 layers, hidden size 512, vocabulary 8192."""
    return LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
    )


def whole_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def use_checkpoints(model: PreTrainedModel) -> None:
    """Lets transformers save what enters each layer alone, and compute the rest again."""
    model.train()
    # The name is another one in later versions.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LayersOf(nn.Module):
    """Some layers of a model built as Llama is, with its embedding or its head where they are first or last."""

    def __init__(self, model: PreTrainedModel, layers: range) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens if layers.start == 0 else None
        self.layers = nn.ModuleList(model.model.layers[i] for i in layers)
        self.rotary = model.model.rotary_emb
        is_last = layers.stop == NUM_LAYERS
        self.head = nn.Sequential(model.model.norm, model.lm_head) if is_last else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        return hidden if self.head is None else self.head(hidden)


def torch_pipeline(
    schedule: str,
    config: PretrainedConfig,
    partition: Sequence[int],
    num_microbatches: int,
    inputs: Tensor,
    targets: Tensor,
) -> tuple[Callable[[], float | None], list[nn.Parameter]]:
    """Returns a step of torch.distributed.pipelining on this rank, with the loss on the last, and its parameters."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = whole_model(config)
    bounds = list(pairwise(accumulate(partition, initial=0)))
    stages = [
        PipelineStage(LayersOf(model, range(*bounds[index])), index, len(partition), torch.device("cpu"))
        for index in range(rank, len(partition), num_ranks)
    ]
    several = len(partition) > num_ranks
    runner = SCHEDULES[schedule](stages if several else stages[0], num_microbatches, loss_fn=mean_loss)

    def step() -> float | None:
        losses: list[Tensor] = []
        if rank == 0:
            runner.step(inputs)
        else:
            runner.step(target=targets, losses=losses)
        return float(torch.stack(losses).detach().mean()) if losses else None

    return step, [parameter for stage in stages for parameter in stage.submod.parameters()]
