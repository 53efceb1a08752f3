"""The layers that people write are exact, refused by name, or what the page says: in none is anything silently off."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

from slipstream import CutTokens, Layers, Memory, Pipeline, SlipstreamError
from support.architectures import ARCHITECTURES, BOUND, build, gradient_error, gradients, no_rounding_inside, tokens
from support.forked import launch
from support.parameters import first_of
from support.paths import WORKERS
from support.refusals import refused
from support.sequences.own_layer_runs import NUM_MICROBATCHES, SLICED, WHOLE, Way, batch, outcome, references
from support.sequences.own_layers import (
    BY_MICROBATCH,
    CASES,
    DIFFERS,
    EXACT,
    TOKENS,
    WIDTH,
    Classes,
    LayerCase,
    doubled_forward,
    forward_hook,
    linear,
)

OUTCOMES = (EXACT, BY_MICROBATCH, DIFFERS)


def is_expected(case: LayerCase, way: Way, found: str) -> bool:
    expected = case.expected(way.slices > 1, way.recompute != "none")
    return found == expected if expected in OUTCOMES else found not in OUTCOMES and bool(re.search(expected, found))


OF_ONE_PROCESS = [*first_of([WHOLE[1], SLICED[1]]), *first_of([*WHOLE[2:], SLICED[0], WHOLE[0]], 0, "grid")]


@pytest.mark.parametrize("way", OF_ONE_PROCESS, ids=lambda way: way.name)
def test_two_ranks_of_one_process(way: Way) -> None:
    assert len(CASES) >= 60
    found = {case.name: outcome(case, way, references(case, way)) for case in CASES}
    assert {case.name: found[case.name] for case in CASES if not is_expected(case, way, found[case.name])} == {}


@pytest.mark.more
@pytest.mark.parametrize(
    ("way", "every"),
    first_of([(WHOLE[3], 4), *((way, 1) for way in (*SLICED, *WHOLE))], 1, "grid"),
    ids=lambda given: getattr(given, "name", given),
)
def test_two_processes(way: Way, every: int) -> None:
    """Each rank says the same: a refusal reaches all of them. `make test-all` has one case in four."""
    ended = launch(2, WORKERS / "pipeline/own_layers.py", str(way.slices), way.recompute, str(every))
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    found, cases = {(rank, name): outcome for rank, name, outcome in told}, CASES[::every]
    assert len(found) == 2 * len(cases)
    unexpected = {
        (rank, case.name): found[rank, case.name]
        for case in cases
        for rank in range(2)
        if not is_expected(case, way, found[rank, case.name]) and not _of_another_rank(found, rank, case, way)
    }
    assert unexpected == {}


def _of_another_rank(found: dict[tuple[int, str], str], rank: int, case: LayerCase, way: Way) -> bool:
    """Whether this rank was told that another's layer differs, which that rank names."""
    told = found[rank, case.name].startswith("a layer of another rank: the output differs when it is computed again")
    return told and is_expected(case, way, found[1 - rank, case.name])


