"""An adapter beside weights in 4 bits has the gradients of transformers' quantised model with PEFT, and is exported."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from slipstream import Pipeline, SlipstreamError, number_format
from slipstream.model import ModelEnd, find_anatomy, meta_model
from slipstream.model.adapters import Adapter
from slipstream.model.quantised import QuantisedLinear
from slipstream.model.trained_weights import TrainedWeights
from slipstream.pipeline.weight_source import pretrained_source
from slipstream.profile import count_model
from support.adapters import PREFIX, SLICES, lora, pipe_error, whole_gradients
from support.architectures import ARCHITECTURES, BOUND, build, tokens
from support.options import grouped

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights float32 holds, so that it quantises alike in float32 and in float64."""
    place = tmp_path_factory.mktemp("base")
    build(ARCHITECTURES["llama"]).float().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """The quantised model of transformers on a CPU, where bitsandbytes computes in bfloat16 unless it trains. Tests
    change copies."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=NF4, device_map={"": "cpu"}, attn_implementation="eager"
    )
    return model.train()


def make(folder: Path, dtype: str, schedule: str = "zb-h1", **options: Any) -> Pipeline:
    arguments = {"num_microbatches": 2, "slices": SLICES, "num_ranks": 2, "dtype": dtype, "self_check": False} | options
    return Pipeline.from_pretrained(
        folder, schedule=schedule, lora=lora(), lora_base_precision="nf4", **grouped(**arguments)
    )


def draw_adapter(named: Iterator[tuple[str, nn.Parameter]]) -> None:
    """Draws all of an adapter by its names, which begin otherwise in a PeftModel."""
    trained = {name.removeprefix(PREFIX): parameter for name, parameter in named if parameter.requires_grad}
    for number, name in enumerate(sorted(trained)):
        generator = torch.Generator().manual_seed(number)
        trained[name].data.copy_(0.1 * torch.randn(trained[name].shape, generator=generator))


def adapted(model: Any) -> Any:
    """A copy with an adapter."""
    made = get_peft_model(copy.deepcopy(model), lora(), autocast_adapter_dtype=False)
    draw_adapter(made.named_parameters())
    return made


def test_weights_and_products_are_those_of_bitsandbytes(theirs: Any) -> None:
    for name, linear in build(ARCHITECTURES["llama"]).float().named_modules():
        if type(linear) is nn.Linear and name != "lm_head":
            own, other = QuantisedLinear(linear), theirs.get_submodule(name)
            x = torch.randn(2, 5, linear.in_features)
            results = []
            for module in (own, other):
                leaf = x.clone().requires_grad_()
                y = module(leaf)
                y.backward(torch.ones_like(y))
                results.append((y, leaf.grad))
            assert torch.equal(own.weight, other.weight)
            assert all(torch.equal(*each) for each in zip(*results, strict=True))
            assert list(own.state_dict()) == ["weight"]


@pytest.mark.parametrize(
    ("schedule", "options"), [("zb-h1", {}), ("1f1b", {"recompute": "full"}), ("zb-v", {"stages_per_rank": 2})]
)
def test_gradients_are_those_of_what_4_bits_stand_for(
    folder: Path, theirs: Any, schedule: str, options: dict[str, Any]
) -> None:
    wide = adapted(copy.deepcopy(theirs).dequantize())
    for parameter in wide.parameters():  # rope's frequencies keep float32
        parameter.data = parameter.data.double()
    pipe = make(folder, "float64", schedule, **options)
    draw_adapter(pipe.named_parameters())
    assert pipe_error(pipe, whole_gradients(wide)[1]) < BOUND


def test_gradients_and_what_is_saved_are_those_of_transformers_and_peft(
    folder: Path, theirs: Any, tmp_path: Path
) -> None:
    """In float32; both ways to save it have the logits that were trained."""
    whole = adapted(theirs)
    pipe = make(folder, "float32")
    draw_adapter(pipe.named_parameters())
    assert pipe_error(pipe, whole_gradients(whole)[1]) < 1e-4
    pipe.save_pretrained(tmp_path / "adapter")
    pipe.save_pretrained(tmp_path / "merged", merged=True)
    with torch.no_grad():
        expected = whole(input_ids=tokens()).logits
        for found in (
            PeftModel.from_pretrained(copy.deepcopy(theirs), tmp_path / "adapter"),
            AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
        ):
            torch.testing.assert_close(found.train()(input_ids=tokens()).logits, expected, rtol=1e-4, atol=1e-4)
        with whole.disable_adapter():
            assert not torch.allclose(whole(input_ids=tokens()).logits, expected, atol=1e-2)


def test_a_rank_reads_and_quantises_its_own_layers(folder: Path) -> None:
    config = ARCHITECTURES["llama"]
    source = pretrained_source(str(folder), (), lora(), base_precision="nf4")

    def packed(parts: list[Any]) -> dict[str, torch.Tensor]:
        model = source.load(find_anatomy(config), parts, torch.float32)
        return {name: each.weight for name, each in model.named_modules() if isinstance(each, QuantisedLinear)}

    whole = packed([ModelEnd.EMBEDDING, 0, 1, 2, 3, ModelEnd.HEAD])
    cut = [packed([ModelEnd.EMBEDDING, 0]), packed([1, 2, 3, ModelEnd.HEAD])]
    assert len(whole) == 4 * 7
    assert sorted(whole) == sorted(name for part in cut for name in part)
    assert all(torch.equal(whole[name], each) for part in cut for name, each in part.items())


def test_plans_count_4_bits_and_leave_those_of_weights_as_they_are() -> None:
    config = ARCHITECTURES["llama"]
    with torch.device("meta"):
        shapes = QuantisedLinear(nn.Linear(96, 64))
    real = QuantisedLinear(nn.Linear(96, 64))  # after the other, of which bitsandbytes must keep nothing
    own = {name: (each.shape, each.dtype) for name, each in real.named_buffers()}
    assert own == {name: (each.shape, each.dtype) for name, each in shapes.named_buffers()}
    assert shapes.weight.shape == real.weight.shape
    wide, narrow = (
        count_model(config, 256, torch.bfloat16, TrainedWeights(adapter=Adapter("default", lora(), each)))
        for each in ("full", "nf4")
    )
    assert narrow.num_parameters == wide.num_parameters
    assert narrow.num_trained == wide.num_trained
    layers = sum(each.numel() for name, each in meta_model(config).named_parameters() if "_proj" in name)
    assert sum(n * part.num_quantised for n, part in narrow.counted(narrow.whole)) == layers
    full, packed = (
        sum(n * (2 * part.num_parameters - part.saved_bytes(2)) for n, part in each.counted(each.whole))
        for each in (wide, narrow)
    )
    assert full - packed == pytest.approx(layers * (2 - number_format.NF4.weight_bytes))


REFUSED = {
    "precision": ({"lora_base_precision": "int4"}, r"lora_base_precision='int4': give 'full' or 'nf4'"),
    "without lora": ({"lora": None}, r"'nf4' without lora.*lora=peft.LoraConfig"),
    "DoRA": ({"lora": lora(use_dora=True)}, r"nf4 with use_dora=True"),
    "a copy": ({"lora": lora(modules_to_save=["k_proj"])}, r"modules_to_save=\['k_proj'\].*k_proj is kept in 4 bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_beside_4_bits_is_refused(name: str, folder: Path) -> None:
    changes, said = REFUSED[name]
    with pytest.raises(SlipstreamError, match=f"(?s){said}"):
        Pipeline.from_pretrained(folder, **{"lora": lora(), "lora_base_precision": "nf4", **changes})


def test_a_quantised_model_in_memory_is_refused(theirs: Any) -> None:
    with pytest.raises(SlipstreamError, match=r"are quantised.*lora_base_precision"):
        Pipeline(get_peft_model(copy.deepcopy(theirs), peft.LoraConfig(target_modules=["q_proj"])), num_ranks=2)


def test_it_is_named_where_bitsandbytes_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.model.quantised.find_spec", lambda name: None)
    with pytest.raises(SlipstreamError, match=r"needs bitsandbytes, an extra: pip install 'slipstream\[qlora\]'"):
        make(folder, "float32")
