"""Finds the head of an architecture, if its rows can be spread over ranks: a linear layer whose outputs are the logits.

A toy of the architecture runs once: some models scale or cap what the head returns, which no rank could do alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model.model_anatomy import ModelAnatomy
from slipstream.model.toy import toy_model, toy_tokens


def find_spreadable_head(config: PretrainedConfig, anatomy: ModelAnatomy) -> str:
    """Returns the name of the head, such as "lm_head". Raises SlipstreamError, saying why, where it can't be spread."""
    if anatomy.tied:
        head, embedding = anatomy.tied[0]
        raise _refusal(
            f"{head} is tied to {embedding}, which is whole on the first stage. Give a model with "
            "tie_word_embeddings=False, or leave vocabulary out"
        )
    model = toy_model(config)
    head = model.get_output_embeddings()
    name = next((name for name in anatomy.after if model.get_submodule(name) is head), None)
    if type(head) is not nn.Linear or name is None:
        kind = type(head).__name__
        raise _refusal(f"the head of model_type {config.model_type!r} is a {kind}, not an nn.Linear")
    outputs: list[Tensor] = []
    head.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    with torch.no_grad():
        logits = model(input_ids=toy_tokens(config), use_cache=False).logits
    if len(outputs) != 1 or logits.data_ptr() != outputs[0].data_ptr() or logits.shape != outputs[0].shape:
        raise _refusal(f"model_type {config.model_type!r} changes what its head returns, such as by a scale or a cap")
    return name


def _refusal(reason: str) -> SlipstreamError:
    return SlipstreamError(f"vocabulary='spread': {reason}.")
