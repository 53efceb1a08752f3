"""Finds which parts of a model are spread over the tensor ranks, and how: the model's plan, resolved and checked.

Transformers' configs contain the plan (`base_model_tp_plan`): a style for every linear layer that is cut, in pairs, by
columns and then by rows, so that nothing is exchanged between the two (PTD-P section 2.3). Embedding and head are cut
by rows of the vocabulary in every model.

Extends a model's plan to its adapter: the factors of a layer are cut as its weight is.

Of y = x W^T + x A^T B^T a column cuts W by rows, and so B, and a row cuts both W and A by columns: then each rank's
part of the product with the factors belongs to its part of the product with W, and f and g around the layer are right
for both. The other factor is whole on every rank, which has a part of its gradient.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from slipstream.errors import SlipstreamError
from slipstream.model import AdaptedName, ModelAnatomy, expert_modules, features_of, is_wrapper, own_module, parse_name
from slipstream.parallel.parameter_share import ParameterCut


class TensorStyle(Enum):
    """The way a module is spread, by transformers' names."""

    COLUMN = "colwise"  # f before it; different output features on each rank
    PACKED_COLUMN = "packed_colwise"  # COLUMN, for several matrices in one weight
    GATHERED_COLUMN = "colwise_gather_output"  # COLUMN, with its output gathered
    ROW = "rowwise"  # g after it; different input features on each rank
    SPLIT_ROW = "rowwise_split_input"  # ROW, with an input that all ranks have and split first
    EXPERTS = "moe_tp_experts"  # f before all experts together, g after them
    PER_HEAD = "replicated_with_grad_allreduce"  # whole, but each rank applies it to different heads


COLUMNS = (TensorStyle.COLUMN, TensorStyle.PACKED_COLUMN, TensorStyle.GATHERED_COLUMN)
ROWS = (TensorStyle.ROW, TensorStyle.SPLIT_ROW)
_EXPERT_SIZES = ("intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_dim")


def cut_linear(
    module: nn.Module, name: str, style: TensorStyle, tensor_ranks: int, heads: AttentionHeads | None
) -> dict[str, ParameterCut]:
    """Returns the cuts of y = x W^T + b: of a row W's columns, which are x's features, with b whole; else W's rows, and
    b.

    (PTD-P cuts A in Y = X A, so that its rows are W's columns.) `heads` are those of the attention module around it. A
    packed column has several matrices in W, one after the other: query, key and value, or gate and up.
    """
    if not isinstance(module, (nn.Linear, Conv1D)):
        raise SlipstreamError(
            f"the plan cuts {name}, a {type(module).__name__}; only linear layers can be. Train with tp=1."
        )
    if heads is not None:
        heads.check(name.rpartition(".")[0], tensor_ranks)
    by_rows = style in ROWS
    shape = tuple(module.weight.shape)
    # Conv1D keeps its weight transposed.
    dim = int(by_rows != isinstance(module, Conv1D))
    size = shape[dim]
    num_parts = tensor_ranks
    matrices: tuple[int, ...] = (size,)
    if style is TensorStyle.PACKED_COLUMN:
        matrices = _packed(name, size, heads, tensor_ranks)
    elif heads is not None and not by_rows:
        num_parts = heads.num_parts(size, tensor_ranks)
    for matrix in matrices:
        _check_features(name, matrix, num_parts)
    cuts = {f"{name}.weight": ParameterCut(shape, dim, matrices, num_parts)}
    if not by_rows and module.bias is not None:
        cuts[f"{name}.bias"] = ParameterCut(tuple(module.bias.shape), 0, matrices, num_parts)
    return cuts


