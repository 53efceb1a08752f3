"""Tries the functions of a user's that transformers calls by names: whether stages, rows and tokens may be apart.

A toy of the architecture runs whole and in two stages, in float64. What its experts compute is compared in slices, too.
A user's attention isn't: it gets the keys and values of a sequence, never those of earlier slices.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PretrainedConfig

from slipstream.keyed_draws import kept_random_states
from slipstream.model.anatomy import ModelAnatomy, anatomy_of_size
from slipstream.model.dispatched_functions import DispatchedFunctions
from slipstream.model.self_check.change_trial import TrialResult, differ
from slipstream.model.self_check.toy_runs import TOLERANCE, TokenCuts, cut_in_two, run_sliced, run_whole
from slipstream.model.toy import (
    TOY_LENGTH,
    full_precision,
    perturb_parameters,
    reference_model,
    toy_config,
    toy_tokens,
)

_WHOLE = TokenCuts((0, TOY_LENGTH), (0, TOY_LENGTH))
_SLICES = TokenCuts((0, 5, 20, 41, TOY_LENGTH), (0, TOY_LENGTH))


def try_dispatched(config: PretrainedConfig, anatomy: ModelAnatomy, own: DispatchedFunctions) -> TrialResult:
    """Returns what can't be computed apart by a user's functions. Not collective.

    A function that fails on the toy, or gives something else the second time, can't be apart either.
    """
    result = result_by_kind(own)
    if not any(own):
        return result
    blamed = " and ".join(map(str, own))
    try:
        with kept_random_states(), torch.enable_grad(), full_precision():
            torch.manual_seed(0)
            return _tried(config, anatomy, own, blamed)
    except Exception as error:  # the user's own code
        reason = f"{blamed}, and trying it failed ({type(error).__name__}: {error})"
        return TrialResult(reason, reason, reason, reason)


def result_by_kind(own: DispatchedFunctions) -> TrialResult:
    """Returns what follows from the kind of a user's functions, tried or not."""
    return TrialResult(f"{own.attention}, which is given no keys of earlier slices" if own.attention else "")


def _tried(config: PretrainedConfig, anatomy: ModelAnatomy, own: DispatchedFunctions, blamed: str) -> TrialResult:
    toy, result = toy_config(config), result_by_kind(own)
    attention = "eager" if own.attention is None else own.attention.name
    model = reference_model(toy, attention, "eager" if own.experts is None else own.experts.name)
    perturb_parameters(model)
    sized = replace(anatomy_of_size(anatomy, toy), attends_itself=anatomy.attends_itself or own.attention is not None)
    tokens = toy_tokens(toy)
    whole, again = (run_whole(model, sized, tokens, _WHOLE) for _ in range(2))
    if differ(again.outputs, whole.outputs, TOLERANCE):
        return replace(result, again=f"{blamed}, which draws random numbers or keeps a state")
    rows = [run_whole(model, sized, row[None], _WHOLE).outputs for row in tokens]
    if differ({place: torch.cat([row[place] for row in rows]) for place in whole.outputs}, whole.outputs, TOLERANCE):
        result = replace(result, rows=f"{blamed}, which computes a sequence alone in another way")
    stages = cut_in_two(model, sized)
    found = run_sliced(stages, sized, tokens, _WHOLE)
    if differ(found.outputs, whole.outputs, TOLERANCE) or differ(found.gradients, whole.gradients, TOLERANCE):
        return replace(result, layers=f"{blamed}, which computes something else in stages")
    if own.attention is None:
        found = run_sliced(stages, sized, tokens, _SLICES)
        if differ(found.outputs, whole.outputs, TOLERANCE) or differ(found.gradients, whole.gradients, TOLERANCE):
            return replace(result, tokens=f"{blamed}, which computes a slice in another way than the whole sequence")
    return result
