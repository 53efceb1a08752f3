"""What can't be exact of an nn.Sequential, whole or in token slices, is refused by the layer's name before anything
runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream import CutTokens, Pipeline, Skip, causal_attention
from slipstream.schedule import Schedule, make_schedule
from support.architectures import llama
from support.options import grouped
from support.pipelines import make_pipe
from support.refusals import refused
from support.sequences.own_layers import Classes
from support.sequences.random_layers import Mix

ROWS, CLASSES = torch.randn(4, 4), torch.randint(0, 4, (4,))
TOKENS, TARGETS = torch.randn(4, 8, 6), torch.randint(0, 6, (4, 6))  # (rows, tokens, classes) of length 8 and 6
Make = Callable[[Skip], list[nn.Module]]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x).tanh())


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return causal_attention(x, x, x)[:, 0]


class PlainAttention(nn.Module):
    """Looks at earlier tokens, but not by causal_attention."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class Ahead(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.flip(1)


class Places(nn.Module):
    """Counts tokens from where it is given them."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


class With(nn.Module):
    """A second tensor, which stays whole."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.tanh()


class ChangesWhole(nn.Module):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return inputs[0] + inputs[1].mul_(2).mean(1, keepdim=True)


class OnlyWhole(nn.Module):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return inputs[1]


class HeadsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(2, (3, 2))
        return causal_attention(x, x, x).flatten(2)


def linear(width: int = 4) -> nn.Linear:
    return nn.Linear(width, width)


def pipeline(*layers: nn.Module, **settings: Any) -> Pipeline:
    defaults = {"num_ranks": 1, "num_microbatches": 2}
    return Pipeline(nn.Sequential(*layers), **grouped(**defaults | settings))


