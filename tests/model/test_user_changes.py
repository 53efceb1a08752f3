"""A given model stays the user's: its changes are named and tried, and what is elsewhere takes no memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slipstream import Pipeline, SlipstreamError
from slipstream.model import find_anatomy
from slipstream.model.cutting import EmptyEmbedding, PassThrough
from slipstream.model.module_copies import copy_with_shared_weights
from slipstream.model.self_check.change_trial import TrialResult, try_changes
from slipstream.model.user_changes import compare_with_config
from slipstream.profile.stage_bench import LiveMemory
from support.architectures import ARCHITECTURES, llama


def made(name: str = "llama") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(ARCHITECTURES[name])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_that_was_only_made_has_no_changes(name: str) -> None:
    model = made(name)
    found = compare_with_config(model)
    assert (found.changes, found.shared, found.renumbered, found.gradient_hooks) == ((), (), (), ())
    with torch.no_grad():
        model(input_ids=torch.arange(1, 41)[None])
    assert compare_with_config(model).changes == ()


def test_changes_are_named() -> None:
    model = made()
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)
    model.model.layers[1].mlp.act_fn = nn.ReLU()
    model.model.layers[1].self_attn.scaling = 0.5
    model.lm_head.forward = lambda x: x
    model.model.norm.weight.register_hook(lambda gradient: gradient)
    found = compare_with_config(model)
    assert set(map(str, found.changes)) == {
        "model.layers.0 has a forward hook",
        "model.layers.1.mlp.act_fn is a ReLU, not a SiLUActivation",
        f"model.layers.1.self_attn has scaling=0.5, not {made().model.layers[1].self_attn.scaling}",
        "lm_head has a forward of its own",
    }
    assert found.gradient_hooks == ("model.norm.weight",)


def test_the_configuration_follows_the_model() -> None:
    model = made()
    del model.model.layers[0]
    model.lm_head.weight = model.model.embed_tokens.weight
    found = compare_with_config(model)
    assert found.config.num_hidden_layers == len(model.model.layers)
    assert found.config.tie_word_embeddings
    assert not model.config.tie_word_embeddings
    assert found.renumbered[0] == "model.layers.0.self_attn"


def test_more_layers_than_run_are_refused() -> None:
    model = made()
    model.model.layers.append(nn.Identity())
    with pytest.raises(
        SlipstreamError, match=r"its configuration says num_hidden_layers=\d.*Remove the others, or set"
    ):
        Pipeline(model)


def test_what_a_wrapped_forward_calls_is_the_copys() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = model[0].forward
    model[0].forward = lambda x: 2 * first(model[1](x))
    copied = copy_with_shared_weights(model)
    copied[1] = nn.Identity()
    x = torch.ones(1, 2)
    assert torch.equal(copied[0](x), 2 * nn.Linear.forward(model[0], x))
    functions = [copied[0].forward.__closure__[0].cell_contents, copied[0].forward.__closure__[1].cell_contents]
    assert functions[0].__self__ is copied[0]
    assert functions[1] is copied


@pytest.mark.parametrize(
    ("function", "mixes"),
    [
        (lambda output: output * 1.1, ""),
        (lambda output: output + 0.1 * output.cumsum(1), "mixes tokens"),
        (lambda output: output + 1e-9 * output.mean(1, keepdim=True), "mixes tokens"),
        (lambda output: output / output.detach().abs().max(), "mixes the sequences"),
        (lambda output: output + output.flip(0), "mixes the sequences"),
        (lambda output: output + torch.arange(output.shape[1], dtype=output.dtype)[:, None], "another way"),
        (lambda output: output * output.shape[0], "another way"),
        (lambda output: output + torch.rand_like(output), "draws random numbers"),
        (lambda output: output[:, :0], "trying it failed"),
    ],
)
@pytest.mark.parametrize("place", ["model.layers.1.mlp", "model.norm"])
def test_what_a_hook_mixes_is_found(place: str, function: Any, mixes: str) -> None:
    model = AutoModelForCausalLM.from_config(llama())
    model.get_submodule(place).register_forward_hook(lambda module, args, output: function(output))
    found = compare_with_config(model)
    result = try_changes(found, model, find_anatomy(found.config), packs=True)
    reasons = " ".join((result.tokens, result.rows, result.again))
    assert mixes in reasons if mixes else not reasons.strip()


def test_each_changed_layer_is_tried() -> None:
    model = AutoModelForCausalLM.from_config(llama())
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + 0.1 * output.cumsum(1))
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output + output.flip(0))
    found = compare_with_config(model)
    result = try_changes(found, model, find_anatomy(found.config), packs=True)
    assert "layers.0.mlp has a forward hook, which mixes tokens" in result.tokens
    assert "layers.1.mlp has a forward hook, which mixes the sequences" in result.rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_copies_a_large_layer_once(dtype: torch.dtype) -> None:
    """In float32, in which large layers are compared; of one that has this dtype, what gets noise alone."""
    sizes = {"hidden_size": 1152, "intermediate_size": 1152, "num_hidden_layers": 1, "head_dim": 288}
    config = llama(**sizes, num_attention_heads=4, num_key_value_heads=4)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 1.1)
    found = compare_with_config(model)
    size = sum(each.numel() for each in model.model.layers[0].parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with LiveMemory(model.state_dict().values()) as memory:
        held = memory.num_bytes
        result = try_changes(found, model, find_anatomy(found.config), packs=True, most_in_float64=1 << 20)
        assert result == TrialResult()
    copied = 4 * size if dtype == torch.bfloat16 else 0
    one_weight = 4 * 1152**2
    assert 0.9 * copied < memory.peak - held < copied + 2 * one_weight
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_function_that_assigns_a_global_and_knows_modules_by_another_is_refused() -> None:
    model = made()
    script = """
