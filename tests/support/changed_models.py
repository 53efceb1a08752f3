"""Ways to change a model before a Pipeline takes it, and what each must be in each use: exact, or refused by name.

`docs/own-models.md` shows them. A change is made to a model as it was built, in place, or returns another one.
"""

from __future__ import annotations

import copy
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.parametrizations import spectral_norm
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slipstream.model.adapters import quiet_peft
from slipstream.model.toy.toy_comparison import REFERENCE_ATTENTION
from support.adapters import lora
from support.architectures import ARCHITECTURES, VOCABULARY, build

EXACT, REFUSED, EITHER = "exact", "refused", "exact or refused"
SLICES = [31, 20, 13]

# A use is what a Pipeline is given. Numbers of layers stand for those of a model of four layers.
USES: dict[str, dict[str, Any]] = {
    "whole": {"slices": 1},
    "sliced": {"slices": SLICES},
    "stages": {"slices": SLICES, "num_ranks": 2, "partition": [2, 2]},
    "microbatches": {"slices": 1, "num_microbatches": 2, "num_ranks": 2, "partition": [2, 2]},
    "processes": {"slices": SLICES, "partition": [2, 2]},
    "halves": {"slices": SLICES, "num_ranks": 2, "partition": [1.5, 2.5]},
    "spread": {"slices": SLICES, "num_ranks": 2, "partition": [2, 2], "vocabulary": "spread"},
    "fused": {"slices": SLICES, "fused": True},
    "recompute": {"slices": SLICES, "recompute": "full"},
}
_IN_SLICES = [use for use in USES if use not in ("whole", "microbatches")]
_IN_PIECES = [use for use in USES if use != "whole"]
_IN_STAGES = ["stages", "microbatches", "processes", "halves", "spread"]


@dataclass(frozen=True, eq=False)
class Change:
    """A change, and of uses (and of `save_pretrained`) the outcomes that aren't exact.

    A refusal has one of `names` at least. `during` is entered for as long as the model is built and runs.
    """

    name: str
    does: str
    make: Callable[[PreTrainedModel], nn.Module | None]
    config: PretrainedConfig
    group: str
    outcomes: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    during: Callable[[], AbstractContextManager[object]] = nullcontext
    num_layers: int = 4

    def outcome(self, use: str) -> str:
        return self.outcomes.get(use, EXACT)

    def built(self) -> nn.Module:
        """The changed model in float64, each time with the same numbers."""
        model = build(self.config)
        changed = self.make(model)
        return (model if changed is None else changed).train()

    def settings(self, use: str) -> dict[str, Any]:
        """The arguments of a Pipeline for the use, with stages that fit the number of layers."""
        settings = dict(USES[use])
        if "partition" in settings:
            first = settings["partition"][0]
            settings["partition"] = [first, self.num_layers - first]
        return settings


CHANGES: dict[str, Change] = {}


