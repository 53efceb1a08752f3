"""What can't be exact in token slices of an nn.Sequential is refused by name, before anything runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream import CutTokens, Pipeline, Skip, SlipstreamError, causal_attention
from slipstream.schedule import Schedule, make_schedule
from support.options import grouped
from support.sequences.own_layers import Classes

INPUTS, TARGETS = torch.randn(4, 8, 6), torch.randint(0, 6, (4, 6))  # (rows, tokens, classes) of length 8 and 6


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


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def pipeline(*layers: nn.Module, **given: object) -> Pipeline:
    defaults = {"num_microbatches": 2, "slices": 2, "num_ranks": 1, "example": INPUTS}
    return Pipeline(nn.Sequential(*layers), **grouped(**defaults | given))  # type: ignore[arg-type]


def skips(make: Callable[[Skip], list[nn.Module]]) -> list[nn.Module]:
    return make(Skip("s"))


SLICED = [linear(), CutTokens(), Attend(), linear(), Classes()]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([CutTokens(), linear(), PlainAttention(), Classes()], r"layer 2 \(PlainAttention\) gives other outputs on"),
        ([CutTokens(), nn.Sequential(linear(), Ahead())], r"layer 1.1 \(Ahead\) gives other outputs on token slices"),
        ([CutTokens(), Places(), Classes()], r"layer 1 \(Places\) .* slices of \[3, 3, 2\] than on 8 tokens at once"),
        ([CutTokens(), Pool()], r"layer 1 \(Pool\) gives other outputs .* put the layer before CutTokens"),
        ([CutTokens(), nn.LayerNorm((8, 6))], r"layer 1 \(LayerNorm\) fails on \[\(1, 3, 6\)\] in float64"),
        ([CutTokens(), HeadsLast()], r"layer 1 \(HeadsLast\) fails on .* dim 2 must be the 2 tokens"),
        ([With(), CutTokens(), OnlyWhole()], r"layer 2 \(OnlyWhole\): output 0 .* is the same for every token slice"),
        ([CutTokens(), linear(), CutTokens()], r"layer 2 \(CutTokens\): tokens are cut once, by layer 0 \(CutTokens\)"),
        ([CutTokens(), Classes(), nn.BatchNorm1d(6)], r"layer 2 \(BatchNorm1d\): a batch norm after layer 0"),
        ([Pool(), nn.Flatten(0), CutTokens(), nn.Tanh()], r"layer 2 \(CutTokens\) is given \(6,\)\. The first must be"),
        (
            skips(lambda s: [s.stash(), linear(), CutTokens(), linear(), s.pop(), OnlyWhole()]),
            r"layer 4 \(SkipPop\): the skip 's' begins before layer 2 \(CutTokens\) and ends after it",
        ),
    ],
)
def test_layers(layers: list[nn.Module], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        pipeline(*layers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"example": None}, r"slices=2 of an nn.Sequential are compared with the whole .* Give example=.*self_check"),
        ({"slices": 2.5}, r"slices=2.5: give a count"),
        ({"slices": [4, 4], "schedule": make_schedule("1f1b", 1, 2, 3)}, r"\[4, 4\] are 2 lengths, .* has 3 slices"),
        ({"schedule": "reach"}, r"has a reach, but slices of an nn.Sequential attend to all before them"),
    ],
)
def test_settings(settings: dict[str, object], message: str) -> None:
    if settings.get("schedule") == "reach":
        plain = make_schedule("gpipe", 1, 2, 2)
        settings = {"schedule": Schedule("reach", plain.actions, plain.placement, 2, 2, reach=((0, 1), (0, 0)))}
    with pytest.raises(SlipstreamError, match=message):
        pipeline(*SLICED, **settings)


def test_without_a_cut() -> None:
    for cut in ({"slices": 2}, {"slices": [4, 4]}, {"slices": None, "schedule": make_schedule("1f1b", 1, 2, 3)}):
        with pytest.raises(SlipstreamError, match=r"take whole microbatches\. Put slipstream.CutTokens\(\) before"):
            pipeline(linear(), Classes(), **cut)


@pytest.mark.parametrize(
    ("inputs", "targets", "given", "message"),
    [
        (INPUTS, TARGETS, {}, r"targets of shape \(4, 6\) for 8 tokens in slices: give \(rows, 8, \.\.\.\)"),
        (INPUTS, torch.randn(4, 8), {}, r"targets of torch.float32 in token slices: such a loss is a mean over rows"),
        (INPUTS[:, :6], TARGETS, {"slices": [4, 4]}, r"\[4, 4\] add up to 8 tokens, but the sequence has 6"),
        (INPUTS[:, :1], TARGETS[:, :1], {}, r"slices=2: a sequence of 1 tokens takes 1 to 1 slices"),
    ],
)
def test_batches(inputs: Tensor, targets: Tensor, given: dict[str, object], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        pipeline(*SLICED, **given).step(inputs, targets)


def test_a_whole_tensor_that_is_changed_in_place() -> None:
    pipe = pipeline(linear(), With(), CutTokens(), ChangesWhole(), Classes(), self_check=False)
    with pytest.raises(SlipstreamError, match=r"\(ChangesWhole\) changes in place a tensor that all token slices"):
        pipe.step(INPUTS[:, :6], TARGETS)


def test_the_self_check_can_be_left_out() -> None:
    pipe = pipeline(CutTokens(), linear(), Ahead(), Classes(), self_check=False, example=None)
    pipe.step(INPUTS[:, :6], TARGETS)


def test_one_slice_is_no_slicing() -> None:
    """CutTokens does nothing then, whatever comes after it."""
    model = nn.Sequential(linear(), CutTokens(), PlainAttention(), Ahead(), Classes())
    expected = functional.cross_entropy(model(INPUTS[:, :6]), TARGETS)
    for slices in (None, 1):
        pipe = Pipeline(nn.Sequential(*model), slices=slices, num_microbatches=2)
        assert torch.allclose(pipe.evaluate(INPUTS[:, :6], TARGETS), expected.detach().double())


def test_a_model_can_be_checked_again_and_again() -> None:
    """The check runs copies: the model's weights, modes and random state stay."""
    layers = [linear(), nn.Dropout(0.5), CutTokens(), Attend(), nn.Dropout(0.5), linear(), Classes()]
    before, state = [p.clone() for layer in layers for p in layer.parameters()], torch.get_rng_state()
    pipeline(*layers)
    assert torch.equal(torch.get_rng_state(), state)
    after = [p for layer in layers for p in layer.parameters()]
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(before, after, strict=True))
