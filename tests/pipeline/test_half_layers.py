"""Stages that end inside a layer are exact, chosen where they balance the ranks, and refused by name elsewhere."""

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

from slipstream import Pipeline, SlipstreamError
from slipstream.model import LayerRange
from support.architectures import (
    ARCHITECTURES,
    LENGTH,
    VOCABULARY,
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


def assert_exact(model: PreTrainedModel, **settings: object) -> Pipeline:
    inputs = tokens()
    return exact_pipe(model, inputs, labels_of(inputs), **{"slices": SLICES, "num_microbatches": 2} | settings)


@pytest.mark.parametrize("name", first_of(CUT, 2))
def test_every_architecture_is_exact(name: str) -> None:
    pipe = assert_exact(build(ARCHITECTURES[name]), num_ranks=2, partition=[1.5, 2.5])
    assert pipe.layout.layers == (LayerRange(0, 1.5), LayerRange(1.5, 4))


@pytest.mark.parametrize("name", first_of(ARCHITECTURES, 2))
def test_stages_without_layers_are_exact(name: str) -> None:
    """The embedding alone, and the norm and the head alone."""
    assert_exact(build(ARCHITECTURES[name]), num_ranks=4, partition=[0, 2, 2, 0])


SCHEDULES = [
    ("1f1b", 1, [2.5, 1.5]),
    ("zb-h1", 1, [0.5, 3.5]),
    ("zb-v", 2, [0.5, 1, 1.5, 1]),
    ("zb-v", 2, [1.5, 1, 1, 0.5]),
    ("interleaved-1f1b", 2, [1.5, 0.5, 0.5, 1.5]),
    ("interleaved-1f1b", 2, [1, 1.5, 1.5, 0]),
    ("zb-v", 2, [0, 2, 2, 0]),
]


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "partition", "name"),
    each_once(SCHEDULES, ["llama", "llama, tied", "qwen3", "gpt2", "mixtral", "gemma2"], 4),
)
def test_every_schedule_is_exact(name: str, schedule: str, stages_per_rank: int, partition: list[float]) -> None:
    model = build(ARCHITECTURES[name])
    assert_exact(model, schedule=schedule, num_ranks=2, stages_per_rank=stages_per_rank, partition=partition)


def test_a_stage_for_every_half() -> None:
    pipe = assert_exact(build(llama(tie_word_embeddings=True)), num_ranks=8, partition=[0.5] * 8)
    held = [[name for name, _ in stage.named_parameters()] for stage in pipe._runtime.stages.values()]
    assert held[5] == [f"model.layers.2.{name}.weight" for name in MLP]
    assert sum(map(len, held)) == len([*build(llama()).named_parameters()])  # the tied embedding is on two


MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"]


LESS = [{"recompute": "full"}, {"recompute": "selective"}, {"recompute": 1}, {"recompute": 2}, {"offload": 0.7}]


@pytest.mark.parametrize(("less", "name"), each_once(LESS, ["llama, tied", "gpt2", "mixtral"], 3))
def test_less_memory_is_exact(name: str, less: dict[str, object]) -> None:
    assert_exact(build(ARCHITECTURES[name]), num_ranks=3, partition=[1.5, 1, 1.5], **less)


def test_half_a_layer_counts_as_one_that_is_recomputed() -> None:
    """Layers 1 (its second half), 2 and 3 of the second stage: of `recompute=2` the first two run again."""
    model = build(llama())
    pipe = make_pipe(model, "gpipe", slices=3, num_ranks=2, partition=[1.5, 2.5], recompute=2)
    runs = [0] * 4
    for index, layer in enumerate(pipe._runtime.stages[1].model.model.layers):

        def count(*_: object, index: int = index) -> None:
            runs[index] += 1

        layer.get_submodule("mlp").register_forward_pre_hook(count)
    pipe.step(tokens(), tokens())
    assert runs[1:] == [6, 6, 3]
    with pytest.raises(SlipstreamError, match="1 to 3 here"):
        make_pipe(model, num_ranks=2, partition=[1.5, 2.5], recompute=4)


@pytest.mark.parametrize("name", ["llama, tied", "gpt2"])
def test_embedding_and_head_are_where_the_partition_says(name: str) -> None:
    """And nowhere else, but for a tied head's weight; of a head alone nothing is run again for `recompute=1`."""
    pipe = assert_exact(build(ARCHITECTURES[name]), schedule="gpipe", num_ranks=3, partition=[0, 4, 0], recompute=1)
    held = [{key.split(".")[1] for key, _ in stage.named_parameters()} for stage in pipe._runtime.stages.values()]
    if name == "gpt2":
        assert held == [{"wte", "wpe"}, {"h"}, {"ln_f", "wte"}]
    else:
        assert held == [{"embed_tokens"}, {"layers"}, {"norm", "embed_tokens"}]