def change(
    name: str,
    does: str,
    *,
    of: str = "llama",
    group: str = "",
    names: str = "",
    num_layers: int = 4,
    during: Callable[[], AbstractContextManager[object]] = nullcontext,
    **outcomes: str,
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Registers a function that changes a model. `names` are words apart by |; without, those of a layer or a hook."""

    def add(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        words = tuple(names.split("|")) if names else ("layers.", "hook", "forward")
        CHANGES[name] = Change(
            name, does, make, ARCHITECTURES[of], group or _Section.now, outcomes, words, during, num_layers
        )
        return make

    return add


class _Section:
    now = ""


def _section(title: str) -> None:
    _Section.now = title


def _all(uses: list[str], outcome: str = REFUSED) -> dict[str, str]:
    return dict.fromkeys(uses, outcome)


def noise(*shape: int, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def scaled(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 1.1


def scaled_first_argument(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return (args[0] * 1.1, *args[1:])


def scaled_gradients(module: nn.Module, grad_input: tuple[Tensor | None, ...], grad_output: object) -> tuple[Any, ...]:
    return tuple(None if each is None else 0.9 * each for each in grad_input)


# --------------------------------------------------------------------------------------------------------------------
_section("Hooks that work token by token")


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
    model.model.layers[1].register_forward_hook(scaled)


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
    **_all([*USES], EITHER),
)
def _(model: Any) -> None:
    pass


# --------------------------------------------------------------------------------------------------------------------
_section("Forwards of your own")


def straight_through(found: Tensor, wanted: Tensor) -> Tensor:
    return found + (wanted - found).detach()


def in_four_bits(weight: Tensor) -> Tensor:
    step = weight.detach().abs().max() / 7
    return straight_through(weight, (weight / step).round() * step)


def with_quantised_weight(linear: Any, inputs: Tensor) -> Tensor:
    return F.linear(inputs, in_four_bits(linear.weight), linear.bias)


@change("forward of a linear layer", "`linear.forward` replaced on instances: a fake-quantised weight")
def _(model: Any) -> None:
    for linear in (model.model.layers[1].self_attn.q_proj, model.model.layers[2].mlp.down_proj):
        linear.forward = types.MethodType(with_quantised_weight, linear)


@change("forward of a linear layer, closure", "`linear.forward` replaced by a function that remembers the layer")
def _(model: Any) -> None:
    linear = model.model.layers[1].mlp.up_proj
    linear.forward = lambda inputs: with_quantised_weight(linear, inputs)


@change("scales for each token", "`linear.forward` that quantises its inputs too, with a scale for each token")
def _(model: Any) -> None:
    def forward(linear: Any, inputs: Tensor) -> Tensor:
        step = inputs.detach().abs().amax(-1, keepdim=True) / 127
        return with_quantised_weight(linear, straight_through(inputs, (inputs / step).round() * step))

    for layer in model.model.layers:
        layer.mlp.down_proj.forward = types.MethodType(forward, layer.mlp.down_proj)


@change("forward of the head", "`lm_head.forward` replaced", names="lm_head", spread=REFUSED)
def _(model: Any) -> None:
    model.lm_head.forward = types.MethodType(with_quantised_weight, model.lm_head)


@change("forward of Conv1D", "`forward` of GPT-2's `Conv1D` replaced", of="gpt2", spread=EITHER)
def _(model: Any) -> None:
    def forward(conv: Any, inputs: Tensor) -> Tensor:
        return inputs @ in_four_bits(conv.weight) + conv.bias

    conv = model.transformer.h[1].mlp.c_fc
    conv.forward = types.MethodType(forward, conv)


@change("forward of the embedding", "`embed_tokens.forward` replaced: scaled rows")
def _(model: Any) -> None:
    embedding = model.model.embed_tokens
    embedding.forward = lambda ids: 2.0 * F.embedding(ids, embedding.weight)


@change(
    "forward of a tied embedding", "the same where the head has the embedding's weight", of="llama, tied", spread=EITHER
)
def _(model: Any) -> None:
    embedding = model.model.embed_tokens
    embedding.forward = lambda ids: 2.0 * F.embedding(ids, embedding.weight)


class ScaledLinear(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return 1.5 * super().forward(inputs)


def _as_scaled(linear: nn.Linear) -> ScaledLinear:
    made = ScaledLinear(linear.in_features, linear.out_features, bias=False, dtype=torch.float64)
    made.weight = linear.weight
    return made


@change("subclass of a linear layer", "a subclass of `nn.Linear` with a forward of its own in place of `o_proj`")
def _(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj = _as_scaled(model.model.layers[1].self_attn.o_proj)


@change("subclass of a linear layer as head", "such a subclass as `lm_head`", names="lm_head", spread=REFUSED)
def _(model: Any) -> None:
    model.lm_head = _as_scaled(model.lm_head)


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 2.0 * super().forward(ids)


@change("subclass of the embedding", "a subclass of `nn.Embedding` with a forward of its own")
def _(model: Any) -> None:
    given = model.model.embed_tokens
    model.model.embed_tokens = ScaledEmbedding(*given.weight.shape, dtype=torch.float64)
    model.model.embed_tokens.weight = given.weight


def _patched_linear() -> AbstractContextManager[object]:
    return patch.object(nn.Linear, "forward", with_quantised_weight)


@change(
    "nn.Linear.forward patched",
    "`nn.Linear.forward` replaced on the class",
    names="Linear",
    during=_patched_linear,
    spread=EITHER,
)
def _(model: Any) -> None:
    pass


@change("forward of a norm", "`input_layernorm.forward` replaced", fused=EITHER)
def _(model: Any) -> None:
    norm = model.model.layers[2].input_layernorm

    def forward(inputs: Tensor) -> Tensor:
        return 1.2 * norm.weight * inputs * torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + 1e-3)

    norm.forward = forward


@change("forward of an MLP wrapped", "`mlp.forward` wrapped by a function that calls the one before", fused=EITHER)
def _(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    inner = mlp.forward
    mlp.forward = lambda inputs: 1.1 * inner(inputs)


@change("forward of a layer wrapped", "`layer.forward` wrapped likewise", halves=REFUSED)
def _(model: Any) -> None:
    layer = model.model.layers[1]
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: 1.1 * inner(*args, **kwargs)


@change("forward of a stage's first layer wrapped", "`layer.forward` wrapped on a layer with which a stage begins")
def _(model: Any) -> None:
    layer = model.model.layers[2]
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: 1.1 * inner(*args, **kwargs)


@change("forward of attention wrapped", "`self_attn.forward` wrapped likewise")
def _(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    inner = attention.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        output, *rest = inner(*args, **kwargs)
        return (1.1 * output, *rest)

    attention.forward = forward


@change("class of an MLP", "`mlp.__class__` set to a subclass with a forward of its own", fused=EITHER)
def _(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type(
        "ScaledMLP", (type(mlp),), {"forward": lambda self, x: 1.1 * super(type(self), self).forward(x)}
    )


@change("MLP replaced", "a module of the user's own in place of an MLP", fused=EITHER, save_pretrained=EITHER)
def _(model: Any) -> None:
    torch.manual_seed(3)
    model.model.layers[1].mlp = nn.Sequential(nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 32)).double()


@change(
    "norm of Qwen 3's queries", "`q_norm` replaced by `nn.Identity`", of="qwen3", fused=EITHER, save_pretrained=EITHER
)
def _(model: Any) -> None:
    model.model.layers[1].self_attn.q_norm = nn.Identity()


@change("forward of a router wrapped", "`forward` of a mixture's router wrapped", of="mixtral", **_all([*USES], EITHER))
def _(model: Any) -> None:
    gate = model.model.layers[1].mlp.gate
    inner = gate.forward
    gate.forward = lambda inputs: inner(1.5 * inputs)


@change(
    "forward of the model wrapped",
    "`model.forward` wrapped",
    names="forward|CausalLM",
    **_all([*USES], EITHER) | _all(_IN_STAGES),
)
def _(model: Any) -> None:
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        found.logits = 1.3 * found.logits
        return found

    model.forward = forward


@change(
    "forward of the layers' model wrapped",
    "`model.model.forward` wrapped",
    names="forward|Model",
    **_all([*USES], EITHER) | _all(_IN_STAGES),
)
def _(model: Any) -> None:
    inner = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        found.last_hidden_state = 1.3 * found.last_hidden_state
        return found

    model.model.forward = forward


# --------------------------------------------------------------------------------------------------------------------
_section("Weights that are shared, or are not")


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
    **_all([*_IN_STAGES], EITHER),
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
    **_all([*_IN_STAGES], EITHER),
)
def _(model: Any) -> None:
    model.model.layers[3].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


@change("weight twice in a layer", "one `nn.Parameter` as `gate_proj` and `up_proj` of a layer", save_pretrained=EITHER)
def _(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[1].mlp.gate_proj.weight


@change(
    "norm's weight shared",
    "one norm's weight in all layers",
    names="input_layernorm",
    save_pretrained=EITHER,
    **_all([*_IN_STAGES], EITHER),
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


# --------------------------------------------------------------------------------------------------------------------
_section("Layers that are deleted, added or repeated")


@change(
    "layer deleted", "`del model.model.layers[1]`, the configuration as it was", num_layers=3, save_pretrained=EITHER
)
def _(model: Any) -> None:
    del model.model.layers[1]


@change("layer deleted, configuration too", "the same with `num_hidden_layers` and `layer_idx` adapted", num_layers=3)
def _(model: Any) -> None:
    del model.model.layers[1]
    _renumber(model)


def _renumber(model: Any) -> None:
    model.config.num_hidden_layers = len(model.model.layers)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number


@change("layer of Qwen 3 deleted", "the same of a model that lists its layers' types", of="qwen3", num_layers=3)
def _(model: Any) -> None:
    del model.model.layers[2]
    model.config.layer_types = model.config.layer_types[:3]
    _renumber(model)


@change("layer appended", "`layers.append(copy.deepcopy(layers[3]))` with the configuration adapted", num_layers=5)
def _(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[3]))
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [*model.config.layer_types, model.config.layer_types[-1]]
    _renumber(model)


@change(
    "layer appended that doesn't run",
    "the same with the configuration as it was: transformers runs the first four",
    names="layers",
    save_pretrained=EITHER,
    **_all([*USES], EITHER),
)
def _(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[3]))


@change("layers in another order", "two layers exchanged")
def _(model: Any) -> None:
    first, second = model.model.layers[0], model.model.layers[3]
    model.model.layers[0], model.model.layers[3] = second, first


@change(
    "layer twice in a stage",
    "one layer object at two places of a stage",
    names="layers",
    save_pretrained=EITHER,
    **_all([*USES], EITHER),
)
def _(model: Any) -> None:
    model.model.layers[3] = model.model.layers[2]


@change(
    "layer in two stages",
    "one layer object in two stages",
    names="layers",
    save_pretrained=EITHER,
    **_all([*USES], EITHER),
)
def _(model: Any) -> None:
    model.model.layers[3] = model.model.layers[0]


# --------------------------------------------------------------------------------------------------------------------
_section("Parametrizations, quantised layers, adapters, settings")


@change("weight_norm", "`torch.nn.utils.parametrizations.weight_norm` on a linear layer", save_pretrained=EITHER)
def _(model: Any) -> None:
    parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)


@change("old weight_norm", "`torch.nn.utils.weight_norm` on a linear layer", save_pretrained=EITHER)
def _(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(model.model.layers[1].mlp.up_proj)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight.tanh()


@change(
    "parametrized head",
    "a parametrization of `lm_head.weight`",
    names="lm_head",
    spread=REFUSED,
    save_pretrained=EITHER,
)
def _(model: Any) -> None:
    parametrize.register_parametrization(model.lm_head, "weight", Doubled())


class Int8Linear(nn.Module):
    """A frozen weight in int8 with a scale for each of its rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight.to(inputs.dtype) * self.scale)


