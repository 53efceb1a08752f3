"""The operators of one region of a layer, as hooks: they work with whatever runs the linear layers inside.

    replicated tokens                        spread tokens (sequence parallelism)
    x ─ f ─ column ─ row ─ g ─ y             x ─ all-gather ─ column ─ row ─ reduce-scatter ─ y

Inside a region only the input of a column goes through f, once for every tensor: what else reads the region's input,
such as a router, computes the same on all ranks, so its gradient is whole on all. A region where something else has
parameters exchanges the tokens at its ends and has f and g inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.model.adapters import inner_modules
from slipstream.model.hooks.layer_arguments import Arguments, hidden_states, with_hidden_states
from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.tensor.adapter_hooks import share_dropout, sum_up_norms
from slipstream.parallel.tensor.replication_tracker import ReplicationTracker
from slipstream.parallel.tensor.tensor_operators import copy_to_ranks, gather, split, sum_over_ranks
from slipstream.parallel.tensor.tensor_plan import TensorRegion
from slipstream.parallel.tensor.weight_cutting import COLUMNS, ROWS, TensorStyle

TOKENS = 1  # the dimension: hidden states are (b, T, features)


class RegionHooks:
    """Puts f, g and the other operators into one region of one model. `length()` is the number of tokens if they are
    `spread`."""

    def __init__(
        self, region: TensorRegion, group: RankGroup, spread: bool, length: Callable[[], int], whose: ReplicationTracker
    ) -> None:
        self._region, self._group, self._length, self._whose = region, group, length, whose
        self._spreads = spread
        self._scatters = spread and region.is_direct  # at its row, as nothing inside needs the whole sum
        has_columns = any(style in COLUMNS for style in region.styles.values())
        self._gathers = spread and (has_columns or not region.is_direct)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor -> the tensor and f of it, in this forward
        self._biases: dict[nn.Module, nn.Parameter] = {}  # of the rows that are running without

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
        own = args[0] if self._scatters else self._copy(args[0])  # the gather's backward adds gradients up
        self._whose.switch(is_own=True)
        return (own, *args[1:])

    def _gather_features(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        last = output.dim() - 1
        features = gather(output, self._group, last, self._group.size * output.shape[last])
        self._whose.switch(is_own=False)
        return features

    def _split_features(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        own = split(args[0], self._group, args[0].dim() - 1)
        self._whose.switch(is_own=True)
        return (own, *args[1:])

    def _before_experts(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Applies f to hidden states and router weights: gradients of both are sums over the ranks' parts of the
        experts."""
        found = tuple(map(self._copy, args)), {key: self._copy(value) for key, value in kwargs.items()}
        self._whose.switch(is_own=True)
        return found

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
        for inner in inner_modules(module):  # the last is the one that ran
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
