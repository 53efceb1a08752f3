"""Which tokenizers are refused: those whose code isn't trusted, that know nothing, or not the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.train.config import SourceSection
from slipstream.train.data import load_tokenizer
from slipstream.train.data.open_source import OpenSource

CODE = """
from transformers import PreTrainedTokenizerFast
class Spiral(PreTrainedTokenizerFast):
    pass
"""


def test_code_of_a_tokenizer_runs_only_where_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "spiral"
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1}, [])), eos_token="a")
    made.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Spiral", "auto_map": {"AutoTokenizer": [None, "tokenization_spiral.Spiral"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenization_spiral.py").write_text(CODE)
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # who would say yes to anything
    with pytest.raises(SlipstreamError, match=r"Python code of its own.*set model.trust_remote_code: true"):
        load_tokenizer(str(folder))
    trusted = load_tokenizer(str(folder), trusts_code=True)
    assert type(trusted).__name__ == "Spiral"
    trusted.save_pretrained(tmp_path / "export")
    assert (tmp_path / "export" / "tokenization_spiral.py").is_file()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "gpt2", "gemma", "gpt_neox", "cohere", "llama"])
def test_a_configuration_alone_has_no_tokenizer(tmp_path: Path, kind: str) -> None:
    """Of most of these transformers makes one of its special tokens alone, and saves it like any other."""
    bare, saved = tmp_path / "bare", tmp_path / "saved"
    CONFIG_MAPPING[kind]().save_pretrained(bare)
    with pytest.raises(
        SlipstreamError, match=r"no tokenizer in .*: the folder has no tokenizer\.json.*data\.tokenizer"
    ):
        load_tokenizer(str(bare))
    if kind != "llama":
        AutoTokenizer.from_pretrained(bare).save_pretrained(saved)
        with pytest.raises(SlipstreamError, match=r"no tokenizer in .*: it has no vocabulary but its special tokens"):
            load_tokenizer(str(saved))


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SlipstreamError, match=r"the tokenizer in .* can't be read"):
        load_tokenizer(str(tmp_path))


def of_words(words: list[str], unknown: str | None, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer that knows these words."""
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=unknown or "?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


WORDS = ["?", "<end>", "owl", "fox", "sees", "the"]
TEXT = "the owl sees the fox"


@pytest.mark.parametrize("special", [{"unk_token": "?", "eos_token": "<end>"}, {"unk_token": "?"}, {}], ids=str)
@pytest.mark.parametrize("row", [{"text": "TEXT"}, {"prompt": "TEXT", "completion": "TEXT"}], ids=["text", "samples"])
@pytest.mark.parametrize(("text", "is_known"), [(TEXT, True), ("an owl", True), ("an emu hides", False)])
def test_text_that_a_tokenizer_does_not_know(
    tmp_path: Path, special: dict[str, str], row: dict[str, str], text: str, is_known: bool
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(dict.fromkeys(row, f"{text} {TEXT[:3]}")) + "\n")
    source = SourceSection(dataset=str(tmp_path / "rows.jsonl"))
    opened, tokenizer = OpenSource.of(source, lambda _: None), of_words(WORDS, "?", **special)
    if is_known:
        assert opened.tokenise(tokenizer, None, 64, Progress(None)).num_documents == 1
        return
    with pytest.raises(SlipstreamError, match=r"doesn't know the text of .*rows\.jsonl: \d of \d tokens are '\?'"):
        opened.tokenise(tokenizer, None, 64, Progress(None))
