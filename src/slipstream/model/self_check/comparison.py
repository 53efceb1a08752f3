"""Compares a toy of an architecture, cut into stages and slices, with the whole toy, layer by layer, in float64.

No config says whether an architecture can be sliced: state may run along the tokens, positions may come from elsewhere,
a mask may be added to the one that slices know. Running it shows all of these, if whatever counts tokens is smaller
than the toy's sequences; and if the whole toy runs its own attention under the name "eager", since some models do more
there than under other names.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model.anatomy import ModelAnatomy, anatomy_of_size, find_anatomy
from slipstream.model.config import check_is_causal_lm
from slipstream.model.hooks.crossing_tensors import TRAIN_WHOLE
from slipstream.model.self_check.toy_runs import (
    INPUT,
    TOLERANCE,
    TokenCuts,
    check_carried_state,
    cut_in_two,
    refusal,
    run_sliced,
    run_whole,
)
from slipstream.model.toy import (
    TOY_LENGTH,
    full_precision,
    perturb_parameters,
    reference_model,
    relative_errors,
    toy_config,
    toy_failure,
    toy_model,
    toy_tokens,
)
from slipstream.model.toy_sizes import TokenNumber, shrink_number, token_numbers

_WHOLE = (0, TOY_LENGTH)
_SLICINGS = (  # unequal slices, the first one shorter than every threshold of the toy
    TokenCuts((0, 5, 20, 41, TOY_LENGTH), _WHOLE),
    # A single token in one slice, a case of its own in models' code for generation.
    TokenCuts((0, 17, 18, 37), (0, 37)),
)
_DOCUMENTS = TokenCuts((0, 5, 20, 41, TOY_LENGTH), (0, TOY_LENGTH // 2, TOY_LENGTH))  # two documents in the third slice
# Sequences up to this length may be compared where a number that counts tokens can't be made smaller.
_LONGEST = 1024


@dataclass(frozen=True)
class SelfCheck:
    """The result of a self-check: the largest relative errors of layer outputs and gradients, and its duration."""

    model_type: str
    num_layers: int
    output_error: float
    gradient_error: float
    seconds: float
    longest_packed: float  # tokens of the longest exact sequence of several documents; each document is as if alone
    # Per layer of the toy: kinds of attention and of carried states; empty: none.
    paths: tuple[frozenset[str], ...] = ()
    refusal: str = ""
    """Why slices and packed documents are refused, where whole sequences are exact in stages."""

    @property
    def packs_any_length(self) -> bool:
        """Whether documents packed in a sequence are as if they were alone, however long it is."""
        return self.longest_packed == inf

    @property
    def carries_states(self) -> bool:
        """Whether layers see earlier tokens by more than attention through transformers' interface."""
        return any(path - {"attention"} for path in self.paths)


def check_trainable(config: PretrainedConfig, is_cut: bool) -> SelfCheck:
    """Checks an architecture as `check_sliceable` does; where sequences aren't cut, whole ones in stages are enough.

    Raises SlipstreamError where these aren't exact either. Not collective.
    """
    try:
        return check_sliceable(config)
    except SlipstreamError as error:
        if is_cut:
            raise
        return _check_whole(config, str(error))


def _check_whole(config: PretrainedConfig, why_not_cut: str) -> SelfCheck:
    began = time.perf_counter()
    check_causal(config)
    anatomy = find_anatomy(config)
    try:
        with torch.enable_grad(), full_precision():
            pair = _ToyPair(toy_config(config), anatomy)
            errors = pair.compare(TokenCuts(_WHOLE, _WHOLE))
    except SlipstreamError as error:
        raise SlipstreamError(
            f"model_type {config.model_type!r} can't be cut into stages: {error}. {TRAIN_WHOLE}"
        ) from error
    except Exception as error:  # the model's own code
        reason = f"a toy of it fails when cut into stages ({type(error).__name__}: {error})"
        raise SlipstreamError(f"model_type {config.model_type!r} can't be cut: {reason}. {TRAIN_WHOLE}") from error
    return SelfCheck(
        config.model_type, pair.num_layers, *errors, time.perf_counter() - began, 0, pair.paths, why_not_cut
    )


def longest_packed_sequence(config: PretrainedConfig) -> float:
    """Returns how long sequences of several documents may be, in tokens, as `check_sliceable` finds it beside all else.
    Not collective."""
    try:
        with torch.enable_grad(), full_precision():
            return _longest_packed(_ToyPair(toy_config(config), find_anatomy(config)), config)
    except SlipstreamError:
        raise
    except Exception as error:  # the model's own code
        raise refusal(config, toy_failure(config, error)) from error


