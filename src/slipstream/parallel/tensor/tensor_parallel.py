"""Tensor parallelism: several ranks compute every layer together, each with its share of the weights.

PTD-P section 2.3 (Megatron-LM): two all-reduces of (b, T, hidden) in the forward of a layer of attention and MLP and
two in its backward. With sequence parallelism (Korthikanti et al. 2022) each is an all-gather or a reduce-scatter, and
tensors between the regions are spread over the ranks by tokens.

Embedding and loss where each rank has some rows of the vocabulary: no rank ever has all logits of a token.

PTD-P section 2.3: the parallel cross entropy exchanges (b, T) numbers instead of (b, T, vocabulary) logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from slipstream.errors import SlipstreamError
from slipstream.model import inner_modules, own_module
from slipstream.model.hooks import Arguments, hidden_states, with_hidden_states
from slipstream.parallel.parameter_share import ParameterShare, part_bounds, part_length
from slipstream.parallel.rank_group import RankGroup, sum_over_ranks
from slipstream.parallel.tensor.hooks import (
    TOKENS,
    RegionHooks,
    ReplicationTracker,
    copy_to_ranks,
    gather,
    split,
    sum_up_norms,
)
from slipstream.parallel.tensor.plan import TensorPlan


class TensorParallel:
    """This rank's part of a plan.

    Call `shard` once, `install` on every copy of the modules, and `begin` before every forward. With `sequence` the
    residual stream is (b, local_length(T), hidden) from the first layer to the last, padded where T doesn't divide.

    Raises SlipstreamError for `sequence` and a model with more than a norm between its layers and its head.
    """

    def __init__(self, plan: TensorPlan, group: RankGroup, sequence: bool) -> None:
        if group.size != plan.tensor_ranks:
            raise ValueError(f"a plan for {plan.tensor_ranks} tensor ranks, but the group has {group.size}")
        if sequence and len(plan.after_layers) > 1:
            raise SlipstreamError(
                f"sequence parallelism needs one norm between the layers and the head, and here run "
                f"{', '.join(plan.after_layers)}. Turn it off for this model."
            )
        self.plan = plan
        self.group = group
        self.sequence = sequence
        self._length = 0

    @property
    def rank(self) -> int:
        """This process's number among those that share its layers."""
        return self.group.rank

    def begin(self, length: int) -> None:
        """Announces forwards of `length` tokens."""
        self._length = length

    def shard(self, model: nn.Module) -> None:
        """Keeps this rank's share of every parameter of `model`, in place. Tied weights stay one parameter."""
        done: set[int] = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) not in done:
                done.add(id(parameter))
                parameter.data = self.share(name).take(parameter.data)

    def install(
        self, model: nn.Module, enter: Callable[[], None], leave: Callable[[], None], is_first: bool = True
    ) -> None:
        """Puts the operators around the modules that are here, after `shard`, and adjusts their sizes.

        Where the model is a stage that isn't the first (`is_first`), its first layer is given tokens that are already
        split, and an embedding is here for a tied head alone. `enter` is called where the ranks begin to compute
        different things, `leave` where they compute the same again. Between regions they compute the same; with spread
        tokens each has its own from the first layer to the last, so there the first call is `leave`.
        """
        every = dict(model.named_modules())
        modules = {name: module for name, module in every.items() if next(module.parameters(), None) is not None}
        whose = ReplicationTracker(enter, leave, is_own=self.sequence)
        self._adjust_sizes(modules)
        for region in self.plan.regions:
            if region.name in modules:
                RegionHooks(region, self.group, self.sequence, lambda: self._length, whose).install(modules)
        first_layer = f"{self.plan.layers}.0"
        embedding = modules.get(self.plan.embedding)
        if embedding is not None and isinstance(own_module(embedding), nn.Embedding):
            first_id = self._first_row(self.plan.embedding)
            sum_up_norms(embedding, self.group)
            VocabularyEmbedding(self.group, first_id, is_first).install(embedding)
        if self.sequence and is_first and self.plan.embedding in modules:
            every[first_layer].register_forward_pre_hook(self._split_tokens, with_kwargs=True)
        if self.sequence and self.plan.after_layers:
            change = self._gather_tokens if self.plan.head in modules else self._as_long_as_gathered
            every[self.plan.after_layers[0]].register_forward_hook(lambda _module, _args, output: change(output))
        elif self.plan.head in modules:
            modules[self.plan.head].register_forward_pre_hook(self._before_head)

    def share(self, name: str) -> ParameterShare:
        """Returns this rank's share of the parameter that the whole model calls `name`, or ties to another of that
        name."""
        cut = self.plan.cuts.get(name)
        if cut is None:
            return ParameterShare.whole(self.plan.shapes[name], copy=self.group.rank)
        return cut.share(self.group.rank, self.group.size)

    def added_over(self, name: str) -> tuple[int, ...]:
        """Returns the tensor ranks, including this one, whose gradients of a parameter must be summed; () for none.

        They are all ranks where a whole parameter is applied to different heads or tokens on each rank, and else those
        that have the same key and value heads.
        """
        cut = self.plan.cuts.get(name)
        ranks = tuple[int, ...]()
        if cut is not None:
            ranks = cut.holders(self.group.rank, self.group.size)
        elif name in self.plan.partial or (self.sequence and self.plan.is_spread(name)):
            ranks = tuple(range(self.group.size))
        return ranks if len(ranks) > 1 else ()

    @property
    def first_id(self) -> int:
        """The token id of this rank's first logit; 0 where the head isn't here."""
        return self._first_row(self.plan.head) if f"{self.plan.head}.weight" in self.plan.cuts else 0

    @property
    def num_ids(self) -> int:
        """The number of logits of a token, those of all ranks."""
        return self.plan.shapes[f"{self.plan.head}.weight"][0]

    def local_length(self, length: int) -> int:
        """Returns how many of `length` tokens this rank has in the residual stream, including padding."""
        return part_length(length, self.group.size) if self.sequence else length

    def _first_row(self, module: str) -> int:
        ((first, _),) = self.share(f"{module}.weight").ranges
        return first

    def _adjust_sizes(self, modules: dict[str, nn.Module]) -> None:
        for name in {parameter.rpartition(".")[0] for parameter in self.plan.cuts} & modules.keys():
            module = modules[name]
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
            elif isinstance(module, Conv1D):
                module.nx, module.nf = module.weight.shape
        for name, sizes in self.plan.attributes.items():
            for attribute, size in sizes.items() if name in modules else ():
                setattr(modules[name], attribute, size)

    def _before_head(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        whole = self._gather_tokens(args[0]) if self.sequence else copy_to_ranks(args[0], self.group)
        return (whole, *args[1:])

    def _split_tokens(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return with_hidden_states(args, kwargs, split(hidden_states(args, kwargs), self.group, TOKENS))

    def _gather_tokens(self, hidden: Tensor) -> Tensor:
        # The norm before the head is applied to each rank's tokens.
        return gather(hidden, self.group, TOKENS, self._length, is_partial=True)

    def _as_long_as_gathered(self, hidden: Tensor) -> Tensor:
        # On stages without the head nothing reads this output, but GPT-2's code reshapes it.
        return hidden.new_zeros(()).expand(len(hidden), self._length, hidden.shape[-1])


def vocabulary_cross_entropy(
    group: RankGroup, first_id: int, ignore_index: int
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns the loss of logits (b, T, V_local), of ids first_id to first_id + V_local, and targets (b, T).

    The loss returns (sum over tokens, number of valid tokens), the same on every rank, in float32 or wider; targets
    equal to `ignore_index` don't count. Forward all-reduces each token's largest logit, then the sum of exponentials
    with the target's logit; backward is local. Calling it is collective over the group.
    """

    losses = vocabulary_token_losses(group, first_id, ignore_index)

    def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return losses(logits, targets).sum(), (targets != ignore_index).sum()

    return loss


def vocabulary_token_losses(group: RankGroup, first_id: int, ignore_index: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the summands of `vocabulary_cross_entropy`: the loss of each token, (b, T), zero where none counts."""

    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        result: Tensor = _CrossEntropy.apply(logits, targets, group, first_id, ignore_index)  # type: ignore[no-untyped-call]
        return result

    return losses


def gather_vocabulary(logits: Tensor, group: RankGroup, num_ids: int) -> Tensor:
    """Returns the logits of all ids, (b, T, num_ids), of those of this rank's rows, (b, T, V_local). Collective."""
    bounds = [part_bounds(num_ids, group.size, rank) for rank in range(group.size)]
    sizes = [stop - start for start, stop in bounds]
    parts = group.all_gather(functional.pad(logits, (0, max(sizes) - logits.shape[-1])))
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)


class _CrossEntropy(torch.autograd.Function):
    """Computes log(sum_v exp(logit_v)) - logit_target for each token."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: RankGroup, first_id: int, ignore_index: int
    ) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        shifted = wide - group.max(wide.amax(-1))[..., None]  # (b, T, V_local)
        is_valid = targets != ignore_index  # (b, T)
        index = targets - first_id
        is_here = is_valid & (index >= 0) & (index < logits.shape[-1])
        index = index.masked_fill(~is_here, 0)[..., None]  # (b, T, 1)
        chosen = shifted.gather(-1, index).squeeze(-1).masked_fill(~is_here, 0)
        exponentials = shifted.exp_()
        denominator, chosen = group.sum(torch.stack([exponentials.sum(-1), chosen]))
        probabilities = exponentials.div_(denominator[..., None])
        ctx.save_for_backward(probabilities, index, is_here, is_valid)
        ctx.dtype = logits.dtype
        token_losses: Tensor = (denominator.log() - chosen).masked_fill(~is_valid, 0)
        return token_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, index, is_here, is_valid = ctx.saved_tensors
        of_logits = probabilities * (gradient * is_valid)[..., None]
        of_logits.scatter_add_(-1, index, -(gradient * is_here)[..., None])
        return of_logits.to(ctx.dtype), None, None, None, None


class VocabularyEmbedding:
    """Hooks for an nn.Embedding of which this rank has the rows from `first_id` on: other ids give zeros, then g.

    Unless `is_read`, its output stays without g: a last stage has a tied embedding for its head alone.
    """

    def __init__(self, group: RankGroup, first_id: int, is_read: bool) -> None:
        self._group = group
        self._first_id = first_id
        self._is_read = is_read
        self._num_ids = 0  # number of ids on this rank
        self._is_elsewhere: Tensor | None = None  # (b, T), set between the two hooks

    def install(self, module: nn.Module) -> None:
        """Installs the hooks on a module whose weight is already this rank's share, or on one with an adapter or a
        trained copy around it."""
        for inner in inner_modules(module):
            self._adjust(inner)
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _adjust(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Embedding)
        if module.padding_idx is not None:
            padding = module.padding_idx - self._first_id
            module.padding_idx = padding if 0 <= padding < len(module.weight) else None
        module.num_embeddings = self._num_ids = len(module.weight)

    def _before(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        index = args[0] - self._first_id
        self._is_elsewhere = (index < 0) | (index >= self._num_ids)
        return (index.masked_fill(self._is_elsewhere, 0), *args[1:])

    def _after(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        assert self._is_elsewhere is not None
        rows = output.masked_fill(self._is_elsewhere[..., None], 0)
        self._is_elsewhere = None
        return sum_over_ranks(rows, self._group) if self._is_read else rows
