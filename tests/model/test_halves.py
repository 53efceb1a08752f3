"""Layers are cut between attention and feed-forward where the architecture allows it, and refused by name elsewhere."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoXConfig, OPTConfig, PhiConfig, PretrainedConfig
from transformers.models.llama import modeling_llama

from slipstream import SlipstreamError
from slipstream.model import (
    HalfLayer,
    LayerHalf,
    LayerRange,
    ModelAnatomy,
    ModelEnd,
    find_anatomy,
    find_halves,
    halves_or_none,
    pretrained_model,
    random_model,
)
from slipstream.model.cutting import ZeroBranch, keep_half
from support.architectures import ARCHITECTURES, llama

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CUT = {name: config for name, config in ARCHITECTURES.items() if name != "gpt_neox"}  # its branches run side by side


def halves_of(config: PretrainedConfig) -> dict[str, LayerHalf]:
    return {part.name: part.half for part in find_halves(config, find_anatomy(config))}


def with_halves(config: PretrainedConfig) -> ModelAnatomy:
    anatomy = find_anatomy(config)
    return replace(anatomy, halves=find_halves(config, anatomy))


def test_ranges_hold_whole_layers_and_halves_at_their_ends() -> None:
    first, second = (
        (lambda layer: HalfLayer(layer, LayerHalf.ATTENTION)),
        (lambda layer: HalfLayer(layer, LayerHalf.FEED_FORWARD)),
    )
    assert [*LayerRange(1, 3)] == [1, 2]
    assert [*LayerRange(3.5, 6)] == [second(3), 4, 5]
    assert [*LayerRange(0, 1.5)] == [0, first(1)]
    assert [*LayerRange(2, 2.5)] == [first(2)]
    assert [*LayerRange(0.5, 1.0)] == [second(0)]
    assert LayerRange(0.5, 3.5).layers == range(0, 4)
    assert [*LayerRange(0, 0)] == [ModelEnd.EMBEDDING]
    assert [*LayerRange(4, 4)] == [ModelEnd.HEAD]
    assert not LayerRange(4, 4).layers


def test_a_configuration_that_was_saved_is_not_tried_again(tmp_path: Path) -> None:
    """Where a run's preflight tries it as given, the pipeline's is read from the run's folder."""
    given = llama(num_hidden_layers=5)
    given.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert find_anatomy(read) is find_anatomy(given)
    assert halves_or_none(read, find_anatomy(read)) is halves_or_none(given, find_anatomy(given)) != ()


@pytest.mark.parametrize("name", CUT)
def test_the_parts_of_every_architecture(name: str) -> None:
    found = halves_of(CUT[name])
    attends = [part for part, half in found.items() if half is LayerHalf.ATTENTION]
    assert {"self_attn", "attn"} & set(attends)
    assert {"mlp", "feed_forward"} & (set(found) - set(attends))
    if name in ("gemma2", "gemma3", "olmo2"):  # their norms are behind the branches
        assert "post_attention_layernorm" in attends


def test_layers_of_linear_layers_without_a_block_around_them() -> None:
    found = halves_of(OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32))
    assert [part for part, half in found.items() if half is LayerHalf.FEED_FORWARD] == [
        "final_layer_norm",
        "fc1",
        "fc2",
    ]


def test_residual_branches_one_after_the_other_are_cut_wherever_a_switch_says_so() -> None:
    assert halves_of(GPTNeoXConfig(**SMALL, use_parallel_residual=False))["mlp"] is LayerHalf.FEED_FORWARD


@pytest.mark.parametrize(
    ("config", "layer"), [(GPTNeoXConfig(**SMALL), "GPTNeoXLayer"), (PhiConfig(**SMALL), "PhiDecoderLayer")]
)
def test_branches_side_by_side_are_refused_by_name(config: PretrainedConfig, layer: str) -> None:
    with pytest.raises(SlipstreamError, match=rf"inside layer 0 \({layer}\).*same input.*Give whole numbers of layers"):
        halves_of(config)


