"""What isn't a causal LM of transformers is refused by what it is; code that comes with a model runs if allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, BertConfig, ElectraConfig, LlamaConfig, LlamaModel, MinistralConfig, T5Config

import slipstream
from slipstream import SlipstreamError
from slipstream.model import check_sliceable, find_anatomy, load_config
from slipstream.model.toy import toy_config
from support.architectures import llama
from support.versions import provided

_CONFIGURATION = """
from transformers import LlamaConfig

class SpiralConfig(LlamaConfig):
    model_type = "spiral"
"""
_MODELING = """
from transformers import LlamaForCausalLM
from .configuration_spiral import SpiralConfig

class SpiralForCausalLM(LlamaForCausalLM):
    config_class = SpiralConfig
"""


@pytest.fixture
def custom_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a model and its code, which transformers copies to a folder of the test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "spiral"
    folder.mkdir()
    auto_map = {
        "AutoConfig": "configuration_spiral.SpiralConfig",
        "AutoModelForCausalLM": "modeling_spiral.SpiralForCausalLM",
    }
    settings = toy_config(LlamaConfig()).to_dict() | {"model_type": "spiral", "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "configuration_spiral.py").write_text(_CONFIGURATION)
    (folder / "modeling_spiral.py").write_text(_MODELING)
    return str(folder)


def test_code_of_a_model_runs_only_where_it_is_trusted(custom_model: str, tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"code of its own.*whatever you can.*--trust-remote-code"):
        load_config(custom_model)
    slipstream.trust_remote_code(custom_model)
    config = load_config(custom_model)
    assert type(config).__name__ == "SpiralConfig"
    pipe = slipstream.Pipeline.from_config(config, slices=2)
    assert torch.isfinite(pipe.step(torch.arange(16)[None], torch.arange(16)[None]))
    pipe.save_pretrained(tmp_path / "export")
    assert (tmp_path / "export" / "modeling_spiral.py").is_file()


def test_code_that_is_no_causal_lm_is_refused(custom_model: str) -> None:
    path = Path(custom_model, "config.json")
    settings = json.loads(path.read_text())
    del settings["auto_map"]["AutoModelForCausalLM"]
    path.write_text(json.dumps(settings | {"model_type": "helix"}))
    with pytest.raises(SlipstreamError, match=r"no code for a causal LM.*needs AutoConfig and AutoModelForCausalLM"):
        slipstream.trust_remote_code(custom_model)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BertConfig(), r"'bert' isn't causal.*Set is_decoder=True"),
        (ElectraConfig(), r"'electra' isn't causal.*Set is_decoder=True"),
        (T5Config(), r"no causal LM of model_type 't5': it is an encoder and a decoder"),
        (MinistralConfig(head_dim=None), r"'ministral'.*transformers' own code fails.*leaves .*head_dim.* open"),
        (AutoConfig.for_model("siglip"), r"no causal LM of model_type 'siglip': it has no language-model head"),
    ],
    ids=lambda each: getattr(each, "model_type", ""),
)
def test_is_refused_as_what_it_is(config: transformers.PretrainedConfig, reason: str) -> None:
    with pytest.raises(SlipstreamError, match=reason):
        check_sliceable(config)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(SlipstreamError, match="LlamaModel, which has no language-model head"):
        slipstream.Pipeline(LlamaModel(llama()))


@pytest.mark.parametrize(
    ("path", "why"),
    [("no/such-model", "expected an existing folder or a hub name"), ("./nowhere", "there is no such file or folder")],
)
def test_a_model_that_does_not_exist(path: str, why: str) -> None:
    with pytest.raises(SlipstreamError, match=f"no model at '{path}': {why}"):
        load_config(path)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"expected a folder with config.json"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("name", ["zamba2", pytest.param("zamba", marks=pytest.mark.more)])
def test_layers_that_share_weights_are_refused(name: str) -> None:
    """A toy of Zamba 2 has one of the layers that share them."""
    with pytest.raises(
        SlipstreamError, match=r"its layers share weights \(model\.layers\.\d+\.shared_transf.* is model"
    ):
        find_anatomy(AutoConfig.for_model(name))


def test_layers_that_run_in_cycles_are_refused() -> None:
    with pytest.raises(SlipstreamError, match=r"'hrm_text'.* layers run in cycles, \d+ calls in one forward"):
        find_anatomy(AutoConfig.for_model("hrm_text"))


def test_layers_that_all_take_a_table_of_the_first_stage_are_refused() -> None:
    with pytest.raises(SlipstreamError, match=r"'roformer'.*all take what roformer.encoder.embed_positions"):
        find_anatomy(AutoConfig.for_model("roformer", is_decoder=True))


@pytest.mark.parametrize(
    ("name", "module"),
    [
        pytest.param("inkling2_text", "model.final_input", marks=provided("inkling2_text")),
        ("blt", "model.local_decoder"),
    ],
)
def test_modules_after_the_layers_that_take_more_than_the_last_one_gives_are_refused(name: str, module: str) -> None:
    """Inkling 2's last residual weighs what all blocks left; BLT's decoder takes its encoder's hidden states, too."""
    with pytest.raises(SlipstreamError, match=rf"'{name}'.*{module} .*takes more than what.*Give it to a trainer"):
        find_anatomy(AutoConfig.for_model(name))


def test_layers_on_more_tokens_than_the_model_is_given_are_refused() -> None:
    """CPM-Ant puts tokens of a prompt before the others."""
    with pytest.raises(SlipstreamError, match=r"CpmAnt.*can't be cut into stages: its layers take.*Give it to"):
        find_anatomy(AutoConfig.for_model("cpmant"))
