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
from slipstream.model.layer_arguments import hidden_states, with_hidden_states
from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.tensor.tensor_operators import copy_to_ranks, gather, split, sum_and_split, sum_over_ranks
from slipstream.parallel.tensor.tensor_plan import COLUMNS, ROWS, TensorRegion, TensorStyle

TOKENS = 1  # the dimension: hidden states are (b, T, features)


class ReplicationTracker:
    """Calls `enter` where the ranks begin to compute different things, and `leave` where they compute the same again.

    Each change is reported once. Between regions the state is the initial `is_own`: different where tokens are spread.
    """

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None], is_own: bool) -> None:
        self._enter, self._leave = enter, leave
        self._is_own = self._at_rest = is_own

    def own(self) -> None:
        """Notes that from here on the ranks compute different things."""
        if not self._is_own:
            self._is_own = True
            self._enter()

    def same(self) -> None:
        """Notes that from here on the ranks compute the same."""
        if self._is_own:
            self._is_own = False
            self._leave()

    def rest(self) -> None:
        """Notes that a region ends."""
        if self._at_rest:
            self.own()
        else:
            self.same()


class RegionHooks:
    """Puts f, g and the other operators into one region of one model. `length()` is the number of tokens if they are
    spread."""

    def __init__(
        self,
        region: TensorRegion,
        group: RankGroup,
        sequence: bool,
        length: Callable[[], int],
        whose: ReplicationTracker,
    ) -> None:
        self._region = region
        self._group = group
        self._spreads = sequence
        self._scatters = sequence and region.is_direct  # at its row, as nothing inside needs the whole sum
        self._length = length
        self._whose = whose
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor -> the tensor and f of it, in this forward

    def install(self, modules: dict[str, nn.Module]) -> None:
        """Installs the hooks on the modules of a model, given by name, whose weights are already this rank's share."""
        module = modules[self._region.name]
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        for name, style in self._region.styles.items():
            self._install_style(modules[name], style)
        module.register_forward_hook(self._leave, always_call=True)

    def _install_style(self, module: nn.Module, style: TensorStyle) -> None:
        if style is TensorStyle.EXPERTS:
            module.register_forward_pre_hook(self._before_experts, with_kwargs=True)
            module.register_forward_hook(self._after_experts)
        if style in COLUMNS:
            module.register_forward_pre_hook(self._before_column)
        if style is TensorStyle.GATHERED_COLUMN:
            module.register_forward_hook(self._gather_features)
        if style in ROWS:
            _Row(self, splits_input=style is TensorStyle.SPLIT_ROW).install(module)

    def reduce(self, output: Tensor) -> Tensor:
        """Applies g: returns the sum of the ranks' parts of a row's output, or this rank's tokens of it."""
        if self._scatters:
            self._whose.own()
            return sum_and_split(output, self._group, TOKENS)
        total = sum_over_ranks(output, self._group)
        self._whose.same()
        return total

    def split_features(self, features: Tensor) -> Tensor:
        """Returns this rank's part of features that all ranks have."""
        own = split(features, self._group, features.dim() - 1)
        self._whose.own()
        return own

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        self._copies.clear()
        if not self._spreads or (self._scatters and not self._region.has_columns):
            return None
        if not self._scatters:
            self._whose.same()
        gathered = self._gather_tokens(hidden_states(args, kwargs), is_partial=self._scatters)
        return with_hidden_states(args, kwargs, gathered)

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Ends the region. `output` is None where the forward raised, as in a replay that ends early."""
        self._copies.clear()
        if output is not None and self._spreads and not self._scatters:
            hidden, *others = output if isinstance(output, tuple) else (output,)
            hidden = split(hidden, self._group, TOKENS)
            output = (hidden, *others) if isinstance(output, tuple) else hidden
        self._whose.rest()
        return output

    def _gather_tokens(self, hidden: Tensor, is_partial: bool) -> Tensor:
        if hidden.dim() != 3:
            raise SlipstreamError(
                f"{self._region.name} takes {tuple(hidden.shape)}, not (batch, tokens, features), so sequence "
                "parallelism can't find its tokens. Turn it off for this model."
            )
        return gather(hidden, self._group, TOKENS, self._length(), is_partial)

    def _before_column(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        own = args[0] if self._scatters else self._copy(args[0])  # the gather's backward adds gradients up
        self._whose.own()
        return (own, *args[1:])

    def _gather_features(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        last = output.dim() - 1
        features = gather(output, self._group, last, self._group.size * output.shape[last])
        self._whose.same()
        return features

    def _before_experts(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Applies f to hidden states and router weights: gradients of both are sums over the ranks' parts of the
        experts."""
        found = tuple(map(self._copy, args)), {key: self._copy(value) for key, value in kwargs.items()}
        self._whose.own()
        return found

    def _after_experts(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return self.reduce(output)

    def _copy(self, value: Any) -> Any:
        """Applies f, once for each tensor, as query, key and value take the same one."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = value, copy_to_ranks(value, self._group)
        return self._copies[id(value)][1]


class _Row:
    """A linear layer whose input features differ between ranks: its bias is added once, after g."""

    def __init__(self, operators: RegionHooks, splits_input: bool) -> None:
        self._operators = operators
        self._splits_input = splits_input
        self._bias: nn.Parameter | None = None  # while the module runs without

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._bias = module._parameters.get("bias")
        if self._bias is not None:
            module._parameters["bias"] = torch.zeros_like(self._bias)  # type: ignore[assignment]  # Conv1D needs one
        return (self._operators.split_features(args[0]), *args[1:]) if self._splits_input else args

    def _after(self, module: nn.Module, _args: Any, output: Tensor | None) -> Tensor | None:
        """`output` is None where the forward raised."""
        bias, self._bias = self._bias, None
        if bias is not None:
            module._parameters["bias"] = bias
        if output is None:
            return None
        total = self._operators.reduce(output)
        return total if bias is None else total + bias.to(total.dtype)
