"""Trains one step of a tiny model in slices over two ranks, and compares loss and gradients with the unsplit model."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from benchmarks.zoo.outcomes import Outcome, Verdict
from slipstream import Pipeline, SlipstreamError
from slipstream.model import (
    SelfCheck,
    causal_cross_entropy,
    check_sliceable,
    check_trainable,
    find_anatomy,
    meta_model,
)
from slipstream.model.toy import (
    full_precision,
    perturb_parameters,
    quiet_transformers,
    relative_errors,
    widen_parameters,
)
from slipstream.pipeline.families import causal_lm

SLICES = (5, 1, 46, 44)  # tokens; the second slice has one token, as in generating text
LENGTH, BATCH = sum(SLICES), 2
BOUND = 1e-9  # of the largest relative error
_INSIDES = re.compile(r"\(\w*(Error|Exception|Exit|Interrupt|Iteration)\b")  # a refusal that quotes an exception
_UNUSABLE = "transformers' own code fails"  # a refusal that says so


def try_out(name: str, config: PretrainedConfig, stages: str) -> Outcome:
    """Returns the verdict about a configuration, which the caller's process may not survive.

    Args:
        name: the variant's.
        config: of a tiny model.
        stages: the larger one of the two, "first" or "last".
    """
    began = time.process_time()
    found = _verdict(config, stages)
    return Outcome(variant=name, seconds=round(time.process_time() - began, 1), **found)


def explained(outcome: Outcome, config: PretrainedConfig) -> Outcome:
    """Returns why Slipstream refuses an architecture of which no tiny model runs.

    It is the same outcome where transformers can't build the architecture either.
    """
    try:
        with quiet_transformers():
            meta_model(config)
    except Exception:
        return outcome
    try:
        check_sliceable(config)
    except Exception as error:
        return replace(outcome, **ended_by(error))
    return replace(outcome, verdict=Verdict.CRASH)


def at_own_size(outcome: Outcome, config: PretrainedConfig) -> Outcome:
    """Returns why Slipstream refuses an architecture that is exact at toy size only, else the same outcome."""
    try:
        find_anatomy(config)
    except SlipstreamError as error:
        return replace(outcome, **ended_by(error), error=0.0, paths=())
    return outcome


def _verdict(config: PretrainedConfig, stages: str) -> dict[str, Any]:
    with full_precision(), quiet_transformers():
        try:
            model = unsplit_model(config)
            whole = copy.deepcopy(model)
            tokens = _tokens(config)
            expected = _unsplit_step(whole, tokens)
        except Exception as error:  # of transformers
            return {"verdict": Verdict.NOT_BUILT, "reason": described(error)}
        partition: tuple[int, ...] = ()
        try:
            anatomy = find_anatomy(config)
            partition = _partition(len(anatomy.layers_of(model)), stages)
            with _observed_paths() as paths:
                pipe = Pipeline(model, slices=list(SLICES), num_ranks=len(partition), partition=list(partition))
                loss = pipe.step(tokens, tokens)
        except Exception as error:
            return {**ended_by(error), "stages": partition}
        named = whole.named_parameters(remove_duplicate=False)
        wanted = {name: p.grad for name, p in named if p.grad is not None and name not in anatomy.second_names}
        error = _error(wanted, pipe, float(loss), float(expected))
    verdict = Verdict.EXACT if error < BOUND else Verdict.WRONG
    return {"verdict": verdict, "error": error, "paths": tuple(sorted(paths)), "stages": partition}


def unsplit_model(config: PretrainedConfig) -> PreTrainedModel:
    """Returns a tiny model in float64 with random weights, none of which is zero or one."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    widen_parameters(model)
    perturb_parameters(model)  # what begins as zero or one counts
    return model


def _tokens(config: PretrainedConfig) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, config.get_text_config().vocab_size, (BATCH, LENGTH), generator=generator)


def _unsplit_step(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    total, count = causal_cross_entropy(logits[:, :-1], tokens[:, 1:])
    (total / count).backward()
    return total.detach() / count


def _partition(num_layers: int, stages: str) -> tuple[int, ...]:
    if num_layers == 1:
        return (1,)
    return (num_layers - 1, 1) if stages == "first" else (1, num_layers - 1)


def _error(wanted: Mapping[str, Tensor], pipe: Pipeline, loss: float, expected: float) -> float:
    """Returns the largest relative error of the loss and the gradients, infinite where one is missing."""
    found = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    if not wanted.keys() <= found.keys():
        return float("inf")
    return max(abs(loss - expected) / abs(expected), *relative_errors(found, wanted, floor=1e-6).values())


def ended_by(error: Exception) -> dict[str, Any]:
    """Returns the verdict about an exception, and what it says."""
    if not isinstance(error, SlipstreamError):
        return {"verdict": Verdict.CRASH, "reason": described(error)}
    message = str(error)
    if _UNUSABLE in message:
        return {"verdict": Verdict.NOT_BUILT, "reason": message}
    return {"verdict": Verdict.CRASH if _INSIDES.search(message) else Verdict.REFUSED, "reason": message}


def described(error: Exception) -> str:
    """Returns an exception in one line."""
    return f"{type(error).__name__}: {error}".strip()


@contextmanager
def _observed_paths() -> Iterator[set[str]]:
    """Collects the paths by which earlier tokens reach a slice, as a Pipeline's self-check has found them."""
    paths: set[str] = set()

    def observed(config: PretrainedConfig, is_cut: bool) -> SelfCheck:
        found = check_trainable(config, is_cut)
        paths.update(*found.paths)
        return found

    with patch.object(causal_lm, "check_trainable", observed):
        yield paths