def check_packed(config: PretrainedConfig, longest: float, length: int) -> None:
    """Raises SlipstreamError if documents packed in a sequence of `length` tokens, more than `longest`, would not be
    exact."""
    if length > longest:
        limit = f"of more than {longest} tokens " if longest else ""
        raise SlipstreamError(
            f"the batch has several documents in a sequence of {length} tokens, but {config.model_type!r} counts "
            "positions from the sequence's start, not from the document's, so that packed documents "
            f"{limit}would influence each other. Give one document per sequence."
        )


def check_sliceable(config: PretrainedConfig, anatomy: ModelAnatomy | None = None) -> SelfCheck:
    """Checks that slices and stages are exact for an architecture, in a few seconds. Not collective.

    Args:
        config: the model's configuration; a toy with the same architecture and random weights runs on the CPU.
        anatomy: the architecture's anatomy, if it is known already, as is then that the model is causal.

    Returns:
        The largest relative differences between the sliced and the unsliced toy, in float64.

    Raises:
        SlipstreamError: an output or gradient differs; the message names the layer or the feature that causes it.
    """
    began = time.perf_counter()
    if anatomy is None:
        check_causal(config)
        anatomy = find_anatomy(config)
    check_carried_state(config, anatomy)
    try:
        with full_precision():
            pair = _ToyPair(toy_config(config), anatomy)
            errors = [pair.compare(cuts) for cuts in _SLICINGS]
            errors += _compare_unknown_numbers(config, anatomy)
            longest_packed = _longest_packed(pair, config)
    except SlipstreamError as error:
        raise refusal(config, str(error)) from error
    except Exception as error:  # the model's own code
        reason = f"a toy of it fails when cut into stages and slices ({type(error).__name__}: {error})"
        raise refusal(config, reason) from error
    output_error, gradient_error = map(max, zip(*errors, strict=True))
    seconds = time.perf_counter() - began
    return SelfCheck(
        config.model_type, pair.num_layers, output_error, gradient_error, seconds, longest_packed, pair.paths
    )


class _ToyPair:
    """A toy and the stages that it is cut into, over the same weights."""

    def __init__(self, toy: PretrainedConfig, anatomy: ModelAnatomy) -> None:
        self.toy = toy
        self.anatomy = anatomy_of_size(anatomy, toy)
        # code of its own may compute something else under another name: Falcon adds its position biases twice if eager
        self.model = reference_model(toy, attention=None if anatomy.attends_itself else "eager")
        # Parameters that begin as zero or one would hide mistakes.
        perturb_parameters(self.model)
        self.num_layers = len(anatomy.layers_of(self.model))
        self._stages = cut_in_two(self.model, self.anatomy)
        self.paths: tuple[frozenset[str], ...] = ()  # paths of the last comparison

    def compare(self, cuts: TokenCuts) -> tuple[float, float]:
        """Returns the largest relative errors of outputs and gradients; raises SlipstreamError for one too large."""
        tokens = toy_tokens(self.toy, cuts.length)
        whole = run_whole(self.model, self.anatomy, tokens, cuts)
        sliced = run_sliced(self._stages, self.anatomy, tokens, cuts)
        self.paths = sliced.paths
        errors = relative_errors(sliced.outputs, whole.outputs)
        output_error = _largest_error("the sliced model differs from the whole one in {}", errors)
        for name in whole.gradients:
            if name not in sliced.gradients:
                raise SlipstreamError(f"{name} gets no gradient when the model is sliced")
        errors = relative_errors(sliced.gradients, whole.gradients, floor=1e-6)
        return output_error, _largest_error("the gradient of {} differs from the whole model's", errors)


def _compare_unknown_numbers(config: PretrainedConfig, anatomy: ModelAnatomy) -> list[tuple[float, float]]:
    """Compares a toy in which numbers that may count tokens are small, and longer sequences where they can't be.

    A number that no toy can have smaller is the size of something, as a rule; up to 1024 it is compared all the same.
    """
    unknown = token_numbers(toy_config(config).get_text_config(), TOY_LENGTH)
    if not unknown:
        return []
    smaller = unknown
    if not _runs(_with_small(config, unknown)):
        smaller = [number for number in unknown if _runs(_with_small(config, [number]))]
    lengths = [int(number.value) for number in unknown if number not in smaller and number.value <= _LONGEST]
    errors = [_ToyPair(_with_small(config, smaller), anatomy).compare(_SLICINGS[0])] if smaller else []
    if lengths:
        length = max(lengths) + TOY_LENGTH
        cuts = TokenCuts((0, TOY_LENGTH, max(lengths) - 1, length), (0, length))
        errors.append(_ToyPair(toy_config(config), anatomy).compare(cuts))
    return errors


