"""Expert parallelism: each rank holds some experts of every layer, and tokens go to the ranks whose experts they chose.

The experts are spread over ranks that otherwise hold the same weights and see other tokens. Of 4 replicas and ep=2:

    replica    0        1        2        3
    experts    0, 1     2, 3     0, 1     2, 3        tokens go to and fro between 0 and 1, and between 2 and 3;
                                                      an expert's gradients are summed over 0 and 2, or 1 and 3

In a layer of experts the ranks exchange how many tokens each sends to each expert, then the tokens, by an all-to-all
with uneven parts, and send the results back. Nothing is dropped. Every rank takes part in every exchange, also one that
sends or gets no tokens: so all of them run the same actions in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.autograd_calls import with_backward
from slipstream.errors import SlipstreamError
from slipstream.model import expert_modules, own_module, parse_name
from slipstream.model.hooks import runs_alone
from slipstream.parallel.mesh import divisors_text
from slipstream.parallel.parameter_share import ParameterShare, part_bounds
from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.tensor import TensorParallel
from slipstream.parallel.tensor.hooks import gather, split

_ROWS = 0  # the dimension of tokens in the inputs of experts


def num_experts_of(model: nn.Module) -> dict[str, int]:
    """Returns the number of experts of each layer that has some, by the module's name without an adapter's."""
    return {parse_name(f"{name}.weight").layer: int(module.num_experts) for name, module in expert_modules(model)}


def without_experts(model_type: str) -> str:
    """Returns why the experts of a model without any can't be spread."""
    return f"{model_type!r} has no experts that can be spread, whose weights a layer holds together"


def check_experts(model: nn.Module, model_type: str, size: int) -> None:
    """Raises SlipstreamError where the experts of a whole model, which may be on the meta device, can't be spread over
    `size` ranks."""
    counts = num_experts_of(model)
    option = f"ep={size}"
    if not counts:
        raise SlipstreamError(f"{option}: {without_experts(model_type)}. Leave it out.")
    for name, _ in expert_modules(model):
        if "." in parse_name(f"{name}.weight").rest.replace("base_layer.", ""):
            raise SlipstreamError(
                f"{option}: {name} is in a trained copy (modules_to_save) of a larger module, of which other parts "
                "aren't spread. Name the experts instead."
            )
    for name, count in counts.items():
        if count % size:
            raise SlipstreamError(
                f"{option}: {name} has {count} experts, which {size} ranks can't share evenly. Choose from "
                f"{divisors_text(count)}."
            )
        if count == size and own_module(model.get_submodule(name)) is not model.get_submodule(name):
            raise SlipstreamError(
                f"{option}: {name} has an adapter, which PEFT computes otherwise for a single expert, and each of "
                f"{size} ranks would have one. Choose fewer ranks, from {divisors_text(count)}."
            )


@dataclass(frozen=True)
class ExpertParallel:
    """The experts of this rank: it cuts a model's weights to these, and installs the exchange.

    Args:
        counts: the number of experts of each module that holds some, by its name in the whole model.
        group: the ranks over which they are spread.
        tensor: how ranks share layers. Each of them holds the experts and sends other tokens.
    """

    counts: Mapping[str, int]
    group: RankGroup
    tensor: TensorParallel | None

    def has(self, name: str) -> bool:
        """Returns whether a parameter of the model is one of experts, and so not the same on all ranks of the group."""
        return parse_name(name).layer in self.counts

    def share(self, name: str, parameter: Tensor) -> ParameterShare:
        """Returns the part that this rank has of such a parameter, which is cut already."""
        shape = [*parameter.shape]
        shape[_dim_of_experts(name)] *= self.group.size
        return self._share(name, tuple(shape))

    def shard(self, model: nn.Module) -> None:
        """Keeps this rank's experts of a model, which may lack layers, in place."""
        for name, parameter in model.named_parameters():
            if self.has(name):
                parameter.data = self._share(name, tuple(parameter.shape)).take(parameter.data).clone()
        for name, module in model.named_modules():
            num_experts = self.counts.get(parse_name(f"{name}.weight").layer)
            if num_experts is not None and getattr(module, "num_experts", None) == num_experts:
                # An adapter around the experts has the attribute, too.
                module.num_experts = num_experts // self.group.size

    def install(self, model: nn.Module) -> None:
        """Makes tokens go to the ranks of their experts, in every forward of the model from now on, after `shard`."""
        for name, module in expert_modules(model):
            module.forward = _Exchange(module, self.group, self._ranks_with(name))

    def _ranks_with(self, name: str) -> RankGroup | None:
        """Returns the ranks of the tensor axis that give these experts the same tokens, None for no others."""
        if self.tensor is None:
            return None
        in_region = any(name.startswith(f"{region.name}.") for region in self.tensor.plan.regions)
        return self.tensor.group if in_region or not self.tensor.sequence else None

    def _share(self, name: str, shape: tuple[int, ...]) -> ParameterShare:
        num_experts = self.counts[parse_name(name).layer]
        dim = _dim_of_experts(name)
        start, stop = part_bounds(num_experts, self.group.size, self.group.rank)
        rows_each = shape[dim] // num_experts
        # PEFT keeps the rows of lora_A by expert, and the columns of lora_B by rank and then by expert.
        ranges = (
            [(start * rows_each, stop * rows_each)]
            if dim == 0
            else [(r * num_experts + start, r * num_experts + stop) for r in range(rows_each)]
        )
        return ParameterShare(shape, dim, tuple(ranges), 0 if self.tensor is None else self.tensor.rank)


