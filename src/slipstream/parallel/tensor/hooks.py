"""The operators of tensor parallelism (f, g and others), as hooks around regions of a layer.

    replicated tokens                        spread tokens (sequence parallelism)
    x ─ f ─ column ─ row ─ g ─ y             x ─ all-gather ─ column ─ row ─ reduce-scatter ─ y

Inside a region only the input of a column goes through f, once for every tensor: other readers of the region's input,
such as a router, compute the same on all ranks, so their gradients are whole on all. A region with other parameters
exchanges the tokens at its ends and has f and g inside.

The operators that tensor parallelism puts around local linear layers: f, g and others, each another's backward.

PTD-P section 2.3 (figure 5): f is the identity forward and an all-reduce backward, g the reverse. With sequence
parallelism (Korthikanti et al. 2022, figure 5) they become an all-gather and a reduce-scatter over the tokens. Between
them each rank has a different tensor; outside them all ranks have the same tensor and the same whole gradient, unless
the tokens are spread: then each rank has its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.autograd_calls import with_backward
from slipstream.errors import SlipstreamError
from slipstream.model import adapter_dropouts, dora_layers, inner_modules
from slipstream.model.hooks import Arguments, hidden_states, with_hidden_states
from slipstream.parallel.parameter_share import part_length
from slipstream.parallel.rank_group import RankGroup, copied, sum_over_ranks
from slipstream.parallel.tensor.plan import COLUMNS, ROWS, TensorRegion, TensorStyle

TOKENS = 1  # dim of the tokens in hidden states (b, T, features)


class RegionHooks:
    """Puts f, g and the other operators into one region of one model. `length()` is the number of tokens if they are
    `spread`."""

    def __init__(
        self, region: TensorRegion, group: RankGroup, spread: bool, length: Callable[[], int], whose: ReplicationTracker
    ) -> None:
        self._region = region
        self._group = group
        self._length = length
        self._whose = whose
        self._spreads = spread
        # The output is scattered at once, as nothing inside the region needs the whole sum.
        self._scatters = spread and region.is_direct
        has_columns = any(style in COLUMNS for style in region.styles.values())
        self._gathers = spread and (has_columns or not region.is_direct)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor -> the tensor and f of it, in this forward
        self._biases: dict[nn.Module, nn.Parameter] = {}  # biases of row-parallel modules that are running without them

    def install(self, modules: dict[str, nn.Module]) -> None:
        """Installs the hooks on the modules of a model, given by name, whose weights are already this rank's share."""
        module = modules[self._region.name]
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        for name, style in self._region.styles.items():
            self._install_style(modules[name], style)
        for name, each in modules.items():
            if name.startswith(f"{self._region.name}.") and self._region.styles.get(name) not in ROWS:
                share_dropout(each, self._whose)
        module.register_forward_hook(self._leave, always_call=True)

    def _install_style(self, module: nn.Module, style: TensorStyle) -> None:
        if style is TensorStyle.EXPERTS:
            module.register_forward_pre_hook(self._before_experts, with_kwargs=True)
            module.register_forward_hook(self._reduce)
        if style in COLUMNS:
            module.register_forward_pre_hook(self._before_column)
        if style is TensorStyle.GATHERED_COLUMN:
            module.register_forward_hook(self._gather_features)
        if style is TensorStyle.SPLIT_ROW:
            module.register_forward_pre_hook(self._split_features)
        if style in ROWS:
            sum_up_norms(module, self._group)
            module.register_forward_pre_hook(self._put_bias_aside)
            module.register_forward_hook(self._reduce, always_call=True)

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        self._copies.clear()
        if not self._gathers:
            return None
        hidden = hidden_states(args, kwargs)
        if hidden.dim() != 3:
            raise SlipstreamError(
                f"{self._region.name} takes {tuple(hidden.shape)}, not (batch, tokens, features), so sequence "
                "parallelism can't find its tokens. Turn it off for this model."
            )
        if not self._scatters:
            self._whose.switch(is_own=False)
        gathered = gather(hidden, self._group, TOKENS, self._length(), is_partial=self._scatters)
        return with_hidden_states(args, kwargs, gathered)

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Ends the region. `output` is None where the forward raised, as in a replay that ends early."""
        self._copies.clear()
        if output is not None and self._spreads and not self._scatters:
            hidden, *others = output if isinstance(output, tuple) else (output,)
            hidden = split(hidden, self._group, TOKENS)
            output = (hidden, *others) if isinstance(output, tuple) else hidden
        self._whose.switch(is_own=self._spreads)
        return output

    def _before_column(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs = args[0] if self._scatters else self._copy(args[0])  # the gather's backward adds gradients up
        self._whose.switch(is_own=True)
        return (inputs, *args[1:])

    def _gather_features(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        last = output.dim() - 1
        features = gather(output, self._group, last, self._group.size * output.shape[last])
        self._whose.switch(is_own=False)
        return features

    def _split_features(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        features = split(args[0], self._group, args[0].dim() - 1)
        self._whose.switch(is_own=True)
        return (features, *args[1:])

    def _before_experts(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Applies f to hidden states and router weights: gradients of both are sums over the ranks' parts of the
        experts."""
        arguments = tuple(map(self._copy, args)), {key: self._copy(value) for key, value in kwargs.items()}
        self._whose.switch(is_own=True)
        return arguments

    def _copy(self, value: Any) -> Any:
        """Applies f, once for each tensor, as query, key and value take the same one."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = value, copy_to_ranks(value, self._group)
        return self._copies[id(value)][1]

    def _put_bias_aside(self, module: nn.Module, _args: Any) -> None:
        for inner in inner_modules(module):
            bias = inner._parameters.get("bias")
            if bias is not None:
                self._biases[inner] = bias
                inner._parameters["bias"] = torch.zeros_like(bias)  # type: ignore[assignment]  # Conv1D needs one

    def _reduce(self, module: nn.Module, _args: Any, output: Tensor | None) -> Tensor | None:
        """Applies g to the output of a row or of experts: returns the sum of the ranks' parts, or this rank's tokens of
        it. A row's bias is added after it, once. `output` is None where the forward raised."""
        bias = None
        # The last of these modules is the one that ran.
        for inner in inner_modules(module):
            bias = self._biases.pop(inner, None)
            if bias is not None:
                inner._parameters["bias"] = bias
        if output is None:
            return None
        if self._scatters:
            total = split(output, self._group, TOKENS, is_partial=True)
        else:
            total = sum_over_ranks(output, self._group)
        self._whose.switch(is_own=self._scatters)
        return total if bias is None else total + bias.to(total.dtype)


