"""Each architecture has the gradients of the unsplit model, on any number of stages; an error shows above the bound."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from benchmarks.zoo.families import default_config
from benchmarks.zoo.outcomes import DEFAULTS, Verdict
from benchmarks.zoo.trial import try_out
from benchmarks.zoo.variants import alone, tiny_config, variants
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from slipstream.model.initial_states import scan_from
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.exact_steps import exact_pipe
from support.examples import examples
from support.hybrids import HYBRIDS
from support.parameters import each_once, first_of
from support.pipelines import make_pipe
from support.unusual_layers import OWN_ATTENTION

SLICES = [5, 30, 17, 12]


@pytest.mark.parametrize(("name", "num_stages"), each_once(ARCHITECTURES, [2, 4]))
def test_gradients_are_those_of_the_unsplit_model(name: str, num_stages: int) -> None:
    inputs = tokens()
    settings = {"slices": SLICES, "num_microbatches": 2, "num_ranks": num_stages}
    exact_pipe(build(ARCHITECTURES[name]), inputs, labels_of(inputs), **settings)


# Norms of these sum a float32 gradient over the tokens of a slice, so its last bits depend on the cuts.
_ROUNDS_INSIDE = {"gemma2", "gemma3"}


# Norms, experts and ropes of other kinds than the first two have.
OTHER_ROUNDINGS = ["gemma2", "qwen2_moe", "phi3, longrope"]


@pytest.mark.parametrize(
    "name",
    [
        *first_of([*list(ARCHITECTURES)[:2], *OTHER_ROUNDINGS], 2),
        *first_of([name for name in list(ARCHITECTURES)[2:] if name not in OTHER_ROUNDINGS], 0, "grid"),
    ],
)
def test_the_models_own_roundings_are_all_that_differs(name: str) -> None:
    """The same without touching the model's casts: nothing else in the code path depends on the comparison above."""
    model = build(ARCHITECTURES[name])
    whole = copy.deepcopy(model)
    inputs = tokens()
    unsplit_step(whole, inputs, inputs)
    pipe = make_pipe(model, slices=SLICES, num_ranks=2)
    pipe.step(inputs, inputs)
    bound = 1e-6 if name in _ROUNDS_INSIDE else 1e-7
    assert gradient_error(whole, pipe) < bound


def test_an_error_shows_above_the_bound() -> None:
    """A window one token too wide, the smallest mistake of meaning, is far above every bound used here."""
    model, other = (build(ARCHITECTURES["mistral, window of 7"]), copy.deepcopy(ARCHITECTURES["mistral, window of 7"]))
    other.sliding_window = 8
    wrong = build(other)
    inputs = tokens()
    unsplit_step(wrong, inputs, inputs)
    pipe = make_pipe(model, slices=SLICES, num_ranks=2)
    pipe.step(inputs, inputs)
    assert gradient_error(wrong, pipe) > 1e-4


class Sample(NamedTuple):
    """An architecture, the variant of it, the paths by which earlier tokens reach a slice, and the first transformers
    with which it is exact, where that is later than the package's."""

    architecture: str
    variant: str = DEFAULTS
    paths: tuple[str, ...] = ("attention",)
    since: str = "5.17"


FEATURES = {
    "windows, layers without rotary embedding, both branches from one norm": Sample("cohere2"),
    "positions from the cache's length, norms before": Sample("mbart"),
    "windows, rotary bases of layers": Sample("granite_swa"),
    "positions from the cache's length, sinusoidal": Sample("pegasus"),
    "some layers without rotary embedding": Sample("smollm3"),
    "one head of keys and values": Sample("gpt_bigcode", since="5.23"),
    "gated attention in windows, experts": Sample("afmoe"),
    "queries scaled by position": Sample("ministral3"),
    "attention sinks in windows": Sample("gpt_oss"),
    "soft caps": Sample("gemma2", "soft caps"),
    "rotary embedding of type dynamic": Sample("llama", "rope dynamic"),
    "rotary embedding of type longrope": Sample("phi3", "rope longrope"),
    "blocks of tokens, queries scaled by position, experts": Sample("llama4_text"),
    "a window that is in the mask only": Sample("phimoe", "windows"),
    "two attentions a layer": Sample("diffllama"),
    "latent attention, groups of experts": Sample("deepseek_v3"),
    "positions that skip padding, parameters with two names": Sample("roberta"),
    "an embedding in parts, whose dtype rotary tables take": Sample("modernbert-decoder"),
    "biases": Sample("starcoder2", "biases"),
    "a tied head": Sample("qwen3", "tied the other way"),
    "gated delta rule": Sample("qwen3_next", paths=("attention", "convolution", "recurrence"), since="5.21"),
    "state spaces": Sample("mamba2", paths=("convolution", "recurrence"), since="5.21"),
    "layers of state spaces, of attention and of experts": Sample(
        "nemotron_h", paths=("attention", "convolution", "recurrence"), since="5.21"
    ),
    "short convolutions": Sample("lfm2", paths=("attention", "convolution"), since="5.21"),
    "lightning attention": Sample("minimax", paths=("attention", "recurrence")),
    "convolved keys, values of the token before, routers that read the layer before, dynamic rope": Sample(
        "zaya", "rope dynamic", paths=("attention", "convolution", "recurrence"), since="5.21"
    ),
    "a matrix memory": Sample("xlstm", paths=("matrix memory",)),
    "a configuration in parts": Sample("dbrx"),
    "learned positions, projections in one": Sample("gpt2"),
    "position biases (ALiBi)": Sample("bloom", paths=("own attention",)),
    "attention of its own, one head of keys": Sample("falcon", paths=("own attention",)),
    "attention of its own, with rotary embedding": Sample("gptj", paths=("own attention",)),
    "attention of its own, in windows": Sample("gpt_neo", paths=("own attention",)),
    "masks in which the tokens of an image see each other": Sample("gemma4_unified"),
    "embeddings changed in place, numbers read off parts of layers": Sample(
        "git", paths=("own attention",), since="5.18"
    ),
    "keys selected in some layers, windows in others": Sample("dots3_note_text", since="5.23"),
    "outputs of linear layers changed in place": Sample("roc_bert"),
    "names of parts read off the first layer": Sample("xmod"),
    "residual streams within each token": Sample("hy_v4"),
    "relative positions added to scores, short convolutions": Sample(
        "inkling_text", paths=("convolution", "own attention"), since="5.21"
    ),
}


