"""The ways in which ranks share a model's stages: layers, slices and experts, checked beforehand and put to use.

A plan says how weights are cut over tensor ranks, not what the code between them reads: a size that stays whole, a norm
over features that a rank has only some of, a bias counted on every rank. Running a toy of the architecture that the
ranks share, against the whole toy, shows all of these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.attention import ContextStore, TokenExchange
from slipstream.errors import RankFailedError, SlipstreamError
from slipstream.model import (
    IGNORED,
    TOLERANCE,
    Adapter,
    CausalLMStage,
    LayerRange,
    ModelAnatomy,
    TokenCuts,
    adapted_model,
    anatomy_of_size,
    causal_cross_entropy,
    check_parallel,
    find_anatomy,
    full_precision,
    meta_model,
    perturb_parameters,
    reference_model,
    toy_config,
    toy_failure,
    toy_model,
    toy_tokens,
)
from slipstream.model.hooks import TokenParts
from slipstream.options import Degrees, Parallelism
from slipstream.parallel.context import SliceExchange, check_heads
from slipstream.parallel.experts import ExpertParallel, check_experts, num_experts_of, without_experts
from slipstream.parallel.rank_group import RankGroup
from slipstream.parallel.ranks import Ranks
from slipstream.parallel.tensor import (
    TensorParallel,
    TensorPlan,
    adapted_plan,
    find_tensor_plan,
    vocabulary_cross_entropy,
)

_MOST_RANKS = 64


@dataclass(frozen=True)
class SharedStages:
    """A rank's shares of a model's stages, by their names in a CausalLMStage."""

    tensor: TensorParallel | None
    experts: ExpertParallel | None
    exchange: Callable[[TokenParts], TokenExchange] | None  # around the attention of a slice

    @classmethod
    def of(
        cls,
        config: PretrainedConfig,
        anatomy: ModelAnatomy,
        ranks: Ranks,
        parallel: Parallelism,
        adapter: Adapter | None = None,
    ) -> SharedStages:
        """Returns the shares of this rank of a mesh. Raises SlipstreamError that names a part that can't be cut."""
        tensor = experts = exchange = None
        if ranks.tensor.size > 1:
            plan = _tensor_plan(config, anatomy, ranks.degrees, parallel.tensor_plan, adapter)
            tensor = TensorParallel(plan, ranks.tensor, parallel.sequence_parallel)
        if ranks.experts.size > 1:
            experts = ExpertParallel(num_experts_of(meta_model(config)), ranks.experts, tensor)
        if ranks.sharing.size > 1:
            exchange = partial(SliceExchange, ranks.sharing, kind=parallel.context_exchange)
        return cls(tensor, experts, exchange)

    def shard(self, model: nn.Module) -> None:
        """Keeps this rank's part of a model, which may lack layers, in place."""
        for part in (self.tensor, self.experts):
            if part is not None:
                part.shard(model)


def check_sharing(
    config: PretrainedConfig, degrees: Degrees, parallel: Parallelism, adapter: Adapter | None = None
) -> None:
    """Checks that a model's layers, experts and slices can be shared by the given numbers of ranks. Not collective.

    Raises SlipstreamError, the same on every rank, where they can't.
    """
    if adapter is not None:
        check_parallel(adapter, degrees.tensor, parallel.shard == "parameters")
    if degrees.tensor > 1:
        _tensor_plan(config, find_anatomy(config), degrees, parallel.tensor_plan, adapter)
    if degrees.experts > 1:
        whole = meta_model(config)
        whole = whole if adapter is None else adapted_model(whole, adapter).get_base_model()
        check_experts(whole, config.model_type, degrees.experts)
    if degrees.context > 1:
        _check_slices(config, degrees, parallel.context_exchange)


def possible_exchanges(config: PretrainedConfig, degrees: Degrees, parallel: Parallelism) -> tuple[str, ...]:
    """Returns the possible exchanges of ranks that share slices, each in all layers, of those asked for."""
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    is_open = degrees.context > 1 and parallel.context_exchange == "auto"
    divide = isinstance(heads, int) and heads % (degrees.tensor * degrees.context) == 0
    return ("heads", "keys") if is_open and divide else (parallel.context_exchange,)


class PossibleRanks(NamedTuple):
    """The numbers of ranks that can share a model's layers, slices or experts."""

    numbers: tuple[int, ...]
    refusal: str = ""  # reason for only one number, 1
    besides: str = ""  # further possible numbers

    def __str__(self) -> str:
        if self.refusal:
            return f"1 rank: {self.refusal}"
        return f"{', '.join(map(str, self.numbers))} rank{'s' if len(self.numbers) > 1 else ''}{self.besides}"


