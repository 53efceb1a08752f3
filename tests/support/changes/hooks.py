"""Hooks that look at each token by itself, and hooks on gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as all_modules

from support.changes.change import (
    EITHER,
    REFUSED,
    USES,
    change,
    everywhere_in,
    scaled,
    scaled_first_argument,
    scaled_gradients,
)


@change("hook on a layer", "`layer.register_forward_hook` that scales a decoder layer's output")
def _(model: Any) -> None:
    model.model.layers[0].register_forward_hook(scaled)


@change("pre-hook on the first layer", "`register_forward_pre_hook` on the model's first layer")
def _(model: Any) -> None:
    model.model.layers[0].register_forward_pre_hook(scaled_first_argument)


@change("pre-hook on a stage's first layer", "`register_forward_pre_hook` on a layer with which a later stage begins")
def _(model: Any) -> None:
    model.model.layers[2].register_forward_pre_hook(scaled_first_argument)


@change("hook on an MLP", "`register_forward_hook` on a layer's MLP")
def _(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(scaled)


@change("hook on the embedding", "`register_forward_hook` on the embedding")
def _(model: Any) -> None:
    model.model.embed_tokens.register_forward_hook(scaled)


@change("hook on the head", "`register_forward_hook` on `lm_head`", names="lm_head", spread=REFUSED)
def _(model: Any) -> None:
    model.lm_head.register_forward_hook(scaled)


@change("pre-hook on the head", "`register_forward_pre_hook` on `lm_head`", names="lm_head", spread=REFUSED)
def _(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(scaled_first_argument)


@change("hook on the final norm", "`register_forward_hook` on the norm before the head")
def _(model: Any) -> None:
    model.model.norm.register_forward_hook(scaled)


@change("hook with keyword arguments", "`register_forward_hook(..., with_kwargs=True)` on `self_attn`")
def _(model: Any) -> None:
    def with_inputs(
        module: nn.Module, args: object, kwargs: dict[str, Any], output: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        return (output[0] + 0.1 * kwargs["hidden_states"], *output[1:])

    model.model.layers[1].self_attn.register_forward_hook(with_inputs, with_kwargs=True)


@change("pre-hook with keyword arguments", "`register_forward_pre_hook(..., with_kwargs=True)` on `self_attn`")
def _(model: Any) -> None:
    def larger(module: nn.Module, args: object, kwargs: dict[str, Any]) -> tuple[object, dict[str, Any]]:
        return args, kwargs | {"hidden_states": 1.1 * kwargs["hidden_states"]}

    model.model.layers[2].self_attn.register_forward_pre_hook(larger, with_kwargs=True)


@change("backward hook on a layer", "`register_full_backward_hook` that scales a layer's gradient")
def _(model: Any) -> None:
    model.model.layers[3].register_full_backward_hook(scaled_gradients)


@change("backward hook on a stage's first layer", "`register_full_backward_hook` on a layer with which a stage begins")
def _(model: Any) -> None:
    model.model.layers[2].register_full_backward_hook(scaled_gradients)


@change(
    "backward pre-hook on the head", "`register_full_backward_pre_hook` on `lm_head`", names="lm_head", spread=REFUSED
)
def _(model: Any) -> None:
    model.lm_head.register_full_backward_pre_hook(lambda module, grad_output: (0.9 * grad_output[0],))


@change("hook on a layer in two stages", "a hook on a layer of which two stages have a half", halves=REFUSED)
def _(model: Any) -> None:
    model.model.layers[1].register_forward_hook(scaled)


@change("backward hook on a layer in two stages", "a backward hook on such a layer", halves=REFUSED)
def _(model: Any) -> None:
    model.model.layers[1].register_full_backward_hook(scaled_gradients)


@change("hook on a linear layer", "`register_forward_hook` on a linear layer that adds its input")
def _(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda module, args, output: output + 0.1 * args[0])


@change("hooks on experts", "`register_forward_hook` on a mixture's block of experts", of="mixtral")
def _(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(scaled)


@change(
    "hook on Gemma 3's layer", "`register_forward_hook` on a layer with a sliding window", of="gemma3", spread=EITHER
)
def _(model: Any) -> None:
    model.model.layers[0].register_forward_hook(scaled)


def _on_mlps(module: nn.Module, args: object, output: Any) -> Any:
    return output * 1.1 if type(module).__name__ == "LlamaMLP" else None


@contextmanager
def _hooked_everywhere() -> Iterator[None]:
    handle = all_modules.register_module_forward_hook(_on_mlps)
    try:
        yield
    finally:
        handle.remove()


@change(
    "hook on all modules",
    "`torch.nn.modules.module.register_module_forward_hook`",
    during=_hooked_everywhere,
    **everywhere_in([*USES], EITHER),
)
def _(model: Any) -> None:
    pass
