"""torchrun starts a run again that has lost a rank at any moment of its life, and it ends with the same weights."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from benchmarks.hosts import Hosts, NoHostsError
from torch.distributed import TCPStore

from slipstream import SlipstreamError
from slipstream.launch.rendezvous import ConnectedRanks, RendezvousPoint
from support.forked import COMMAND, launch
from support.paths import ROOT, WORKERS, with_path
from support.timeouts import LIMIT
from support.tiny_training import tiny_llama

KILLED_AT = WORKERS / "training/killed_at.py"
RANK, TRAINER = "slipstream.train.training_rank", "slipstream.train.trainer"
# What is being called, how often it has been, and which rank is killed; or 0: what is being imported.
MOMENTS = {
    "saving": ("slipstream.checkpoint.background_save", "Manifest.write", 2, 0),
    "importing": (TRAINER, "", 0, 1),
    "connecting": ("slipstream.launch.rendezvous", "_try_connections", 1, 0),
    "before it is watched": ("slipstream.launch.stop_request", "start_watch", 1, 1),
    "making the process group": ("torch.distributed", "init_process_group", 1, 1),
    "making another group": ("torch.distributed", "new_group", 1, 1),
    "preparing inputs": ("slipstream.train.preflight.run_inputs", "save_texts", 1, 0),
    "waiting for inputs": (RANK, "_appears", 1, 1),
    "checking the model": ("slipstream.train.preflight.all_checks", "check_model", 1, 0),
    "the first step": (TRAINER, "train_step", 1, 1),
    "before an update": (TRAINER, "Trainer._before_update", 3, 0),
    "writing its file": ("slipstream.checkpoint.background_save", "Snapshot.write", 2, 1),
    "naming a checkpoint": ("slipstream.checkpoint.folder", "CheckpointFolder.commit", 1, 0),
    "the last step": (TRAINER, "train_step", 6, 0),
    "exporting": ("slipstream.train.run_results", "_complete", 1, 0),
    "sending its part of the export": ("slipstream.pipeline.saving", "PipelineSaving.save_pretrained", 1, 1),
    "at its end": ("torch.distributed", "destroy_process_group", 1, 1),
}


def write_config(folder: Path) -> Path:
    """Six steps of two stages, with dropout; every second one is saved."""
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text(" ".join(f"{n} is {n * n % 97} more than {n % 13}." for n in range(500)))
    model = tiny_llama(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, attention_dropout=0.1
    )
    values = {
        "model": {"config": model},
        "data": {"files": [str(text)], "vocab_size": 300, "validation_fraction": 0.0},
        "pipeline": {"num_ranks": 2, "slices": 4, "num_microbatches": 2, "schedule": "1f1b"},
        "runtime": {"self_check": False},
        "optimizer": {"lr": 0.01},
        "training": {"output": str(folder / "output"), "seq_len": 64, "batch_size": 2, "steps": 6},
        "checkpoint": {"every": 2, "resume": "latest"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def torchrun(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Two ranks on this machine, which are started again once."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return subprocess.run(
        [*launcher, *meeting, *map(str, command)],
        env=with_path(ROOT / "src") | {"SLIPSTREAM_LOG_LEVEL": "info"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def weights(folder: Path) -> bytes:
    return (folder / "output" / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a run whose ranks were forked: how they are started changes none."""
    config = write_config(tmp_path_factory.mktemp("undisturbed") / "run")
    ended = launch(2, COMMAND, "train", config)
    assert ended.returncode == 0, ended.stderr
    assert "resumed" not in ended.stdout
    return weights(config.parent)


def hosts_can_be_made() -> bool:
    with suppress(NoHostsError):
        Hosts(2).close()
        return True
    return False


@pytest.mark.parametrize(
    "moment",
    [pytest.param(moment, marks=pytest.mark.more if moment == "saving" else pytest.mark.grid) for moment in MOMENTS],
)
def test_a_killed_rank_and_torchrun(tmp_path: Path, moment: str, request: pytest.FixtureRequest) -> None:
    if moment == "saving" and hosts_can_be_made():
        pytest.skip("test_nodes.py has the same moment between two nodes, which this machine can play")
    undisturbed = request.getfixturevalue("undisturbed")
    module, name, at, rank = MOMENTS[moment]
    config = write_config(tmp_path / "run")
    ended = torchrun(KILLED_AT, str(rank), module, name, str(at), "train", config)
    assert "exitcode: -9" in ended.stderr, ended.stderr
    assert "Unable to shutdown process" not in ended.stderr  # as torchrun says after 30 s
    assert ended.returncode == 0, ended.stderr
    assert weights(config.parent) == undisturbed


def test_each_start_has_keys_of_its_own_whatever_the_agents_count() -> None:
    """The agents keep one store; of the first start one rank has asked alone, and one was named alone."""
    agent = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def joined(rank: int, world_size: int, seconds: float = 20.0) -> ConnectedRanks:
        place = RendezvousPoint(rank, world_size, "localhost", agent.port, False, True, rank == 0, seconds)
        ranks = ConnectedRanks(place, TCPStore("localhost", agent.port, timeout=timedelta(seconds=seconds)))
        ranks.begin_start()
        return ranks

    with ThreadPoolExecutor(3) as threads:
        for missing, rank in (("0", 1), ("1", 0)):
            with pytest.raises(SlipstreamError, match=rf"of 2 ranks these didn't within 0\.3 seconds: {missing}\."):
                joined(rank, 2, seconds=0.3)
        for start in range(3):
            ranks = [*threads.map(joined, range(3), [3] * 3)]
            found = threads.map(lambda each, start=start: each.gather("ranks", [start, each.place.rank]), ranks)
            assert [*found] == [[[start, rank] for rank in range(3)]] * 3


def test_all_ranks_know_of_a_restart_that_one_agent_has_counted() -> None:
    agent = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(agent.port)}
    program = "from slipstream.launch import connect_ranks; print(connect_ranks({}).is_restart)"
    started = []
    for rank in ("0", "1"):
        counted = {"RANK": rank, "TORCHELASTIC_RESTART_COUNT": rank, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment = with_path() | place | counted
        started.append(
            subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        )
    assert [each.communicate(timeout=LIMIT)[0] for each in started] == ["True\n"] * 2