def test_a_head_of_its_own_is_not_recomputed_by_number() -> None:
    pipe = make_pipe(build(llama()), "gpipe", slices=3, num_ranks=2, partition=[4, 0], recompute=2)
    runs = []
    pipe._runtime.stages[1].model.lm_head.register_forward_pre_hook(lambda *_: runs.append(1))
    pipe.step(tokens(), tokens())
    assert len(runs) == 3


@st.composite
def partitions(draw: st.DrawFn) -> list[float]:
    halves = draw(st.sets(st.integers(1, 7), max_size=4))
    bounds = [0, *sorted(halves), 8]
    first, last = ([0.0] * draw(st.booleans()) for _ in range(2))  # an end of its own
    return [*first, *((b - a) / 2 for a, b in pairwise(bounds)), *last]


@pytest.mark.parametrize("name", first_of(["llama, tied", "gpt2", "qwen2_moe"]))
@examples(15, thin=3)
@given(data=st.data())
def test_any_partition_and_any_slices(name: str, data: st.DataObject) -> None:
    partition = data.draw(partitions())
    cuts = sorted(data.draw(st.sets(st.integers(1, LENGTH - 1), max_size=4)))
    slices = [b - a for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True)]
    schedule = data.draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
    recompute = data.draw(st.sampled_from(["none", "full", "selective", 1]))
    assert_exact(
        build(ARCHITECTURES[name]),
        schedule=schedule,
        slices=slices,
        num_ranks=len(partition),
        partition=partition,
        recompute=recompute,
    )


# --- to the bit -------------------------------------------------------------------------------------------------------


def step(model: PreTrainedModel, partition: list[float], **settings: object) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(7)
    settings = {"slices": SLICES, "num_microbatches": 2, "num_ranks": len(partition)} | settings
    pipe = make_pipe(copy.deepcopy(model), partition=partition, **settings)
    inputs = tokens(batch=4)
    return pipe.step(inputs, labels_of(inputs)), gradients(pipe)


@pytest.mark.more
@pytest.mark.parametrize("name", first_of(["gpt2", "phi3, longrope", "llama, tied", "mixtral"]))
def test_dropout_and_rounding_do_not_depend_on_the_cut(name: str) -> None:
    """In float32, whose rounding depends on the order of every sum."""
    model = build(with_dropout(name, 0.3)).float()
    expected = step(model, [4])
    for partition in ([1.5, 2.5], [0.5] * 8, [0, 1, 3, 0]):
        for recompute in ("none", "full") if partition == [1.5, 2.5] else ("none",):
            found = step(model, partition, recompute=recompute)
            assert torch.equal(found[0], expected[0])
            assert [key for key, each in expected[1].items() if not torch.equal(each, found[1][key])] == []


def test_autocast_does_not_depend_on_the_cut() -> None:
    model = build(llama()).float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = step(model, [2, 2]), step(model, [1.5, 2.5])
    assert torch.equal(found[0], expected[0])
    assert [key for key, each in expected[1].items() if not torch.equal(each, found[1][key])] == []


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "partition"), each_once(["llama, tied", "gpt2", "mixtral"], [[0.5, 2, 1.5], [0, 4, 0]], 2)
)
def test_weights_are_made_exported_and_read_again(name: str, partition: list[float], tmp_path: Path) -> None:
    config, settings = ARCHITECTURES[name], {"num_ranks": 3, "partition": partition, "self_check": False}
    torch.manual_seed(5)
    whole = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    pipe = Pipeline.from_config(config, seed=5, slices=4, **grouped(**settings))
    found = dict(pipe.named_parameters())
    assert {key: each.shape for key, each in whole.named_parameters()} == {
        key: each.shape for key, each in found.items()
    }
    assert all(torch.equal(each, found[key]) for key, each in whole.named_parameters())
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


