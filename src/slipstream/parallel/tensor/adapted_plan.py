"""Extends a model's plan to its adapter: the factors of a layer are cut as its weight is.

Of y = x W^T + x A^T B^T a column cuts W by rows, and so B, and a row cuts both W and A by columns: then each rank's
part of the product with the factors belongs to its part of the product with W, and f and g around the layer are right
for both. The other factor is whole on every rank, which has a part of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from slipstream.errors import SlipstreamError
from slipstream.model.adapters import AdaptedName, features_of, is_wrapper, own_module, parse_name
from slipstream.parallel.parameter_share import ParameterCut
from slipstream.parallel.tensor.tensor_plan import TensorPlan
from slipstream.parallel.tensor.weight_cutting import ROWS


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
    shapes, cuts, partial = {}, {}, set[str]()
    for name, parameter in adapted.named_parameters(remove_duplicate=False):
        shapes[name], parsed = tuple(parameter.shape), parse_name(name)
        cut = _cut(plan, parsed, shapes[name], parsed.layer in rows)
        if cut is not None:
            cuts[name] = cut
        elif _is_partial(plan, parsed):
            partial.add(name)
    return replace(plan, shapes={**plan.shapes, **shapes}, cuts={**plan.cuts, **cuts}, partial=plan.partial | partial)


def _cut(plan: TensorPlan, name: AdaptedName, shape: tuple[int, ...], is_row: bool) -> ParameterCut | None:
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
            f"as {inside[0].rpartition('.')[0]}; name those parts in its place."
        )
    if f"{name}.weight" not in plan.cuts or not is_row:
        return
    has_bias = getattr(own_module(module), "bias", None) is not None
    factors = dict(module.named_parameters())
    if any(parse_name(f"{name}.{each}")[1:] == ("lora_B", "bias") for each in factors):
        yield f"lora_bias=True: each of {plan.tensor_ranks} tensor ranks would count the bias of {name}'s lora_B."
    if has_bias and any(features_of("ia3_l", tuple(p.shape))[0] == 0 for key, p in factors.items() if "ia3_l" in key):
        yield (
            f"IA3 scales the output of {name} with its bias, which {plan.tensor_ranks} tensor ranks add after their "
            "parts are summed up."
        )
