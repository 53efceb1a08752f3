"""Parts of a model get what the whole gets: random weights, saved ones, tables and adapters."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MarianConfig, PegasusConfig, PretrainedConfig
from transformers.utils import logging

from slipstream import Pipeline, Runtime, SlipstreamError
from slipstream.model import (
    ModelEnd,
    check_saved_model,
    find_anatomy,
    load_config,
    meta_model,
    model_for_timing,
    pretrained_model,
    random_model,
    whole_pretrained_model,
)
from slipstream.model.added_adapter import add_adapter, quiet_peft
from support.adapters import lora
from support.architectures import ARCHITECTURES, build, llama
from support.forked import run_alone
from support.paths import WORKERS

PARTS = [[0], [1, 2], [3], [0, 3], [0, 1, 2, 3]]


def expected(config: PretrainedConfig, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    config = copy.deepcopy(config)
    return dict(AutoModelForCausalLM.from_config(config).named_parameters())


@pytest.mark.parametrize("layers", PARTS)
@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "mixtral", "gemma3"])
def test_random_parts_are_those_of_the_whole_model(name: str, layers: list[int]) -> None:
    config = ARCHITECTURES[name]
    whole = expected(config, seed=5)
    state = torch.get_rng_state()
    part = random_model(config, 5, find_anatomy(config), layers)
    assert torch.equal(state, torch.get_rng_state())
    found = dict(part.named_parameters())
    assert found
    for parameter_name, parameter in found.items():
        assert torch.equal(parameter, whole[parameter_name]), parameter_name


@pytest.mark.parametrize("kind", [MarianConfig, PegasusConfig])
@pytest.mark.parametrize("layers", [[0], [1]])
def test_tables_that_are_computed_and_copied_are_there(kind: type[PretrainedConfig], layers: list[int]) -> None:
    """Positions of these models are copied into a parameter from a table that has no name."""
    sizes = {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 48,
        "vocab_size": 99,
        "pad_token_id": 0,
    }
    config = kind(**sizes, max_position_embeddings=64, is_decoder=True, is_encoder_decoder=False)
    whole = expected(config, seed=5)
    found = dict(random_model(config, 5, find_anatomy(config), layers).named_parameters())
    assert found
    for name, parameter in found.items():
        assert torch.equal(parameter, whole[name]), name


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2"])
def test_the_parts_of_two_stages_are_all_there_is(name: str) -> None:
    config = ARCHITECTURES[name]
    parts = [
        dict(random_model(config, 0, find_anatomy(config), layers).named_parameters()) for layers in ([0, 1], [2, 3])
    ]
    assert set(parts[0]) | set(parts[1]) == set(expected(config, seed=0))
    shared = set(parts[0]) & set(parts[1])
    assert shared == ({"model.embed_tokens.weight"} if config.tie_word_embeddings and name != "gpt2" else shared)
    assert len(shared) == int(config.tie_word_embeddings)


@pytest.mark.parametrize("layers", PARTS)
@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "mixtral", "gemma3", "qwen2_moe"])
def test_a_model_to_time_has_the_same_parts(name: str, layers: list[int]) -> None:
    """Where and of which shape and dtype they are; every number is finite, and tied weights stay one."""
    config, state = ARCHITECTURES[name], torch.get_rng_state()
    wanted = random_model(config, 0, find_anatomy(config), layers, torch.bfloat16)
    found = model_for_timing(config, find_anatomy(config), layers, torch.device("cpu"), torch.bfloat16)
    assert torch.equal(state, torch.get_rng_state())
    shapes = [
        {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}
        for model in (wanted, found)
    ]
    assert shapes[0] == shapes[1]
    assert all(parameter.isfinite().all() and parameter.any() for parameter in found.parameters())
    expected_buffers, buffers = dict(wanted.named_buffers()), dict(found.named_buffers())
    assert expected_buffers.keys() == buffers.keys()
    assert all(torch.equal(buffer, expected_buffers[name]) for name, buffer in buffers.items())


def test_other_layers_take_no_memory() -> None:
    """One of twelve layers of 45 MB each: what is drawn for the others passes through scratch memory."""
    ended = run_alone(WORKERS / "model/loading.py")
    assert ended.returncode == 0, ended.stderr
    grown, own = map(int, ended.stdout.split())
    assert own > 40e6
    assert grown < 2 * own


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "mixtral", "qwen2_moe", "gpt_oss"])
def test_saved_parts_are_read_back(name: str, tmp_path: Path) -> None:
    config = ARCHITECTURES[name]
    torch.manual_seed(1)
    whole = AutoModelForCausalLM.from_config(config)
    whole.save_pretrained(tmp_path, max_shard_size="30KB")
    anatomy = find_anatomy(load_config(str(tmp_path)))
    wanted = dict(whole.named_parameters())
    for layers in PARTS:
        part = pretrained_model(str(tmp_path), load_config(str(tmp_path)), anatomy, layers)
        for parameter_name, parameter in part.named_parameters():
            assert torch.equal(parameter, wanted[parameter_name]), parameter_name


def save(folder: Path) -> Path:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    AutoModelForCausalLM.from_config(llama()).save_pretrained(folder)
    logging.set_verbosity(before)
    return folder / "model.safetensors"


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    weights = save(tmp_path)
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(SlipstreamError, match=r"model.safetensors is corrupt or truncated.*copy or download it again"):
        Pipeline.from_pretrained(tmp_path, runtime=Runtime(self_check=False))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    save(tmp_path).unlink()
    with pytest.raises(SlipstreamError, match=r"weights of .* can't be read"):
        Pipeline.from_pretrained(tmp_path, runtime=Runtime(self_check=False))


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"no model at .*nowhere"):
        Pipeline.from_pretrained(tmp_path / "nowhere")


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    AutoModelForCausalLM.from_config(llama()).model.save_pretrained(tmp_path)
    with pytest.raises(SlipstreamError, match=r"lacks 1 weights of 'llama', first 'lm_head.weight'"):
        Pipeline.from_pretrained(tmp_path, num_ranks=2, runtime=Runtime(self_check=False))


ADAPTERS = {
    "fused experts": ("mixtral", lora(target_modules="all-linear")),
    "copies of both ends": ("llama", lora(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])),
    "all biases": ("gpt2", lora(target_modules=["c_attn"], layers_to_transform=[1], bias="all", fan_in_fan_out=True)),
    "one layer and a copy": (
        "llama",
        lora(target_modules=["q_proj"], layers_to_transform=[1], modules_to_save=["model.norm"]),
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_parts_of_a_model_get_what_the_whole_gets(name: str, tmp_path: Path) -> None:
    config, adapter = ARCHITECTURES[ADAPTERS[name][0]], ADAPTERS[name][1]
    build(config).save_pretrained(tmp_path)
    anatomy = find_anatomy(config)

    def trained(parts: list[Any]) -> dict[str, torch.Tensor]:
        model = pretrained_model(str(tmp_path), config, anatomy, parts, torch.float64)
        add_adapter(model, meta_model(config), copy.deepcopy(adapter), seed=3)
        return {key: each for key, each in model.named_parameters() if each.requires_grad}

    whole = trained([ModelEnd.EMBEDDING, 0, 1, 2, 3, ModelEnd.HEAD])
    cut = [trained([ModelEnd.EMBEDDING, 0, 1]), trained([2, 3, ModelEnd.HEAD])]
    assert whole
    assert sorted(whole) == sorted(key for part in cut for key in part)
    assert all(torch.equal(whole[key], each) for part in cut for key, each in part.items())
    with quiet_peft():
        own = get_peft_model(build(config), copy.deepcopy(adapter), autocast_adapter_dtype=False).get_base_model()
    assert sorted(whole) == sorted(name for name, each in own.named_parameters() if each.requires_grad)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"modules_to_save": ["lm_haed"]}, r"no module 'lm_haed'.*lm_head"),
        ({"target_modules": ["q_prj"]}, r"q_prj.*q_proj"),
    ],
)
def test_names_that_match_nothing_are_refused(changes: dict[str, Any], said: str) -> None:
    config = ARCHITECTURES["llama"]
    with pytest.raises(SlipstreamError, match=said):
        add_adapter(meta_model(config), meta_model(config), lora(**changes), 0)


def test_a_copy_of_a_tied_weight_is_refused() -> None:
    config = ARCHITECTURES["llama, tied"]
    with pytest.raises(SlipstreamError, match=r"shares its weight with"):
        add_adapter(meta_model(config), meta_model(config), lora(modules_to_save=["lm_head"]), 0)


def in_two_files(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="30KB")


def without_a_file(folder: Path) -> None:
    in_two_files(folder)
    min(folder.glob("model-*.safetensors")).unlink()


def change_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    return make


def change_config(**settings: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return make


def cut_an_expert(state: dict[str, torch.Tensor]) -> None:
    name = next(name for name in state if "experts.1." in name)
    state[name] = state[name][:1].clone()


# The architecture, what is done to its folder, and words of the message.
WRONG_WEIGHTS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "another width": (
        "llama",
        change_config(intermediate_size=50),
        r"layers.0.mlp.down_proj.weight is \[32, 48\], and by config.json \[32, 50\], and so are 11 more. Take",
    ),
    "another width, in several files": (
        "llama",
        lambda folder: (in_two_files(folder), change_config(intermediate_size=50)(folder))[0],
        r"down_proj.weight is \[32, 48\], and by config.json \[32, 50\]",
    ),
    "fewer experts": ("mixtral", change_config(num_local_experts=3), r"experts.*is \[4, .*by config.json \[3, "),
    "an expert of another shape": (
        "mixtral",
        change_weights(cut_an_expert),
        r"experts.1.* is \[1, .*others of its kind",
    ),
    "a weight less": (
        "gpt2",
        change_weights(lambda state: state.__delitem__("transformer.h.1.mlp.c_fc.weight")),
        r"lacks 1 weights of 'gpt2', first 'transformer.h.1.mlp.c_fc.weight'",
    ),
    "more layers": ("llama", change_config(num_hidden_layers=5), r"lacks 9 weights of 'llama', first 'model.layers.4"),
    "a file less": ("llama", without_a_file, r"lacks 1 of the \d+ files of its weights, first model-00001-of-"),
}


@pytest.mark.parametrize("wrong", WRONG_WEIGHTS)
def test_weights_of_another_model_are_named(wrong: str, tmp_path: Path) -> None:
    """Their shapes and names are known from the files' headers, by a run's checks, a Pipeline and `generate` alike."""
    name, make, said = WRONG_WEIGHTS[wrong]
    build(ARCHITECTURES[name]).save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    assert check_saved_model(tmp_path, config) == ""
    make(tmp_path)
    if wrong == "more layers":  # a list with an entry by layer, which the architecture makes
        file = tmp_path / "config.json"
        file.write_text(
            json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "layer_types"})
        )
    config = load_config(str(tmp_path))
    with pytest.raises(SlipstreamError, match=said):
        check_saved_model(tmp_path, config)
    with pytest.raises(SlipstreamError, match=said):
        Pipeline.from_pretrained(tmp_path, runtime=Runtime(self_check=False))
    with pytest.raises(SlipstreamError):
        whole_pretrained_model(str(tmp_path))


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "mixtral", "qwen2_moe", "gpt_oss", "gemma3"])
def test_weights_that_are_right_pass_by_their_headers(name: str, tmp_path: Path) -> None:
    model = build(ARCHITECTURES[name])
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert check_saved_model(tmp_path, load_config(str(tmp_path))) == ""


def test_weights_that_are_not_read_are_named(tmp_path: Path) -> None:
    save(tmp_path)
    change_config(num_hidden_layers=2, layer_types=None)(tmp_path)
    said = check_saved_model(tmp_path, load_config(str(tmp_path)))
    assert "has 18 weights that a 'llama' of its config.json hasn't, first 'model.layers.2." in said
