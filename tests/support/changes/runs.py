"""Runs a changed model whole and in a Pipeline, and says how step, evaluation and export compare."""

from __future__ import annotations

import functools
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream import Pipeline, SlipstreamError
from slipstream.model import causal_cross_entropy
from support.adapters import PREFIX
from support.architectures import BOUND, labels_of, no_rounding_inside, tokens
from support.changes import EITHER, EXACT, REFUSED, Change
from support.options import grouped
from support.pipelines import in_usual_order

PARTS = ("step", "evaluate", "state_dict", "save_pretrained")
INSTEAD = (  # what a refusal says that works, one of them
    "slices=1",
    "num_microbatches=1",
    "num_ranks=1",
    "one rank",
    "one stage",
    "same stage",
    "whole numbers",
    "whole layers",
    "partition",
    "vocabulary='whole'",
    "fused=False",
    'recompute="none"',
    "state_dict()",
    "instead",
    "remove",
    "leave",
)
Outcomes = dict[str, str]  # of each part: "exact", "refused: ...", "off by ...", or "raised ..."


@dataclass(frozen=True)
class Whole:
    """What the unsplit changed model computes and holds. A weight has all its names."""

    loss: Tensor
    evaluated: Tensor
    gradients: dict[str, Tensor | None]
    names: tuple[frozenset[str], ...]
    state: dict[str, Tensor]
    saved: dict[str, Tensor] | None

    @property
    def floor(self) -> float:
        return 1e-6 * max(float(each.abs().max()) for each in self.gradients.values() if each is not None)


