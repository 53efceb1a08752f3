"""Runs a toy whole and in stages and slices, and finds the states that its layers carry from token to token.

These are the states besides keys and values, which slices don't carry.

Nothing is compared: a layer that never attends through transformers' interface, or that asks the cache for a state of
its own, can't be sliced at any size. So this holds where the self-check is switched off, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.attention import ContextStore
from slipstream.errors import SlipstreamError
from slipstream.model.anatomy import ModelAnatomy, anatomy_of_size, find_anatomy
from slipstream.model.causal_lm_stage import CausalLMStage
from slipstream.model.hooks.crossing_tensors import first_output, hidden_states
from slipstream.model.hooks.masks import SliceMask
from slipstream.model.hooks.slice_cache import CarriedState
from slipstream.model.hooks.token_slice import TokenSlice
from slipstream.model.layer_range import LayerRange
from slipstream.model.module_copies import copy_with_shared_weights
from slipstream.model.reached_tensors import kept_gradients
from slipstream.model.tensors import Tensors
from slipstream.model.toy import (
    full_precision,
    output_weights,
    perturb_parameters,
    recorded_attention,
    relative_errors,
    toy_failure,
    toy_model,
    toy_tokens,
)

INPUT = "the input of layer 0"
_Slices = dict[str, list[Tensor]]


@dataclass(frozen=True)
class TokenCuts:
    """Where a toy's sequences are cut: into slices, and before that into documents, alike in every row."""

    slices: tuple[int, ...]  # first token of each slice, and the length
    documents: tuple[int, ...]  # first token of each document, and the length

    @property
    def length(self) -> int:
        return self.slices[-1]

    def token_slices(self, tokens: Tensor) -> list[TokenSlice]:
        """Returns the slices of (b, length) tokens, with the documents that they hold."""
        position = torch.arange(self.length)
        starts = torch.tensor(self.documents[:-1])
        begins = starts[torch.searchsorted(starts, position, right=True) - 1]  # first token of each token's document
        document_start = begins.expand(len(tokens), -1) if len(starts) > 1 else None
        longest = max(b - a for a, b in pairwise(self.documents))
        positions = (position - begins).expand(len(tokens), -1)
        return [
            TokenSlice(
                tokens[:, a:b],
                positions[:, a:b],
                None if document_start is None else document_start[:, a:b],
                start=a,
                length=self.length,
                max_position=longest - 1,
                index=index,
            )
            for index, (a, b) in enumerate(pairwise(self.slices))
        ]


@dataclass(frozen=True)
class ToyRun:
    """The gradients, and the outputs by place in the order of the forward: "the input of layer 0", ..., "logits"."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    paths: tuple[frozenset[str], ...] = ()  # per layer of a sliced run: how a slice's tokens see those before it


def run_whole(model: PreTrainedModel, anatomy: ModelAnatomy, tokens: Tensor, cuts: TokenCuts) -> ToyRun:
    """Runs the toy without stages and slices, each document as a batch of its own."""
    outputs: _Slices = defaultdict(list)
    layers = anatomy.layers_of(model)
    model.zero_grad()
    with _recording(layers, range(len(layers)), outputs):
        logits = [model(input_ids=tokens[:, a:b], use_cache=False).logits for a, b in pairwise(cuts.documents)]
    outputs["logits"] = [tensor.detach() for tensor in logits]
    whole = torch.cat(logits, dim=1)
    with kept_gradients([whole], model.parameters()):
        torch.autograd.backward(whole, output_weights(whole))
    named = [pair for pair in model.named_parameters(remove_duplicate=False) if pair[0] not in anatomy.second_names]
    gradients = {name: p.grad.to_dense().clone() for name, p in named if p.grad is not None}
    return ToyRun(_joined(outputs, anatomy), gradients)


def whole_outputs(model: PreTrainedModel, anatomy: ModelAnatomy, tokens: Tensor) -> dict[str, Tensor]:
    """Returns the layers' outputs without stages and slices."""
    outputs: _Slices = defaultdict(list)
    layers = anatomy.layers_of(model)
    with _recording(layers, range(len(layers)), outputs):
        model(input_ids=tokens, use_cache=False)
    return _joined(outputs, anatomy)


def sliced_outputs(
    stage: CausalLMStage, anatomy: ModelAnatomy, pieces: list[TokenSlice], store: ContextStore
) -> dict[str, Tensor]:
    """Returns the outputs of the layers of a stage that has them all, run slice by slice."""
    outputs: _Slices = defaultdict(list)
    with _recording(anatomy.layers_of(stage.model), stage.layers_here, outputs):
        for piece in pieces:
            stage.compute(piece, (), store)
    return _joined(outputs, anatomy)