def forward(inputs):
    global calls
    calls = 1
    return inner(inputs)

inner = model.model.layers[0].mlp.forward
model.model.layers[0].mlp.forward = forward
"""
    exec(script, {"model": model})
    with pytest.raises(SlipstreamError, match="forward, which the model calls, assigns the global calls and reads"):
        Pipeline(model)


def test_a_global_that_changes_later_is_the_functions() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = {"model": model, "inner": model[0].forward, "factor": 2.0}
    exec("model[0].forward = lambda x: factor * inner(model[1](x)) + max(0, 0)", names)
    copied = copy_with_shared_weights(copy_with_shared_weights(model))
    copied[1] = nn.Identity()
    names["factor"] = 3.0
    x = torch.ones(1, 2)
    assert torch.equal(copied[0](x), 3 * nn.Linear.forward(model[0], x))


def empty_embedding() -> EmptyEmbedding:
    return EmptyEmbedding(nn.Embedding(7, 4), 4, torch.float64, torch.device("cpu"))


def takes_memory(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.element_size()


def test_an_embedding_elsewhere_takes_no_memory() -> None:
    embedding, ids = empty_embedding(), torch.zeros(2, 5, dtype=torch.int64)
    first, second, third = (embedding(ids) for _ in range(3))
    assert first.shape == second.shape == third.shape == (2, 5, 4)
    assert not takes_memory(second)
    assert not takes_memory(third)


def test_an_embedding_elsewhere_may_be_changed_in_place() -> None:
    embedding, ids = empty_embedding(), torch.zeros(2, 5, dtype=torch.int64)
    for _ in range(3):
        found = embedding(ids)
        found += 1
        assert torch.equal(found, torch.ones_like(found))


class Layer(nn.Module):
    """A layer off which a model may read attributes of its class and of its parts."""

    attention_type = "sliding_attention"

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Module()
        self.mixer.num_patches = 9
        self.mixer.adapters = nn.ModuleDict({"en": nn.Linear(2, 2), "de": nn.Linear(2, 2)})
        self.mixer.blocks = nn.ModuleList([nn.Dropout(0.25), nn.Linear(3, 2)])


def test_a_layer_elsewhere_keeps_what_models_read_off_its_parts() -> None:
    layer = copy.deepcopy(PassThrough(Layer()))
    assert layer.attention_type == "sliding_attention"
    assert layer.mixer.num_patches == 9
    assert list(layer.mixer.adapters.keys()) == ["en", "de"]
    assert [layer.mixer.blocks[0].p, layer.mixer.blocks[1].in_features] == [0.25, 3]


def test_a_layer_elsewhere_has_no_parts_that_run() -> None:
    layer = PassThrough(Layer())
    assert list(layer.children()) == list(layer.parameters()) == []
    with pytest.raises(NotImplementedError):
        layer.mixer.blocks[1](torch.zeros(3))