def test_a_scale_over_both_halves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1 in a new model, which would hide it."""

    def scale(self: nn.Module, hidden_states: Tensor, **kwargs: object) -> Tensor:
        return forward(self, hidden_states, **kwargs) * self.scale

    def construct(self: nn.Module, *args: object, **kwargs: object) -> None:
        build(self, *args, **kwargs)
        self.scale = nn.Parameter(torch.ones(1))

    layer = modeling_llama.LlamaDecoderLayer
    forward, build = layer.forward, layer.__init__
    monkeypatch.setattr(layer, "forward", scale)
    monkeypatch.setattr(layer, "__init__", construct)
    with pytest.raises(SlipstreamError, match=r"layer 0 \(LlamaDecoderLayer\): scale belongs to the layer itself"):
        halves_of(llama())


def test_a_norm_over_the_residual_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that both branches start from."""

    def normalised(self: nn.Module, hidden_states: Tensor, **kwargs: object) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        hidden_states = normed + self.self_attn(normed, **kwargs)[0]
        return normed + self.mlp(self.post_attention_layernorm(hidden_states))

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", normalised)
    with pytest.raises(SlipstreamError, match=r"layer 0 \(LlamaDecoderLayer\): attention first"):
        halves_of(llama())


def test_placeholders_leave_the_residual_stream_as_it_is_to_the_bit() -> None:
    model = AutoModelForCausalLM.from_config(llama())
    layer, parts = model.model.layers[0], with_halves(llama()).halves
    keep_half(layer, parts, LayerHalf.ATTENTION)
    assert isinstance(layer.mlp, ZeroBranch)
    hidden = torch.tensor([0.0, -0.0, 1e-45, -3.5])
    found = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    assert torch.equal(found.view(torch.int32), hidden.view(torch.int32))  # -0.0 too, which equal() takes for 0.0


PARTS = [
    [HalfLayer(0, LayerHalf.ATTENTION)],
    [*LayerRange(0.5, 2.5)],
    [*LayerRange(2.5, 4)],
    [*LayerRange(0, 1.5), *LayerRange(2.5, 4)],
    [*LayerRange(0, 1.5), *LayerRange(1.5, 2)],
]


@pytest.mark.parametrize("owned", PARTS)
@pytest.mark.parametrize("name", ["llama, tied", "gpt2", "mixtral", "gemma3"])
def test_parts_are_those_of_the_whole_model(name: str, owned: list[int | HalfLayer], tmp_path: Path) -> None:
    config, anatomy = ARCHITECTURES[name], with_halves(ARCHITECTURES[name])
    torch.manual_seed(5)
    whole = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    wanted = dict(whole.named_parameters())
    whole.save_pretrained(tmp_path)
    expected = {name for name in wanted if _belongs(name, owned, anatomy)}
    for part in (random_model(config, 5, anatomy, owned), pretrained_model(str(tmp_path), config, anatomy, owned)):
        found = dict(part.named_parameters())
        assert set(found) == expected
        assert all(torch.equal(parameter, wanted[key]) for key, parameter in found.items())


def _belongs(parameter: str, owned: list[int | HalfLayer], anatomy: ModelAnatomy) -> bool:
    """Whether a parameter is in `owned`, by its name alone."""
    is_first, is_last = (
        {0, HalfLayer(0, LayerHalf.ATTENTION)} & {*owned},
        {3, HalfLayer(3, LayerHalf.FEED_FORWARD)} & {*owned},
    )
    if parameter.startswith(f"{anatomy.layers}."):
        layer, child = parameter.removeprefix(f"{anatomy.layers}.").split(".")[:2]
        half = next(part.half for part in anatomy.halves if part.name == child)
        return bool({int(layer), HalfLayer(int(layer), half)} & {*owned})
    if parameter.startswith(anatomy.before):
        return bool(is_first or (is_last and parameter in dict(anatomy.tied).values()))
    return bool(is_last)


def test_the_callers_random_state_stays() -> None:
    config = copy.deepcopy(ARCHITECTURES["gpt2"])
    config.resid_pdrop = config.attn_pdrop = 0.3
    state = torch.get_rng_state()
    halves_of(config)
    assert torch.equal(state, torch.get_rng_state())
