"""Processes of a launcher that can't be connected are refused, instead of each training a copy of its own."""

from __future__ import annotations

import socket

import pytest

from slipstream import make_mesh
from slipstream.errors import SlipstreamError
from support.architectures import ARCHITECTURES
from support.pipelines import make_pipe

TASKS = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TASKS, r"srun started 4 processes \(SLURM_STEP_NUM_TASKS\), but they have no process group"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started 2 processes"),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            "WORLD_SIZE=2 says that several processes run, but MASTER_ADDR, MASTER_PORT",
        ),
    ],
)
def test_what_no_pipeline_can_connect(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SlipstreamError, match=message) as error:
        make_pipe(ARCHITECTURES["llama"], slices=2)
    assert "torch.distributed.init_process_group(...) before the Pipeline is made" in str(error.value)


@pytest.mark.parametrize(
    ("rank", "message"),
    [(0, "rank 0 on .* can't listen at"), (1, "rank 1 on .* reached .* another program holds that")],
)
def test_a_port_that_another_program_holds_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, rank: int, message: str
) -> None:
    """One that accepts connections and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(stranger.getsockname()[1])}
        more = {"RANK": str(rank), "WORLD_SIZE": "2", "SLIPSTREAM_RENDEZVOUS_SECONDS": "0.5"}
        for name, value in (place | more).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SlipstreamError, match=message) as error:
            make_mesh(pp=2)
    assert f"MASTER_ADDR=127.0.0.1, MASTER_PORT={place['MASTER_PORT']}" in str(error.value)


def test_one_task_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TASKS, "SLURM_STEP_NUM_TASKS": "1", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert make_pipe(ARCHITECTURES["llama"], slices=2).num_ranks == 1
