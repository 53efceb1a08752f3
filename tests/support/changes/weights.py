"""Weights that are shared though the configuration doesn't say so, or aren't though it does; and other heads."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from slipstream.model.toy import REFERENCE_ATTENTION
from support.architectures import ARCHITECTURES, VOCABULARY, build
from support.changes.change import EITHER, IN_STAGES, REFUSED, change, everywhere_in, noise


@change(
    "head tied by hand",
    "`lm_head.weight = embed_tokens.weight`, though the configuration says untied",
    spread=EITHER,
    save_pretrained=EITHER,
)
def _(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


@change(
    "MLP in two stages",
    "one MLP in two layers of different stages",
    names="mlp",
    save_pretrained=EITHER,
    **everywhere_in([*IN_STAGES], EITHER),
)
def _(model: Any) -> None:
    model.model.layers[3].mlp = model.model.layers[0].mlp


@change("MLP twice in a stage", "one MLP in two layers of a stage", save_pretrained=EITHER)
def _(model: Any) -> None:
    model.model.layers[3].mlp = model.model.layers[2].mlp


@change("weight twice in a stage", "one `nn.Parameter` in two layers of a stage", save_pretrained=EITHER)
def _(model: Any) -> None:
    model.model.layers[3].mlp.up_proj.weight = model.model.layers[2].mlp.up_proj.weight


@change(
    "weight in two stages",
    "one `nn.Parameter` in two layers of different stages",
    names="up_proj",
    save_pretrained=EITHER,
    **everywhere_in([*IN_STAGES], EITHER),
)
def _(model: Any) -> None:
    model.model.layers[3].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


@change(
    "weight twice in a layer",
    "one `nn.Parameter` as `gate_proj` and `up_proj` of a layer",
    halves=EITHER,
    save_pretrained=EITHER,
)
def _(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[1].mlp.gate_proj.weight


@change(
    "norm's weight shared",
    "one norm's weight in all layers",
    names="input_layernorm",
    save_pretrained=EITHER,
    **everywhere_in([*IN_STAGES], EITHER),
)
def _(model: Any) -> None:
    for layer in model.model.layers[1:]:
        layer.input_layernorm.weight = model.model.layers[0].input_layernorm.weight


@change("head untied by hand", "a head with a weight of its own, though the configuration says tied", of="llama, tied")
def _(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach() + 0.02 * noise(VOCABULARY, 32))


def save_untied(folder: str) -> None:
    """Writes a folder that has embedding and head, and a configuration that says tied."""
    model = build(ARCHITECTURES["llama"])
    model.config.tie_word_embeddings = True
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)


@change("file with both", "`from_pretrained` of a file that has both, as transformers loads it", of="llama, tied")
def _(model: Any) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        save_untied(folder)
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation=REFERENCE_ATTENTION
        )


@change(
    "head replaced",
    "`nn.Sequential(Linear, GELU, Linear)` as `lm_head`",
    names="lm_head",
    spread=REFUSED,
    save_pretrained=EITHER,
)
def _(model: Any) -> None:
    torch.manual_seed(3)
    head = nn.Sequential(nn.Linear(32, 24), nn.GELU(), nn.Linear(24, VOCABULARY))
    model.lm_head = head.double()


@change("vocabulary resized", "`resize_token_embeddings`")
def _(model: Any) -> None:
    model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)


@change("vocabulary resized, tied", "`resize_token_embeddings` where head and embedding are one", of="llama, tied")
def _(model: Any) -> None:
    model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
