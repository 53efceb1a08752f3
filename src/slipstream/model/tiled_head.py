"""The head and the loss of a slice on some of its tokens at a time, so that the logits of few exist.

    hidden     | 0 . . . | 1 . . . | 2 . . . |     the slice's last hidden states
    logits         V         V         V           of one tile at a time, and again in the backward

What a causal LM computes after its base model, such as a scale or a cap of the logits, is its own code: it runs on each
tile, with the tile's hidden states in place of the base model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.autograd_memory import recompute_in_backward
from slipstream.model.toy import toy_model, toy_tokens

_Result = TypeVar("_Result")
OfLogits = Callable[[Tensor, Tensor], _Result]  # function(logits (b, n, V), targets (b, n)) of a tile


@dataclass(frozen=True)
class HeadTiles:
    """The last hidden states of a slice in place of its logits, which exist for some tokens at a time."""

    logits_of: Callable[[Tensor], Tensor]  # (b, n, hidden) -> (b, n, V)
    hidden: Tensor  # (b, T, hidden)
    num_tokens: int  # tokens of a tile
    is_repeated: bool  # whether a replay of the stage makes the graph of the backward

    def summed(self, function: OfLogits[tuple[Tensor, Tensor]], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sums of a function's two results over all tiles, given the slice's targets (b, T)."""
        firsts, seconds = zip(*self._each(function, targets), strict=True)
        return torch.stack(firsts).sum(0), torch.stack(seconds).sum(0)

    def joined(self, function: OfLogits[Tensor], targets: Tensor) -> Tensor:
        """Returns a function's results (b, T, ...), which belong to tokens."""
        return torch.cat([*self._each(function, targets)], dim=1)

    def _each(self, function: OfLogits[_Result], targets: Tensor) -> Iterator[_Result]:
        # The gradients of all tiles are joined once.
        tiles = torch.split(self.hidden, self.num_tokens, dim=1)
        for hidden, own in zip(tiles, torch.split(targets, self.num_tokens, dim=1), strict=True):
            run = partial(self._of_tile, function, own)
            yield recompute_in_backward(
                partial(run, hidden), run, hidden, is_checked=False, is_repeated=self.is_repeated
            )

    def _of_tile(self, function: OfLogits[_Result], targets: Tensor, hidden: Tensor) -> _Result:
        return function(self.logits_of(hidden), targets)


class TiledHead:
    """The code of a causal LM after its base model, for some tokens at a time."""

    def __init__(self, model: PreTrainedModel, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._model: Any = model
        self._name = model.base_model_prefix
        self._kind: Any = None  # class of the base model's output

    def hidden(self, **arguments: Any) -> Tensor:
        """Returns the base model's hidden states (b, T, hidden). What comes after it is given one token, whose logits
        nobody reads."""
        base = self._model._modules[self._name]
        whole: list[Tensor] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            output = base(*args, **kwargs)
            self._kind = type(output)
            whole.append(output.last_hidden_state)
            return self._kind(last_hidden_state=whole[0][:, :1].detach())

        with self._standing_in(run):
            self._model(**arguments)
        return whole[0]

    def logits(self, hidden: Tensor, **arguments: Any) -> Tensor:
        """Returns the logits (b, n, V) of hidden states (b, n, hidden), given what isn't the base model's."""
        output = self._kind(last_hidden_state=hidden)
        with self._standing_in(lambda *_, **__: output):
            logits: Tensor = self._model(**arguments).logits
        return logits

    @contextmanager
    def _standing_in(self, run: Callable[..., Any]) -> Iterator[None]:
        modules = self._model._modules
        base = modules[self._name]
        modules[self._name] = _StandIn(base, run)
        try:
            yield
        finally:
            modules[self._name] = base


class _StandIn(nn.Module):
    """Runs a function in place of a module, and has whatever else the module has."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_original"] = module
        self.__dict__["_run"] = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


@torch.no_grad()
def check_tiled_head(config: PretrainedConfig) -> None:
    """Raises SlipstreamError where the logits of a toy of the architecture aren't those of its tiles."""
    model = toy_model(config)
    tokens = toy_tokens(config)
    arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        arguments["output_router_logits"] = False
    whole = model(**arguments).logits
    head = TiledHead(model, 1 + tokens.shape[1] // 3)
    try:
        hidden = head.hidden(**arguments)
        tiles = [head.logits(tile, **arguments) for tile in torch.split(hidden, head.num_tokens, dim=1)]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        tiles = []
    if not tiles or not torch.allclose(torch.cat(tiles, dim=1), whole, rtol=0, atol=1e-12):
        raise SlipstreamError(
            f"memory.loss_tokens: model_type {config.model_type!r} doesn't compute logits from its base model's hidden "
            "states, token by token. Leave memory.loss_tokens out."
        )
