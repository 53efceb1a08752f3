"""A step in slices is exact in a sample of transformers' architectures, each with a feature that the others don't have.

`python -m benchmarks.zoo` tries them all.
"""

from __future__ import annotations

from itertools import chain
from math import inf
from typing import NamedTuple

import pytest
import transformers
from benchmarks.zoo.families import default_config
from benchmarks.zoo.outcomes import DEFAULTS, Verdict
from benchmarks.zoo.trial import try_out
from benchmarks.zoo.variants import alone, tiny_config, variants
from packaging.version import Version

from slipstream.model import SelfCheck
from support.parameters import first_of
from support.versions import since


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


# Of these `make test` checks the same feature, by the self-check and against the unsplit model: see test_exactness.
ELSEWHERE = {"gemma2", "gpt2", "gpt_oss", "llama", "llama4_text", "phi3"}
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


@pytest.mark.more
@since("5.21")
def test_a_wrong_slice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the self-check passed over, a state that goes back without its gradient shows as silently wrong."""
    monkeypatch.setattr("slipstream.attention.store._add_gradient", lambda *_: None)
    passed = SelfCheck("lfm2", 4, output_error=0.0, gradient_error=0.0, seconds=0.0, longest_packed=inf)
    monkeypatch.setattr("benchmarks.zoo.trial.check_sliceable", lambda _: passed)
    config = tiny_config(default_config("lfm2"))
    assert try_out(DEFAULTS, config, "first").verdict is Verdict.WRONG