# Of these the same feature is checked above or in test_unusual_layers, by the self-check and against the unsplit model.
ELSEWHERE = {"gemma2", "gpt2", "gpt_oss", "llama", "llama4_text", "phi3", *HYBRIDS, *OWN_ATTENTION}
SAMPLED = [each for each, sample in FEATURES.items() if sample.architecture not in ELSEWHERE]
OFTEN = SAMPLED[::2]
OTHERS = [each for each in FEATURES if each not in OFTEN]


@pytest.mark.parametrize("feature", [*first_of(OFTEN), *first_of(OTHERS, 0, "grid")])
def test_architectures_are_exact(feature: str) -> None:
    sample = FEATURES[feature]
    if Version(transformers.__version__) < Version(sample.since):
        pytest.skip(f"{sample.architecture} is exact with transformers {sample.since} and later")
    default = default_config(sample.architecture)
    configs = {DEFAULTS: tiny_config(default)} | dict(chain(variants(default), alone(default)))
    config = configs[sample.variant]
    found = try_out(sample.variant, config, stages="first")
    assert (found.verdict, found.reason) == (Verdict.EXACT, "")
    assert found.paths == sample.paths


WIDTH, STATES = 6, 4


@examples(25)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), has_bias=st.booleans(), seed=st.integers(0, 99))
def test_scans_one_after_the_other_are_the_whole_scan(lengths: list[int], has_bias: bool, seed: int) -> None:
    """Outputs and last state, and the gradients of both: transformers' scan leaves the state, and begins without."""
    generator, length = torch.Generator().manual_seed(seed), sum(lengths)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, dt, z = (numbers(2, WIDTH, length) for _ in range(3))
    B, C = (numbers(2, STATES, length) for _ in range(2))
    A, D, bias = numbers(WIDTH, STATES), numbers(WIDTH), numbers(WIDTH) if has_bias else None
    settings: dict[str, Any] = {"D": D, "delta_bias": bias, "delta_softplus": True}
    with no_rounding_inside():
        output, last = mamba_selective_scan(x, dt, -A.exp(), B, C, z=z, return_last_state=True, **settings)
        pieces: list[Tensor] = []
        state: Tensor | None = None
        for parts in zip(*(each.split(lengths, dim=-1) for each in (x, dt, z, B, C)), strict=True):
            own_x, own_dt, own_z, own_b, own_c = parts
            inputs = own_x, own_dt, -A.exp(), own_b, own_c
            piece, state = scan_from(state, mamba_selective_scan, *inputs, z=own_z, **settings)
            pieces.append(piece)
    assert state is not None
    torch.testing.assert_close(torch.cat(pieces, dim=-1), output, rtol=BOUND, atol=BOUND)
    torch.testing.assert_close(state, last, rtol=BOUND, atol=BOUND)
    leaves = [each for each in (x, dt, z, B, C, A, D, bias) if each is not None]
    weights = torch.randn(last.shape, generator=generator, dtype=torch.float64)

    def gradients(outputs: Tensor, after: Tensor) -> dict[str, Tensor]:
        total = outputs.square().sum() + (weights * after).sum()
        return dict(zip(map(str, range(9)), torch.autograd.grad(total, leaves), strict=False))

    assert gradient_error(gradients(output, last), gradients(torch.cat(pieces, dim=-1), state)) < BOUND
