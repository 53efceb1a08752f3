"""`slipstream train` with an adapter: it is resumed to the bit, and what commands make of it has its logits."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from slipstream.checkpoint import Manifest
from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.model.quantised import round_to_4_bits
from slipstream.train.config import load_config
from slipstream.train.preflight import preflight
from support.forked import COMMAND, launch
from support.paths import ROOT

_YAML = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OF_THE_PAGE = _YAML.findall((ROOT / "docs" / "lora.md").read_text(encoding="utf-8"))[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and text, and the configuration of the page about adapters."""
    folder = tmp_path_factory.mktemp("lora")
    alphabet = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(vocab=alphabet | {"<eos>": 256}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder / "my-model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=257)).save_pretrained(folder / "my-model")
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(f"the quick brown fox {number} jumps over the lazy dog\n" * 3)
    (folder / "lora.yaml").write_text(OF_THE_PAGE)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a folder is where commands are typed."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")


def train(*more: str) -> None:
    settings = ["--lora.layers_to_transform=[1,3]", "--lora.dropout=0.1", "--pipeline.partition=[1,3]", *more]
    result = launch(2, COMMAND, "train", "lora.yaml", "--runtime.self_check=false", *settings)
    assert result.returncode == 0, result.stderr


@pytest.mark.more
@pytest.mark.usefixtures("place")
def test_a_run_is_resumed_to_the_bit_and_exported() -> None:
    run = Path("runs/lora")
    train()
    tensors = Manifest.read(run / "checkpoints" / "step-00000002").tensors
    assert all("lora_" in name for name in tensors)
    assert len(tensors) == 4 * (2 * 2 * 2)  # a weight and three of its state; A and B, two modules, two layers
    first = load_file(run / "adapter" / "adapter_model.safetensors")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    train("--checkpoint.resume=latest")
    again = load_file(run / "adapter" / "adapter_model.safetensors")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    result = launch(1, COMMAND, "export", str(run), "--output", "exported")
    assert result.returncode == 0, result.stderr
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        adapted = AutoPeftModelForCausalLM.from_pretrained(run / "adapter")(input_ids=tokens).logits
        for folder in (run / "model", "exported"):
            merged = AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens).logits
            torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)
        base = AutoModelForCausalLM.from_pretrained("my-model")
        assert not torch.allclose(base(input_ids=tokens).logits, adapted, atol=1e-4)
    base.lm_head.weight.data += 1
    base.save_pretrained("my-model")
    with pytest.raises(SlipstreamError, match=r"an adapter of other weights than those in model.path=my-model"):
        check("--checkpoint.resume=latest", "--training.steps=6")
    with pytest.raises(SlipstreamError, match="holds an adapter, but the run trains all weights"):
        check("--checkpoint.resume=latest", "--lora=null")


@pytest.mark.more
@pytest.mark.usefixtures("place")
def test_an_adapter_beside_4_bits_is_exported_as_it_was_trained() -> None:
    run, tokens = Path("runs/lora"), torch.arange(40)[None]
    train("--lora.base_precision=nf4")
    base = AutoModelForCausalLM.from_pretrained("my-model")
    plain = base(input_ids=tokens).logits
    round_to_4_bits(base)
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, run / "adapter")(input_ids=tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(run / "model")(input_ids=tokens).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, adapted, atol=1e-3)
    assert launch(1, COMMAND, "export", str(run), "--output", "exported").returncode == 0
    again = AutoModelForCausalLM.from_pretrained("exported")(input_ids=tokens).logits
    torch.testing.assert_close(again, merged, rtol=1e-5, atol=1e-5)
    with pytest.raises(SlipstreamError, match=r"weights with lora.base_precision=nf4, but the run has full"):
        check("--checkpoint.resume=latest", "--training.steps=6")


def check(*more: str) -> Any:
    return preflight(load_config(Path("lora.yaml"), ["--runtime.self_check=false", *more]), Progress(None))


MISTAKES = {
    "--lora.r=0": "lora.r",
    "--lora.target_modules=[q_prj]": r"q_prj.*q_proj.*target_modules=all-linear",
    "--lora.target_modules=all-linear --lora.layers_to_transform=[2]": r"needs a list of names in lora.target_modules",
    "--lora.modules_to_save=[lm_haed]": r"modules_to_save: the model has no module 'lm_haed'.*lm_head",
    "--training.single_process_steps=1": r"compares with training all weights",
    "--lora.base_precision=int4": "lora.base_precision.*full.*nf4",
    "--lora.base_precision=nf4 --parallel.tensor=2": r"nf4 with tensor parallelism of 2.*lora.base_precision=full",
    "--lora.base_precision=nf4 --lora.use_dora=true": "lora.base_precision=nf4 with use_dora=True",
    "--lora.bias=some": "lora.bias.*lora_only.*all",
    "--lora.path=an-adapter --lora.r=4": r"lora.path=an-adapter is an adapter with settings.*; leave lora.r out",
    '--lora={"path":"nowhere"}': r"lora.path=nowhere has no adapter_config.json",
    "--model.init=random": r"lora trains an adapter of given weights; give model.path",
    "--lora.export=adapter --sample.prompt=a": r"sample.prompt needs the merged model; give lora.export=both",
}


@pytest.mark.parametrize("given", MISTAKES)
@pytest.mark.usefixtures("place")
def test_mistakes_are_found_before_ranks_start(given: str) -> None:
    with pytest.raises(SlipstreamError, match=f"(?s){MISTAKES[given]}"):
        check(*given.split())


@pytest.mark.usefixtures("place")
def test_the_page_s_configuration_is_fine() -> None:
    assert yaml.safe_load(OF_THE_PAGE)["lora"]["r"] == check().config.lora.r


@pytest.mark.grid
@pytest.mark.usefixtures("place")
def test_tensor_ranks_train_an_adapter_that_a_pipeline_goes_on_with() -> None:
    """One step on two tensor ranks, and another on two stages: both folders that are left have the same logits."""
    settings = ["--runtime.self_check=false", "--lora.dropout=0.1", "--lora.modules_to_save=[lm_head,norm]"]
    settings += ["--training.steps=2", "--checkpoint.every=1"]
    shared = ["--pipeline.num_ranks=1", "--parallel.tensor=2", "--pipeline.schedule=1f1b"]
    for more in (shared, ["--checkpoint.resume=1"]):
        result = launch(2, COMMAND, "train", "lora.yaml", *settings, *more)
        assert result.returncode == 0, result.stderr
    run, tokens = Path("runs/lora"), torch.arange(40)[None]
    with torch.no_grad():
        adapted = AutoPeftModelForCausalLM.from_pretrained(run / "adapter")(input_ids=tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(run / "model")(input_ids=tokens).logits
        base = AutoModelForCausalLM.from_pretrained("my-model")(input_ids=tokens).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(base, adapted, atol=1e-4)
