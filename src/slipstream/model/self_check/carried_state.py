"""Finds what an architecture's layers carry from token to token besides keys and values, which slices don't carry.

Nothing is compared: a layer that never attends through transformers' interface, or that asks the cache for a state of
its own, can't be sliced at any size. So this holds where the self-check is switched off, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.attention import ContextStore
from slipstream.errors import SlipstreamError
from slipstream.model.attached_code import copy_with_shared_weights
from slipstream.model.causal_lm_stage import CausalLMStage
from slipstream.model.hooks.mask_tables import SliceMask
from slipstream.model.hooks.slice_cache import CarriedState
from slipstream.model.layer_range import LayerRange
from slipstream.model.model_anatomy import ModelAnatomy, anatomy_of_size, find_anatomy
from slipstream.model.self_check.toy_runs import TokenCuts, sliced_outputs, whole_outputs
from slipstream.model.toy.toy_comparison import full_precision, recorded_attention, relative_errors
from slipstream.model.toy.toy_failure import toy_failure
from slipstream.model.toy.toy_model import perturb_parameters, toy_model, toy_tokens

TOLERANCE = 1e-5  # sums that a model forms in float32 differ by up to 1e-6, a mistake by 1e-4 or more
_SLICES = TokenCuts((0, 5, 12), (0, 12))


def check_carried_state(config: PretrainedConfig, anatomy: ModelAnatomy | None = None) -> None:
    """Runs a toy of the architecture once whole and once in slices, forwards only. Not collective.

    Raises SlipstreamError, naming the layer and the state, where slices can't be exact whatever the sizes are.
    """
    anatomy = anatomy or find_anatomy(config)
    try:
        with torch.no_grad(), full_precision():
            model = toy_model(config)
            perturb_parameters(model)  # so that states count
            sized = anatomy_of_size(anatomy, model.config)
            _ToyInSlices(model, sized, toy_tokens(config, _SLICES.length)).check()
    except SlipstreamError as error:
        raise refusal(config, str(error)) from error
    except Exception as error:  # the model's own code
        raise refusal(config, toy_failure(config, error)) from error


def refusal(config: PretrainedConfig, reason: str) -> SlipstreamError:
    """Returns the error that says why token slices of an architecture wouldn't be exact."""
    return SlipstreamError(
        f"model_type {config.model_type!r} can't be trained in token slices: {reason.removesuffix('.')}. Give whole "
        "sequences, in microbatches: slices=1 and self_check=False."
    )


class _ToyInSlices:
    """A toy's forward in slices, next to the whole one."""

    def __init__(self, model: PreTrainedModel, anatomy: ModelAnatomy, tokens: Tensor) -> None:
        self._layers = anatomy.layers_of(model)
        with recorded_attention() as attending:
            self._whole = whole_outputs(model, anatomy, tokens)
        self._attending = set(attending)
        self._model, self._anatomy, self._tokens = model, anatomy, tokens

    def check(self) -> None:
        """Raises SlipstreamError for what slices can't carry."""
        for place, output in self._whole.items():
            if _SLICES.length not in output.shape[:-1]:  # residual streams may be another dimension
                given = f"{place} has the shape {tuple(output.shape)} for {_SLICES.length} tokens"
                raise SlipstreamError(f"{given}, so it can't be cut between tokens")
        store, outputs, failed = ContextStore(_SLICES.length), {}, None
        try:
            owned, model = LayerRange(0, len(self._layers)), copy_with_shared_weights(self._model)
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

    def _check_layers(self, outputs: Mapping[str, Tensor], carrying: frozenset[int]) -> None:
        """Raises SlipstreamError for the first layer that sees earlier tokens neither by attention nor by a state.

        Layers without either may treat every token alone. What attention gets wrong is the comparison's to say.
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
