"""Tensor parallelism: several ranks compute every layer together, each with its share of the weights.

PTD-P section 2.3 (Megatron-LM): two all-reduces of (b, T, hidden) in the forward of a layer of attention and MLP and
two in its backward. With sequence parallelism (Korthikanti et al. 2022) each is an all-gather or a reduce-scatter, and
what is between the regions is spread over the ranks by tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slipstream.errors import SlipstreamError
from slipstream.model.adapters import own_module
from slipstream.model.hooks.layer_arguments import Arguments, hidden_states, with_hidden_states
from slipstream.parallel.parameter_share import ParameterShare
from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.tensor.adapter_hooks import sum_up_norms
from slipstream.parallel.tensor.region_hooks import TOKENS, RegionHooks
from slipstream.parallel.tensor.replication_tracker import ReplicationTracker
from slipstream.parallel.tensor.tensor_operators import copy_to_ranks, gather, part_length, split
from slipstream.parallel.tensor.tensor_plan import TensorPlan
from slipstream.parallel.tensor.vocabulary_parallel import VocabularyEmbedding


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
        self.plan, self.group, self.sequence = plan, group, sequence
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
        cut, ranks = self.plan.cuts.get(name), tuple[int, ...]()
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
        """Applies f before the head: the norm before it is applied to each rank's tokens."""
        return gather(hidden, self.group, TOKENS, self._length, is_partial=True)

    def _as_long_as_gathered(self, hidden: Tensor) -> Tensor:
        """Returns a placeholder: on stages without the head nothing reads this output, but GPT-2's code reshapes it."""
        return hidden.new_zeros(()).expand(len(hidden), self._length, hidden.shape[-1])
