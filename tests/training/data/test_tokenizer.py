"""A tokenizer's own code runs only where it is trusted, and an export has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from slipstream.errors import SlipstreamError
from slipstream.train.data import load_tokenizer

CODE = """
from transformers import PreTrainedTokenizerFast
class Spiral(PreTrainedTokenizerFast):
    pass
"""


def test_code_of_a_tokenizer_runs_only_where_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "spiral"
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), eos_token="a")
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