@change(
    "int8 linear layers",
    "a linear class of the user's own, with an int8 weight and a scale as buffers",
    save_pretrained=EITHER,
)
def _(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj = Int8Linear(layer.mlp.up_proj)
        layer.self_attn.k_proj = Int8Linear(layer.self_attn.k_proj)


def _adapted(model: Any, config: peft.LoraConfig) -> nn.Module:
    with quiet_peft():
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False).double()
    for number, parameter in enumerate(each for each in adapted.parameters() if each.requires_grad):
        parameter.data += 0.1 * noise(*parameter.shape, seed=number)
    return adapted


@change("LoRA and a hook", "a PeftModel with LoRA, and a hook on one of its layers")
def _(model: Any) -> nn.Module:
    model.model.layers[2].register_forward_hook(scaled)
    torch.manual_seed(3)
    return _adapted(model, lora())


@change("LoRA and a forward", "a PeftModel with LoRA over a linear layer whose forward was replaced")
def _(model: Any) -> nn.Module:
    linear = model.model.layers[2].self_attn.q_proj
    linear.forward = types.MethodType(with_quantised_weight, linear)
    torch.manual_seed(3)
    return _adapted(model, lora())


@change(
    "LoRA by target_parameters",
    "LoRA of a linear layer's weight by `target_parameters`",
    names="target_parameters|ParamWrapper|lora|up_proj",
    save_pretrained=EITHER,
    **_all([*USES], EITHER),
)
def _(model: Any) -> nn.Module:
    torch.manual_seed(3)
    return _adapted(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=["mlp.up_proj.weight"]))


