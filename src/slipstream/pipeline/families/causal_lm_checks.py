"""Checks before training: what can't be done with a changed model, and tensor parallelism on a toy.

Checks tensor parallelism before training: a toy of the architecture shared by the ranks, against the whole toy.

A plan says how weights are cut, not what the code between them reads: a size that stays whole, a norm over features
that a rank has only some of, a bias counted on every rank. Running it shows all of these.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.attention import ContextStore
from slipstream.errors import RankFailedError, SlipstreamError
from slipstream.model import (
    IGNORED,
    TOLERANCE,
    CausalLMStage,
    LayerRange,
    ModelAnatomy,
    SelfCheck,
    TokenCuts,
    causal_cross_entropy,
    find_anatomy,
)
from slipstream.model.anatomy import anatomy_of_size
from slipstream.model.given_model import GivenModel
from slipstream.model.self_check.instance_trial import TrialResult, try_changes
from slipstream.model.toy import (
    full_precision,
    perturb_parameters,
    reference_model,
    toy_config,
    toy_failure,
    toy_model,
    toy_tokens,
)
from slipstream.parallel import RankGroup, Ranks, SliceExchange, check_heads
from slipstream.parallel.tensor import TensorParallel, find_tensor_plan, vocabulary_cross_entropy
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.families.stage_layout import StageLayout
from slipstream.pipeline.pipeline_options import PipelineOptions

_ONE_STAGE = "Train it on one rank with one stage, or make the change inside of its layers"


@dataclass(frozen=True)
class ChangedModel:
    """How a model was changed, and what its changes keep from being computed apart."""

    given: GivenModel
    result: TrialResult
    layers: str  # the name of the list of layers
    num_replicas: int
    shares_slices: bool  # whether other ranks have other tokens of every slice

    @classmethod
    def tried(
        cls,
        given: GivenModel,
        model: PreTrainedModel,
        anatomy: ModelAnatomy,
        check: SelfCheck | None,
        ranks: Ranks,
        options: PipelineOptions,
    ) -> ChangedModel:
        """Tries the changes on the leader, unless self-checks are off. Collective.

        Raises SlipstreamError for a mesh or an option that no changed model can have.
        """
        result = TrialResult()
        is_shared = [f"{' and '.join(names[:2])} are one weight" for names in given.shared]
        if changed := [*given.changes, *is_shared]:
            first = changed[0]
            if ranks.tensor.size > 1:
                raise SlipstreamError(
                    f"{first}: tensor parallelism cuts the weights that the configuration describes, by code of its "
                    "own. Use tp=1, or undo the change."
                )
            if ranks.experts.size > 1:
                raise SlipstreamError(
                    f"{first}, which hasn't been shown to be exact where experts are spread over ranks. Use ep=1, or "
                    "undo the change."
                )
            if options.parallel.shard == "parameters":
                raise SlipstreamError(
                    f"{first}, which hasn't been shown to be exact with parallel.shard='parameters'. Use "
                    "parallel.shard='optimizer'."
                )
            if check is not None and given.changes:
                result = ranks.decided(lambda: try_changes(given, model, anatomy, check.packs_any_length))
        if given.renumbered and (anatomy.attends_itself or (check is not None and check.carries_states)):
            raise SlipstreamError(
                f"{given.renumbered[0]} has another layer_idx than its place in {anatomy.layers}, by which layers of "
                "this architecture find what earlier tokens left. Set layer_idx to the place, in every layer."
            )
        return cls(given, result, anatomy.layers, ranks.data.size, ranks.context.size > 1)

    def outlined(self, anatomy: ModelAnatomy) -> ModelAnatomy:
        """Returns the anatomy with the weights that layers share, and with what mustn't be cut in this model."""
        kept: dict[str, str] = {}
        for change in self.given.changes:
            child = change.module.removeprefix(f"{anatomy.layers}.").split(".")
            is_inside = len(child) > 2 or (len(child) == 2 and not change.replaces)
            if change.module.startswith(f"{anatomy.layers}."):
                if self.result.halves or not is_inside:
                    kept.setdefault(f"{anatomy.layers}.{child[0]}", self.result.halves or str(change))
            else:
                kept.setdefault(change.module, str(change))
        for name in (name for names in self.given.shared for name in names):
            module = name.rpartition(".")[0]
            if module.startswith(f"{anatomy.layers}."):
                module = f"{anatomy.layers}.{module.removeprefix(f'{anatomy.layers}.').partition('.')[0]}"
            kept.setdefault(module, f"{name} is a weight of several modules")
        return replace(anatomy, shared=self.given.shared, kept_whole=tuple(kept.items()))

    def check_layout(self, layout: StageLayout, options: PipelineOptions) -> None:
        """Raises SlipstreamError where the stages can't be exact, or a schedule always cuts what can't be."""
        around = self.given.changes_around(self.layers)
        if len(layout.layers) > 1 and around:
            raise SlipstreamError(
                f"{around[0]}, and contains all layers, so each of {len(layout.layers)} stages would run it on its own "
                f"part. {_ONE_STAGE}."
            )
        if len(layout.layers) > 1 and self.result.layers:
            raise SlipstreamError(f"{self.result.layers}, so layers can't run on several stages. {_ONE_STAGE}.")
        if self.result.again:
            raise SlipstreamError(
                f"{self.result.again}, and forwards run more often here than in the model by itself, as a stage learns "
                "its masks from a first token. Remove it, or let what it computes follow from its input alone."
            )
        schedule = layout.training
        self._check_pieces(schedule.num_slices, schedule.num_microbatches)

    @property
    def restricts_pieces(self) -> bool:
        """Whether some slices or microbatches can't be exact."""
        return bool(self.result.tokens or self.result.rows or self.given.gradient_hooks)

    def check_batch(self, batch: SplitBatch) -> None:
        """Raises SlipstreamError where slices, documents or microbatches of this batch can't be exact."""
        has_documents = any(each.document_start is not None for slices in batch.slices for each in slices)
        cut = batch.groups or has_documents or any(len(slices) > 1 for slices in batch.slices)
        self._check_pieces(2 if cut else 1, 2 if batch.groups else len(batch.slices))

    def _check_pieces(self, num_slices: int, num_microbatches: int) -> None:
        num_slices = max(num_slices, 1 + self.shares_slices)
        if self.result.tokens and num_slices > 1:
            raise SlipstreamError(
                f"{self.result.tokens}, so token slices, packed documents and sequences of different lengths wouldn't "
                "be exact. Give whole sequences of one length: slices=1, without cp."
            )
        if self.result.rows and (num_microbatches > 1 or self.num_replicas > 1):
            raise SlipstreamError(
                f"{self.result.rows}, so microbatches and replicas wouldn't be exact. Give num_microbatches=1 and a "
                "mesh without dp."
            )
        if self.given.gradient_hooks and (num_slices > 1 or num_microbatches > 1 or self.num_replicas > 1):
            raise SlipstreamError(
                f"{self.given.gradient_hooks[0]} has a hook on its gradient, which would run once for each slice and "
                "microbatch, on a part of the gradient. Change .grad after step instead, or give slices=1 and "
                "num_microbatches=1 without dp and cp."
            )


