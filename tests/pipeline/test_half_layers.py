"""Stages that end inside a layer are exact, and chosen where they balance the ranks."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, PhiConfig, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from slipstream import Pipeline
from support.architectures import (
    ARCHITECTURES,
    LENGTH,
    build,
    gradients,
    labels_of,
    llama,
    tokens,
    with_dropout,
)
from support.exact_steps import exact_pipe
from support.examples import examples
from support.options import grouped
from support.parameters import each_once, first_of
from support.pipelines import make_pipe

SLICES = [5, 30, 17, 12]
CUT = [name for name in ARCHITECTURES if name != "gpt_neox"]  # its branches run side by side
INSIDE: dict[str, Any] = {"partition": [1.5, 2.5]}
APART: dict[str, Any] = {"partition": [0, 2, 2, 0]}  # the embedding alone, and the norm and the head
# Of each architecture the one that is tried more often comes first.
CUTS = {name: (INSIDE, APART) if n % 2 else (APART, INSIDE) for n, name in enumerate(ARCHITECTURES)}
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "1f1b", "partition": [2.5, 1.5]},
    {"schedule": "zb-h1", "partition": [0.5, 3.5]},
    {"schedule": "zb-v", "stages_per_rank": 2, "partition": [0.5, 1, 1.5, 1]},
    {"schedule": "zb-v", "stages_per_rank": 2, "partition": [1.5, 1, 1, 0.5]},
    {"schedule": "interleaved-1f1b", "stages_per_rank": 2, "partition": [1.5, 0.5, 0.5, 1.5]},
    {"schedule": "interleaved-1f1b", "stages_per_rank": 2, "partition": [1, 1.5, 1.5, 0]},
    {"schedule": "zb-v", "stages_per_rank": 2, "partition": [0, 2, 2, 0]},
]
LESS = [{"recompute": "full"}, {"recompute": "selective"}, {"recompute": 1}, {"recompute": 2}, {"offload": 0.7}]


def assert_exact(model: PreTrainedModel, **settings: Any) -> Pipeline:
    inputs = tokens()
    settings = {"num_ranks": len(settings["partition"]) // settings.get("stages_per_rank", 1)} | settings
    pipe = exact_pipe(model, inputs, labels_of(inputs), **{"slices": SLICES, "num_microbatches": 2} | settings)
    assert layers_of(pipe) == settings["partition"]
    return pipe


def layers_of(pipe: Pipeline) -> list[float]:
    return [stage.stop - stage.start for stage in pipe.layout.layers]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        *first_of([(cut, name) for name, (cut, _) in CUTS.items()], 4),
        *first_of([(cut, name) for name, (_, cut) in CUTS.items() if name in CUT or cut is APART], 0, "grid"),
        *each_once(SCHEDULES, ["llama", "llama, tied", "qwen3", "gpt2", "mixtral", "gemma2"], 4),
        *each_once([{"partition": [1.5, 1, 1.5], **each} for each in LESS], ["llama, tied", "gpt2", "mixtral"], 3),
    ],
    ids=str,
)
def test_a_step_is_exact(name: str, settings: dict[str, Any]) -> None:
    assert_exact(build(ARCHITECTURES[name]), **settings)


def test_an_architecture_that_cannot_be_cut_inside_runs_in_whole_layers() -> None:
    assert_exact(build(ARCHITECTURES["gpt_neox"]), partition=[1, 3])


MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"]


def test_a_stage_for_every_half() -> None:
    pipe = assert_exact(build(llama(tie_word_embeddings=True)), partition=[0.5] * 8)
    held = [[name for name, _ in stage.named_parameters()] for stage in pipe._runtime.stages.values()]
    assert held[5] == [f"model.layers.2.{name}.weight" for name in MLP]
    assert sum(map(len, held)) == len([*build(llama()).named_parameters()])  # the tied embedding is on two


def runs_of(pipe: Pipeline, stage: int, name: str) -> int:
    """How often a part of a stage runs in a step."""
    runs = []
    handle = pipe._runtime.stages[stage].model.get_submodule(name).register_forward_pre_hook(lambda *_: runs.append(1))
    pipe.step(tokens(), tokens())
    handle.remove()
    return len(runs)


def test_half_a_layer_counts_as_one_that_is_recomputed() -> None:
    """Layers 1 (its second half), 2 and 3 of the second stage: of `recompute=2` the first two run again."""
    pipe = make_pipe(build(llama()), "gpipe", slices=3, num_ranks=2, partition=[1.5, 2.5], recompute=2)
    assert [runs_of(pipe, 1, f"model.layers.{layer}.mlp") for layer in (1, 2, 3)] == [6, 6, 3]


def test_a_head_of_its_own_is_not_recomputed_by_number() -> None:
    pipe = make_pipe(build(llama()), "gpipe", slices=3, num_ranks=2, partition=[4, 0], recompute=2)
    assert runs_of(pipe, 1, "lm_head") == 3


@pytest.mark.parametrize("name", ["llama, tied", "gpt2"])
def test_embedding_and_head_are_where_the_partition_says(name: str) -> None:
    """And nowhere else, but for a tied head's weight; of a head alone nothing is run again for `recompute=1`."""
    pipe = assert_exact(build(ARCHITECTURES[name]), schedule="gpipe", partition=[0, 4, 0], recompute=1)
    held = [{key.split(".")[1] for key, _ in stage.named_parameters()} for stage in pipe._runtime.stages.values()]
    if name == "gpt2":
        assert held == [{"wte", "wpe"}, {"h"}, {"ln_f", "wte"}]
    else:
        assert held == [{"embed_tokens"}, {"layers"}, {"norm", "embed_tokens"}]