def heavy_head(**changes: object) -> PretrainedConfig:
    """A head as heavy as a layer, whose feed-forward half is as heavy as its attention."""
    layer = 2 * (32 * 32 * 2 + 2 * 32 * 16)  # attention: queries and output, keys and values
    return llama(**{"vocab_size": layer // 32, "intermediate_size": layer // 2 // (3 * 32)} | changes)


def stages(config: PretrainedConfig, **settings: object) -> list[float]:
    pipe = make_pipe(AutoModelForCausalLM.from_config(config), slices=4, **settings)
    return [stage.stop - stage.start for stage in pipe.layout.layers]


def test_auto_cuts_a_layer_where_that_balances_a_heavy_head() -> None:
    assert stages(heavy_head(), num_ranks=2) == [2.5, 1.5]
    assert stages(heavy_head(num_hidden_layers=3), num_ranks=2) == [2, 1]  # already even
    first, second, third, last = stages(heavy_head(), num_ranks=2, schedule="zb-v", stages_per_rank=2)
    assert first + last + 1 == second + third  # a V: the first rank has both ends


def test_halves_are_those_of_the_code_that_is_there_now(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stages(heavy_head(), num_ranks=2) == [2.5, 1.5]

    def both_at_once(self: Any, hidden: Tensor, **settings: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden), **settings)
        return hidden + attended + self.mlp(self.post_attention_layernorm(hidden))

    monkeypatch.setattr(LlamaDecoderLayer, "forward", both_at_once)
    assert all(layers == int(layers) for layers in stages(heavy_head(), num_ranks=2))


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("interleaved-1f1b", (0, 1, 0, 1)), ("auto", (0, 1, 0, 1)), ("v-min", (0, 1, 1, 0)), ("auto-v", (0, 1, 1, 0))],
)
def test_auto_balances_ranks_and_not_stages(schedule: str, ranks: tuple[int, ...]) -> None:
    """Two stages a rank, four layers, and a head of two: even stages would leave a rank with 3.5."""
    cut = stages(heavy_head(vocab_size=384), num_ranks=2, schedule=schedule, stages_per_rank=2)
    of_rank = [sum(count for count, owner in zip(cut, ranks, strict=True) if owner == rank) for rank in (0, 1)]
    of_rank[ranks[-1]] += 2  # the head
    assert of_rank == [3, 3]


def test_auto_weighs_attention_where_it_knows_the_length() -> None:
    """By its weights the head is two layers; of long sequences, whose attention takes most, next to nothing."""
    config = llama(vocab_size=2 * (2 * (32 * 32 * 2 + 2 * 32 * 16)) // 32, num_hidden_layers=6)
    assert stages(config, num_ranks=2)[0] > 3
    assert stages(config, num_ranks=2, seq_len=10**6) == [3, 3]
    windows = llama(vocab_size=61, num_hidden_layers=6).to_dict() | {"sliding_window": 8, "model_type": "mistral"}
    assert stages(MistralConfig(**windows), num_ranks=2, seq_len=64) == [3, 3]


def test_given_slices_say_the_length() -> None:
    config = heavy_head()
    model = AutoModelForCausalLM.from_config(config)
    pipe = make_pipe(model, slices=[10**6 - 8, 8], num_ranks=2)
    assert [stage.stop - stage.start for stage in pipe.layout.layers] == [2, 2]


def test_auto_keeps_whole_layers_where_little_is_gained() -> None:
    config = llama(vocab_size=VOCABULARY)
    assert stages(config, num_ranks=2) == [2, 2]
    assert stages(heavy_head(num_hidden_layers=24), num_ranks=2) == [12.5, 11.5]  # instead of 13: 3.8 % less
    assert stages(heavy_head(num_hidden_layers=34), num_ranks=2) == [17, 17]  # 17.5 instead of 18 would be 2.8 %


def test_auto_keeps_whole_layers_where_they_cannot_be_cut() -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 64}
    assert stages(PhiConfig(vocab_size=256, **shape), num_ranks=2) == [2, 2]


def test_an_architecture_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(
        SlipstreamError, match=r"'gpt_neox' can't be cut inside layer 0 \(GPTNeoXLayer\).*whole numbers"
    ):
        Pipeline(build(ARCHITECTURES["gpt_neox"]), num_ranks=2, partition=[1.5, 2.5])
    assert_exact(build(ARCHITECTURES["gpt_neox"]), num_ranks=2, partition=[1, 3])


def test_an_inner_stage_has_layers() -> None:
    with pytest.raises(SlipstreamError, match=r"partition=\[2, 0, 2\].*the last 0, for the head alone"):
        make_pipe(build(llama()), num_ranks=3, partition=[2, 0, 2])


@pytest.mark.parametrize("partition", [[1.25, 2.75], [2.5, 2.5], [4, 0, 0], [5, -1], [1.5, 1.5, 1], [float("nan"), 2]])
def test_partitions_that_do_not_add_up_are_refused(partition: list[float]) -> None:
    message = r"2 stages of at least half a layer, in multiples of 0\.5 .*the head alone\), 4 layers in all"
    with pytest.raises(SlipstreamError, match=message):
        make_pipe(build(llama()), num_ranks=2, partition=partition)


def test_a_layer_that_is_not_its_architectures_is_refused() -> None:
    model = build(llama())
    model.model.layers[1].mlp = torch.nn.Linear(32, 32, dtype=torch.float64)
    with pytest.raises(SlipstreamError, match="mlp is a Linear, not a LlamaMLP"):
        make_pipe(model, num_ranks=2, partition=[1.5, 2.5])
