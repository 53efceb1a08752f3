"""Counts what a model computes, moves and saves, by running its code on meta tensors, without memory or hardware.

Each part (a layer of every kind, the embedding, the head with the loss) runs forward and backward at two lengths; the
difference is the cost of a token, the rest the cost of a slice of any length. Attention's scores are left out of that
and described instead by heads, widths and the mask's window, as their number depends on what came before the slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import (
    LayerHalf,
    LayerPart,
    SavedStorages,
    causal_cross_entropy,
    copy_with_shared_weights,
    keep_half,
)
from slipstream.model.adapters import ALL_WEIGHTS, TrainedWeights
from slipstream.model.hooks.layer_arguments import first_output, hidden_states, with_hidden_states
from slipstream.planner.costs import Amount, ModelCount, OpCount, PartCount
from slipstream.profiler.layer_kinds import anatomy_with_halves, find_layer_kinds, trained_parts
from slipstream.profiler.operation_tally import OperationTally, counted_operations
from slipstream.profiler.recorded_calls import META, ModelCalls, counting_model, record_calls, recording, uncountable
from slipstream.schedule import Op

_LENGTHS = (256, 512)  # tokens of the two counts


def count_model(
    config: PretrainedConfig,
    seq_len: int,
    dtype: torch.dtype = torch.bfloat16,
    trained: TrainedWeights = ALL_WEIGHTS,
) -> ModelCount:
    """Returns the operations of a causal LM with this configuration. Not collective; takes seconds and little memory.

    Args:
        config: the model's configuration.
        seq_len: the length of a sequence in tokens, up to which attention windows are looked for.
        dtype: the dtype of parameters and activations.
        trained: what of it is trained. Layers below the lowest trained one have forwards alone, frozen ones above the
            input gradient alone; what an adapter computes is counted too.

    Raises:
        SlipstreamError: the architecture can't be cut into stages, its attention can't be recorded, or its code or its
            adapter's can't be run without weights.
    """
    try:
        return _counted(config, seq_len, dtype, trained)
    except SlipstreamError:
        raise
    except Exception as error:  # of the model's code on the meta device, or of PEFT's
        if trained.adapter is None:
            problem = f"its code doesn't run without values ({type(error).__name__}: {error})"
            raise SlipstreamError(uncountable(config, problem)) from error
        raise SlipstreamError(f"an adapter by {trained.adapter.method} can't be counted: {error}") from error


def _counted(config: PretrainedConfig, seq_len: int, dtype: torch.dtype, trained: TrainedWeights) -> ModelCount:
    anatomy = anatomy_with_halves(config)
    model = counting_model(config, dtype, trained)
    places = _Places(trained_parts(model, anatomy), 2 if anatomy.halves else 1)
    structures, names = find_layer_kinds(config, anatomy, model)
    placed = [(kind, places.of_layer(layer)) for layer, kind in enumerate(structures)]
    distinct = list(dict.fromkeys(placed))
    calls = [record_calls(model, anatomy, length, seq_len) for length in _LENGTHS]
    width, last = config.get_text_config().hidden_size, len(places.trained) - 1
    layers = {f"{anatomy.layers}.{placed.index(each)}": each for each in distinct}
    counted = [
        _count_part(model, names[kind], (layer,), calls, width, gets[0]) for layer, (kind, gets) in layers.items()
    ]
    halves = zip(counted, layers.items(), strict=True) if anatomy.halves else ()
    return ModelCount(
        kinds=tuple(map(distinct.index, placed)),
        layers=tuple(counted),
        embedding=_count_part(model, "embedding", anatomy.before, calls, width, places.gets_gradient(0)),
        head=_count_part(model, "head", anatomy.after, calls, width, places.gets_gradient(last)),
        hidden_size=width,
        dtype=str(dtype).removeprefix("torch."),
        dtype_bytes=dtype.itemsize,
        tied=bool(anatomy.tied),
        halves=tuple(
            _count_halves(part, model, layer, anatomy.halves, calls, width, gets) for part, (layer, (_, gets)) in halves
        ),
    )


@dataclass(frozen=True)
class _Places:
    """Where the parts of a model are, above or below the lowest trained one."""

    trained: list[bool]  # of each part whether it has a trained parameter
    units_per_layer: int

    def gets_gradient(self, part: int) -> bool:
        """Returns whether the input of a part has a gradient; the embedding, which has none, counts as if it had."""
        return any(self.trained[:part]) if part else self.trained[0]

    def of_layer(self, layer: int) -> tuple[bool, ...]:
        """Returns whether the inputs of a layer's units have gradients."""
        first = 1 + layer * self.units_per_layer
        return tuple(map(self.gets_gradient, range(first, first + self.units_per_layer)))