def _with_small(config: PretrainedConfig, numbers: list[TokenNumber]) -> PretrainedConfig:
    toy = toy_config(config)
    for number in numbers:
        shrink_number(toy.get_text_config(), number)
    return toy


def _runs(toy: PretrainedConfig) -> bool:
    try:
        with torch.no_grad():
            reference_model(toy, attention="eager")(input_ids=toy_tokens(toy), use_cache=False)
    except Exception:  # the model's own code
        return False
    return True


def _longest_packed(pair: _ToyPair, config: PretrainedConfig) -> float:
    """Returns how long sequences of several documents may be, in tokens: 0 if they are wrong at any length.

    Where they are exact only in a toy that keeps the model's own numbers, they are so below the smallest of these.
    """
    try:
        pair.compare(_DOCUMENTS)
        return inf
    except SlipstreamError:
        toy = toy_config(config, shrinks_numbers=False)
    numbers = [n.value for n in token_numbers(toy.get_text_config(), TOY_LENGTH) if n.value >= TOY_LENGTH]
    try:
        _ToyPair(toy, pair.anatomy).compare(_DOCUMENTS)
    except SlipstreamError:
        return 0
    return min(numbers, default=TOY_LENGTH) - 1


def _largest_error(difference: str, errors: Mapping[str, float]) -> float:
    """Returns the largest error; raises SlipstreamError for the first that isn't below TOLERANCE."""
    for name, error in errors.items():
        if not error < TOLERANCE:
            hint = ": its positions do not follow position_ids" if name == INPUT else ""
            raise SlipstreamError(f"{difference.format(name)} by {error:.1e}{hint}")
    return max(errors.values())


_LAST = 8  # last tokens, exchanged between sequences


def check_causal(config: PretrainedConfig) -> None:
    """Raises SlipstreamError where the architecture is no causal LM, or a toy of it isn't. Not collective.

    Other checks name the reason where a toy doesn't run.
    """
    check_is_causal_lm(config)
    try:
        with torch.no_grad(), full_precision():
            difference = _difference(config)
    except Exception:  # the model's own code
        return
    if difference > TOLERANCE:
        decoder = getattr(config, "is_decoder", None) is False
        hint = "Set is_decoder=True in its configuration to train it as a causal LM" if decoder else "Give a causal LM"
        raise SlipstreamError(
            f"model_type {config.model_type!r} isn't causal: its logits of a token depend on later tokens, as an "
            f"encoder's do, so that no token slice is ever complete. {hint}."
        )


def _difference(config: PretrainedConfig) -> float:
    """Returns by how much the logits of a toy's first tokens change with its last ones, relative to the largest."""
    model, tokens = toy_model(config), toy_tokens(config)
    others = torch.cat([tokens[:, :-_LAST], tokens[:, -_LAST:].roll(1, dims=0)], dim=1)
    first, second = (model(input_ids=ids, use_cache=False).logits[:, :-_LAST] for ids in (tokens, others))
    return float((first - second).abs().max() / first.abs().max())


class LabelLoss(Enum):
    """The kind of transformers' mean loss, as far as a toy shows."""

    NEXT = "the label of the next token"  # slipstream's own loss
    SAME = "the label at the same place"  # labels shifted by the caller, as for BART, Marian and Whisper
    OTHER = "something else"
    NONE = "nothing"  # no labels taken, or a failure with them


def find_label_loss(config: PretrainedConfig) -> LabelLoss:
    """Returns the kind of the architecture's own loss, by running a toy of it. Raises no error of the model's code."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), full_precision():
            return _find(config)
    except Exception:  # the model's own code
        return LabelLoss.NONE


def _find(config: PretrainedConfig) -> LabelLoss:
    model = toy_model(config)
    if "labels" not in inspect.signature(type(model).forward).parameters:
        return LabelLoss.NONE
    perturb_parameters(model)
    tokens = toy_tokens(config)  # (b, T)
    output = model(input_ids=tokens, labels=tokens, use_cache=False)
    candidates = {
        LabelLoss.NEXT: _mean(output.logits[:, :-1], tokens[:, 1:]),
        LabelLoss.SAME: _mean(output.logits, tokens),
    }
    kinds = (kind for kind, loss in candidates.items() if abs(loss - output.loss) < TOLERANCE * loss)
    return next(kinds, LabelLoss.OTHER)


def _mean(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).double(), labels.flatten())
