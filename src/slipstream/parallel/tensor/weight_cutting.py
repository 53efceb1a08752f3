"""Decides where the weights of linear layers, experts and the vocabulary are cut, or says why they can't be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from torch import nn
from transformers.pytorch_utils import Conv1D

from slipstream.errors import SlipstreamError
from slipstream.parallel.parameter_share import ParameterCut
from slipstream.parallel.tensor.attention_heads import AttentionHeads


class TensorStyle(Enum):
    """The way a module is spread, by transformers' names."""

    COLUMN = "colwise"  # f before it; each rank has different output features
    PACKED_COLUMN = "packed_colwise"  # the same for several matrices in one weight
    GATHERED_COLUMN = "colwise_gather_output"  # the same, and its output is gathered
    ROW = "rowwise"  # each rank has different input features; g after it
    SPLIT_ROW = "rowwise_split_input"  # the same, with an input that all ranks have and that is split first
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
    dim = int(by_rows != isinstance(module, Conv1D))  # Conv1D keeps its weight transposed
    size, num_parts = shape[dim], tensor_ranks
    matrices: tuple[int, ...] = (size,)
    if style is TensorStyle.PACKED_COLUMN:
        matrices = _packed(name, size, heads, tensor_ranks)
    elif heads is not None and not by_rows:
        num_parts = heads.num_parts(size, tensor_ranks)
    for each in matrices:
        _check_features(name, each, num_parts)
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
            f"the plan cuts the experts {name}, but not their {', '.join(without)}, which every rank would then count. "
            "Train with tp=1."
        )
    if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        raise SlipstreamError(
            f"the experts {name} keep their weights transposed or interleave gate and up, for which there is no cut "
            "here. Train with tp=1."
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
            f"{name} has {size} features to share, which {num_parts} tensor ranks can't evenly. Choose tp from the "
            f"divisors of {size}."
        )