def possible_sharing(config: PretrainedConfig, anatomy: ModelAnatomy) -> dict[str, PossibleRanks]:
    """Returns how many ranks can share a model's work, by the names of `Degrees`. Not collective."""
    text = config.get_text_config()
    model = meta_model(config)
    heads = 2 if getattr(text, "is_heterogeneous", False) else getattr(text, "num_attention_heads", 2)  # layers differ
    divisors = [ranks for ranks in range(2, min(heads, _MOST_RANKS) + 1) if heads % ranks == 0]
    experts = num_experts_of(model)
    spread = PossibleRanks((1,), without_experts(config.model_type))
    if experts:
        spread = _possible(
            range(2, max(experts.values()) + 1), lambda ranks: check_experts(model, config.model_type, ranks)
        )
    problem = _slices_problem(config, Degrees(context=2), "auto")
    by_keys = PossibleRanks((1, *divisors), besides=" by heads for tokens, those of tp included; any number by keys")
    return {
        "context": PossibleRanks((1,), problem) if problem else by_keys,
        "tensor": _possible(divisors, lambda ranks: find_tensor_plan(model, config, ranks, anatomy)),
        "experts": spread,
    }


def _possible(numbers: Iterable[int], check: Callable[[int], object]) -> PossibleRanks:
    """Returns 1 and the numbers that the check lets pass, and why there is only 1."""
    possible = [1]
    reason = ""
    for count in numbers:
        try:
            check(count)
            possible.append(count)
        except SlipstreamError as error:
            reason = reason or str(error)
    return PossibleRanks(tuple(possible), "" if len(possible) > 1 else reason)


def _tensor_plan(
    config: PretrainedConfig,
    anatomy: ModelAnatomy,
    degrees: Degrees,
    given: Mapping[str, str] | None,
    adapter: Adapter | None,
) -> TensorPlan:
    """Returns how the whole model is cut over tensor ranks. Raises SlipstreamError that names a part that can't be."""
    plan = find_tensor_plan(meta_model(config), config, degrees.tensor, anatomy, given, degrees.experts == 1)
    return plan if adapter is None else adapted_plan(plan, adapted_model(meta_model(config), adapter).get_base_model())


def _check_slices(config: PretrainedConfig, degrees: Degrees, kind: str) -> None:
    """Checks that ranks can share every slice, each with some of its tokens; `kind` is their exchange, as
    `parallel.context_exchange` has it.

    Raises SlipstreamError where its layers exchange more between tokens than attention does, or where heads are to be
    exchanged that don't divide.
    """
    if problem := _slices_problem(config, degrees, kind):
        raise SlipstreamError(
            f"model_type {config.model_type!r} can't be trained with cp={degrees.context}, where ranks share every "
            f"slice: {problem}. Use cp=1, and more of pp, dp or tp."
        )


def _slices_problem(config: PretrainedConfig, degrees: Degrees, kind: str) -> str:
    """Returns why ranks can't share every slice, by a toy of the architecture; "" where they can."""
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    try:
        if kind == "heads" and isinstance(heads, int):
            check_heads(heads // degrees.tensor, degrees.context, degrees.tensor)
        with torch.no_grad(), full_precision():
            model = toy_model(config)
            cuts = TokenCuts((0, 5, 12), (0, 12))
            anatomy = anatomy_of_size(find_anatomy(config), model.config)
            owned = LayerRange(0, len(anatomy.layers_of(model)))
            alone = partial(SliceExchange, RankGroup())
            stage = CausalLMStage(model, anatomy, owned, torch.device("cpu"), exchange=alone)
            store = ContextStore(cuts.length)
            for piece in cuts.token_slices(toy_tokens(config, cuts.length)):
                stage.compute(piece, (), store)
    # The only such parameter is the bias of a row.
    except Exception as error:
        reason = str(error) if isinstance(error, SlipstreamError) else toy_failure(config, error)
        return reason.removesuffix(".")
    return ""


_INTERMEDIATE_SIZES = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "intermediate_size_mlp",
    "ffn_dim",
    "n_inner",
)


