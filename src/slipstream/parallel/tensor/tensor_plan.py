"""Finds which parts of a model are spread over the tensor ranks, and how: the model's plan, resolved and checked.

Transformers' configs contain the plan (`base_model_tp_plan`): a style for every linear layer that is cut, in pairs, by
columns and then by rows, so that nothing is exchanged between the two (PTD-P section 2.3). Embedding and head are cut
by rows of the vocabulary in every model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from slipstream.errors import SlipstreamError
from slipstream.model import ModelAnatomy
from slipstream.parallel.parameter_share import ParameterCut
from slipstream.parallel.tensor.attention_heads import AttentionHeads, is_attention
from slipstream.parallel.tensor.weight_cutting import ROWS, TensorStyle, cut_experts, cut_linear, cut_vocabulary

_STYLES = {style.value: style for style in TensorStyle} | {
    "colwise_rep": TensorStyle.GATHERED_COLUMN,
    "rowwise_rep": TensorStyle.SPLIT_ROW,
}
_VOCABULARY_STYLES = {"embedding_rowwise", "colwise", "colwise_gather_output", "colwise_rep"}
_OWN_PLANS = {  # for models without one in transformers
    "gpt2": {
        "h.*.attn.c_attn": "packed_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
}


@dataclass(frozen=True)
class TensorRegion:
    """A layer's child that contains cut modules. Its input and output are whole."""

    name: str  # "model.layers.0.mlp"
    styles: Mapping[str, TensorStyle]  # of the modules in it, by their names in the model
    is_direct: bool  # from its input only to columns, and to its output only from a row: nothing else has parameters


@dataclass(frozen=True)
class TensorPlan:
    """A model over `tensor_ranks` ranks: how each parameter is cut, and where f and g go."""

    tensor_ranks: int
    layers: str  # "model.layers"
    embedding: str  # "model.embed_tokens"
    head: str  # "lm_head"
    after_layers: tuple[str, ...]  # what runs between the layers and the head, such as ("model.norm",)
    regions: tuple[TensorRegion, ...]
    shapes: Mapping[str, tuple[int, ...]]  # of every whole parameter, tied names included
    cuts: Mapping[str, ParameterCut]  # of the parameters that are cut
    partial: frozenset[str]  # whole parameters of whose gradients each rank has a part, such as that of its heads
    attributes: Mapping[str, Mapping[str, int]]  # sizes on a rank, by module, where its code reads them

    def is_spread(self, name: str) -> bool:
        """Returns whether sequence parallelism applies this whole parameter to different tokens on each rank."""
        region = next((region for region in self.regions if name.startswith(f"{region.name}.")), None)
        if region is not None:
            return region.is_direct and name not in self.cuts and name not in self.partial  # that is a row's bias
        return name.startswith(tuple(f"{part}." for part in (self.layers, *self.after_layers)))


def find_tensor_plan(
    model: nn.Module, config: Any, tensor_ranks: int, anatomy: ModelAnatomy, given: Mapping[str, str] | None = None
) -> TensorPlan:
    """Returns the plan of `model`, a causal LM of transformers, for `tensor_ranks` ranks.

    Args:
        model: the whole model, or what is left of it; its parameters may be on the meta device.
        config: the model's config.
        tensor_ranks: the number of ranks that share every layer.
        anatomy: the names of the modules that run before the layers, including the embedding, and after them, including
            the head.
        given: styles by patterns of names, such as {"model.layers.*.mlp.up_proj": "colwise"}, instead of the model's
            plan.

    Raises:
        SlipstreamError: the model has no plan, the plan has an unsupported style, or the ranks can't share heads,
            features or vocabulary.
    """
    config = config.get_text_config()
    if getattr(config, "is_heterogeneous", False):
        raise SlipstreamError(
            f"model_type {config.model_type!r} has other {', '.join(sorted(config.per_layer_attributes))} in some "
            "layers, which tensor ranks can't share. Train with tp=1."
        )
    if anatomy.crossing:
        raise SlipstreamError(
            f"tensor parallelism for {config.model_type!r}, whose layers take keys, values or inputs from far before: "
            "these are sent whole between stages. Train with tp=1."
        )
    embedding = _name_of(model, model.get_input_embeddings(), anatomy.before, "embedding")  # type: ignore[operator]
    head = _name_of(model, model.get_output_embeddings(), anatomy.after, "head")  # type: ignore[operator]
    styles = _resolve(model, config, given, embedding, head)
    layers = _common_list(styles)
    cuts = cut_vocabulary(model, (embedding, head), tensor_ranks)
    attributes: dict[str, Mapping[str, int]] = {}
    for name in styles:
        found, sizes = _cut(model, config, name, styles, tensor_ranks)
        cuts |= found
        attributes |= sizes
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    partial = frozenset(
        name for name in shapes if styles.get(name, styles.get(name.rpartition(".")[0])) is TensorStyle.PER_HEAD
    )
    regions = _regions(model, layers, styles, shapes.keys() - cuts.keys() - partial)
    after_layers = tuple(name for name in anatomy.after if name != head)
    return TensorPlan(tensor_ranks, layers, embedding, head, after_layers, regions, shapes, cuts, partial, attributes)


def _own_plan(model: nn.Module, config: Any) -> Mapping[str, str]:
    """Returns the config's plan, by names within the base model, such as "layers.*.mlp.up_proj"."""
    plan: Mapping[str, str] | None = getattr(config, "base_model_tp_plan", None) or _OWN_PLANS.get(config.model_type)
    if plan:
        return plan
    linear = _linear_layers(model)
    styles = ", ".join(style.value for style in TensorStyle)
    raise SlipstreamError(
        f"model_type {config.model_type!r} has no plan for tensor parallelism. Its linear layers are "
        f"{', '.join(linear)}. Give a style to each that should be cut ({styles}), such "
        f"as tensor_plan={{{linear[0]!r}: 'colwise', ...}}, or train with tp=1."
    )