def cut_in_two(model: PreTrainedModel, anatomy: ModelAnatomy) -> list[CausalLMStage]:
    """Returns two stages over the model's own weights, or one where it has one layer."""
    num_layers = len(anatomy.layers_of(model))
    middle = (num_layers + 1) // 2
    cuts = [LayerRange(0, middle), LayerRange(middle, num_layers)] if num_layers > 1 else [LayerRange(0, 1)]
    cpu = torch.device("cpu")
    return [CausalLMStage(copy_with_shared_weights(model), anatomy, owned, cpu) for owned in cuts]


def run_sliced(stages: list[CausalLMStage], anatomy: ModelAnatomy, tokens: Tensor, cuts: TokenCuts) -> ToyRun:
    """Runs the stages on every slice: forwards, then backwards in reverse order."""
    stores = [ContextStore(cuts.length) for _ in stages]
    outputs: _Slices = defaultdict(list)
    runs: list[list[tuple[Tensors, Tensors]]] = []  # per slice: the tensors that each stage received and sent
    for stage in stages:
        stage.model.zero_grad()
        for tied in stage.tied:
            tied.parameter.grad = None
        if len(cuts.documents) > 2:
            # Carriers are found before any run is recorded.
            stage.find_carriers()
    for piece in cuts.token_slices(tokens):
        sent: Tensors = ()
        ends: list[tuple[Tensors, Tensors]] = []
        for stage, store in zip(stages, stores, strict=True):
            received = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in sent)
            with _recording(anatomy.layers_of(stage.model), stage.layers_here, outputs):
                computed = stage.compute(piece, received, store)
            sent = computed if isinstance(computed, tuple) else (computed,)
            ends.append((received, sent))
            _check_attention(stage, store, piece.index + 1)
        runs.append(ends)
    paths = tuple(path for stage, store in zip(stages, stores, strict=True) for path in _paths(stage, store))
    outputs["logits"] = [ends[-1][1][0].detach() for ends in runs]
    sizes = [b - a for a, b in pairwise(cuts.slices)]
    weights = torch.split(output_weights(torch.cat(outputs["logits"], 1)), sizes, dim=1)
    own = [parameter for stage in stages for parameter in stage.model.parameters()]
    own += [accumulator for stage in stages for tied in stage.tied for accumulator in tied.accumulators]
    for ends, gradient in reversed(list(zip(runs, weights, strict=True))):
        gradients: Tensors = (gradient,)
        for received, sent in reversed(ends):
            reached = [(tensor, grad) for tensor, grad in zip(sent, gradients, strict=True) if tensor.requires_grad]
            with kept_gradients([tensor for tensor, _ in reached], [*own, *received]):
                torch.autograd.backward([tensor for tensor, _ in reached], [grad for _, grad in reached])
            gradients = tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in received)
    return ToyRun(_joined(outputs, anatomy), _stage_gradients(stages), paths)


