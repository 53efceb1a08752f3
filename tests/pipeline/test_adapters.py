"""Adapters of PEFT have the gradients of the unsplit model and are exported as by PEFT, or are refused by name; stages
in which nothing is trained have no backward."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slipstream import Memory, Op, Pipeline, Precision, Schedule
from slipstream.model.added_adapter import quiet_peft
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
from support.options import grouped
from support.parameters import each_once, first_of
from support.pipelines import make_pipe
from support.refusals import refused


def make(model: Any, schedule: str = "zb-h1", **options: Any) -> Pipeline:
    stages = 2 if schedule == "zb-v" else 1
    arguments = {"num_microbatches": 2, "slices": SLICES, "num_ranks": 2, "stages_per_rank": stages} | options
    return make_pipe(model, schedule, **arguments)


OF_GPT2 = lora(target_modules=["c_attn", "c_proj"], bias="lora_only", lora_bias=True, fan_in_fan_out=True)
RANK_STABLE, ALL_LINEAR = {"bias": "all", "use_rslora": True}, {"target_modules": "all-linear"}
EXACT: dict[str, tuple[str, peft.PeftConfig, dict[str, Any]]] = {
    "1f1b": ("llama", lora(**RANK_STABLE), {"schedule": "1f1b"}),
    "zb-v": ("llama", lora(**RANK_STABLE), {"schedule": "zb-v"}),
    "recomputed, a layer in halves": ("llama", lora(**ALL_LINEAR), {"recompute": "full", "partition": [2.5, 1.5]}),
    "products kept, the embedding alone": (
        "llama",
        lora(**ALL_LINEAR),
        {"recompute": "selective", "partition": [0, 4]},
    ),
    "trained copies of both ends": ("llama", lora(modules_to_save=["lm_head", "embed_tokens"]), {}),
    "trained copies in halves": ("llama", lora(modules_to_save=["norm", "layernorm"]), {"partition": [1.5, 2.5]}),
    "both ends": ("llama", lora(target_modules=["q_proj", "lm_head", "embed_tokens"]), {}),
    "transposed weights": ("gpt2", OF_GPT2, {}),
    "fused experts": ("mixtral", lora(**ALL_LINEAR), {"schedule": "zb-v", "recompute": "full"}),
    "a frozen tied embedding": ("llama, tied", lora(), {}),
    "a spread vocabulary": ("llama", lora(), {"schedule": "1f1b", "vocabulary": "spread"}),
    # further ones
    "zb-h1": ("llama", lora(**RANK_STABLE), {}),
    "all linear layers": ("llama", lora(**ALL_LINEAR), {}),
    "recomputed, the embedding alone": ("llama", lora(**ALL_LINEAR), {"recompute": "full", "partition": [0, 4]}),
    "products kept, a layer in halves": (
        "llama",
        lora(**ALL_LINEAR),
        {"recompute": "selective", "partition": [2.5, 1.5]},
    ),
    "fused experts on a V": ("mixtral", lora(**ALL_LINEAR), {"schedule": "zb-v"}),
    "fused experts, recomputed": ("mixtral", lora(**ALL_LINEAR), {"recompute": "full"}),
}


@pytest.mark.parametrize("name", first_of(EXACT, 11))
def test_gradients_are_those_of_the_unsplit_model(name: str) -> None:
    """PEFT turns "all-linear" into target_parameters of the router and of the weights that hold all experts."""
    architecture, config, options = EXACT[name]
    model = adapted(config, architecture)
    loss, expected = whole_gradients(model)
    assert architecture != "mixtral" or sum("experts" in name for name in expected) == 4 * 4
    pipe = make(model, **options)
    assert pipe_error(pipe, expected) < BOUND
    assert abs(pipe.evaluate(tokens(), labels_of(tokens())) - loss) < 1e-6


_TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
EXPORTED: dict[str, tuple[str, peft.PeftConfig]] = {
    "a trained copy": ("llama", lora(modules_to_save=["lm_head"])),
    "fused experts": ("mixtral", lora(target_modules="all-linear")),
    "tied, dora": ("llama, tied", lora(use_dora=True)),
    "LoHa": ("llama", peft.LoHaConfig(r=4, **_TARGETS)),
    "LoKr": ("llama", peft.LoKrConfig(r=4, **_TARGETS)),
    "OFT": ("llama", peft.OFTConfig(r=0, oft_block_size=4, **_TARGETS)),
    "HRA": ("llama", peft.HRAConfig(r=4, **_TARGETS)),
    "IA3": ("llama", peft.IA3Config(feedforward_modules=["down_proj"], **_TARGETS)),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_adapter_and_merged_model_have_the_trained_logits(name: str, tmp_path: Path) -> None:
    """After a step whose gradients are those of the unsplit model."""
    architecture, config = EXPORTED[name]
    base, saved, merged = (tmp_path / each for each in ("base", "adapter", "merged"))
    build(ARCHITECTURES[architecture]).save_pretrained(base)
    model = adapted(config, architecture)
    config.base_model_name_or_path = str(base)
    whole, (_, gradients_of_all) = copy.deepcopy(model), whole_gradients(model)
    pipe = make(model)
    assert pipe_error(pipe, gradients_of_all) < BOUND
    with torch.no_grad():
        for _, parameter in pipe.named_parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    pipe.save_pretrained(saved)
    pipe.save_pretrained(merged, merged=True)
    trained = dict(pipe.state_dict())
    whole.get_base_model().load_state_dict(trained, strict=False)  # a tied weight has one name
    with torch.no_grad(), quiet_peft():
        expected = whole(input_ids=tokens()).logits
        loaded = PeftModel.from_pretrained(build(ARCHITECTURES[architecture]), saved, autocast_adapter_dtype=False)
        found = {
            "PeftModel": loaded,
            "AutoPeftModel": AutoPeftModelForCausalLM.from_pretrained(saved, dtype=torch.float64),
            "merged": AutoModelForCausalLM.from_pretrained(merged),
        }
        for what, each in found.items():
            each.set_experts_implementation("eager")  # the only one in float64
            torch.testing.assert_close(each(input_ids=tokens()).logits, expected, rtol=1e-6, atol=1e-6, msg=what)
        assert not torch.allclose(build(ARCHITECTURES[architecture])(input_ids=tokens()).logits, expected, atol=1e-3)
    assert json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert sorted(trained) == sorted(pipe.state_dict())
    assert all(torch.equal(trained[key], now) for key, now in pipe.state_dict().items())  # merging changed nothing


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
    with refused("requires_grad of model.embed_tokens.weight was False when"):
        pipe.step(tokens(), labels_of(tokens()))


def test_a_schedule_of_a_run_may_be_given_again() -> None:
    model = adapted(lora(layers_to_transform=[3]))
    _, expected = whole_gradients(model)
    text = str(make(model, "1f1b").layout.training)
    again = Schedule.parse(text)
    assert again.num_frozen_stages == 1
    pipe = make_pipe(adapted(lora(layers_to_transform=[3])), again, slices=SLICES)
    assert pipe_error(pipe, expected) < BOUND
    for name, parameter in pipe.named_parameters():
        parameter.requires_grad_(name == "model.embed_tokens.weight")
    with refused("requires_grad of model.embed_tokens.weight was False when"):
        pipe.step(tokens(), labels_of(tokens()))
    with refused("no backwards of its first 1 stages, but stage 0 has trained"):
        make_pipe(adapted(lora()), again, slices=SLICES)


def plain(config: peft.PeftConfig) -> Any:
    return peft.get_peft_model(build(ARCHITECTURES["llama"]).float(), config)


def with_two() -> Any:
    model = adapted(lora())
    model.add_adapter("second", lora())
    return model


def merged() -> Any:
    model = adapted(lora())
    model.merge_adapter()
    return model


_OF_A_TASK: dict[str, Any] = {"task_type": "CAUSAL_LM"}
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "PREFIX_TUNING": (lambda: plain(peft.PrefixTuningConfig(num_virtual_tokens=3, **_OF_A_TASK)), {}),
    "PROMPT_TUNING": (lambda: plain(peft.PromptTuningConfig(num_virtual_tokens=3, **_OF_A_TASK)), {}),
    "ADALORA": (lambda: plain(peft.AdaLoraConfig(total_step=10, **_TARGETS)), {}),
    "VERA": (lambda: plain(peft.VeraConfig(r=4, **_TARGETS)), {}),
    "init_lora_weights='pissa'": (lambda: plain(lora(init_lora_weights="pissa")), {}),
    "layer_replication": (lambda: plain(lora(layer_replication=[(0, 2), (1, 4)])), {}),
    "2 adapters, default, second; one can be trained": (with_two, {}),
    "'default' is merged": (merged, {}),
    "lm_head shares its weight with model.embed_tokens": (
        lambda: adapted(lora(target_modules=["lm_head"]), "llama, tied"),
        {},
    ),
    "lm_head has an adapter .. vocabulary='whole'": (
        lambda: adapted(lora(target_modules=["lm_head"])),
        {"schedule": "1f1b", "vocabulary": "spread"},
    ),
    "adapters (LORA) with parallel.shard='parameters'": (lambda: adapted(lora()), {"shard": "parameters"}),
}


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_exact_is_refused_by_name(words: str) -> None:
    model, options = REFUSED[words]
    with refused(words):
        make(model(), **options)


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


# --- adapters that were saved -----------------------------------------------------------------------------------------


SAVED = {  # by what is said of them; the architecture comes first
    "llama, copies": lora(use_rslora=True, modules_to_save=["lm_head", "norm"]),
    "llama, head": lora(target_modules=["q_proj", "lm_head"]),
    "llama, embedding": lora(target_modules=["q_proj", "embed_tokens"]),
    "llama, both ends": lora(target_modules=["embed_tokens", "lm_head"], r=2),
    "llama, ends by a pattern": lora(target_modules=r".*(q_proj|lm_head|embed_tokens)"),
    "llama, orthogonal": lora(init_lora_weights="orthogonal"),
    "llama, patterns": lora(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}, layers_to_transform=[0, 3]),
    "gpt2, dora": lora(target_modules=["c_attn", "c_proj"], bias="all", use_dora=True, fan_in_fan_out=True),
    "gpt2, head": lora(target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True),
    "mixtral, all linear": lora(target_modules="all-linear"),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_adapter_is_trained_further_as_peft_loads_it(name: str, tmp_path: Path) -> None:
    """Its weights and gradients, on stages of which each reads its own part; and what is saved again is the same."""
    base, folder, architecture = tmp_path / "base", tmp_path / "adapter", name.partition(",")[0]
    build(ARCHITECTURES[architecture]).save_pretrained(base)
    model = adapted(SAVED[name], architecture)
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        if architecture == "llama" and hasattr(end, "base_layer"):
            end.base_layer.weight.data += 0.1  # which PEFT saves along
    with quiet_peft(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")
        model.save_pretrained(folder)
    whole = build(ARCHITECTURES[architecture])
    with quiet_peft():
        loaded = PeftModel.from_pretrained(whole, str(folder), is_trainable=True, autocast_adapter_dtype=False)
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


def test_an_orthogonal_start_is_that_of_any_cut_and_changes_nothing(tmp_path: Path) -> None:
    build(ARCHITECTURES["llama"]).save_pretrained(tmp_path)
    ids, found = tokens(), []
    config = lora(target_modules=["q_proj", "lm_head", "embed_tokens"], init_lora_weights="orthogonal")
    for settings in ({"lora": config, "num_ranks": 1}, {"lora": config, "num_ranks": 2}, {}):
        pipe = Pipeline.from_pretrained(tmp_path, slices=2, precision=Precision(dtype=torch.float64), **settings)
        found.append((float(pipe.evaluate(ids, ids)), pipe.state_dict()))
    (first, state), (second, again), (base, _) = found
    assert first == pytest.approx(base, rel=1e-6)
    assert second == pytest.approx(first, rel=1e-12)
    assert all(torch.equal(each, again[name]) for name, each in state.items())
    factors = [state[f"model.layers.0.self_attn.q_proj.lora_{factor}.default.weight"] for factor in "AB"]
    assert all(factor.any() for factor in factors)
    with refused("init_lora_weights='orthogonal' with r=3 .. Give an even r"):
        Pipeline.from_pretrained(tmp_path, lora=lora(init_lora_weights="orthogonal", r=3))


def test_an_adapter_of_another_model_is_not_loaded(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    build(ARCHITECTURES["llama"]).save_pretrained(base)

    def assert_refused(words: str) -> None:
        with refused(words):
            Pipeline.from_pretrained(base, lora=folder)

    assert_refused("lora= .. /adapter has no adapter_config.json")
    adapted(lora(r=4)).save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    saved = load_file(file)
    name = next(name for name in saved if "lora_A" in name)
    for said, changed in {
        "lacks": {key: each for key, each in saved.items() if key != name},
        "has in addition": saved | {"base_model.model.more.lora_A.weight": torch.zeros(1)},
        "has in another shape": saved | {name: saved[name][:-1].clone()},
    }.items():
        save_file(changed, file)
        assert_refused(f"isn't an adapter of this model: it {said} base_model")
    file.write_bytes(file.read_bytes()[:-100])
    assert_refused("corrupt or truncated")
    plain(peft.IA3Config(feedforward_modules=["down_proj"], **_TARGETS)).save_pretrained(folder)
    assert_refused("by IA3; only one by LORA can be loaded")