def cut_experts(
    module: nn.Module, name: str, styles: Mapping[str, TensorStyle], tensor_ranks: int
) -> tuple[dict[str, ParameterCut], dict[str, int]]:
    """Returns the cuts of experts held as 3-D weights (expert, output, input), and the sizes that their code reads.

    `styles` are those of all names, their parameters' among them.
    """
    parameters = {f"{name}.{key}": parameter for key, parameter in module.named_parameters()}
    cuttable = (TensorStyle.PACKED_COLUMN, TensorStyle.COLUMN, TensorStyle.ROW)
    without = sorted(key.removeprefix(f"{name}.") for key in parameters if styles.get(key) not in cuttable)
    if without:
        raise SlipstreamError(
            f"the plan cuts the experts {name}, but not their {', '.join(without)}, which every rank would then add. "
            "Train with tp=1."
        )
    if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        raise SlipstreamError(
            f"the experts {name} keep their weights transposed or interleave gate and up, which can't be cut here. "
            "Train with tp=1."
        )
    cuts = {}
    for key, parameter in parameters.items():
        shape = tuple(parameter.shape)
        dim = len(shape) - (1 if styles[key] is TensorStyle.ROW else 2)
        matrices = (shape[dim] // 2,) * 2 if styles[key] is TensorStyle.PACKED_COLUMN else (shape[dim],)
        _check_features(key, matrices[0], tensor_ranks)
        cuts[key] = ParameterCut(shape, dim, matrices, tensor_ranks)
    sizes = {key: value for key, value in vars(module).items() if key in _EXPERT_SIZES and isinstance(value, int)}
    return cuts, {key: value // tensor_ranks for key, value in sizes.items()}


def cut_vocabulary(model: nn.Module, names: Sequence[str], tensor_ranks: int) -> dict[str, ParameterCut]:
    """Returns the cuts of embedding and head by rows, one per id. Raises SlipstreamError for fewer rows than ranks."""
    cuts = {}
    for name in names:
        module = model.get_submodule(name)
        _check_vocabulary(module, name)
        for key, parameter in module.named_parameters():
            shape = tuple(parameter.shape)
            if shape[0] < tensor_ranks:
                raise SlipstreamError(f"{name} has {shape[0]} rows, too few for {tensor_ranks} tensor ranks.")
            cuts[f"{name}.{key}"] = ParameterCut(shape, 0, (shape[0],), tensor_ranks)
    return cuts


def _check_vocabulary(module: nn.Module, name: str) -> None:
    """Raises SlipstreamError for modules that need all rows; ignores placeholders, which have no parameters."""
    if next(module.parameters(), None) is None:
        return
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
        raise SlipstreamError(
            f"{name} has max_norm, scale_grad_by_freq or sparse gradients, which need all rows of the vocabulary. "
            "Build the embedding without, or train with tp=1."
        )
    if not isinstance(module, (nn.Embedding, nn.Linear)):
        raise SlipstreamError(
            f"{name} is a {type(module).__name__}; tensor ranks share the vocabulary of nn.Embedding and nn.Linear. "
            "Train with tp=1."
        )


def _packed(name: str, size: int, heads: AttentionHeads | None, tensor_ranks: int) -> tuple[int, ...]:
    if heads is None:
        return (size // 2,) * 2  # gate and up
    matrices = heads.matrices()
    if sum(matrices) != size:
        raise SlipstreamError(
            f"{name} has {size} output features, which are not query, key and value of {heads.num_heads} and "
            f"{heads.num_key_value_heads} heads of {heads.size}: it can't be cut as packed_colwise."
        )
    if heads.num_key_value_heads % tensor_ranks:
        raise SlipstreamError(
            f"{name} has query, key and value in one weight, so {tensor_ranks} tensor ranks can't each have one of its "
            f"{heads.num_key_value_heads} key-value heads. Choose tp from the divisors of {heads.num_key_value_heads}."
        )
    return matrices


def _check_features(name: str, size: int, num_parts: int) -> None:
    if size % num_parts:
        raise SlipstreamError(
            f"{name} has {size} features, which {num_parts} tensor ranks can't share evenly. Choose tp from the "
            f"divisors of {size}."
        )


_STYLES = {style.value: style for style in TensorStyle} | {
    "colwise_rep": TensorStyle.GATHERED_COLUMN,
    "rowwise_rep": TensorStyle.SPLIT_ROW,
}
_VOCABULARY_STYLES = {"embedding_rowwise", "colwise", "colwise_gather_output", "colwise_rep"}
_OWN_PLANS = {  # plans of models without one in transformers
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
    styles: Mapping[str, TensorStyle]  # style of each module in the region, by name in the model
    # True if the input goes only to columns and the output comes only from a row, with no other parameters.
    is_direct: bool


@dataclass(frozen=True)
class TensorPlan:
    """A model over `tensor_ranks` ranks: how each parameter is cut, and where f and g go."""

    tensor_ranks: int
    layers: str  # "model.layers"
    embedding: str  # "model.embed_tokens"
    head: str  # "lm_head"
    after_layers: tuple[str, ...]  # modules between the layers and the head, such as ("model.norm",)
    regions: tuple[TensorRegion, ...]
    shapes: Mapping[str, tuple[int, ...]]  # shape of every whole parameter, tied names included
    cuts: Mapping[str, ParameterCut]  # cuts of parameters that aren't whole
    partial: frozenset[str]  # whole parameters with only a part of their gradient on each rank, such as its heads'
    attributes: Mapping[str, Mapping[str, int]]  # module -> sizes on a rank of the attributes that its code reads

    def is_spread(self, name: str) -> bool:
        """Returns whether sequence parallelism applies this whole parameter to different tokens on each rank."""
        region = next((region for region in self.regions if name.startswith(f"{region.name}.")), None)
        if region is not None:
            # The only such parameter is the bias of a row.
            return region.is_direct and name not in self.cuts and name not in self.partial
        return name.startswith(tuple(f"{part}." for part in (self.layers, *self.after_layers)))


def find_tensor_plan(
    model: nn.Module,
    config: Any,
    tensor_ranks: int,
    anatomy: ModelAnatomy,
    given: Mapping[str, str] | None = None,
    cuts_experts: bool = True,
) -> TensorPlan:
    """Returns the plan of `model`, a causal LM of transformers, for `tensor_ranks` ranks.

    Args:
        model: the whole model, or the rest of it; its parameters may be on the meta device.
        config: the model's config.
        tensor_ranks: the number of ranks that share every layer.
        anatomy: the names of the modules that run before the layers, including the embedding, and after them, including
            the head.
        given: styles by patterns of names, such as {"model.layers.*.mlp.up_proj": "colwise"}, instead of the model's
            plan.
        cuts_experts: whether ranks share every expert; else each has whole ones, as with expert parallelism.

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
    whole = () if cuts_experts else tuple(name for name, _ in expert_modules(model))
    styles = _resolve(model, config, given, embedding, head, whole)
    layers = _common_list(styles)
    cuts = cut_vocabulary(model, (embedding, head), tensor_ranks)
    attributes: dict[str, Mapping[str, int]] = {}
    for name in styles:
        cut, sizes = _cut(model, config, name, styles, tensor_ranks)
        cuts |= cut
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
    model: nn.Module, config: Any, given: Mapping[str, str] | None, embedding: str, head: str, whole: Sequence[str]
) -> dict[str, TensorStyle]:
    """Returns the style of every module, or parameter of experts, that a pattern is meant for, but for those in
    `whole` modules."""
    names = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
    base = "" if given is not None else r"(?:.+\.)?"
    resolved: dict[str, TensorStyle] = {}
    for pattern, style in (_own_plan(model, config) if given is None else given).items():
        matcher = re.compile(base + re.escape(pattern).replace(r"\*", r"[^.]+"))
        matches = [name for name in names if matcher.fullmatch(name)]
        if given is not None and not matches:
            raise SlipstreamError(
                f"tensor_plan names {pattern!r}, which this model doesn't have. Its linear layers are "
                f"{', '.join(_linear_layers(model))}."
            )
        matches = [name for name in matches if not f"{name}.".startswith(tuple(f"{prefix}." for prefix in whole))]
        of_vocabulary = style in _VOCABULARY_STYLES and set(matches) <= {embedding, head}
        if matches and not of_vocabulary and style != "replicate":
            if style not in _STYLES:
                raise SlipstreamError(
                    f"the plan spreads {pattern!r} in the style {style!r}, which isn't supported. Supported are "
                    f"{', '.join(known.value for known in TensorStyle)}: give a tensor_plan with these, or train with "
                    "tp=1."
                )
            resolved |= dict.fromkeys(matches, _STYLES[style])
    return resolved


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
    parent = name.rpartition(".")[0]
    style = styles[name]
    if style is TensorStyle.PER_HEAD or styles.get(parent) is TensorStyle.EXPERTS:
        # The parameter is whole, or the experts' parameters are cut together.
        return {}, {}
    module, around = model.get_submodule(name), model.get_submodule(parent)
    if style is TensorStyle.EXPERTS:
        cuts, sizes = cut_experts(module, name, styles, tensor_ranks)
        return cuts, {name: sizes}
    # The code around these uses all heads.
    keeps_heads = style in (TensorStyle.GATHERED_COLUMN, TensorStyle.SPLIT_ROW)
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
    by_region: dict[str, dict[str, TensorStyle]] = {}
    for name, module in model.named_modules():
        is_cut = styles.get(name, TensorStyle.PER_HEAD) is not TensorStyle.PER_HEAD
        if is_cut or (name.startswith(f"{layers}.") and name.count(".") >= depth - 1 and is_attention(module)):
            inside = by_region.setdefault(".".join(name.split(".")[:depth]), {})
            inside |= {name: styles[name]} if is_cut else {}
    return tuple(TensorRegion(name, inside, _is_direct(name, inside, whole)) for name, inside in by_region.items())


def _is_direct(region: str, styles: Mapping[str, TensorStyle], whole: set[str]) -> bool:
    rows = [name for name, style in styles.items() if style in ROWS]
    others = [name for name in whole - {f"{name}.bias" for name in rows} if name.startswith(f"{region}.")]
    return bool(styles) and not others and len(rows) <= 1 and TensorStyle.EXPERTS not in styles.values()


def _name_of(model: nn.Module, wanted: Any, names: Sequence[str], role: str) -> str:
    """Returns the name of the embedding or the head among the modules outside the layers."""
    chosen = next((name for name in names if wanted is not None and model.get_submodule(name) is wanted), None)
    if chosen is None:
        raise SlipstreamError(
            f"the {role} of {type(model).__name__} is not among {', '.join(names) or 'its modules'}, so tensor ranks "
            "can't share its vocabulary. Train with tp=1."
        )
    return chosen


_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_NUM_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True)
class AttentionHeads:
    """The number of query heads and key-value heads (fewer with grouped queries) and the size of each."""

    num_heads: int
    num_key_value_heads: int
    size: int

    @classmethod
    def of(cls, attention: nn.Module, config: Any) -> AttentionHeads:
        """Returns the heads of an attention module of a model of transformers."""
        num_heads = config.num_attention_heads
        sizes = (getattr(attention, "head_dim", None), getattr(attention, "head_size", None))
        size = next((size for size in sizes if size), None) or config.hidden_size // num_heads
        return cls(num_heads, getattr(config, "num_key_value_heads", None) or num_heads, size)

    def check(self, name: str, tensor_ranks: int) -> None:
        """Raises SlipstreamError where `tensor_ranks` ranks can't each have equally many heads."""
        if self.num_heads % tensor_ranks:
            raise SlipstreamError(
                f"{name} has {self.num_heads} attention heads, which {tensor_ranks} tensor ranks can't share evenly. "
                f"Choose tp from the divisors of {self.num_heads}."
            )
        if self.num_key_value_heads % tensor_ranks and tensor_ranks % self.num_key_value_heads:
            raise SlipstreamError(
                f"{name} has {self.num_key_value_heads} key-value heads for {self.num_heads} query heads: "
                f"{tensor_ranks} tensor ranks can neither share them evenly nor each have one. Choose a tp that "
                f"divides {self.num_key_value_heads}, or a multiple of it that divides {self.num_heads}."
            )

    def num_parts(self, num_rows: int, tensor_ranks: int) -> int:
        """Returns into how many parts a weight of `num_rows` output features is cut: fewer than ranks if they share
        a head."""
        is_key_or_value = num_rows == self.num_key_value_heads * self.size != self.num_heads * self.size
        return min(tensor_ranks, self.num_key_value_heads) if is_key_or_value else tensor_ranks

    def matrices(self) -> tuple[int, int, int]:
        """Returns the output features of query, key and value where one weight has all three, one after the other."""
        return self.num_heads * self.size, self.num_key_value_heads * self.size, self.num_key_value_heads * self.size

    def local(self, tensor_ranks: int) -> AttentionHeads:
        """Returns the heads of one rank."""
        return AttentionHeads(
            self.num_heads // tensor_ranks, max(1, self.num_key_value_heads // tensor_ranks), self.size
        )

    def attributes(self, attention: nn.Module, tensor_ranks: int) -> dict[str, int]:
        """Returns those sizes that `attention` keeps as attributes and that differ on a rank, with their values
        there."""
        whole = self._attributes()
        local = self.local(tensor_ranks)._attributes()
        known = [name for name in whole if vars(attention).get(name) == whole[name]]
        return {name: local[name] for name in known if local[name] != whole[name]}

    def _attributes(self) -> dict[str, int]:
        return {
            **dict.fromkeys(_NUM_HEADS, self.num_heads),
            **dict.fromkeys(_NUM_KEY_VALUE_HEADS, self.num_key_value_heads),
            "num_key_value_groups": self.num_heads // self.num_key_value_heads,
            "split_size": self.num_heads * self.size,  # GPT-2's size of query, key and value
        }


def is_attention(module: nn.Module) -> bool:
    """Returns whether a module is an attention module of transformers, by their common attributes."""
    return hasattr(module, "is_causal") or "attention" in type(module).__name__.lower()


def adapted_plan(plan: TensorPlan, adapted: nn.Module) -> TensorPlan:
    """Returns the plan of a model with an adapter of PEFT, from that of the model without.

    Args:
        plan: of the model without the adapter.
        adapted: the model with it; its parameters may be on the meta device.

    Raises:
        SlipstreamError: a layer's cut can't be its adapter's too.
    """
    styles = {name: style for region in plan.regions for name, style in region.styles.items()}
    rows = {name for name, style in styles.items() if style in ROWS} | {plan.embedding}
    for name, module in adapted.named_modules():
        if is_wrapper(module):
            _check(plan, name, module, name in rows)
    shapes = {}
    cuts = {}
    partial = set[str]()
    for name, parameter in adapted.named_parameters(remove_duplicate=False):
        shapes[name], parsed = tuple(parameter.shape), parse_name(name)
        cut = _factor_cut(plan, parsed, shapes[name], parsed.layer in rows)
        if cut is not None:
            cuts[name] = cut
        elif _is_partial(plan, parsed):
            partial.add(name)
    return replace(plan, shapes={**plan.shapes, **shapes}, cuts={**plan.cuts, **cuts}, partial=plan.partial | partial)


def _factor_cut(plan: TensorPlan, name: AdaptedName, shape: tuple[int, ...], is_row: bool) -> ParameterCut | None:
    if name.factor is None:
        return plan.cuts.get(name.of_layer)
    weight = plan.cuts.get(f"{name.layer}.weight")
    dim = features_of(name.factor, shape)[is_row]
    return None if weight is None or dim is None else replace(weight, shape=shape, dim=dim)


def _is_partial(plan: TensorPlan, name: AdaptedName) -> bool:
    """Returns whether each rank has a part of the gradient of a whole parameter."""
    if name.factor is None:
        return name.of_layer in plan.partial
    weight = f"{name.layer}.weight"
    return weight in plan.cuts or weight in plan.partial


def _check(plan: TensorPlan, name: str, module: Any, is_row: bool) -> None:
    """Raises SlipstreamError where an adapted module is cut in a way that its adapter can't be."""
    for problem in _problems(plan, name, module, is_row):
        raise SlipstreamError(f"{problem} Leave {name.rpartition('.')[2]} out of the adapter, or train with tp=1.")


def _problems(plan: TensorPlan, name: str, module: Any, is_row: bool) -> Iterator[str]:
    if f"{name}.weight" not in plan.cuts and any(
        f"{name}.{key}" in plan.cuts for key in own_module(module)._parameters
    ):
        yield f"{name}: {plan.tensor_ranks} tensor ranks share these experts, whose adapter they can't."
    inside = [cut for cut in plan.cuts if cut.startswith(f"{name}.") and cut.count(".") > name.count(".") + 1]
    if inside:
        yield (
            f"{name} has a trained copy (modules_to_save) of parts that {plan.tensor_ranks} tensor ranks share, such "
            f"as {inside[0].rpartition('.')[0]}; name those parts instead."
        )
    if f"{name}.weight" not in plan.cuts or not is_row:
        return
    has_bias = getattr(own_module(module), "bias", None) is not None
    factors = dict(module.named_parameters())
    if any(parse_name(f"{name}.{factor}")[1:] == ("lora_B", "bias") for factor in factors):
        yield f"lora_bias=True: each of {plan.tensor_ranks} tensor ranks would add the bias of {name}'s lora_B."
    if has_bias and any(features_of("ia3_l", tuple(p.shape))[0] == 0 for key, p in factors.items() if "ia3_l" in key):
        yield (
            f"IA3 scales the output of {name} with its bias, which {plan.tensor_ranks} tensor ranks add after their "
            "parts are summed up."
        )