def sliced(*layers: nn.Module, **settings: Any) -> Pipeline:
    return pipeline(*layers, **{"slices": 2, "example": TOKENS} | settings)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda s: [s.pop(), Mix(), s.stash()], "layer 0 (SkipPop): the skip 's' is popped before it is stashed"),
        (lambda s: [linear(), s.pop(), Mix()], "layer 1 (SkipPop): the skip 's' is popped before it is stashed"),
        (lambda s: [s.stash(), s.stash(), s.pop()], "layer 1 (SkipStash): the skip 's' is stashed twice"),
        (lambda s: [s.stash(), s.pop(), Mix(), s.pop()], "layer 3 (SkipPop): the skip 's' is popped twice"),
        (lambda s: [s.stash(), Skip("s").pop()], "layer 1 (SkipPop): two skips are called 's'"),
        (lambda s: [s.stash()], "layer 0 (SkipStash): the skip 's' is never consumed. Add a layer skip.pop()"),
        (lambda s: [nn.BatchNorm1d(4, track_running_stats=False)], "normalises by the batch in evaluation too"),
        (lambda s: [], "has no layers"),
    ],
)
def test_layers(make: Make, words: str) -> None:
    with refused(words):
        pipeline(*make(Skip("s")))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda s: [CutTokens(), linear(6), PlainAttention(), Classes()], "layer 2 (PlainAttention) gives other"),
        (lambda s: [CutTokens(), nn.Sequential(linear(6), Ahead())], "layer 1.1 (Ahead) gives other outputs on token"),
        (lambda s: [CutTokens(), Places(), Classes()], "layer 1 (Places) .. slices of [3, 3, 2] than on 8 tokens"),
        (lambda s: [CutTokens(), Pool()], "layer 1 (Pool) gives other outputs .. put the layer before CutTokens"),
        (lambda s: [CutTokens(), nn.LayerNorm((8, 6))], "layer 1 (LayerNorm) fails on [(1, 3, 6)] in float64"),
        (lambda s: [CutTokens(), HeadsLast()], "layer 1 (HeadsLast) fails on .. dim 2 must be the 2 tokens"),
        (lambda s: [With(), CutTokens(), OnlyWhole()], "layer 2 (OnlyWhole): output 0 .. is the same for every token"),
        (lambda s: [CutTokens(), linear(6), CutTokens()], "layer 2 (CutTokens): tokens are cut once, by layer 0 (CutT"),
        (lambda s: [CutTokens(), Classes(), nn.BatchNorm1d(6)], "layer 2 (BatchNorm1d): a batch norm after layer 0"),
        (
            lambda s: [Pool(), nn.Flatten(0), CutTokens(), nn.Tanh()],
            "layer 2 (CutTokens) is given (6,). The first must be",
        ),
        (
            lambda s: [s.stash(), linear(6), CutTokens(), linear(6), s.pop(), OnlyWhole()],
            "layer 4 (SkipPop): the skip 's' begins before layer 2 (CutTokens) and ends after it",
        ),
    ],
)
def test_layers_in_slices(make: Make, words: str) -> None:
    with refused(words):
        sliced(*make(Skip("s")))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_ranks": 4}, "4 stages, but the sequence has 3 layers, .. Use 3 stages or fewer"),
        ({"num_ranks": 2}, "partition='auto' must know what the layers cost. Give example= .. costs=[...] of 3"),
        ({"costs": [1.0, 2.0]}, "costs has 2 numbers, but the sequence has 3 layers, .. : layer 0 (Linear)"),
        ({"costs": [1.0, 0.0, 2.0]}, "costs: layer 1.0 (ReLU) costs 0.0, but a cost is above 0"),
        ({"costs": [1.0, -1.0, 2.0]}, "costs: layer 1.0 (ReLU) costs -1.0"),
        ({"costs": [1.0, float("nan"), 2.0]}, "costs: layer 1.0 (ReLU) costs nan"),
        ({"partition": [2, 2], "num_ranks": 2}, "partition=[2, 2] has 2 stages and 4 layers; it takes 2 stages"),
        ({"partition": [1.5, 1.5], "num_ranks": 2}, "it takes 2 stages of at least one layer"),
        ({"partition": "even"}, "partition='even': give 'auto' or the number of layers"),
        ({"slices": 4}, "slices=4: the layers of this nn.Sequential take whole microbatches. Put"),
        ({"slices": "auto"}, "slices='auto': the layers of this nn.Sequential take whole microbatches"),
        ({"slices": [4, 4]}, "take whole microbatches. Put slipstream.CutTokens() before"),
        ({"schedule": make_schedule("1f1b", 1, 2, 3)}, "take whole microbatches. Put slipstream.CutTokens() before"),
        ({"seq_len": 16}, "seq_len=16: an option of causal LMs"),
        ({"sequence_parallel": True}, "parallel.sequence_parallel=True: an option of causal LMs"),
        ({"tensor_plan": {"a": "colwise"}}, "parallel.tensor_plan= .. : an option of causal LMs"),
        ({"fused": True}, "runtime.fused=True: an option of causal LMs"),
        ({"memory_limit": 1e9}, "memory.limit=1000000000.0: not for an nn.Sequential"),
        ({"shard": "parameters"}, "parallel.shard='parameters': not for an nn.Sequential"),
        ({"recompute": "segments", "offload": 0.5}, "memory.recompute='segments' with memory.offload=0.5"),
        ({"recompute": 4}, "memory.recompute=4: give 'none', .. 'segments'"),
    ],
)
def test_settings(settings: dict[str, Any], words: str) -> None:
    with refused(words):
        pipeline(linear(), nn.Sequential(nn.ReLU(), linear()), **settings)


PLAIN = make_schedule("gpipe", 1, 2, 2)
REACH = Schedule("reach", PLAIN.actions, PLAIN.placement, 2, 2, reach=((0, 1), (0, 0)))


def attending() -> list[nn.Module]:
    return [linear(6), CutTokens(), Attend(), linear(6), Classes()]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"example": None}, "slices=2 of an nn.Sequential are compared with the whole .. Give example= .. self_check"),
        ({"slices": 2.5}, "slices=2.5: give a count"),
        ({"slices": [4, 4], "schedule": make_schedule("1f1b", 1, 2, 3)}, "[4, 4] are 2 lengths, .. has 3 slices"),
        ({"schedule": REACH}, "has a reach, but slices of an nn.Sequential attend to all before them"),
    ],
)
def test_settings_of_slices(settings: dict[str, Any], words: str) -> None:
    with refused(words):
        sliced(*attending(), **settings)


