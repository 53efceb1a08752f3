"""`slipstream profile` measures real processes and a real link, and writes a file that plans can be made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import slipstream
from slipstream.cli.profile import profile as command
from slipstream.cost import MeasuredCosts, StageParts, load_profile
from slipstream.errors import SlipstreamError
from support.architectures import VOCABULARY, llama
from support.forked import slipstream_command


@pytest.fixture
def model(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.more
def test_a_training_configuration_whose_ranks_share_layers(tmp_path: Path) -> None:
    """They measure their shares together, and a plan from the profile has their degree."""
    config, output = tmp_path / "config.yaml", tmp_path / "profile.json"
    settings = {
        "model": {"config": llama().to_diff_dict()},
        "parallel": {"sequence_parallel": True},
        "data": {"corpus": "python-stdlib"},
        "training": {"output": str(tmp_path / "run"), "steps": 1, "seq_len": 16},
    }
    config.write_text(yaml.safe_dump(settings))
    quick = ("--repeats=2", "--ranks=1", "--tp=2", "--granularity=8", "--budget=0.001")
    ended = slipstream_command("profile", config, "--output", output, *quick)
    assert ended.returncode == 0, ended.stderr
    assert "--budget=0.001 is too short for a fit of this model: measuring for about" in ended.stdout + ended.stderr
    assert not (tmp_path / "run").exists()
    profile = load_profile(output)
    assert (profile.seq_len, profile.degrees.tensor, profile.hardware.processes) == (16, 2, 2)
    assert profile.sequence_parallel
    head = MeasuredCosts(profile).num_parameters(StageParts(len(profile.parts) - 1, len(profile.parts)))
    rows = (VOCABULARY + 1) // 2  # the first rank's
    assert head == rows * profile.model.hidden_size + profile.model.hidden_size  # and a norm
    plan = slipstream.plan(config, output, seq_len=16, global_batch=1, num_slices=2)
    assert plan.best.plan.tensor_parallel == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "how long are the sequences\\? give --seq-len=4096"),
        ({"seq_len": 64, "dtype": "float8"}, "dtype='float8' isn't known; choose one of float64,"),
        ({"seq_len": 64, "device": "tpu"}, "--device='tpu' isn't known; choose auto, cpu or cuda"),
        ({"seq_len": 64, "device": "cuda"}, "--device=cuda needs a CUDA device, but there is none; use --device=cpu"),
        ({"seq_len": 64, "output": Path("/no/p.json")}, "there is no folder /no; make it first"),
        ({"seq_len": 64, "model": "/no"}, "no model at '/no'"),
        ({"seq_len": 64, "tp": 3}, "attention heads"),
        ({"seq_len": 4096}, "positions"),
    ],
)
def test_bad_input_starts_nothing(
    model: Path, tmp_path: Path, settings: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SlipstreamError, match=reason):
        command(**{"model": str(model), "output": tmp_path / "profile.json"} | settings)
    assert not (tmp_path / "profile.json").exists()
