"""Finds the head of an architecture, if its rows can be spread over ranks: a linear layer whose outputs are the logits.

A toy of the architecture runs once: some models scale or cap what the head returns, which no rank could do alone. If
the head's weight embeds too, it must be the embedding's only weight, looked up once, for the tokens.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model.attached_code import runs_class_code
from slipstream.model.model_anatomy import ModelAnatomy
from slipstream.model.toy.toy_model import toy_model, toy_tokens
from slipstream.model.vocabulary.tied_rows import SpreadEmbedding


class HeadNames(NamedTuple):
    """The names of a head, such as "lm_head", and of the embedding that has the same weight, "" where none has."""

    head: str
    embedding: str


def find_spreadable_head(config: PretrainedConfig, anatomy: ModelAnatomy) -> HeadNames:
    """Returns the names of head and tied embedding. Raises SlipstreamError, saying why, where they can't be spread."""
    model: Any = toy_model(config)
    head, tokens = model.get_output_embeddings(), toy_tokens(config)
    name = next((name for name in anatomy.after if model.get_submodule(name) is head), None)
    if type(head) is not nn.Linear or name is None:
        kind = type(head).__name__
        raise _refusal(f"the head of model_type {config.model_type!r} is a {kind}, not an nn.Linear")
    outputs: list[Tensor] = []
    head.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    embedding = _tied_embedding(model, name, anatomy) if anatomy.tied else ""
    obstacle = anatomy.obstacle((name, embedding))
    if not runs_class_code(head):
        obstacle = "nn.Linear has another forward than PyTorch's"
    if obstacle:
        raise _refusal(f"{obstacle}, and rows of a head are multiplied by other code. Give vocabulary='whole'")
    lookups: list[tuple[Any, Tensor]] = []
    if embedding:
        model.get_submodule(embedding).register_forward_hook(lambda _, args, output: lookups.append((args, output)))
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    if len(outputs) != 1 or logits.data_ptr() != outputs[0].data_ptr() or logits.shape != outputs[0].shape:
        raise _refusal(f"model_type {config.model_type!r} changes what its head returns, such as by a scale or a cap")
    if embedding and not _only_looks_up(model.get_submodule(embedding), lookups, tokens):
        raise _refusal(f"{embedding} of model_type {config.model_type!r} does more than to look the tokens' rows up")
    return HeadNames(name, embedding)


def _tied_embedding(model: Any, head: str, anatomy: ModelAnatomy) -> str:
    """Returns the name of the embedding of tokens, which shares its one weight with the head."""
    embedding = model.get_input_embeddings()
    name = next((name for name in anatomy.before if model.get_submodule(name) is embedding), None)
    if name is None or anatomy.tied != ((f"{head}.weight", f"{name}.weight"),):
        shared = ", ".join(" with ".join(each) for each in anatomy.tied)
        raise _refusal(f"model_type {model.config.model_type!r} shares {shared}, not its head with its token embedding")
    if not isinstance(embedding, nn.Embedding) or [*embedding.state_dict()] != ["weight"]:
        raise _refusal(f"{name} is a {type(embedding).__name__}, not an nn.Embedding with a weight alone")
    if embedding.max_norm or embedding.scale_grad_by_freq or embedding.sparse:
        raise _refusal(f"{name} has max_norm, scale_grad_by_freq or sparse")
    return name


def _only_looks_up(embedding: nn.Module, lookups: list[tuple[Any, Tensor]], tokens: Tensor) -> bool:
    """Returns whether one lookup was made, and what it gave follows from the tokens' rows alone."""
    if len(lookups) != 1 or len(lookups[0][0]) != 1 or not torch.equal(lookups[0][0][0], tokens):
        return False
    weight: Any = embedding.weight
    spread = SpreadEmbedding(copy.deepcopy(embedding), None, is_first=True)
    with torch.no_grad():
        found = spread.of_looked_up(functional.embedding(tokens, weight))
    return torch.equal(found, lookups[0][1])


def _refusal(reason: str) -> SlipstreamError:
    return SlipstreamError(f"vocabulary='spread': {reason}.")
