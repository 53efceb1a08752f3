"""Adds the load-balancing loss of a mixture of experts, of every layer by itself, to the pipeline's loss.

Fedus et al. 2021, Switch Transformers, equations 4 to 6. Of a layer with E experts, for the N tokens of a microbatch:

    loss = E sum_e f_e P_e      f_e = choices of expert e / N      P_e = mean probability that the router gives it

transformers averages f and P over all layers before it multiplies them. No stage has those of all layers before its
backwards begin, so here each layer has a loss, and their mean counts. Sums of both go from slice to slice; the last
slice has the loss, and the gradients of all slices' probabilities follow from it in reverse order.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.attention import begin_with
from slipstream.errors import SlipstreamError
from slipstream.model.hooks.token_slice import SliceContext, current_slice

_RECORDED = "router_logits"  # transformers' name of the outputs of routers
_FUNCTION = "load_balancing_loss_func"
_TRIED = 7  # tokens for comparing transformers' function with the formula


class RouterSums(NamedTuple):
    """The key of sums over tokens: a layer's router."""

    router: str


class _Router(NamedTuple):
    name: str
    module: nn.Module
    place: int  # index of the logits in the module's output


@dataclass(frozen=True)
class RouterLoss:
    """The loss of each router of a model: the configuration's coefficient, over the number of routers."""

    weight: float
    top_k: int

    @classmethod
    def of(cls, model: PreTrainedModel, setting: str) -> RouterLoss:
        """Returns the loss of a whole model, which may be on the meta device.

        Raises SlipstreamError for a model that has no such loss, or another one than the formula above.
        """
        routers = list(_routers(model))
        coefficient, top_k = (getattr(model, key, None) for key in ("router_aux_loss_coef", "num_experts_per_tok"))
        if not routers or coefficient is None or top_k is None or not _has_the_formula(model, top_k):
            raise SlipstreamError(
                f"{setting}='per_layer': {model.config.model_type!r} has no load-balancing loss in transformers that "
                f"can be computed for each layer by itself. Leave {setting} out."
            )
        return cls(coefficient / len(routers), top_k)

    def install(self, model: PreTrainedModel) -> None:
        """Makes the routers of a stage note their choices, in every forward from now on."""
        for name, router, place in _routers(model):
            router.register_forward_hook(partial(self._note, RouterSums(name), place))

    def _note(self, call: RouterSums, place: int, _router: nn.Module, _args: Any, output: Any) -> None:
        logits: Tensor = output[place] if isinstance(output, (tuple, list)) else output
        context = current_slice()
        before = context.router_sums.get(call)
        if before is None:
            before = context.store.carried.read(call, context.token_slice.start)
        sums = _sums(logits.flatten(0, -2), self.top_k) * (context.token_slice.num_own > 0)
        context.router_sums[call] = sums if before is None else before + sums

    def finish_slice(self, context: SliceContext, hidden: Tensor) -> Tensor:
        """Leaves the sums to the next slice, and after a sequence's last one adds the loss.

        Returns `hidden`, the stage's last hidden states, whose gradient begins that of the sums and of the loss.
        """
        tokens, sums = context.token_slice, context.router_sums
        if sums and tokens.end == tokens.length:
            every = torch.stack([*sums.values()])
            if context.exchange is not None:
                every = context.exchange.sum(every)
            loss = self._loss(every) * tokens.loss_share
            hidden = begin_with(hidden, lambda: [torch.ones_like(loss)], loss)
        return context.leave(sums, hidden)

    def _loss(self, sums: Tensor) -> Tensor:
        # Padding is in no sum, and a row of nothing else has no loss.
        num_tokens = (sums[0, 1].sum() / self.top_k).clamp(min=1)
        losses = [len(choices) * (choices @ chances) / num_tokens**2 for chances, choices in sums]
        return self.weight * torch.stack(losses).sum()


def _sums(logits: Tensor, top_k: int) -> Tensor:
    """Returns (2, experts): the sum of the probabilities over tokens, and how often each expert was chosen."""
    chances = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    chosen = chances.topk(top_k, dim=-1).indices.flatten()
    choices = torch.zeros_like(chances[0]).scatter_add_(0, chosen, torch.ones_like(chosen, dtype=chances.dtype))
    return torch.stack([chances.sum(0), choices])


def _routers(model: PreTrainedModel) -> Iterator[_Router]:
    """Yields the modules whose output transformers records as the logits of routers."""
    routers: dict[int, _Router] = {}
    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel)):
        recorder = (part._can_record_outputs or {}).get(_RECORDED)
        for asked in recorder if isinstance(recorder, (tuple, list)) else [recorder]:
            kind, place, within = _asked(asked)
            for name, module in model.named_modules():
                if kind is not None and isinstance(module, kind) and within in name:
                    routers.setdefault(id(module), _Router(name, module, place))
    yield from routers.values()


def _asked(recorder: Any) -> tuple[type[nn.Module] | None, int, str]:
    """Returns the recorded class, the place in its output, and a part of its name."""
    kind: Any = recorder if inspect.isclass(recorder) else getattr(recorder, "target_class", None)
    return kind, getattr(recorder, "index", 0), getattr(recorder, "layer_name", None) or ""


def _has_the_formula(model: PreTrainedModel, top_k: int) -> bool:
    """Returns whether transformers' own function of the logits of one layer is the formula."""
    function = getattr(sys.modules[type(model).__module__], _FUNCTION, None)
    num_experts = getattr(model, "num_experts", None)
    if function is None or not isinstance(num_experts, int):
        return False
    with torch.device("cpu"):
        logits = torch.randn(_TRIED, num_experts, generator=torch.Generator().manual_seed(0))
        chances, choices = _sums(logits, top_k)
        return bool(torch.isclose(function((logits,), num_experts, top_k), num_experts * choices @ chances / _TRIED**2))