@change("MLP compiled", "`mlp.compile()`", **_all([*USES], EITHER))
def _(model: Any) -> None:
    model.model.layers[1].mlp.compile(backend="eager")


@change("activation replaced", "`mlp.act_fn = nn.ReLU()`", fused=EITHER)
def _(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()


@change("activation replaced in a layer", "the same in one layer alone", fused=EITHER)
def _(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


@change("scale of attention", "`self_attn.scaling` changed in one layer")
def _(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 1.7


@change("frequencies of the rotary embedding", "`rotary_emb.inv_freq` changed")
def _(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.8)


@change("epsilon of a norm", "`variance_epsilon` of one norm changed", fused=EITHER)
def _(model: Any) -> None:
    model.model.layers[2].input_layernorm.variance_epsilon = 1e-2


@change("bias added", "a bias put into a linear layer that had none", save_pretrained=EITHER)
def _(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.bias = nn.Parameter(0.1 * noise(48))


# --------------------------------------------------------------------------------------------------------------------
_section("Code that mixes tokens or remembers")

_MIXING = _all(_IN_SLICES)


class OwnAttention(nn.Module):
    """Attends by itself, not through transformers' interface."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = given.q_proj, given.k_proj, given.v_proj, given.o_proj

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        B, T, _ = hidden_states.shape

        def heads(linear: nn.Module) -> Tensor:
            return linear(hidden_states).view(B, T, -1, 8).transpose(1, 2)

        k, v = (heads(each).repeat_interleave(2, 1) for each in (self.k_proj, self.v_proj))
        found = F.scaled_dot_product_attention(heads(self.q_proj), k, v, is_causal=True)
        return self.o_proj(found.transpose(1, 2).reshape(B, T, -1)), None


@change(
    "attention replaced",
    "a `self_attn` that calls `scaled_dot_product_attention` itself",
    names="self_attn",
    save_pretrained=EITHER,
    **_MIXING,
)
def _(model: Any) -> None:
    model.model.layers[1].self_attn = OwnAttention(model.model.layers[1].self_attn)


class WithSums(nn.Module):
    """Adds to an MLP's inputs their sum over all tokens before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs + 0.1 * inputs.cumsum(1))


@change("sum over tokens", "an MLP with a cumulative sum over tokens", names="mlp", save_pretrained=EITHER, **_MIXING)
def _(model: Any) -> None:
    model.model.layers[1].mlp = WithSums(model.model.layers[1].mlp)


def over_tokens(inputs: Tensor, weight: Tensor) -> Tensor:
    """A causal convolution of each channel over the last four tokens."""
    padded = F.pad(inputs.transpose(1, 2), (3, 0))
    return F.conv1d(padded, weight, groups=weight.shape[0]).transpose(1, 2)


@change("convolution in a hook", "a hook with a convolution over tokens", names="mlp|hook", **_MIXING)
def _(model: Any) -> None:
    weight = 0.2 * noise(32, 1, 4)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output + over_tokens(output, weight))


@change(
    "scale over all tokens",
    "a hook with an activation scale over the whole tensor",
    names="mlp|hook",
    **_all(_IN_PIECES),
)
def _(model: Any) -> None:
    def largest(module: nn.Module, args: object, output: Tensor) -> Tensor:
        step = output.detach().abs().max() / 7
        return straight_through(output, (output / step).round() * step)

    model.model.layers[1].mlp.register_forward_hook(largest)


@change("positions counted in a hook", "a hook that adds `torch.arange(tokens)`", names="mlp|hook", **_MIXING)
def _(model: Any) -> None:
    def with_positions(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output + 0.01 * torch.arange(output.shape[1], dtype=output.dtype)[:, None]

    model.model.layers[1].mlp.register_forward_hook(with_positions)


class GatedConvolution(nn.Module):
    """Adds a convolution over tokens to an MLP, behind a gate that is zero at first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.weight, self.gate = nn.Parameter(0.2 * noise(32, 1, 4)), nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) + self.gate.tanh() * over_tokens(inputs, self.weight)


@change(
    "gated convolution",
    "an MLP with a convolution over tokens behind a gate that is zero",
    names="mlp",
    save_pretrained=EITHER,
    **_MIXING,
)
def _(model: Any) -> None:
    model.model.layers[1].mlp = GatedConvolution(model.model.layers[1].mlp)


@change("numbers drawn", "a hook that draws random numbers", names="mlp|hook", **_all(_IN_PIECES))
def _(model: Any) -> None:
    generator = torch.Generator().manual_seed(5)

    def noisy(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output + 0.1 * torch.randn(output.shape, generator=generator, dtype=output.dtype)

    model.model.layers[1].mlp.register_forward_hook(noisy)


@change("calls counted", "a hook that counts its calls", names="mlp|hook", **_all(_IN_PIECES))
def _(model: Any) -> None:
    calls = [0]

    def counted(module: nn.Module, args: object, output: Tensor) -> Tensor:
        calls[0] += 1
        return output * (1 + 0.1 * calls[0])

    model.model.layers[1].mlp.register_forward_hook(counted)


@change("last output kept", "an MLP that adds its output of the call before", names="mlp|hook", **_all(_IN_PIECES))
def _(model: Any) -> None:
    kept: dict[str, Tensor] = {}

    def with_last(module: nn.Module, args: object, output: Tensor) -> Tensor:
        found = output + 0.1 * kept.get("sum", torch.ones(output.shape[-1], dtype=output.dtype))
        kept["sum"] = output.detach().mean((0, 1))
        return found

    model.model.layers[1].mlp.register_forward_hook(with_last)


@change(
    "output of another layer",
    "a layer that reads another's output from a dict that hooks fill",
    names="layers.",
    **_all(["sliced", "recompute", "fused"], EITHER) | _all(_IN_STAGES),
)
def _(model: Any) -> None:
    _read_another(model, 0, 3)


@change(
    "output of another layer in a stage",
    "the same where both are in one stage",
    names="layers.",
    **_all(["sliced", "recompute", "fused", *_IN_STAGES], EITHER),
)
def _(model: Any) -> None:
    _read_another(model, 2, 3)


def _read_another(model: Any, source: int, reader: int) -> None:
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        kept["hidden"] = output

    model.model.layers[source].register_forward_hook(keep)
    model.model.layers[reader].register_forward_hook(lambda module, args, output: output + 0.3 * kept["hidden"])


@change("gradient clamped", "`Parameter.register_hook` that clamps a gradient", names="up_proj", **_all(_IN_PIECES))
def _(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@change(
    "accumulated gradient changed",
    "`register_post_accumulate_grad_hook` that changes `.grad`",
    names="up_proj",
    **_all(_IN_PIECES),
)
def _(model: Any) -> None:
    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model.model.layers[1].mlp.up_proj.weight.register_post_accumulate_grad_hook(scale)


@change(
    "spectral_norm",
    "`spectral_norm`, which iterates in each forward",
    names="up_proj",
    whole=EITHER,
    save_pretrained=EITHER,
    **_all(_IN_PIECES),
)
def _(model: Any) -> None:
    torch.manual_seed(3)
    spectral_norm(model.model.layers[1].mlp.up_proj)


@change(
    "old spectral_norm",
    "`torch.nn.utils.spectral_norm`",
    names="up_proj",
    whole=EITHER,
    save_pretrained=EITHER,
    **_all(_IN_PIECES),
)
def _(model: Any) -> None:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.spectral_norm(model.model.layers[1].mlp.up_proj)
