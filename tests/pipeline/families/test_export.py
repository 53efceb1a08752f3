"""What is exported is read back with the trained logits, and keeps what lay beside the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from slipstream import Pipeline, SlipstreamError
from support.adapters import lora
from support.architectures import ARCHITECTURES, build, tokens
from support.hybrids import HYBRIDS
from support.options import grouped
from support.parameters import first_of
from support.pipelines import make_pipe

MODELS = ARCHITECTURES | HYBRIDS


class Adapted(nn.Module):
    """A linear layer with an adapter beside it, under the names that PEFT gives them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.lora_B = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base_layer(hidden) + self.lora_B(self.lora_A(hidden))


HOW = {"eos_token_id": [5, 9], "temperature": 0.7, "top_p": 0.8, "do_sample": False, "max_new_tokens": 7}


@pytest.mark.parametrize("kind", ["in memory", "of a folder", "adapter merged"])
def test_how_a_model_generates_is_kept(kind: str, tmp_path: Path) -> None:
    """Also where transformers would refuse to write it, as temperatures of a model that doesn't sample."""
    how, given = GenerationConfig(**HOW), tmp_path / "given"
    model = build(ARCHITECTURES["llama"])
    model.save_pretrained(given)
    (given / "generation_config.json").write_text(how.to_json_string())
    settings = grouped(slices=2, num_ranks=2, self_check=False)
    if kind == "in memory":
        model.generation_config = how
        pipe = Pipeline(model, **settings)
    else:
        pipe = Pipeline.from_pretrained(given, lora=lora() if kind == "adapter merged" else None, **settings)
    pipe.save_pretrained(tmp_path / "written", merged=kind == "adapter merged")
    found = GenerationConfig.from_pretrained(tmp_path / "written").to_dict()
    assert {name: found[name] for name in HOW} == HOW
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "written").generation_config.eos_token_id == [5, 9]


BESIDE = ("tokenizer.json", "chat_template.jinja", "merges.txt", "LICENSE", "configuration_own.py")
OF_THE_WEIGHTS = (
    "pytorch_model.bin",
    "model-Q4.gguf",
    "old.safetensors",
    "pytorch_model.bin.index.json",
    "optimizer.pt",
)
NOT_BESIDE = (*OF_THE_WEIGHTS, "adapter_config.json", ".gitattributes", "runs/events")


@pytest.mark.parametrize("kind", ["model", "adapter merged", "adapter"])
def test_what_lies_beside_the_weights_of_a_folder_is_kept(kind: str, tmp_path: Path) -> None:
    given, written = tmp_path / "given", tmp_path / "written"
    build(ARCHITECTURES["llama"]).save_pretrained(given)
    pipe = Pipeline.from_pretrained(
        given, lora=None if kind == "model" else lora(), **grouped(slices=2, num_ranks=2, self_check=False)
    )
    (given / "runs").mkdir()
    for name in (*BESIDE, *NOT_BESIDE):
        (given / name).write_text(f"given {name}")
    (given / "LICENSE").chmod(0o444)
    written.mkdir()
    (written / "merges.txt").write_text("there before")
    pipe.save_pretrained(written, merged=kind == "adapter merged")
    found = {file.name: file.read_text() for file in written.iterdir() if file.suffix != ".safetensors"}
    if kind == "adapter":
        assert not {*BESIDE} & found.keys() - {"merges.txt"}
        return
    expected = {name: f"given {name}" for name in BESIDE} | {"merges.txt": "there before"}
    assert {name: found[name] for name in BESIDE} == expected
    assert found.keys() == {*BESIDE, "config.json", "generation_config.json"}
    assert [file.name for file in written.glob("*.safetensors")] == ["model.safetensors"]
    (written / "LICENSE").write_text("can be replaced")
    assert AutoModelForCausalLM.from_pretrained(written).config.hidden_size > 0
    (given / "old.safetensors").unlink()
    pipe.save_pretrained(given)
    assert (given / "LICENSE").read_text() == "given LICENSE"


def test_adapters_are_not_exported_as_a_model(tmp_path: Path) -> None:
    """It would load with a random weight in the place of each that has an adapter."""
    model = build(ARCHITECTURES["llama"])
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    pipe = make_pipe(model, slices=2)
    pipe.step(tokens(), tokens())
    with pytest.raises(SlipstreamError, match="the weights aren't those of LlamaForCausalLM") as error:
        pipe.save_pretrained(tmp_path / "model")
    assert "lacks model.layers.0.self_attn.q_proj.weight, model.layers.1.self_attn.q_proj.weight" in str(error.value)
    assert "in addition model.layers.0.self_attn.q_proj.base_layer.weight" in str(error.value)
    assert "merge adapters into the model before the Pipeline takes it" in str(error.value)
    assert not (tmp_path / "model").exists()


# Tied and not, with experts of either layout, and with states.
OFTEN = ["llama, tied", "gpt2", "llama", "qwen2_moe", "gpt_oss", "recurrent_gemma", "nemotron_h", "xlstm"]


@pytest.mark.parametrize("name", [*first_of(OFTEN, 2), *first_of(sorted(MODELS.keys() - {*OFTEN}), 0, "grid")])
def test_what_is_exported_is_read_back(tmp_path: Path, name: str) -> None:
    pipe = make_pipe(MODELS[name], seed=3, slices=2, num_ranks=2)
    pipe.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for key, tensor in pipe.state_dict().items():
        assert torch.equal(loaded[key], tensor), key
