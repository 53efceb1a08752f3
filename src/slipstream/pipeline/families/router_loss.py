"""Finds the load-balancing loss that the routers of a causal LM add, if any."""

from __future__ import annotations

from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model import check_router_loss, meta_model
from slipstream.model.hooks import RouterLoss


def find_router_loss(
    config: PretrainedConfig, asked: str, tensor_ranks: int, setting: str = "router_loss"
) -> RouterLoss | None:
    """Returns what routers add to the loss, None where nothing is asked for; users ask for it by `setting`.

    Raises SlipstreamError where the configuration asks for the loss of all layers together, where the architecture has
    none, and with ranks that share layers.
    """
    if asked == "none":
        check_router_loss(config, setting)
        return None
    if tensor_ranks > 1:
        raise SlipstreamError(
            f"{setting}='per_layer' isn't computed where {tensor_ranks} ranks share each layer (tensor parallelism). "
            "Use tp=1, or leave it out."
        )
    return RouterLoss.of(meta_model(config), setting)
