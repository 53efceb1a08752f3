"""Interfaces that aren't there, and a launcher's variables left in a shell, are named before anything waits."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from slipstream.network_interfaces import GLOO, NCCL, interface_problems, joining_hint
from support.forked import launch, slipstream_command
from support.tiny_training import TEXT, tiny_training, with_settings

NAMES = sorted(name for _, name in socket.if_nameindex())
HERE = f"the interfaces here are {', '.join(NAMES)}: name one of them, or type unset"
GIVEN = {
    (GLOO, "lo"): None,
    (GLOO, "lo,nic9"): "but there is no 'nic9'",
    (GLOO, "l"): "but there is no 'l'",
    (GLOO, ""): None,
    (NCCL, "lo"): None,
    (NCCL, "l"): None,
    (NCCL, "=lo:4000"): None,
    (NCCL, "=l"): "but there is none of that name",
    (NCCL, "nic9,lo"): None,
    (NCCL, "^nic9"): None,
    (NCCL, f"^{','.join(NAMES)}"): "which leaves none",
    (NCCL, "nic9"): "but there is none of that name",
}


@pytest.mark.skipif("lo" not in NAMES, reason="no interface is called lo")
@pytest.mark.parametrize(("name", "value"), GIVEN)
def test_what_gloo_and_nccl_make_of_a_name(name: str, value: str) -> None:
    problem = GIVEN[name, value]
    wanted = {} if problem is None else {name: f"{name}={value}, {problem}; {HERE} {name}"}
    assert interface_problems({name: value}, uses_nccl=True) == wanted
    assert interface_problems({name: value}, uses_nccl=False) == (wanted if name == GLOO else {})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    path = tmp_path / "config.yaml"
    places = {"data.files": [str(tmp_path / "text.txt")], "training.output": str(tmp_path / "run")}
    path.write_text(json.dumps(with_settings(tiny_training(1, 0), places)))
    return path


def refused(*command: str | Path) -> str:
    ended = slipstream_command(*command)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    (line,) = ended.stderr.splitlines()
    return line


def test_a_run_by_itself(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "nic9")
    for ranks in ("--pp=2", "--pp=1"):
        assert refused("train", config, ranks) == f"error: {GLOO}=nic9, but there is no 'nic9'; {HERE} {GLOO}"
    assert not (config.parent / "run").exists()


def test_the_doctor_reads_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "nic9")
    monkeypatch.setenv(NCCL, "nic8")
    ended = slipstream_command("doctor", "--json", "--folder", tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    gloo, nccl = (each for each in json.loads(ended.stdout)["findings"] if each["topic"] == "interface")
    assert gloo["problem"] == f"{GLOO}=nic9, but there is no 'nic9'; {HERE} {GLOO}"
    assert f"{NCCL}=nic8, but there is none of that name" in (nccl["problem"] or nccl["advice"])


LOOP = """
import os
import slipstream
from transformers import LlamaConfig

if os.environ["RANK"] == "1":
    os.environ["GLOO_SOCKET_IFNAME"] = "nic9"
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
slipstream.Pipeline.from_config(LlamaConfig(vocab_size=32, **sizes), slices=2)
"""


def test_one_rank_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    """The others hear of it, and don't wait for a limit."""
    (tmp_path / "loop.py").write_text(LOOP)
    ended = launch(2, tmp_path / "loop.py")
    assert ended.returncode != 0
    assert f"SlipstreamError: rank 1 on {socket.gethostname()}: {GLOO}=nic9, but there is no 'nic9'" in ended.stderr
    assert "hangs" not in ended.stderr


LEFT = [
    {"RANK": "0", "WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
]


@pytest.mark.parametrize("left", LEFT, ids=["two", "all of one", "all of two"])
def test_variables_left_in_a_shell(config: Path, monkeypatch: pytest.MonkeyPatch, left: dict[str, str]) -> None:
    if "MASTER_PORT" in left:
        with socket.create_server(("127.0.0.1", 0)) as free:
            left = left | {"MASTER_PORT": str(free.getsockname()[1])}
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLIPSTREAM_RENDEZVOUS_SECONDS", "2")
    ended = slipstream_command("train", config)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert f"This process joins others because RANK=0 and WORLD_SIZE={left['WORLD_SIZE']} are set" in ended.stderr
    assert f"type unset {' '.join(left)}" in ended.stderr
    assert not joining_hint(os.environ | {"TORCHELASTIC_RUN_ID": "none"})