@st.composite
def partitions(draw: st.DrawFn) -> list[float]:
    halves = draw(st.sets(st.integers(1, 7), max_size=4))
    bounds = [0, *sorted(halves), 8]
    first, last = ([0.0] * draw(st.booleans()) for _ in range(2))  # an end of its own
    return [*first, *((b - a) / 2 for a, b in pairwise(bounds)), *last]


@pytest.mark.parametrize("name", first_of(["llama, tied", "gpt2", "qwen2_moe"], 1, "grid"))
@examples(15, thin=3)
@given(data=st.data())
def test_any_partition_and_any_slices(name: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, LENGTH - 1), max_size=4)))
    assert_exact(
        build(ARCHITECTURES[name]),
        schedule=data.draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])),
        slices=[b - a for a, b in pairwise([0, *cuts, LENGTH])],
        partition=data.draw(partitions()),
        recompute=data.draw(st.sampled_from(["none", "full", "selective", 1])),
    )


# --- to the bit -------------------------------------------------------------------------------------------------------


def assert_same_bits(model: PreTrainedModel, whole: list[float], *cuts: dict[str, Any]) -> None:
    """In float32, whose rounding depends on the order of every sum."""
    inputs, found = tokens(batch=4), list[tuple[Tensor, dict[str, Tensor]]]()
    for cut in ({"partition": whole}, *cuts):
        torch.manual_seed(7)
        options = {
            "schedule": "1f1b",
            "slices": SLICES,
            "num_microbatches": 2,
            "num_ranks": len(cut["partition"]),
        } | cut
        pipe = make_pipe(copy.deepcopy(model), **options)
        found.append((pipe.step(inputs, labels_of(inputs)), gradients(pipe)))
        assert torch.equal(found[-1][0], found[0][0]), cut
        assert [key for key, each in found[0][1].items() if not torch.equal(each, found[-1][1][key])] == [], cut


@pytest.mark.more
@pytest.mark.parametrize("name", first_of(["gpt2", "mixtral", "phi3, longrope", "llama, tied"], 2, "grid"))
def test_dropout_and_rounding_do_not_depend_on_the_cut(name: str) -> None:
    again = INSIDE | {"recompute": "full"}
    others = [{"partition": partition} for partition in ([0.5] * 8, [0, 1, 3, 0])]
    assert_same_bits(build(with_dropout(name, 0.3)).float(), [4], INSIDE, again, *others)


def test_autocast_does_not_depend_on_the_cut() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(build(llama()).float(), [2, 2], INSIDE)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "partition"), each_once(["llama, tied", "gpt2", "mixtral"], [[0.5, 2, 1.5], [0, 4, 0]], 2)
)
def test_weights_are_made_exported_and_read_again(name: str, partition: list[float], tmp_path: Path) -> None:
    config, settings = ARCHITECTURES[name], {"num_ranks": 3, "partition": partition, "self_check": False}
    torch.manual_seed(5)
    whole = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    pipe = Pipeline.from_config(config, seed=5, slices=4, **grouped(**settings))
    made, expected = dict(pipe.named_parameters()), dict(whole.named_parameters())
    assert made.keys() == expected.keys()
    assert all(torch.equal(each, made[key]) for key, each in expected.items())
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    pipe.step(tokens(), tokens())
    optimizer.step()
    pipe.save_pretrained(tmp_path)
    trained = {key: each.detach().clone() for key, each in pipe.named_parameters()}
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    again = dict(Pipeline.from_pretrained(tmp_path, slices=4, **grouped(**settings)).named_parameters())
    assert exported.keys() == again.keys() == trained.keys()
    assert all(torch.equal(each, exported[key]) and torch.equal(each, again[key]) for key, each in trained.items())