def _dim_of_experts(name: str) -> int:
    return int("lora_B" in name.split("."))


class _Exchange:
    """The forward of a module that holds this rank's experts alone: all-to-all, the experts, and all-to-all back.

    Where a forward runs on this process alone, each of its own experts stands for one of every rank. Of tokens that
    all ranks of the tensor axis have, each sends a part.
    """

    def __init__(self, experts: Any, group: RankGroup, shared: RankGroup | None) -> None:
        self._forward = experts.forward
        self._num_experts = int(experts.num_experts)
        self._group = group
        self._shared = shared

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        if runs_alone():
            output = self._routed(RankGroup(), hidden_states, top_k_index % self._num_experts, top_k_weights)
        elif self._shared is None:
            output = self._routed(self._group, hidden_states, top_k_index, top_k_weights)
        # Rows of padding go to the first expert, with a weight of zero.
        else:
            inputs = hidden_states, top_k_index, top_k_weights
            mine = self._routed(self._group, *(split(tensor, self._shared, _ROWS) for tensor in inputs))
            output = gather(mine, self._shared, _ROWS, len(hidden_states))
        return output.to(hidden_states.dtype)

    def _routed(self, group: RankGroup, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sums (N,h) of the outputs of each token's k experts. Collective.

        Each choice of a token is a row; rows are sorted by expert, and so by rank. How many there are is read on the
        host. The backward adds up the gradients of a token's rows where they are neighbours again.
        """
        per_token = index.shape[1]
        size = group.size
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = chosen.new_zeros(size * self._num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        counts = counts.view(size, self._num_experts)
        of_ranks = group.all_to_all(counts, [1] * size, [1] * size)
        sent, received = torch.stack([counts.sum(1), of_ranks.sum(1)]).tolist()

        def dispatched(rows: Tensor) -> Tensor:
            return group.all_to_all(rows, sent, received)

        def returned(rows: Tensor) -> Tensor:
            return group.all_to_all(rows, received, sent)[place]

        (rows,) = with_backward(
            lambda tokens: (dispatched(tokens[order // per_token]),),
            lambda gradient: (torch.unflatten(returned(gradient), 0, index.shape).sum(1),),
            hidden,
        )
        numbers = torch.arange(self._num_experts, device=order.device).repeat(size)
        numbers = numbers.repeat_interleave(of_ranks.flatten(), output_size=sum(received))
        # A row of zeros gives the experts' weights gradients of zeros, and lets the backward join its exchanges.
        if not sum(received):
            rows = functional.pad(rows, (0, 0, 0, 1))
            numbers = numbers.new_zeros(1)
        output = self._forward(rows, numbers[:, None], torch.ones_like(numbers[:, None], dtype=rows.dtype))
        (mine,) = with_backward(
            lambda rows: (returned(rows),), lambda gradient: (dispatched(gradient[order]),), output[: sum(received)]
        )
        return (torch.unflatten(mine, 0, index.shape) * weights[..., None]).sum(1)
