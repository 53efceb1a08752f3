"""The configurations among the examples can be read, and that of a million tokens fits the GPUs that it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from slipstream.cost import load_cluster
from slipstream.train.config import Config, load_config
from slipstream.train.preflight import memory_account
from support.forked import slipstream_command
from support.paths import ROOT

EXAMPLES = ROOT / "examples"
MILLION = EXAMPLES / "long_sequences" / "qwen3-8b-million.yaml"
QWEN3_8B = Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=1_048_576,
)


def trainings() -> list[Path]:
    """The files that are training configurations, and not those of other programs."""
    return [file for file in sorted(EXAMPLES.rglob("*.yaml")) if "kubernetes" not in file.parts]


@pytest.mark.parametrize("file", trainings(), ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_a_configuration_can_be_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert load_config(file).training.output.parts[0] == "runs"


def million() -> Config:
    config = load_config(MILLION)
    assert sum(config.pipeline.slices) == config.training.seq_len == 1_048_576
    assert config.num_processes == 8
    return config


def test_a_million_tokens_fit_eight_gpus_by_the_account() -> None:
    account = memory_account(million(), QWEN3_8B)
    assert account is not None
    assert 55e9 < account() < 0.95 * load_cluster("h100-dgx").device.memory


@pytest.mark.more
def test_the_check_of_a_million_tokens_takes_a_model_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B.to_dict()))
    ended = slipstream_command("check", MILLION)
    assert "exact: largest relative difference" in ended.stdout, ended.stderr
    assert "no tokenizer" in ended.stdout