# --- which layers are cut ---------------------------------------------------------------------------------------------


LAYER = 2 * (32 * 32 * 2 + 2 * 32 * 16)  # weights of attention: queries and output, keys and values; as many besides


def heavy_head(**changes: object) -> PretrainedConfig:
    """A head as heavy as a layer, whose feed-forward half is as heavy as its attention."""
    return llama(**{"vocab_size": LAYER // 32, "intermediate_size": LAYER // 2 // (3 * 32)} | changes)


def stages(config: PretrainedConfig, **settings: object) -> list[float]:
    return layers_of(
        make_pipe(
            AutoModelForCausalLM.from_config(config), **{"schedule": "1f1b", "slices": 4, "num_ranks": 2} | settings
        )
    )


LONG = llama(vocab_size=2 * LAYER // 32, num_hidden_layers=6)  # by its weights the head is two layers
WINDOWS = llama(vocab_size=61, num_hidden_layers=6).to_dict() | {"sliding_window": 8, "model_type": "mistral"}
PHI = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("config", "settings", "chosen"),
    [
        (heavy_head(), {}, [2.5, 1.5]),
        (heavy_head(num_hidden_layers=3), {}, [2, 1]),  # already even
        (llama(), {}, [2, 2]),
        (heavy_head(num_hidden_layers=24), {}, [12.5, 11.5]),  # instead of 13: 3.8 % less
        (heavy_head(num_hidden_layers=34), {}, [17, 17]),  # 17.5 instead of 18 would be 2.8 %
        (PhiConfig(vocab_size=256, **PHI), {}, [2, 2]),  # can't be cut inside layers
        (LONG, {"seq_len": 10**6}, [3, 3]),  # of long sequences attention takes most, and the head next to nothing
        (heavy_head(), {"slices": [10**6 - 8, 8]}, [2, 2]),  # given slices say the length
        (MistralConfig(**WINDOWS), {"seq_len": 64}, [3, 3]),
    ],
    ids=["heavy head", "even", "light head", "much gained", "little gained", "phi", "long", "slices", "windows"],
)
def test_auto_cuts_a_layer_where_that_balances(
    config: PretrainedConfig, settings: dict[str, Any], chosen: list[float]
) -> None:
    assert stages(config, **settings) == chosen


def test_without_a_length_weights_alone_count() -> None:
    assert stages(LONG)[0] > 3


def test_on_a_v_the_first_rank_has_both_ends() -> None:
    first, second, third, last = stages(heavy_head(), schedule="zb-v", stages_per_rank=2)
    assert first + last + 1 == second + third


def test_halves_are_those_of_the_code_that_is_there_now(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stages(heavy_head()) == [2.5, 1.5]

    def both_at_once(self: Any, hidden: Tensor, **settings: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden), **settings)
        return hidden + attended + self.mlp(self.post_attention_layernorm(hidden))

    monkeypatch.setattr(LlamaDecoderLayer, "forward", both_at_once)
    assert all(layers == int(layers) for layers in stages(heavy_head()))


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("interleaved-1f1b", (0, 1, 0, 1)), ("auto", (0, 1, 0, 1)), ("v-min", (0, 1, 1, 0)), ("auto-v", (0, 1, 1, 0))],
)
def test_auto_balances_ranks_and_not_stages(schedule: str, ranks: tuple[int, ...]) -> None:
    """Two stages a rank, four layers, and a head of two: even stages would leave a rank with 3.5."""
    cut = stages(heavy_head(vocab_size=384), schedule=schedule, stages_per_rank=2)
    of_rank = [sum(count for count, owner in zip(cut, ranks, strict=True) if owner == rank) for rank in (0, 1)]
    of_rank[ranks[-1]] += 2  # the head
    assert of_rank == [3, 3]
