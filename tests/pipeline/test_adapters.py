"""Adapters of PEFT have the gradients of the unsplit model, or are refused by name; frozen stages have no backward."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import Memory, Op, Pipeline, SlipstreamError
from slipstream.model.adapters import quiet_peft
from support.adapters import PREFIX, SLICES, adapted, lora, pipe_error, whole_gradients
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.forked import launch
from support.options import grouped
from support.parameters import each_once, first_of
from support.paths import ROOT
from support.pipelines import make_pipe

_TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def make(model: Any, schedule: str = "zb-h1", **options: Any) -> Pipeline:
    stages = 2 if schedule == "zb-v" else 1
    arguments = {"num_microbatches": 2, "slices": SLICES, "num_ranks": 2, "stages_per_rank": stages} | options
    return make_pipe(model, schedule, **arguments)


@pytest.mark.parametrize("schedule", first_of(["1f1b", "zb-v", "zb-h1"], 2))
def test_lora_is_exact(schedule: str) -> None:
    model = adapted(lora(bias="all", use_rslora=True))
    loss, expected = whole_gradients(model)
    pipe = make(model, schedule)
    assert pipe_error(pipe, expected) < BOUND
    assert abs(pipe.evaluate(tokens(), labels_of(tokens())) - loss) < 1e-6


VARIANTS = {
    "dora": lora(use_dora=True),
    "all linear layers": lora(target_modules="all-linear"),
    "trained copies of both ends": lora(modules_to_save=["lm_head", "embed_tokens"]),
    "both ends": lora(target_modules=["q_proj", "lm_head", "embed_tokens"]),
    "IA3": peft.IA3Config(feedforward_modules=["down_proj"], **_TARGETS),
    "LoHa": peft.LoHaConfig(r=4, **_TARGETS),
    "LoKr": peft.LoKrConfig(r=4, **_TARGETS),
    "OFT": peft.OFTConfig(r=0, oft_block_size=4, **_TARGETS),
    "HRA": peft.HRAConfig(r=4, **_TARGETS),
}


@pytest.mark.parametrize("name", first_of(VARIANTS, 5))
def test_its_kin_are_exact(name: str) -> None:
    model = adapted(VARIANTS[name])
    _, expected = whole_gradients(model)
    assert pipe_error(make(model), expected) < BOUND


def test_gpt2_with_its_transposed_weights_is_exact() -> None:
    model = adapted(
        lora(target_modules=["c_attn", "c_proj"], bias="lora_only", lora_bias=True, fan_in_fan_out=True), "gpt2"
    )
    _, expected = whole_gradients(model)
    assert pipe_error(make(model), expected) < BOUND


@pytest.mark.parametrize(("schedule", "recompute"), each_once(["zb-v", "zb-h1"], ["full", "none"], 1))
def test_fused_experts_are_exact(schedule: str, recompute: str) -> None:
    """PEFT turns "all-linear" into target_parameters of the router and of the weights that hold all experts."""
    model = adapted(lora(target_modules="all-linear"), "mixtral")
    _, expected = whole_gradients(model)
    assert sum("experts" in name for name in expected) == 4 * 4
    assert pipe_error(make(model, schedule, recompute=recompute), expected) < BOUND


def test_a_tied_embedding_may_be_frozen() -> None:
    model = adapted(lora(), "llama, tied")
    _, expected = whole_gradients(model)
    assert pipe_error(make(model), expected) < BOUND


@pytest.mark.parametrize(("recompute", "partition"), each_once(["full", "selective"], [[2.5, 1.5], [0, 4]]))
def test_recomputation_and_other_cuts_are_exact(recompute: str, partition: list[float]) -> None:
    model = adapted(lora(target_modules="all-linear"))
    _, expected = whole_gradients(model)
    assert pipe_error(make(model, partition=partition, recompute=recompute), expected) < BOUND


def test_a_layer_with_trained_copies_may_be_cut_in_half() -> None:
    model = adapted(lora(modules_to_save=["norm", "layernorm"]))
    _, expected = whole_gradients(model)
    assert pipe_error(make(model, partition=[1.5, 2.5]), expected) < BOUND


def test_a_spread_vocabulary_is_exact() -> None:
    model = adapted(lora())
    _, expected = whole_gradients(model)
    assert pipe_error(make(model, "1f1b", vocabulary="spread"), expected) < BOUND


def test_a_head_with_an_adapter_is_not_spread() -> None:
    model = adapted(lora(target_modules=["lm_head"]))
    with pytest.raises(SlipstreamError, match=r"lm_head has an adapter.*vocabulary='whole'"):
        make(model, "1f1b", vocabulary="spread")


def test_dropout_is_the_same_on_any_ranks_and_when_it_is_recomputed() -> None:
    def trained(**options: Any) -> dict[str, torch.Tensor]:
        pipe = make(adapted(lora(lora_dropout=0.3)), **options)
        pipe.random_state = 5, 0
        pipe.step(tokens(), labels_of(tokens()))
        return gradients(pipe)

    one = trained(num_ranks=1, schedule="1f1b")
    for options in ({"recompute": "full", "partition": [1.5, 2.5]}, {"schedule": "zb-v"}):
        found = trained(**options)
        assert found.keys() == one.keys()
        assert all(torch.equal(found[name], one[name]) for name in one), options
    plain = make(adapted(lora()))
    plain.step(tokens(), labels_of(tokens()))
    assert not torch.equal(one[(name := next(iter(one)))], gradients(plain)[name])


@pytest.mark.parametrize(("schedule", "trained"), each_once(["gpipe", "1f1b", "zb-h2", "zb-v"], [[1, 3], [2], [3]], 2))
def test_the_backward_ends_at_the_lowest_trained_stage(schedule: str, trained: list[int]) -> None:
    model = adapted(lora(layers_to_transform=trained))
    _, expected = whole_gradients(model)
    pipe = make(model, schedule)
    assert pipe_error(pipe, expected) < BOUND
    lowest = next(g for g, owned in enumerate(pipe.layout.layers) if trained[0] in owned.layers)
    ran = pipe.timeline().spans
    backwards = {span.action.stage for span in ran if span.action.op in (Op.B, Op.I, Op.W, Op.SEND_B, Op.RECV_B)}
    assert min(backwards) == lowest
    assert lowest not in {span.action.stage for span in ran if span.action.op is Op.SEND_B}
    assert pipe_error(pipe, {name: 2 * found for name, found in expected.items()}) < BOUND


@pytest.mark.parametrize("memory", first_of([Memory(recompute="full"), Memory(offload=1.0), Memory(limit=1e9)], 2))
def test_what_is_kept_for_a_backward_that_does_not_come_is_not_kept(memory: Memory) -> None:
    model = adapted(lora(layers_to_transform=[3]))
    _, expected = whole_gradients(model)
    pipe = make(model, "1f1b", memory=memory)
    assert pipe_error(pipe, expected) < BOUND
    kept = {action.stage for action in pipe.layout.training.positions if action.op in (Op.R, Op.OFFLOAD)}
    assert kept <= {1}


def test_a_model_whose_parts_are_frozen_without_adapters() -> None:
    model = build(ARCHITECTURES["llama"])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    pipe = make(model, "1f1b")
    pipe.step(tokens(), labels_of(tokens()))
    assert [name for name, parameter in pipe.named_parameters() if parameter.grad is not None] == ["lm_head.weight"]
    assert float(pipe.clip_grad_norm_(1.0)) > 0
    assert pipe.layout.training.num_frozen_stages == 1
    for name, parameter in pipe.named_parameters():
        parameter.requires_grad_(name == "model.embed_tokens.weight")
    with pytest.raises(SlipstreamError, match=r"requires_grad of model.embed_tokens.weight was False when"):
        pipe.step(tokens(), labels_of(tokens()))


def test_a_schedule_of_a_run_may_be_given_again() -> None:
    model = adapted(lora(layers_to_transform=[3]))
    _, expected = whole_gradients(model)
    text = str(make(model, "1f1b").layout.training)
    assert "frozen stages: 1" in text
    from slipstream import Schedule

    again = Schedule.parse(text)
    pipe = make_pipe(adapted(lora(layers_to_transform=[3])), again, slices=SLICES)
    assert pipe_error(pipe, expected) < BOUND
    with pytest.raises(SlipstreamError, match="no backwards of its first 1 stages, but stage 0 has trained"):
        make_pipe(adapted(lora()), again, slices=SLICES)


REFUSED = {
    "PREFIX_TUNING": peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "PROMPT_TUNING": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "ADALORA": peft.AdaLoraConfig(total_step=10, **_TARGETS),
    "VERA": peft.VeraConfig(r=4, **_TARGETS),
    "init_lora_weights='pissa'": lora(init_lora_weights="pissa"),
    "layer_replication": lora(layer_replication=[(0, 2), (1, 4)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused_by_name(name: str) -> None:
    with pytest.raises(SlipstreamError, match=re.escape(name)):
        make(peft.get_peft_model(build(ARCHITECTURES["llama"]).float(), REFUSED[name]))


def test_an_adapter_of_a_tied_weight_is_refused() -> None:
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        tied = adapted(lora(target_modules=["lm_head"]), "llama, tied")
    with pytest.raises(SlipstreamError, match=r"lm_head shares its weight with model.embed_tokens"):
        make(tied)


def test_several_and_merged_adapters_are_refused() -> None:
    several = adapted(lora())
    several.add_adapter("second", lora())
    with pytest.raises(SlipstreamError, match="2 adapters, default, second; one can be trained"):
        make(several)
    merged = adapted(lora())
    merged.merge_adapter()
    with pytest.raises(SlipstreamError, match="'default' is merged"):
        make(merged)


def test_sharded_parameters_are_refused() -> None:
    with pytest.raises(SlipstreamError, match=r"adapters \(LORA\) with parallel.shard='parameters'"):
        make(adapted(lora()), shard="parameters")


def test_sequences_of_different_lengths_are_exact() -> None:
    lengths, inputs = (64, 21, 40), tokens(3)
    labels = inputs.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    for trained in (None, [3]):
        model = adapted(lora(layers_to_transform=trained))
        whole = copy.deepcopy(model)
        with no_rounding_inside():
            unsplit_step(whole, inputs, labels)
        expected = {name.removeprefix(PREFIX): each for name, each in gradients(whole).items()}
        pipe = make(model, "1f1b", slices=4)
        with no_rounding_inside():
            cut = [[row[:n] for row, n in zip(rows, lengths, strict=True)] for rows in (inputs, labels)]
            pipe.step(*cut)
        found = gradients(pipe)
        assert found.keys() == expected.keys()
        assert gradient_error(expected, found) < BOUND
        assert pipe.layout.training.num_frozen_stages == (0 if trained is None else 1)


def test_an_adapter_that_transformers_added_is_exact() -> None:
    model = build(ARCHITECTURES["llama"])
    model.add_adapter(lora(init_lora_weights="gaussian"))
    whole = copy.deepcopy(model)
    with no_rounding_inside():
        unsplit_step(whole, tokens(), labels_of(tokens()))
    assert pipe_error(make(model), gradients(whole)) < BOUND


SAVED = {
    "llama": lora(use_rslora=True, modules_to_save=["lm_head", "norm"]),
    "gpt2": lora(target_modules=["c_attn", "c_proj"], bias="all", use_dora=True, fan_in_fan_out=True),
    "mixtral": lora(target_modules="all-linear"),
}


@pytest.mark.parametrize("architecture", first_of(SAVED))
def test_a_saved_adapter_is_trained_further_as_peft_loads_it(architecture: str, tmp_path: Path) -> None:
    """Its weights and gradients, on stages of which each reads its own part; and what is saved again is the same."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    build(ARCHITECTURES[architecture]).save_pretrained(base)
    adapted(SAVED[architecture], architecture).save_pretrained(folder)
    whole = build(ARCHITECTURES[architecture])
    with quiet_peft():
        loaded = peft.PeftModel.from_pretrained(whole, str(folder), is_trainable=True, autocast_adapter_dtype=False)
    _, expected = whole_gradients(loaded)
    options = {"num_ranks": 2, "slices": SLICES, "num_microbatches": 2, "dtype": torch.float64, "self_check": False}
    pipe = Pipeline.from_pretrained(base, lora=folder, schedule="zb-h1", **grouped(**options))
    assert pipe.adapter is not None
    assert pipe.adapter.config.base_model_name_or_path == str(base)
    values = {name.removeprefix(PREFIX): each for name, each in loaded.named_parameters()}
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter, values[name]), name
    assert pipe_error(pipe, expected) < BOUND
    pipe.save_pretrained(tmp_path / "again")
    first, again = (load_file(place / "adapter_model.safetensors") for place in (folder, tmp_path / "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_an_adapter_of_another_model_is_not_loaded(tmp_path: Path) -> None:
    base = tmp_path / "base"
    build(ARCHITECTURES["llama"]).save_pretrained(base)
    with pytest.raises(SlipstreamError, match=r"lora=.*/adapter has no adapter_config.json"):
        Pipeline.from_pretrained(base, lora=tmp_path / "adapter")
    adapted(lora(r=4)).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    saved = load_file(file)
    name = next(name for name in saved if "lora_A" in name)
    for said, changed in {
        "lacks": {key: each for key, each in saved.items() if key != name},
        "has in addition": saved | {"base_model.model.more.lora_A.weight": torch.zeros(1)},
        "has in another shape": saved | {name: saved[name][:-1].clone()},
    }.items():
        save_file(changed, file)
        with pytest.raises(SlipstreamError, match=f"isn't an adapter of this model: it {said} base_model"):
            Pipeline.from_pretrained(base, lora=tmp_path / "adapter")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SlipstreamError, match="corrupt or truncated"):
        Pipeline.from_pretrained(base, lora=tmp_path / "adapter")
    peft.get_peft_model(build(ARCHITECTURES["llama"]), VARIANTS["IA3"]).save_pretrained(tmp_path / "other")
    with pytest.raises(SlipstreamError, match="by IA3; only one by LORA can be loaded"):
        Pipeline.from_pretrained(base, lora=tmp_path / "other")


@pytest.mark.more
def test_ranks_and_replicas_have_exact_gradients() -> None:
    result = launch(2, ROOT / "tests" / "workers" / "pipeline" / "adapters.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("exact: ") == 2 * 6