def check_tensor_parallel(
    config: PretrainedConfig,
    given_plan: Mapping[str, str] | None,
    group: RankGroup,
    sequence: bool,
    cuts_experts: bool = True,
) -> None:
    """Compares the loss and all gradients of the toy in float64. Collective over the tensor axis.

    Raises SlipstreamError, on every rank, that names the parameter whose gradient would be wrong, or what can't run.
    """
    try:
        with torch.random.fork_rng(devices=[]), full_precision():
            wrong = _first_wrong(config, given_plan, group, sequence, cuts_experts)
    # A rank that has ended says nothing about the model.
    except (SlipstreamError, RankFailedError):
        raise
    except Exception as error:  # the model's own code
        raise _refusal(config, group, f"a toy of it fails ({type(error).__name__}: {error})") from error
    first_problem = next(filter(None, group.gather(wrong)), None)
    if first_problem is not None:
        raise _refusal(config, group, first_problem)


def _first_wrong(
    config: PretrainedConfig, given_plan: Mapping[str, str] | None, group: RankGroup, sequence: bool, cuts_experts: bool
) -> str | None:
    device = torch.device("cuda", torch.cuda.current_device()) if group.uses_nccl else torch.device("cpu")
    whole = reference_model(_toy_config(config, group.size))
    # Biases that begin as zero would hide one that is counted twice.
    perturb_parameters(whole)
    whole.to(device)
    # An odd number of tokens needs padding on some ranks.
    inputs = toy_tokens(config)[:, :-1].to(device)
    labels = inputs.masked_fill(torch.arange(inputs.shape[1], device=device) % 7 == 3, IGNORED)
    anatomy = find_anatomy(config)
    shared = copy.deepcopy(whole)
    plan = find_tensor_plan(shared, shared.config, group.size, anatomy, given_plan, cuts_experts)
    parallel = TensorParallel(plan, group, sequence)
    parallel.shard(shared)
    parallel.install(shared, lambda: None, lambda: None)
    parallel.begin(inputs.shape[1])
    expected = _step(whole, inputs, labels, causal_cross_entropy)
    actual = _step(shared, inputs, labels, vocabulary_cross_entropy(group, parallel.first_id, IGNORED))
    if not abs(actual - expected) < TOLERANCE * abs(expected):
        return f"its loss differs from the whole model's by {float(abs(actual - expected)):.1e}"
    return _first_wrong_gradient(whole, shared, parallel)


def _step(model: PreTrainedModel, inputs: Tensor, labels: Tensor, loss_function: Any) -> Tensor:
    logits = model(input_ids=inputs, use_cache=False).logits
    total, count = loss_function(logits[:, :-1], labels[:, 1:])
    (total / count).backward()
    mean: Tensor = total.detach() / count
    return mean


def _first_wrong_gradient(whole: PreTrainedModel, shared: PreTrainedModel, parallel: TensorParallel) -> str | None:
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    floor = 1e-6 * max(gradient.abs().max() for gradient in expected.values())
    errors = {}
    parameters = dict(shared.named_parameters())
    for name, gradient in expected.items():
        mine = parameters[name].grad
        total = torch.zeros_like(parameters[name]) if mine is None else mine
        if ranks := parallel.added_over(name):
            total = parallel.group.all_gather(total)[list(ranks)].sum(0)
        difference = (total - parallel.share(name).take(gradient)).abs().max()
        errors[name] = float(difference / max(gradient.abs().max(), floor))
    for name, error in errors.items():
        if not error < TOLERANCE:
            return f"the gradient of {name} differs from the whole model's by {error:.1e}"
    return None


def _toy_config(config: PretrainedConfig, tensor_ranks: int) -> PretrainedConfig:
    """Returns the toy's config with heads and features that the ranks can share.

    As many ranks have one key-value head as have it with `config`.
    """
    toy = toy_config(config)
    num_heads = config.num_attention_heads
    num_key_value_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_size = toy.hidden_size // toy.num_attention_heads
    toy.num_attention_heads = tensor_ranks * (1 if num_key_value_heads == num_heads else 2)
    toy.hidden_size = head_size * toy.num_attention_heads
    if getattr(toy, "num_key_value_heads", None) is not None:
        is_shared = tensor_ranks % num_key_value_heads == 0 and num_key_value_heads < tensor_ranks
        toy.num_key_value_heads = num_key_value_heads if is_shared else tensor_ranks
    for name in _INTERMEDIATE_SIZES:
        if isinstance(getattr(toy, name, None), int):
            setattr(toy, name, 4 * tensor_ranks)
    return toy


def _refusal(config: PretrainedConfig, group: RankGroup, reason: str) -> SlipstreamError:
    return SlipstreamError(
        f"model_type {config.model_type!r} can't be shared by {group.size} tensor ranks: {reason}. Give a tensor_plan "
        "that leaves out what can't be cut, and gives what stays whole between cut layers the style "
        "'replicated_with_grad_allreduce'; or use a mesh with tp=1."
    )