@pytest.mark.parametrize(
    ("make", "inputs", "targets", "words"),
    [
        (lambda s: [linear(), nn.Linear(5, 4)], ROWS, CLASSES, "layer 1 (Linear) fails on (2, 4) float32: Runtime"),
        (lambda s: [Twice()], ROWS, CLASSES, "layer 0 (Twice): a batch norm runs twice in one forward"),
        (
            lambda s: [linear(), s.stash(0), nn.ReLU(inplace=True)],
            ROWS,
            CLASSES,
            "layer 1 (SkipStash): the skip 's' is never consumed",
        ),
        (
            lambda s: [linear(), s.stash(2), s.pop(), Mix()],
            ROWS,
            CLASSES,
            "layer 1 (SkipStash): stash(2) of the skip 's' is given (2, 4) float32",
        ),
        (lambda s: [linear()], ROWS[:1], CLASSES[:1], "a batch of 1 rows can't be cut into 2 microbatches"),
        (lambda s: [linear()], ROWS, CLASSES[:3], "targets of shape (3,) for a batch of 4 rows"),
        (lambda s: [linear()], ROWS, torch.randn(4), "returns (2, 4) for targets of (2,) torch.float32, .. Give a"),
        (lambda s: [linear()], ROWS, torch.full((4,), -100), "no label of this batch counts"),
        (
            lambda s: [linear()],
            (ROWS, ROWS),
            CLASSES,
            "layer 0 (Linear) fails on ((2, 4) float32, (2, 4) float32): TypeError",
        ),
    ],
)
def test_steps(make: Make, inputs: Any, targets: Tensor, words: str) -> None:
    with refused(words):
        pipeline(*make(Skip("s"))).step(inputs, targets)


@pytest.mark.parametrize(
    ("inputs", "targets", "settings", "words"),
    [
        (TOKENS, TARGETS, {}, "targets of shape (4, 6) for 8 tokens in slices: give (rows, 8, ...)"),
        (TOKENS, torch.randn(4, 8), {}, "targets of torch.float32 in token slices: such a loss is a mean over rows"),
        (TOKENS[:, :6], TARGETS, {"slices": [4, 4]}, "[4, 4] add up to 8 tokens, but the sequence has 6"),
        (TOKENS[:, :1], TARGETS[:, :1], {}, "slices=2: a sequence of 1 tokens takes 1 to 1 slices"),
    ],
)
def test_steps_in_slices(inputs: Tensor, targets: Tensor, settings: dict[str, Any], words: str) -> None:
    pipe = sliced(*attending(), **settings)
    with refused(words):
        pipe.step(inputs, targets)


def test_a_whole_tensor_that_is_changed_in_place() -> None:
    pipe = sliced(linear(6), With(), CutTokens(), ChangesWhole(), Classes(), self_check=False)
    with refused("(ChangesWhole) changes in place a tensor that all token slices"):
        pipe.step(TOKENS[:, :6], TARGETS)


@pytest.mark.parametrize("setting", [{"costs": [1.0]}, {"example": ROWS}, {"batch_norm_over_replicas": True}])
def test_settings_of_sequences_are_not_for_language_models(setting: dict[str, Any]) -> None:
    with refused(f"{next(iter(setting))}= .. : an option of nn.Sequential models"):
        make_pipe(llama(), **setting)


def test_what_a_sequence_does_not_have() -> None:
    pipe = pipeline(linear())
    with refused("torch.save(pipe.state_dict(), path)"):
        pipe.save_pretrained("nowhere")
    with refused("config is for models of transformers"):
        _ = pipe.config
    with refused("costs of the layers aren't known"):
        _ = pipe.balance
    with refused("position_ids and document_ids are for causal LMs"):
        pipe.step(ROWS, CLASSES, position_ids=CLASSES)


# --- what isn't refused -----------------------------------------------------------------------------------------------


def test_the_self_check_can_be_left_out() -> None:
    pipe = sliced(CutTokens(), linear(6), Ahead(), Classes(), self_check=False, example=None)
    pipe.step(TOKENS[:, :6], TARGETS)


def test_one_slice_is_no_slicing() -> None:
    """CutTokens does nothing then, whatever comes after it."""
    model = nn.Sequential(linear(6), CutTokens(), PlainAttention(), Ahead(), Classes())
    expected = functional.cross_entropy(model(TOKENS[:, :6]), TARGETS)
    for slices in (None, 1):
        pipe = Pipeline(nn.Sequential(*model), slices=slices, num_microbatches=2)
        assert torch.allclose(pipe.evaluate(TOKENS[:, :6], TARGETS), expected.detach().double())


def test_a_model_can_be_checked_again_and_again() -> None:
    """The check runs copies: the model's weights, modes and random state stay."""
    layers = [linear(6), nn.Dropout(0.5), CutTokens(), Attend(), nn.Dropout(0.5), linear(6), Classes()]
    before, state = [p.clone() for layer in layers for p in layer.parameters()], torch.get_rng_state()
    sliced(*layers)
    assert torch.equal(torch.get_rng_state(), state)
    after = [p for layer in layers for p in layer.parameters()]
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(before, after, strict=True))