def _count_part(
    model: PreTrainedModel,
    name: str,
    modules: Sequence[str],
    recorded: Sequence[ModelCalls],
    width: int,
    gets_gradient: bool,
    cut: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> PartCount:
    """Returns the counts of a part, whose modules, once cut, run one after the other at both lengths."""
    short, long = (_PartRun(model, modules, calls, width, name == "head", gets_gradient, cut) for calls in recorded)
    num_tokens = long.own.length - short.own.length

    def line(op: Op, key: str) -> Amount:
        less, more = vars(short.ops[op])[key], vars(long.ops[op])[key]
        per_token = (more - less) / num_tokens
        return Amount(max(0.0, less - per_token * short.own.length), per_token)

    ops = {}
    for op, tally in long.ops.items():
        amounts = line(op, "flops"), line(op, "matmul_bytes"), line(op, "wide_bytes"), line(op, "other_bytes")
        ops[op] = OpCount(*amounts, tally.num_matmuls, tally.num_kernels)
    itemsize = long.parameters[0].dtype.itemsize
    calls = long.own.attentions
    attended = sum(c.num_heads * (c.value_width * itemsize + 4) for c in calls)  # its output and log-sum-exp
    return PartCount(
        name=name,
        num_parameters=sum(p.numel() for p in long.parameters),
        ops=ops,
        attentions=tuple(calls),
        activation_bytes=(long.saved_bytes - short.saved_bytes) / num_tokens,
        context_bytes=sum(c.num_key_value_heads * (c.key_width + c.value_width) for c in calls) * itemsize,
        product_bytes=line(Op.F, "product_bytes").per_token + attended,
        state_bytes=sum(recorded[-1].state_bytes[name] for name in modules),
        num_frozen=sum(p.numel() for p in long.parameters if not p.requires_grad),
        has_backward=long.has_backward,
    )


def _count_halves(
    whole: PartCount,
    model: PreTrainedModel,
    layer: str,
    parts: Sequence[LayerPart],
    recorded: Sequence[ModelCalls],
    width: int,
    gets: Sequence[bool],
) -> tuple[PartCount, PartCount]:
    """Returns the counts of a layer's halves, which add up to those of the whole layer.

    A half that runs alone also adds the -0.0 that stands in for the other one. Both do, so it cancels in
    (half + whole - other half) / 2.
    """

    def cut_to(half: LayerHalf, module: nn.Module) -> nn.Module:
        copied = copy_with_shared_weights(module)
        keep_half(copied, parts, half)
        return copied

    attention, other = (
        _count_part(model, f"{whole.name}, {half.value} half", (layer,), recorded, width, own, partial(cut_to, half))
        for half, own in zip(LayerHalf, gets, strict=True)
    )
    alone = attention.mixed(other, whole, lambda own, others, both: (own + both - others) / 2)
    rest = other.mixed(alone, whole, lambda _, others, both: both - others)
    return replace(alone, attentions=whole.attentions, is_half=True), replace(rest, attentions=(), is_half=True)


class _PartRun:
    """A part's F, I and W at one length, alone, on meta tensors.

    W is what a backward to the weights and the input does beyond one to the input. Where the input of the lowest
    trained part has no gradient, I is what remains of the backward that runs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Sequence[str],
        calls: ModelCalls,
        width: int,
        loss: bool,
        gets_gradient: bool,
        cut: Callable[[nn.Module], nn.Module],
    ) -> None:
        names = [name for name in calls.arguments if name in modules]  # in the order of their calls
        self._modules = [(cut(model.get_submodule(name)), *calls.arguments[name]) for name in names]
        self._width, self._loss = width, loss
        self.parameters = list({id(p): p for module, *_ in self._modules for p in module.parameters()}.values())
        # rotary tables and the like, which all layers share
        self._shared = [t for _, *arguments in self._modules for t in _tensors(arguments)[1:]]
        self.own = ModelCalls(calls.length, calls.seq_len)
        self._trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.has_backward = gets_gradient or bool(self._trained)
        forward, inputs = self._pass(weights=False)
        _, backward = self._pass(weights=True)
        weights = backward - inputs
        if not gets_gradient:
            _, backward = self._pass(weights=True, gets_gradient=False)
            inputs = backward - weights
        self.ops = {Op.F: forward, Op.I: inputs, Op.W: weights if self._trained else OperationTally()}

    def _pass(self, weights: bool, gets_gradient: bool = True) -> tuple[OperationTally, OperationTally]:
        """Returns the tallies of the forward and the backward."""
        self.own.attentions.clear()
        self._gets_gradient = gets_gradient
        for parameter in self._trained:
            parameter.requires_grad_(weights)
            parameter.grad = torch.zeros_like(parameter) if weights else None
        saved = SavedStorages([*self.parameters, *self._shared])
        with (
            recording(self.own),
            counted_operations(self._width) as forward,
            saved_tensors_hooks(saved.pack, lambda tensor: tensor),
            META,
        ):
            output, source = self._forward()
        if not output.requires_grad:
            self.saved_bytes = 0
            return forward, OperationTally()
        saved.pack(source)
        self.saved_bytes = saved.num_bytes
        with counted_operations(self._width) as backward, META:
            output.backward(torch.empty_like(output))  # type: ignore[no-untyped-call]
        return forward, backward

    def _forward(self) -> tuple[Tensor, Tensor]:
        """Returns the part's output and its first input."""
        results: list[Tensor] = []
        source = None
        for module, args, kwargs in self._modules:
            args, kwargs = _fresh(args, self._gets_gradient), _fresh(kwargs, self._gets_gradient)
            if self._loss and results:  # the head reads the norm's output
                args, kwargs = with_hidden_states(args, kwargs, results[-1])
            source = hidden_states(args, kwargs) if source is None else source
            results.append(first_output(module(*args, **kwargs)))
        assert source is not None
        if self._loss:
            targets = torch.zeros(results[-1].shape[:-1], dtype=torch.long)
            return causal_cross_entropy(results[-1], targets)[0], source
        return results[0] if len(results) == 1 else sum(results[1:], results[0]), source


def _fresh(value: Any, gets_gradient: bool) -> Any:
    """Returns the arguments as leaves, which get a gradient where they can."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(gets_gradient and value.is_floating_point() and value.dim() == 3)
    if isinstance(value, tuple):
        fresh = [_fresh(item, gets_gradient) for item in value]
        return tuple(
            item.detach() if isinstance(item, Tensor) and len(value) == 2 else new
            for item, new in zip(value, fresh, strict=True)
        )
    return {key: _fresh(item, gets_gradient) for key, item in value.items()} if isinstance(value, dict) else value


def _tensors(arguments: Any) -> list[Tensor]:
    return [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]