def copy_to_ranks(tensor: Tensor, group: RankGroup) -> Tensor:
    """Applies f: each rank uses the tensor separately; the gradients of these uses are summed. Collective."""
    return _apply(tensor, lambda whole: whole.view_as(whole), lambda gradient: group.sum(copied(gradient)))


def gather(tensor: Tensor, group: RankGroup, dim: int, length: int, is_partial: bool = False) -> Tensor:
    """Joins parts along `dim`, `length` in all, to the whole on all ranks; the rest was padding. Collective.

    Backward returns this rank's part of the gradient, where all have the whole one, or, if `is_partial`, of the sum of
    the ranks' gradients (a reduce-scatter: f with sequence parallelism).
    """
    return _apply(
        tensor,
        lambda part: _join(group.all_gather(part), dim, length),
        lambda gradient: _part(gradient, group, dim, is_partial),
    )


def split(tensor: Tensor, group: RankGroup, dim: int, is_partial: bool = False) -> Tensor:
    """Returns this rank's part along `dim`, padded with zeros to equal lengths; backward gathers. Collective.

    It is the part of the tensor that all ranks have or, if `is_partial`, of the sum of the ranks' tensors (a
    reduce-scatter: g with sequence parallelism).
    """
    length = tensor.shape[dim]
    return _apply(
        tensor,
        lambda whole: _part(whole, group, dim, is_partial),
        lambda gradient: _join(group.all_gather(gradient), dim, length),
    )


def _apply(tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    return with_backward(lambda whole: (forward(whole),), lambda gradient: (backward(gradient),), tensor)[0]


def _part(tensor: Tensor, group: RankGroup, dim: int, is_partial: bool) -> Tensor:
    """Returns this rank's part along `dim`, in new memory: of the tensor or, if it `is_partial`, of the ranks' sum."""
    parts = _cut(tensor, dim, group.size)
    return group.reduce_scatter(parts) if is_partial else copied(parts[group.rank])


def _cut(tensor: Tensor, dim: int, num_parts: int) -> Tensor:
    """Turns (..., length, ...) into (num_parts, ..., part_length, ...), the end padded with zeros."""
    length = part_length(tensor.shape[dim], num_parts)
    missing = num_parts * length - tensor.shape[dim]
    if missing:
        tensor = functional.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, missing))
    return tensor.reshape(*tensor.shape[:dim], num_parts, length, *tensor.shape[dim + 1 :]).movedim(dim, 0)


def _join(parts: Tensor, dim: int, length: int) -> Tensor:
    # In new memory, since models may change the result in place.
    return torch.cat([*parts], dim).narrow(dim, 0, length).contiguous()


def share_dropout(module: nn.Module, whose: ReplicationTracker) -> None:
    """Makes the dropout of an adapter's input the same on all ranks, which all have that input.

    A row's input is its rank's features, so its dropout is the rank's own.
    """
    before: list[bool] = []

    def begin(*_: Any) -> None:
        before[:] = [whose.is_own]
        whose.switch(is_own=False)

    def end(*_: Any) -> None:
        whose.switch(is_own=before[0])

    for dropout in adapter_dropouts(module):
        dropout.register_forward_pre_hook(begin)
        dropout.register_forward_hook(end)


def sum_up_norms(module: nn.Module, group: RankGroup) -> None:
    """Makes DoRA divide by the norms of whole rows of a weight, of which each rank has some columns.

    A forward is then collective. DoRA takes these norms for constants, so nothing is exchanged in the backward.
    """
    for layer in dora_layers(module):
        _sum_up(layer, group)


def _sum_up(layer: Any, group: RankGroup) -> None:
    of_columns = layer.get_weight_norm

    def of_rows(*args: Any, **kwargs: Any) -> Tensor:
        return group.sum(of_columns(*args, **kwargs).detach().square()).sqrt()

    layer.get_weight_norm = of_rows


class ReplicationTracker:
    """Calls `enter` where the ranks begin to compute different things, and `leave` where they compute the same again.

    Each change is reported once. Before the first region the ranks' work is different if it `is_own`, as it is where
    tokens are spread.
    """

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None], is_own: bool) -> None:
        self._enter = enter
        self._leave = leave
        self._is_own = is_own

    @property
    def is_own(self) -> bool:
        """Whether the ranks compute different things now."""
        return self._is_own

    def switch(self, is_own: bool) -> None:
        """Notes whether from here on the ranks compute different things or the same."""
        if is_own != self._is_own:
            self._is_own = is_own
            (self._enter if is_own else self._leave)()