def _loss(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    total, count = causal_cross_entropy(model(input_ids=inputs, use_cache=False).logits[:, :-1], labels[:, 1:])
    loss: Tensor = total / count
    return loss


def _plain(name: str) -> str:
    return name.removeprefix(PREFIX)


@functools.cache
def whole_run(change: Change) -> Whole:
    """Step, evaluation and export of the model in one piece, in this order as in the pipeline."""
    inputs = tokens()
    labels = labels_of(inputs)
    with change.during(), no_rounding_inside():
        model: Any = change.built()
        loss = _loss(model, inputs, labels)
        loss.backward()
        with torch.no_grad():
            evaluated = _loss(model, inputs, labels)
        named = list(model.named_parameters(remove_duplicate=False))
        names: dict[int, set[str]] = {}
        for name, parameter in named:
            names.setdefault(id(parameter), set()).add(_plain(name))
        state = {_plain(name): tensor.detach().clone() for name, tensor in model.state_dict().items()}
        with tempfile.TemporaryDirectory() as folder:
            try:
                model.save_pretrained(folder)
            except RuntimeError:  # transformers doesn't write weights that are shared without its knowledge
                saved = None
            else:
                saved = read_folder(folder)
    gradients = {_plain(name): None if p.grad is None else p.grad.clone() for name, p in named}
    shared = tuple(frozenset(each) for each in names.values())
    return Whole(loss.detach(), evaluated, gradients, shared, state, saved)


def read_folder(folder: str | Path) -> dict[str, Tensor]:
    return {name: each for file in Path(folder).glob("*.safetensors") for name, each in load_file(file).items()}


def load_folder(folder: str | Path) -> dict[str, Tensor]:
    """Returns the state of the model that transformers loads; nothing of a folder with an adapter alone."""
    if not Path(folder, "config.json").exists():
        return {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()


def outcomes_of(change: Change, *, join: Callable[[], object] = bool, **settings: Any) -> Outcomes:
    """Makes the pipeline, and returns what became of each part; of one that can't be made, all parts are so.

    `join` makes the group of processes where there is one, in which transformers wouldn't write the whole model.
    """
    inputs = tokens()
    labels = labels_of(inputs)
    whole = whole_run(change)
    with change.during(), no_rounding_inside():
        model = change.built()
        join()
        made: list[Pipeline] = []
        found = _outcome(lambda: made.append(Pipeline(model, **grouped(**in_usual_order(**settings)))) or "")
        if not made:
            return dict.fromkeys(PARTS, found)
        (pipe,) = made
        runs = {
            "step": lambda: step_difference(whole, pipe),
            "evaluate": lambda: _off("loss", pipe.evaluate(inputs, labels), whole.evaluated),
            "state_dict": lambda: _state(whole, pipe),
            "save_pretrained": lambda: _saved(whole, pipe),
        }
        outcomes: Outcomes = {}
        for part, run in runs.items():
            outcomes[part] = _outcome(run)
            if outcomes[part].startswith("raised"):  # the pipeline, and another process, are left in the middle of it
                break
        return outcomes


def _outcome(run: Callable[[], str]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            return run() or EXACT
    except SlipstreamError as error:
        return f"{REFUSED}: {error}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).splitlines() or [""])[0]
        return f"raised {type(error).__name__}: {text[:160]} ({Path(last.filename).name}:{last.lineno})"


def _off(what: str, found: Tensor, wanted: Tensor) -> str:
    error = float((found - wanted).abs() / wanted.abs())
    return "" if error < BOUND else f"off by {error:.2g} ({what})"


def step_difference(whole: Whole, pipe: Pipeline) -> str:
    """Returns the worst gradient of those that this process has, or else the loss; "" where both are exact and the
    processes together have all weights."""
    inputs = tokens()
    loss = pipe.step(inputs, labels_of(inputs))
    mine = {_plain(name): parameter.grad for name, parameter in pipe.named_parameters()}
    everywhere = {name for each in pipe.axes["pp"].gather(tuple(mine)) for name in each}
    if missing := set(mine) - set(whole.gradients):
        return f"off: parameters {sorted(missing)} that the model doesn't have"
    unheld = (min(names) for names in whole.names if not names & everywhere)
    if lost := [name for name in unheld if whole.gradients[name] is not None]:
        return f"off: no parameter {lost[0]}"
    errors = {name: _error(gradient, whole.gradients[name], whole.floor) for name, gradient in mine.items()}
    name = max(errors, key=errors.__getitem__)
    if errors[name] >= BOUND:
        return f"off by {errors[name]:.2g} (gradient of {name})"
    return _off("loss", loss, whole.loss)


def gradient_difference(first: Whole, second: Whole) -> float:
    """Returns the largest relative difference of two models' gradients, infinity where they have other weights."""
    if first.gradients.keys() != second.gradients.keys():
        return float("inf")
    pairs = ((first.gradients[name], second.gradients[name]) for name in first.gradients)
    return max(_error(found, wanted, second.floor) for found, wanted in pairs)


def _error(found: Tensor | None, wanted: Tensor | None, floor: float) -> float:
    if found is None or wanted is None:
        given = wanted if found is None else found
        return 0.0 if given is None else float(given.abs().max()) / floor
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / max(float(wanted.abs().max()), floor))


def _state(whole: Whole, pipe: Pipeline) -> str:
    """The state on rank 0 is that of the unsplit model; with an adapter, that of the adapter is written alone."""
    state = {_plain(name): each for name, each in pipe.state_dict().items()}
    adapted = any("lora_" in name for name in whole.state)
    wanted = {name: whole.state[name] for name in state if name in whole.state} if adapted else whole.state
    return "" if pipe.rank else _compare("state_dict", wanted, state, whole.names)


def _saved(whole: Whole, pipe: Pipeline) -> str:
    """`save_pretrained` writes what transformers or PEFT writes of the whole model, or the state where they refuse.

    What transformers makes of it without any change is the whole model again.
    """
    with tempfile.TemporaryDirectory() as here:
        folder = pipe.axes["pp"].gather(here)[0]
        pipe.save_pretrained(folder)
        pipe.axes["pp"].gather(None)  # rank 0 reads it before it removes it
        if pipe.rank:
            return ""
        saved, loaded = read_folder(folder), load_folder(folder)
    wanted = whole.state if whole.saved is None else whole.saved
    if said := _compare("save_pretrained", wanted, saved, whole.names):
        return said
    return _compare("what transformers loads", whole.state, loaded, whole.names) if loaded else ""


def _compare(
    what: str, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], names: Iterable[frozenset[str]]
) -> str:
    aliases = {name: each for each in names for name in each}
    for name, tensor in wanted.items():
        same = next((found[each] for each in (name, *sorted(aliases.get(name, ()))) if each in found), None)
        if same is None:
            return f"off: {what} has no {name}"
        if same.shape != tensor.shape or not torch.equal(same, tensor):
            return f"off: {name} of {what} differs"
    known = {each for name in wanted for each in (name, *aliases.get(name, ()))}
    if more := sorted(set(found) - known):
        return f"off: {what} has {more[0]}, which the model doesn't"
    return ""


def complaint(change: Change, use: str, found: Outcomes) -> str:
    """Returns what is wrong with the outcomes of a use, nothing where they are as the table says."""
    expected = change.outcome(use)
    for part, outcome in found.items():
        wanted = change.outcome(part) if expected == EXACT else expected
        if outcome != EXACT and not outcome.startswith(REFUSED):
            return f"{part}: {outcome}"
        if wanted == EXACT and outcome != EXACT:
            return f"{part} is {outcome}, and must be exact"
        if outcome.startswith(REFUSED):
            if not any(name in outcome for name in change.names):
                return f"{part} is {outcome}, which names none of {change.names}"
            if not any(word in outcome.lower() for word in INSTEAD):
                return f"{part} is {outcome}, which doesn't say what works instead"
    if expected == REFUSED and found["step"] == EXACT:
        return "step is exact, and must be refused: does the model still do what it should show?"
    assert expected in (EXACT, REFUSED, EITHER)
    return ""