@contextmanager
def _recording(layers: list[nn.Module], owned: range, outputs: _Slices) -> Iterator[None]:
    """Collects the first layer's input and every owned layer's output, a list of slices each."""

    def record(index: int, _layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if index == 0:
            outputs[INPUT].append(hidden_states(args, kwargs).detach())
        outputs[f"layer {index}"].append(first_output(output).detach())

    with ExitStack() as hooks:
        for index in owned:
            hooks.enter_context(layers[index].register_forward_hook(partial(record, index), with_kwargs=True))
        yield


def _joined(outputs: _Slices, anatomy: ModelAnatomy) -> dict[str, Tensor]:
    # Dim of the tokens in (b, T, n), or in streams of these.
    token_dim = 1 if anatomy.hidden is None else anatomy.hidden.token_dim
    dims = {"logits": 1}
    return {place: torch.cat(slices, dim=dims.get(place, token_dim)) for place, slices in outputs.items()}


def _paths(stage: CausalLMStage, store: ContextStore) -> Iterator[frozenset[str]]:
    """Yields each layer's entries in the store after a stage's forwards: kinds of attention and of carried states."""
    for index, layer in zip(stage.layers_here, stage.layers, strict=True):
        kind = "own attention" if stage.attends_itself else "attention"
        attends = {kind} if _attentions(index, layer, store) else set()
        calls = (call for call in store.carried.calls if isinstance(call, CarriedState))
        yield frozenset(attends | {call.kind for call in calls if call.layer == index})


def _check_attention(stage: CausalLMStage, store: ContextStore, num_slices: int) -> None:
    """Raises SlipstreamError where a layer doesn't attend equally often in every slice."""
    for index, layer in zip(stage.layers_here, stage.layers, strict=True):
        if any(len(store.reads[call]) != num_slices for call in _attentions(index, layer, store)):
            raise SlipstreamError(f"layer {index} does not attend equally often in every slice")


def _attentions(index: int, layer: nn.Module, store: ContextStore) -> list[Hashable]:
    """Returns the calls of a layer's attention: they begin with a module of it, or with its number in the cache."""
    places = {index, *layer.modules()}
    return [call for call in store.reads if call[0] in places]  # type: ignore[index]


def _stage_gradients(stages: list[CausalLMStage]) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        gradients |= {name: p.grad.to_dense() for name, p in stage.named_parameters() if p.grad is not None}
        for tied in stage.tied:
            for accumulator in tied.accumulators:
                if accumulator is not tied.parameter and accumulator.grad is not None:
                    gradients[tied.name] = gradients.get(tied.name, torch.zeros(())) + accumulator.grad.to_dense()
    return gradients


# Sums that a model forms in float32 differ by up to 1e-6, a mistake by 1e-4 or more.
TOLERANCE = 1e-5
_SLICES = TokenCuts((0, 5, 12), (0, 12))
_carries_nothing: set[Hashable] = set()


def check_carried_state(config: PretrainedConfig, anatomy: ModelAnatomy | None = None) -> None:
    """Runs a toy of the architecture once whole and once in slices, forwards only. Not collective.

    Raises SlipstreamError, naming the layer and the state, where slices can't be exact whatever the sizes are.
    """
    anatomy = anatomy or find_anatomy(config)
    key = anatomy.toy, repr(anatomy)
    if key in _carries_nothing:
        return
    try:
        with torch.no_grad(), full_precision():
            model = toy_model(config)
            # Parameters that begin as zero would hide states.
            perturb_parameters(model)
            sized = anatomy_of_size(anatomy, model.config)
            if not _ToyInSlices(model, sized, toy_tokens(config, _SLICES.length)).carries_states():
                _carries_nothing.add(key)
    except SlipstreamError as error:
        raise refusal(config, str(error)) from error
    except Exception as error:  # the model's own code
        raise refusal(config, toy_failure(config, error)) from error


def refusal(config: PretrainedConfig, reason: str) -> SlipstreamError:
    """Returns the error that says why token slices of an architecture wouldn't be exact."""
    return SlipstreamError(
        f"model_type {config.model_type!r} can't be trained in token slices: {reason.removesuffix('.')}. Give whole "
        "sequences, in microbatches: slices=1."
    )


class _ToyInSlices:
    """A toy's forward in slices, next to the whole one."""

    def __init__(self, model: PreTrainedModel, anatomy: ModelAnatomy, tokens: Tensor) -> None:
        self._layers = anatomy.layers_of(model)
        with recorded_attention() as attending:
            self._whole = whole_outputs(model, anatomy, tokens)
        self._attending = set(attending)
        self._model = model
        self._anatomy = anatomy
        self._tokens = tokens

    def carries_states(self) -> bool:
        """Returns whether layers carry states between slices. Raises SlipstreamError where slices can't be exact."""
        for place, output in self._whole.items():
            # Residual streams may be a further dimension.
            if _SLICES.length not in output.shape[:-1]:
                shape_text = f"{place} has the shape {tuple(output.shape)} for {_SLICES.length} tokens"
                raise SlipstreamError(f"{shape_text}, so it can't be cut between tokens")
        store = ContextStore(_SLICES.length)
        outputs = {}
        failed = None
        try:
            owned = LayerRange(0, len(self._layers))
            model = copy_with_shared_weights(self._model)
            stage = CausalLMStage(model, self._anatomy, owned, torch.device("cpu"))
            outputs = sliced_outputs(stage, self._anatomy, _SLICES.token_slices(self._tokens), store)
        except SlipstreamError:
            raise
        except Exception as error:  # the model's own code
            failed = error
        carrying = frozenset(call.layer for call in store.carried.calls if isinstance(call, CarriedState))
        self._check_layers(outputs, carrying)
        if failed is not None and SliceMask.__name__ in str(failed):
            raise SlipstreamError(
                "its own code reads the attention mask, as an indexer does that selects keys (sparse attention)"
            )
        if failed is not None:
            raise SlipstreamError(
                f"its code fails where it is given a slice of the tokens ({type(failed).__name__}: {failed})"
            ) from failed
        return bool(carrying)

    def _check_layers(self, outputs: Mapping[str, Tensor], carrying: frozenset[int]) -> None:
        """Raises SlipstreamError for the first layer that sees earlier tokens neither by attention nor by a state.

        Layers without either may treat every token alone. Errors of attention are found by the comparison.
        """
        for index, layer in enumerate(self._layers):
            if self._is_exact(f"layer {index}", outputs):
                continue
            attends = self._anatomy.attends_itself or set(layer.modules()) & self._attending
            if index not in carrying and not attends:
                raise SlipstreamError(
                    f"layer {index} ({type(layer).__name__}) never attends through transformers' AttentionInterface, "
                    "nor to keys and values from transformers' cache, so what it needs from earlier tokens (attention "
                    "of its own, a recurrent state) can't be provided"
                )
            if outputs and index in carrying:
                raise SlipstreamError(
                    f"layer {index} ({type(layer).__name__}) carries a state from token to token, but doesn't continue "
                    "from it over several tokens"
                )
            if outputs:
                return

    def _is_exact(self, name: str, outputs: Mapping[str, Tensor]) -> bool:
        if name not in outputs:
            return False
        return relative_errors({name: outputs[name]}, {name: self._whole[name]})[name] < TOLERANCE