def _linear_layers(model: nn.Module) -> list[str]:
    """Returns the linear layers of one layer, as patterns."""
    names = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    return [*dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names if re.search(r"\.\d+\.", name))] or names


def _resolve(
    model: nn.Module, config: Any, given: Mapping[str, str] | None, embedding: str, head: str
) -> dict[str, TensorStyle]:
    """Returns the style of every module, or parameter of experts, that a pattern is meant for."""
    names = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
    base = "" if given is not None else r"(?:.+\.)?"
    found: dict[str, TensorStyle] = {}
    for pattern, style in (_own_plan(model, config) if given is None else given).items():
        matcher = re.compile(base + re.escape(pattern).replace(r"\*", r"[^.]+"))
        matches = [name for name in names if matcher.fullmatch(name)]
        if given is not None and not matches:
            raise SlipstreamError(
                f"tensor_plan names {pattern!r}, which this model doesn't have. Its linear layers are "
                f"{', '.join(_linear_layers(model))}."
            )
        of_vocabulary = style in _VOCABULARY_STYLES and set(matches) <= {embedding, head}
        if matches and not of_vocabulary and style != "replicate":
            if style not in _STYLES:
                raise SlipstreamError(
                    f"the plan spreads {pattern!r} in the style {style!r}, which isn't supported. Supported are "
                    f"{', '.join(each.value for each in TensorStyle)}: give a tensor_plan with these, or train with "
                    "tp=1."
                )
            found |= dict.fromkeys(matches, _STYLES[style])
    return found


def _common_list(styles: Mapping[str, TensorStyle]) -> str:
    """Returns the list of layers that contains all the names."""
    lists = {re.split(r"\.\d+(?=\.)", name, maxsplit=1)[0] if re.search(r"\.\d+\.", name) else "" for name in styles}
    if len(lists) != 1 or "" in lists:
        named = ", ".join([*sorted(styles)[:3], *(["..."] if len(styles) > 3 else [])]) or "none of this model's"
        raise SlipstreamError(
            f"the plan must spread modules of one list of layers, and it names {named}. Give a tensor_plan with "
            "patterns such as 'model.layers.*.mlp.up_proj'."
        )
    return lists.pop()


def _cut(
    model: nn.Module, config: Any, name: str, styles: Mapping[str, TensorStyle], tensor_ranks: int
) -> tuple[dict[str, ParameterCut], dict[str, Mapping[str, int]]]:
    """Returns the cuts of one module's parameters, and the attributes to change in the module around it, or in
    itself."""
    parent, style = name.rpartition(".")[0], styles[name]
    if style is TensorStyle.PER_HEAD or styles.get(parent) is TensorStyle.EXPERTS:
        return {}, {}  # whole; a parameter of experts, which are cut together
    module, around = model.get_submodule(name), model.get_submodule(parent)
    if style is TensorStyle.EXPERTS:
        cuts, sizes = cut_experts(module, name, styles, tensor_ranks)
        return cuts, {name: sizes}
    keeps_heads = style in (TensorStyle.GATHERED_COLUMN, TensorStyle.SPLIT_ROW)  # the code around uses all of them
    heads = AttentionHeads.of(around, config) if is_attention(around) and not keeps_heads else None
    cuts = cut_linear(module, name, style, tensor_ranks, heads)
    return cuts, {} if heads is None else {parent: heads.attributes(around, tensor_ranks)}


def _regions(
    model: nn.Module, layers: str, styles: Mapping[str, TensorStyle], whole: set[str]
) -> tuple[TensorRegion, ...]:
    """Returns the regions, including children of layers that attend and have nothing cut, as these need all tokens.

    `whole` names the parameters of which all ranks compute the same gradient where they have the same tokens.
    """
    depth = layers.count(".") + 3  # the list, a layer's number, its child
    found: dict[str, dict[str, TensorStyle]] = {}
    for name, module in model.named_modules():
        is_cut = styles.get(name, TensorStyle.PER_HEAD) is not TensorStyle.PER_HEAD
        if is_cut or (name.startswith(f"{layers}.") and name.count(".") >= depth - 1 and is_attention(module)):
            inside = found.setdefault(".".join(name.split(".")[:depth]), {})
            inside |= {name: styles[name]} if is_cut else {}
    return tuple(TensorRegion(name, inside, _is_direct(name, inside, whole)) for name, inside in found.items())


def _is_direct(region: str, styles: Mapping[str, TensorStyle], whole: set[str]) -> bool:
    rows = [name for name, style in styles.items() if style in ROWS]
    others = [name for name in whole - {f"{name}.bias" for name in rows} if name.startswith(f"{region}.")]
    return bool(styles) and not others and len(rows) <= 1 and TensorStyle.EXPERTS not in styles.values()


def _name_of(model: nn.Module, wanted: Any, names: Sequence[str], role: str) -> str:
    """Returns the name of the embedding or the head among the modules outside the layers."""
    found = next((name for name in names if wanted is not None and model.get_submodule(name) is wanted), None)
    if found is None:
        raise SlipstreamError(
            f"the {role} of {type(model).__name__} is not among {', '.join(names) or 'its modules'}, so tensor ranks "
            "can't share its vocabulary. Train with tp=1."
        )
    return found
