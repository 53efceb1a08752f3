"""Counts what a model computes, moves and saves, by running its code on meta tensors, without memory or hardware.

Each part (a layer of every kind, the embedding, the head with the loss) runs forward and backward at two lengths; the
difference is the cost of a token, the rest the cost of a slice of any length. Attention's scores are left out of that
and described instead by heads, widths and the mask's window, as their number depends on what came before the slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.model import find_anatomy
from slipstream.planner.costs import Amount, ModelCount, OpCount, PartCount
from slipstream.profiler.layer_kinds import find_layer_kinds
from slipstream.profiler.operation_tally import OperationTally
from slipstream.profiler.part_run import PartRun
from slipstream.profiler.recorded_calls import ModelCalls, counting_model, record_calls
from slipstream.schedule import Op

_LENGTHS = (256, 512)  # tokens of the two counts


def count_model(config: PretrainedConfig, seq_len: int, dtype: torch.dtype = torch.bfloat16) -> ModelCount:
    """Returns the operations of a causal LM with this configuration. Not collective; takes seconds and little memory.

    Args:
        config: the model's configuration.
        seq_len: the length of a sequence in tokens, up to which attention windows are looked for.
        dtype: the dtype of parameters and activations.

    Raises:
        SlipstreamError: the architecture can't be cut into stages, or its attention can't be recorded.
    """
    anatomy = find_anatomy(config)
    kinds, names = find_layer_kinds(config, anatomy)
    model = counting_model(config, dtype)
    calls = [record_calls(model, anatomy, length, seq_len) for length in _LENGTHS]
    layers = [f"{anatomy.layers}.{kinds.index(kind)}" for kind in range(len(names))]
    width = config.get_text_config().hidden_size
    counted = [_count_part(model, name, (layer,), calls, width) for name, layer in zip(names, layers, strict=True)]
    return ModelCount(
        kinds=kinds,
        layers=tuple(counted),
        embedding=_count_part(model, "embedding", anatomy.before, calls, width),
        head=_count_part(model, "head", anatomy.after, calls, width, loss=True),
        hidden_size=width,
        dtype=str(dtype).removeprefix("torch."),
        dtype_bytes=dtype.itemsize,
        tied=bool(anatomy.tied),
    )


def _count_part(
    model: PreTrainedModel,
    name: str,
    modules: Sequence[str],
    recorded: Sequence[ModelCalls],
    width: int,
    loss: bool = False,
) -> PartCount:
    """Returns the counts of a part, whose modules run one after the other at both lengths."""
    modules = [each for each in recorded[0].arguments if each in modules]  # in the order of their calls
    own = [model.get_submodule(each) for each in modules]
    parameters = {id(p): p for module in own for p in module.parameters()}
    runs = [PartRun(list(zip(own, modules, strict=True)), calls, width, loss) for calls in recorded]
    short, long = (run.count() for run in runs)
    lengths = [calls.length for calls in recorded]
    attentions = runs[-1].attentions
    kept = [run.saved_bytes for run in runs]
    itemsize = next(iter(parameters.values())).dtype.itemsize
    context = sum(c.num_key_value_heads * (c.key_width + c.value_width) for c in attentions) * itemsize
    return PartCount(
        name=name,
        num_parameters=sum(p.numel() for p in parameters.values()),
        ops={op: _amounts(short[op], long[op], lengths) for op in short},
        attentions=tuple(attentions),
        activation_bytes=(kept[1] - kept[0]) / (lengths[1] - lengths[0]),
        context_bytes=context,
        product_bytes=_line(short[Op.F], long[Op.F], lengths, "product_bytes").per_token
        + sum(c.num_heads * (c.value_width * itemsize + 4) for c in attentions),  # attention's output and log-sum-exp
    )


def _amounts(short: OperationTally, long: OperationTally, lengths: Sequence[int]) -> OpCount:
    return OpCount(
        _line(short, long, lengths, "flops"),
        _line(short, long, lengths, "matmul_bytes"),
        _line(short, long, lengths, "wide_bytes"),
        _line(short, long, lengths, "other_bytes"),
        long.num_matmuls,
        long.num_kernels,
    )


def _line(short: OperationTally, long: OperationTally, lengths: Sequence[int], key: str) -> Amount:
    per_token = (vars(long)[key] - vars(short)[key]) / (lengths[1] - lengths[0])
    return Amount(max(0.0, vars(short)[key] - per_token * lengths[0]), per_token)