def check_context_parallel(config: PretrainedConfig, num_ranks: int, tensor_ranks: int = 1, kind: str = "auto") -> None:
    """Checks that `num_ranks` can share every slice, each with some of its tokens, by a toy of the architecture;
    `kind` is what they exchange, as `parallel.context_exchange` has it. Not collective.

    Raises SlipstreamError where its layers exchange more between tokens than attention does, or where heads are to be
    exchanged that don't divide.
    """
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    try:
        if kind == "heads" and isinstance(heads, int):
            check_heads(heads // tensor_ranks, num_ranks)
        with torch.no_grad(), full_precision():
            model, cuts = toy_model(config), TokenCuts((0, 5, 12), (0, 12))
            anatomy = anatomy_of_size(find_anatomy(config), model.config)
            owned, alone = LayerRange(0, len(anatomy.layers_of(model))), partial(SliceExchange, RankGroup())
            stage = CausalLMStage(model, anatomy, owned, torch.device("cpu"), exchange=alone)
            store = ContextStore(cuts.length)
            for piece in cuts.token_slices(toy_tokens(config, cuts.length)):
                stage.forward(piece, None, store)
    except Exception as error:  # or the model's own code
        reason = str(error) if isinstance(error, SlipstreamError) else toy_failure(config, error)
        raise SlipstreamError(
            f"model_type {config.model_type!r} can't be trained with cp={num_ranks}, where ranks share every slice: "
            f"{reason.removesuffix('.')}. Use cp=1, and more of pp, dp or tp."
        ) from error


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
    except (SlipstreamError, RankFailedError):  # a rank that has ended says nothing about the model
        raise
    except Exception as error:  # the model's own code
        raise _refusal(config, group, f"a toy of it fails ({type(error).__name__}: {error})") from error
    found = next(filter(None, group.gather(wrong)), None)
    if found is not None:
        raise _refusal(config, group, found)


def _first_wrong(
    config: PretrainedConfig,
    given_plan: Mapping[str, str] | None,
    group: RankGroup,
    sequence: bool,
    cuts_experts: bool,
) -> str | None:
    device = torch.device("cuda", torch.cuda.current_device()) if group.uses_nccl else torch.device("cpu")
    whole = reference_model(_toy_config(config, group.size))
    perturb_parameters(whole)  # so that a bias that is counted twice shows
    whole.to(device)
    inputs = toy_tokens(config)[:, :-1].to(device)  # an odd number of tokens, so that some are padded
    labels = inputs.masked_fill(torch.arange(inputs.shape[1], device=device) % 7 == 3, IGNORED)
    anatomy = find_anatomy(config)
    shared = copy.deepcopy(whole)
    plan = find_tensor_plan(shared, shared.config, group.size, anatomy, given_plan, cuts_experts)
    parallel = TensorParallel(plan, group, sequence)
    parallel.shard(shared)
    parallel.install(shared, lambda: None, lambda: None)
    parallel.begin(inputs.shape[1])
    expected = _step(whole, inputs, labels, causal_cross_entropy)
    found = _step(shared, inputs, labels, vocabulary_cross_entropy(group, parallel.first_id, IGNORED))
    if not abs(found - expected) < TOLERANCE * abs(expected):
        return f"its loss differs from the whole model's by {float(abs(found - expected)):.1e}"
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
    errors, parameters = {}, dict(shared.named_parameters())
    for name, gradient in expected.items():
        mine = parameters[name].grad
        found = torch.zeros_like(parameters[name]) if mine is None else mine
        if ranks := parallel.added_over(name):
            found = parallel.group.all_gather(found)[list(ranks)].sum(0)
        difference = (found - parallel.share(name).take(gradient)).abs().max()
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
