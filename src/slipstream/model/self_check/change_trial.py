"""Tries a user's changes to a model in memory: whether tokens, rows and layers may be computed apart.

One layer of each changed kind runs at its real width on a few tokens, on a copy with noise on its weights, so that a
branch that begins at zero counts:

    every token a document of its own     one token changes, by a little and by a lot: all others keep their bits,
                                          and no gradient comes from them (attention passes nothing then)
    slices against the whole, float64     dependence on a token's place in the slice, or on the number of tokens
    changed layers in their chain,        values that pass between layers beside the hidden states
    then each alone
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from slipstream.attention import ContextStore
from slipstream.keyed_draws import kept_random_states
from slipstream.model.anatomy import ModelAnatomy, random_rates
from slipstream.model.causal_lm_stage import CausalLMStage
from slipstream.model.cutting import PassThrough
from slipstream.model.hooks.attention import use_attention
from slipstream.model.hooks.crossing_tensors import first_output, hidden_states, with_hidden_states
from slipstream.model.hooks.token_slice import OutsideSliceError, TokenSlice
from slipstream.model.layer_range import LayerRange
from slipstream.model.module_copies import copy_modules, copy_with_shared_weights
from slipstream.model.own_code import HOOKS, code_referents, global_values
from slipstream.model.reached_tensors import NamedWeights, TakenStorages, parts_reached
from slipstream.model.self_check.toy_runs import TOLERANCE, TokenCuts, run_sliced, run_whole
from slipstream.model.toy import full_precision, relative_errors
from slipstream.model.user_changes import Change, GivenModel

# Seconds of this thread for all trials. Other threads may keep the machine busy.
_SECONDS = 10.0
_TOKENS = 12
# The cuts include a slice with a single token.
_CUTS = TokenCuts((0, 3, 8, 9, _TOKENS), (0, _TOKENS))
_ROW, _PLACES = 0, (5, 9)  # indices of the changed tokens
# Embedding and head may be larger than a layer, so trials keep only this part of the vocabulary.
_WORDS = 64
_NARROW_TOLERANCE = 1e-2  # float32: far above rounding, far below the effect of a token's place in a slice
_DIFFERS = "which draws random numbers or keeps a state, so that a second call gives another result"
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class TrialResult:
    """Why something can't be computed apart, as the end of a sentence; "" where it can.

    Args:
        tokens: a token from the others of its sequence.
        rows: a sequence from the others of the batch.
        layers: a layer from the other layers.
        halves: a child of a layer from its other children.
        again: the same tokens a second time, as recomputation does, and the first token by which a stage learns its
            masks.
        runs_again: a layer's forward from its backward, in which no slice is computed.
        reached: a part from others of whose weights it takes one, each with that weight's names.
    """

    tokens: str = ""
    rows: str = ""
    layers: str = ""
    halves: str = ""
    again: str = ""
    runs_again: str = ""
    reached: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def joined(self, other: TrialResult) -> TrialResult:
        """Returns the reasons of both, this one's first."""
        return TrialResult(
            *(mine or theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        )


class _EndedTrialError(Exception):
    """Raised with a TrialResult where nothing more can be tried."""

    def __init__(self, result: TrialResult) -> None:
        super().__init__(result)
        self.result = result


def try_changes(
    given: GivenModel, model: PreTrainedModel, anatomy: ModelAnatomy, packs: bool, most_in_float64: int = 1 << 25
) -> TrialResult:
    """Returns the parts of a changed model that can't be computed apart. Not collective.

    `packs` says whether the architecture keeps packed documents apart, which shows values that pass between tokens
    beside attention. A part that fails when it is tried can't be computed apart either. Layers of more parameters than
    `most_in_float64` are compared in float32, which takes half the memory.
    """
    anatomy = replace(anatomy, halves=(), separate_ends=frozenset(), shared=())
    trial = _Trial(model, anatomy, given, packs, most_in_float64)
    with kept_random_states():
        try:
            return trial.run()
        except _EndedTrialError as error:
            return error.result
        except OutsideSliceError:
            return TrialResult(runs_again=f"{_named(given.changes)}, which calls a layer again in the backward")
        except Exception as error:  # the user's own code
            reason = f"{_named(given.changes)}, and trying it failed ({type(error).__name__}: {error})"
            return TrialResult(reason, reason, reason, reason)


class _Trial:
    """The changed layers of a model, and how each is tried."""

    def __init__(
        self, model: PreTrainedModel, anatomy: ModelAnatomy, given: GivenModel, packs: bool, most_in_float64: int
    ) -> None:
        self._most_in_float64 = most_in_float64
        self._model = model
        self._anatomy = anatomy
        self._packs = packs
        self._given = given
        self._layers = anatomy.layers_of(model)
        self._changes = {
            index: within
            for index in range(len(self._layers))
            if (within := given.changes_within(f"{anatomy.layers}.{index}"))
        }
        inside = {change for changes in self._changes.values() for change in changes}
        self._elsewhere = [change for change in given.changes if change not in inside]
        self._deadline = time.thread_time() + _SECONDS
        self._device = next(model.parameters()).device
        vocabulary = min(_WORDS, model.config.get_text_config().vocab_size)
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(1, vocabulary, (2, _TOKENS), generator=generator).to(self._device)

    def run(self) -> TrialResult:
        """Tries all that differ together, then one layer of each kind."""
        passing = self._passing()
        # No layer can be tried by itself.
        if passing.layers:
            return replace(passing, tokens=passing.layers, rows=passing.layers)
        kinds: dict[object, int] = {}
        for index in self._changes:
            kinds.setdefault(tuple(_described(self._layers[index])), index)
        result = passing
        for index in kinds.values() or (0,):
            tried = self._try_layer(index)
            result = replace(result, tokens=result.tokens or tried.tokens, rows=result.rows or tried.rows)
        return result

    def _try_layer(self, index: int) -> TrialResult:
        """Returns why a layer, with the changes outside of the layers, can't compute tokens or rows apart."""
        blamed = _named([*self._changes.get(index, ()), *self._elsewhere])
        result = TrialResult()
        if self._packs:
            result = self._try_tokens(index, blamed, torch.equal, None)
            if result.tokens:
                # Kernels may round a row in another way where another row is another: not in float64 to this degree.
                result = self._try_tokens(index, blamed, _are_close, torch.float64)
        self._check_time(blamed)
        wide = self._dtype_to_compare(index)
        bound = TOLERANCE if wide == torch.float64 else _NARROW_TOLERANCE
        with full_precision():
            model = self._copy({index}, wide, trains=True)
            if not self._anatomy.attends_itself:
                use_attention(model, "eager", self._anatomy.layers_of(model))
            whole = run_whole(model, self._anatomy, self._tokens, _CUTS)
            rows = [run_whole(model, self._anatomy, row[None], _CUTS).outputs for row in self._tokens]
            apart = {place: torch.cat([row[place] for row in rows]) for place in whole.outputs}
            if not result.rows and differ(apart, whole.outputs, bound):
                result = replace(result, rows=f"{blamed}, which computes a sequence alone in another way")
            if not result.tokens:
                sliced = run_sliced([self._stage(copy_with_shared_weights(model))], self._anatomy, self._tokens, _CUTS)
                pairs = (sliced.outputs, whole.outputs), (sliced.gradients, whole.gradients)
                if any(differ(*pair, bound) for pair in pairs):
                    message = f"{blamed}, which computes a slice in another way than the whole sequence"
                    result = replace(result, tokens=message)
        return result

    def _try_tokens(
        self, index: int, blamed: str, same: Callable[[Tensor, Tensor], bool], dtype: torch.dtype | None
    ) -> TrialResult:
        """Returns why tokens, each a document of its own, have a part in others' outputs or gradients."""
        model = self._copy({index}, dtype)
        stage = self._stage(model)
        inside = [change.module for change in (*self._changes.get(index, ()), *self._elsewhere) if change.module]
        run = _TokenRun(stage, index, self._tokens, [model.get_submodule(name) for name in dict.fromkeys(inside)])
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(run.shape, generator=generator).to(self._device, run.dtype)
        # 1. The same once more: nothing drawn, nothing kept.
        first = run.outputs(hidden)
        states = _states(model)
        again = run.outputs(hidden)
        if not all(map(torch.equal, first, again)):
            raise _EndedTrialError(TrialResult(again=f"{blamed}, {_DIFFERS}"))
        if states != _states(model):
            keeps = f"{blamed}, which keeps a state from call to call"
            return TrialResult(keeps, keeps)
        # 2. Two other tokens, one by a little and one by a lot, at the layer's input and at those of its changed parts,
        #    where no norm takes a factor away; and another word, where the changed parts are outside of the layers.
        row = _ROW
        places = list(_PLACES)
        mixes_tokens = f"{blamed}, which mixes tokens of a sequence"
        mixes_sequences = f"{blamed}, which mixes the sequences of a batch"
        mixes_rows = TrialResult(mixes_sequences, mixes_sequences)
        result = TrialResult()
        others = torch.ones(2, _TOKENS, dtype=torch.bool, device=self._device)
        others[row, places] = False
        trials = [(run.outputs(_scaled(hidden), scales_parts=True), first)]
        if self._elsewhere:
            changed = self._tokens.clone()
            changed[row, places] = self._tokens[row, places] % (_WORDS - 1) + 1
            trials.append((run.outputs(None, changed), run.outputs(None)))
        for outputs, expected in trials:
            for output, before in zip(outputs, expected, strict=True):
                if not same(output[1 - row], before[1 - row]):
                    return mixes_rows
                if not same(output[others], before[others]):
                    result = TrialResult(mixes_tokens)
        # 3. Gradients: none comes back from others' outputs.
        if not same(run.gradient(hidden, others)[row, places], torch.zeros_like(hidden[row, places])):
            others[row] = False
            if not same(run.gradient(hidden, others)[row], torch.zeros_like(hidden[row])):
                return mixes_rows
            result = TrialResult(mixes_tokens)
        return result

    def _passing(self) -> TrialResult:
        """Returns why layers, or their halves, can't run on different ranks: the values between those that differ."""
        layers = [f"{self._anatomy.layers}.{index}" for index in self._changes]
        named = zip(layers, (self._layers[index] for index in self._changes), strict=True)
        children = [f"{name}.{child}" for name, layer in named for child, _ in layer.named_children()]
        names = [*self._anatomy.before, *layers, *children, *self._anatomy.after]
        model = self._copy(set(self._changes), None, shares=True).eval()
        parts = {name: model.get_submodule(name) for name in names}
        calls: dict[str, list[Any]] = {name: [] for name in names}
        recording = True

        def enter(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
            if recording:
                calls[name] = [args, kwargs, None]

        def leave(name: str, _: nn.Module, _args: Any, output: Any) -> None:
            if recording:
                calls[name][2] = output

        for name, part in parts.items():
            part.register_forward_pre_hook(partial(enter, name), with_kwargs=True, prepend=True)
            part.register_forward_hook(partial(leave, name))
        weights = NamedWeights(self._model.named_parameters(remove_duplicate=False))
        taken: dict[str, set[int]] = {}
        with torch.no_grad():
            model(input_ids=self._tokens, use_cache=False)
            recording = False
            model(input_ids=self._tokens.flip(1), use_cache=False)
            for name in reversed(names):
                self._check_time(_named(self._elsewhere))
                if calls[name]:
                    args, kwargs, expected = calls[name]
                    with TakenStorages() as noted:
                        leaves = tree_leaves(parts[name](*args, **kwargs))
                    again = tree_leaves(parts[name](*args, **kwargs))
                    if name not in children:
                        taken[name] = noted.found
                    if not all(map(_is_same_leaf, leaves, again)):
                        changes = self._given.changes_within(name) or self._given.changes
                        raise _EndedTrialError(TrialResult(again=f"{_named(changes)}, {_DIFFERS}"))
                    if not all(map(_is_same_leaf, leaves, tree_leaves(expected))):
                        reason = f"{name} takes more than its input from other modules, as through a hook"
                        return TrialResult(halves=reason, layers="" if name in children else reason)
        return TrialResult(reached=tuple(parts_reached(taken, weights, parts)))

    def _copy(
        self, kept: set[int], dtype: torch.dtype | None, shares: bool = False, trains: bool = False
    ) -> PreTrainedModel:
        """Returns the model with the layers `kept` alone, in `dtype`. Weights of theirs that get noise are copied,
        unless it `shares` them, and those of another dtype; all others are the model's, without gradients."""
        tried = [self._layers[index] for index in kept]
        tried += [self._model.get_submodule(c.module) for c in self._elsewhere if not self._holds_layers(c)]
        ids = {id(t) for part in tried for t in (*part.parameters(), *part.buffers())}
        generator = torch.Generator().manual_seed(2)
        # of a large layer, gradients of small parameters tell, as gates are; of single tokens, those of inputs
        largest = 0 if not trains else sys.maxsize if dtype == torch.float64 else 1 << 20
        memo: dict[int, Any] = {}
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            copied = tensor.detach()
            if id(tensor) in ids:
                if dtype is not None and copied.is_floating_point():
                    copied = copied.to(dtype)
                if not shares:
                    copied = _with_noise(copied, generator)
                    # A tensor that a forward may write to is always a copy.
                    copied = copied if isinstance(tensor, nn.Parameter) else copied.clone()
            if isinstance(tensor, nn.Parameter):
                is_compared = id(tensor) in ids and copied.is_floating_point() and copied.numel() <= largest
                copied = nn.Parameter(copied, requires_grad=is_compared)
            memo[id(tensor)] = copied
        for end in () if shares else (self._model.get_input_embeddings(), self._model.get_output_embeddings()):
            if type(end) in (nn.Embedding, nn.Linear) and ids.isdisjoint(map(id, end.parameters())):
                for tensor in end.parameters():
                    memo[id(tensor)] = nn.Parameter(tensor.detach()[:_WORDS], requires_grad=False)
        for index, layer in enumerate(self._layers):
            if index not in kept:
                memo[id(layer)] = PassThrough(layer, self._anatomy.tuple_length)
        (model,) = copy_modules([self._model], memo)
        for embedding in (module for module in model.modules() if isinstance(module, nn.Embedding)):
            if embedding.padding_idx is not None and embedding.padding_idx >= len(embedding.weight):
                embedding.padding_idx = None
        for index in kept:
            self._anatomy.layers_of(model)[index].register_forward_pre_hook(
                _begin_graph, with_kwargs=True, prepend=True
            )
        _drop_nothing(model)
        if dtype is not None:
            model.to(dtype)
        return model.train()

    def _dtype_to_compare(self, index: int) -> torch.dtype:
        """Returns the dtype in which slices are compared with the whole, wide enough for the layer's size."""
        size = sum(parameter.numel() for parameter in self._layers[index].parameters())
        return torch.float64 if size <= self._most_in_float64 else torch.float32

    def _holds_layers(self, change: Change) -> bool:
        return not change.module or f"{self._anatomy.layers}.".startswith(f"{change.module}.")

    def _stage(self, model: PreTrainedModel) -> CausalLMStage:
        return CausalLMStage(model, self._anatomy, LayerRange(0, len(self._layers)), self._device)

    def _check_time(self, blamed: str) -> None:
        if time.thread_time() > self._deadline:
            reason = f"{blamed or _named(self._given.changes)}, and trying it took longer than {_SECONDS:.0f} s"
            raise _EndedTrialError(TrialResult(reason, reason, reason, reason))


class _TokenRun:
    """Runs a stage with one layer on tokens of which each is a document of its own."""

    def __init__(self, stage: CausalLMStage, index: int, tokens: Tensor, parts: Sequence[nn.Module]) -> None:
        self._stage = stage
        self._tokens = tokens
        layer = stage.layers[index]
        self._hidden: Tensor | None = None  # the layer's input; None: the one in the model
        self._scales_parts = False
        for part in parts:
            part.register_forward_pre_hook(self._scale, with_kwargs=True, prepend=True)
        self._output = torch.empty(0)
        layer.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        layer.register_forward_hook(self._leave)
        self.shape = stage.hidden(self._slice(tokens)).shape
        self.dtype = stage.hidden_dtype
        stage.find_carriers()

    @torch.no_grad()
    def outputs(
        self, hidden: Tensor | None, tokens: Tensor | None = None, scales_parts: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns the layer's output (2, T, hidden) and the logits (2, T, vocabulary); it may scale the parts' inputs,
        too."""
        self._scales_parts = scales_parts
        logits = self._run(hidden, tokens)
        self._scales_parts = False
        return self._output.detach(), logits.detach()

    def gradient(self, hidden: Tensor, counted: Tensor) -> Tensor:
        """Returns the gradient of the layer's input, of a sum over the outputs of the tokens that count."""
        hidden = hidden.clone().requires_grad_()
        logits = self._run(hidden, None)
        total = self._output[counted].float().sin().sum() + logits[counted].float().sin().sum()
        (gradient,) = torch.autograd.grad(total, hidden)
        return gradient

    def _run(self, hidden: Tensor | None, tokens: Tensor | None) -> Tensor:
        self._hidden = hidden
        piece = self._slice(self._tokens if tokens is None else tokens)
        logits: Tensor = self._stage.compute(piece, (), ContextStore(piece.length))
        return logits

    def _slice(self, tokens: Tensor) -> TokenSlice:
        starts = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        return TokenSlice(tokens, torch.zeros_like(tokens), starts, start=0, length=tokens.shape[1], max_position=0)

    def _scale(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = (args or (*kwargs.values(), None))[0]
        if not self._scales_parts or not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        rows = value.numel() // value.shape[-1] if value.dim() > 1 else 0
        is_by_token = rows == self._tokens.numel()  # (2, T, n) or, as of experts, (2 T, n)
        shape = *self._tokens.shape, value.shape[-1] if value.dim() else 0
        return with_hidden_states(args, kwargs, _scaled(value.view(shape)).view_as(value)) if is_by_token else None

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if self._hidden is None else with_hidden_states(args, kwargs, self._hidden)

    def _leave(self, _: nn.Module, _args: Any, output: Any) -> None:
        self._output = first_output(output)


def differ(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> bool:
    """Returns whether tensors differ by `bound` or more, or one is missing among those found."""
    errors = relative_errors(found, expected, floor=1e-6) if found.keys() >= expected.keys() else {"": 1.0}
    return not all(error < bound for error in errors.values())


def _with_noise(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a copy with noise if it is small or constant, as one that begins at zero or one is; else as it is: a
    second copy of a large layer's weights would take its memory once more."""
    is_noisy = tensor.is_floating_point() and (tensor.numel() <= 1 << 16 or bool(tensor.min() == tensor.max()))
    return tensor + (torch.randn(tensor.shape, generator=generator) * 0.1).to(tensor) if is_noisy else tensor


def _begin_graph(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives a layer an input with a gradient, as in training, also where the embedding has none."""
    hidden = hidden_states(args, kwargs)
    return None if hidden.requires_grad else with_hidden_states(args, kwargs, hidden.detach().requires_grad_())


def _scaled(hidden: Tensor) -> Tensor:
    """Returns (2, T, n) with one of the tokens a little and the other much larger."""
    changed = hidden.clone()
    for place, factor in zip(_PLACES, (1.01, 100.0), strict=True):
        changed[_ROW, place] *= factor
    return changed


def _are_close(found: Tensor, expected: Tensor) -> bool:
    largest = float(expected.abs().max()) if expected.any() else 1.0
    return bool((found - expected).abs().max() <= 1e-10 * largest)


def _is_same_leaf(found: Any, expected: Any) -> bool:
    return not isinstance(found, Tensor) or torch.equal(found, expected)


def _drop_nothing(model: nn.Module) -> None:
    """Switches off random draws in training by the model's own settings, which the pipeline keys."""
    for module, name in [*random_rates(model)]:
        setattr(module, name, 0.0)


def _states(model: nn.Module) -> list[object]:
    """Returns states that tell whether code drew random numbers or kept plain values, in modules, hooks or closures."""
    states: list[object] = [torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state())]
    for module in model.modules():
        states += [(name, value) for name, value in vars(module).items() if isinstance(value, _PLAIN)]
        states += [buffer.detach().cpu().clone().numpy().tobytes() for buffer in _plain_buffers(module)]
        for function in _own_functions(module):
            states += _values(function, 3)
    return states


def _plain_buffers(module: nn.Module) -> Iterable[Tensor]:
    buffers = (b for b in module._buffers.values() if b is not None and b.numel() <= 1 << 20)
    return (b.view(torch.uint8) if b.dim() and b.is_contiguous() else b.float() for b in buffers)


def _own_functions(module: nn.Module) -> Iterator[Any]:
    for name, value in vars(module).items():
        if isinstance(value, (FunctionType, MethodType, partial)) and not name.startswith("_"):
            yield value
    for kind in HOOKS:
        yield from getattr(module, kind).values()


def _values(value: Any, depth: int) -> list[object]:
    """Returns the plain values that a function closes over, or that an object or a container has."""
    if isinstance(value, _PLAIN):
        return [value]
    if not depth or isinstance(value, (nn.Module, Tensor, type)):
        return []
    inner: list[Any] = []
    if isinstance(value, (FunctionType, MethodType, partial)):
        inner = code_referents(value)
        if isinstance(value, FunctionType):
            inner += [item for item in global_values(value).values() if not isinstance(item, FunctionType)]
    elif isinstance(value, dict):
        inner = [len(value), *value.values()]
    elif isinstance(value, (list, tuple, set)):
        inner = [len(value), *value]
    elif hasattr(value, "__dict__") and not isinstance(value, ModuleType):
        inner = [*vars(value).values()]
    return [item for part in inner for item in _values(part, depth - 1)]


def _described(layer: nn.Module) -> Iterator[object]:
    """Yields the key that two layers of one kind share: the types of their modules, and the code attached to each."""
    places = {id(module): name for name, module in layer.named_modules(remove_duplicate=False)}

    def describe(value: Any, depth: int) -> object:
        if isinstance(value, _PLAIN):
            return value
        if id(value) in places:
            return "part", places[id(value)]
        if depth and isinstance(value, (FunctionType, MethodType, partial)):
            code = value.__code__ if isinstance(value, FunctionType) else type(value)
            return code, tuple(describe(part, depth - 1) for part in code_referents(value))
        return id(value)

    for name, module in layer.named_modules(remove_duplicate=False):
        yield name, type(module)
        yield tuple(sorted(module._parameters)), tuple(sorted(module._buffers))
        plain = ((key, value) for key, value in vars(module).items() if isinstance(value, _PLAIN))
        yield tuple((key, value) for key, value in plain if key not in ("layer_idx", "training"))
        for function in _own_functions(module):
            yield describe(function, 5)


def _named(changes: Sequence[Change]) -> str:
    more = f" (and {len(changes) - 2} more)" if len(changes) > 2 else ""
    return " and ".join(map(str, changes[:2])) + more