def squares(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()


def of_neighbours(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total, count = squares(outputs, targets)
    return total + (outputs[..., 1:] - outputs[..., :-1]).square().sum(), count


def sequence() -> nn.Sequential:
    return nn.Sequential(linear(), CutTokens(), linear(), Classes()).double()


def test_a_loss_that_looks_at_several_tokens_is_refused() -> None:
    inputs, targets = batch()
    of_each, of_pairs = (
        Pipeline(sequence(), slices=3, loss_fn=loss_fn, layers=Layers(example=inputs))
        for loss_fn in (squares, of_neighbours)
    )
    with refused("the sum .. must be a sum over tokens"):
        of_pairs.step(inputs, targets)
    assert all(parameter.grad is None for parameter in of_pairs.parameters())
    of_each.step(inputs, targets)


def test_averages_without_momentum_are_those_of_all_batches() -> None:
    """BatchNorm(momentum=None) weighs every mini-batch alike, however it is cut and recomputed."""
    inputs, targets = batch()
    norm = nn.BatchNorm1d(TOKENS, momentum=None).double()
    whole = nn.BatchNorm1d(TOKENS, momentum=None).double()
    memory = Memory(recompute="full")
    pipe = Pipeline(nn.Sequential(norm, Classes()), num_microbatches=NUM_MICROBATCHES, memory=memory)
    for factor in (1.0, 2.0, 3.0):
        pipe.step(inputs * factor, targets)
        whole(inputs * factor)
    for name, expected in whole.state_dict().items():
        assert torch.allclose(pipe.state_dict()[f"0.{name}"], expected, rtol=1e-12), name


def test_a_sequence_that_changes_later() -> None:
    model = nn.Sequential(linear(), nn.Sequential(linear(), nn.Tanh()), Classes()).double()
    pipe = Pipeline(model, num_microbatches=NUM_MICROBATCHES)
    pipe.step(*batch())
    for module in (model[1], model):
        module.register_forward_hook(lambda *_: None)
        with pytest.raises(SlipstreamError, match=r"the nn\.Sequential has a forward hook, which wouldn't run"):
            pipe.step(*batch())
        module._forward_hooks.clear()
    pipe.step(*batch())


def test_hooks_of_all_modules() -> None:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(SlipstreamError, match=r"the nn\.Sequential has a hook of all modules"):
            Pipeline(sequence())
    finally:
        handle.remove()


@pytest.mark.parametrize("method", ["forward", "__iter__"])
def test_what_is_set_on_the_class(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(nn.Sequential, method)
    monkeypatch.setattr(nn.Sequential, method, lambda self, *args: original(self, *args))
    with pytest.raises(SlipstreamError, match=f"has a {method} that was set on Sequential"):
        Pipeline(sequence())


def test_a_forward_set_on_batch_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the class it runs as well, and moves the averages as a mini-batch does."""
    original = nn.BatchNorm1d.forward
    monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda self, x: original(self, x) * 3)
    inputs, targets = batch()
    model = nn.Sequential(nn.BatchNorm1d(TOKENS), linear(), Classes()).double()
    alone = nn.Sequential(nn.BatchNorm1d(TOKENS), linear(), Classes()).double()
    alone.load_state_dict(model.state_dict())
    pipe = Pipeline(model, layers=Layers(example=inputs))
    loss = pipe.step(inputs, targets)
    assert torch.allclose(loss, functional.cross_entropy(alone(inputs), targets), rtol=1e-12)
    for name, expected in alone.state_dict().items():
        assert torch.allclose(pipe.state_dict()[name], expected, rtol=1e-12), name


def test_the_comparison_of_what_is_recomputed_can_be_left_out() -> None:
    case = next(case for case in CASES if case.name == "counter")

    def pipeline(**options: bool) -> Pipeline:
        memory = Memory(recompute="full", **options)
        return Pipeline(case.model(), "gpipe", num_microbatches=2, num_ranks=2, partition=[3, 2], memory=memory)

    pipeline(check_recompute=False).step(*batch())
    pipe = pipeline()
    with pytest.raises(SlipstreamError, match=r"layer 2 \(With\).* differs when it is computed again"):
        pipe.step(*batch())
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_layer_that_was_changed_stays_a_layer() -> None:
    """A nested sequence with a hook or a forward of its own isn't cut."""
    for change in (forward_hook, doubled_forward):
        inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        change(inner)
        with pytest.raises(SlipstreamError, match="it takes 2 stages"):
            Pipeline(nn.Sequential(inner, linear(), Classes()), num_ranks=2, partition=[1, 3])


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
def test_a_sparse_embedding_of_a_causal_lm(name: str) -> None:
    """A tied one gets a dense gradient, as the head's is."""
    whole, model, inputs = build(ARCHITECTURES[name]), build(ARCHITECTURES[name]), tokens()
    model.get_input_embeddings().sparse = True
    with no_rounding_inside():
        whole(inputs, labels=inputs).loss.backward()
        pipe = Pipeline(model, num_ranks=2, num_microbatches=2, slices=3)
        pipe.step(inputs, inputs)
    found = gradients(pipe)
    assert found["model.embed_tokens.weight"].is_sparse == (name == "llama")
    dense = {name: gradient.to_dense() for name, gradient in found.items()}
    assert gradient_error(gradients(whole), dense) < BOUND
