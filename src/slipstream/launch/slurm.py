"""Translates the variables that srun sets into those that torchrun would set."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slipstream.errors import SlipstreamError

_FIRST_PORT, _NUM_PORTS = 10_000, 20_000  # below the ports that systems choose by themselves


def is_task(environment: Mapping[str, str]) -> bool:
    """Returns whether srun started this process as one of several tasks.

    A batch script, or a step of a single task, is none: it may start local ranks.
    """
    return "SLURM_PROCID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a task.

    The master is the first node of the step, where Slurm puts task 0, and its port follows from the job and the step.
    MASTER_ADDR and MASTER_PORT stay where they are set.

    Raises:
        SlipstreamError: if Slurm left a variable out.
    """
    try:
        return {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_WORLD_SIZE": str(_tasks_of_each(environment)[int(environment["SLURM_NODEID"])]),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or first_node(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": environment.get("MASTER_PORT") or str(_port(environment)),
        }
    except (KeyError, IndexError, ValueError) as error:
        raise SlipstreamError(
            f"Slurm's variables don't say which rank this task is ({error!r}); start it with srun, or set RANK, "
            "LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself"
        ) from error


def first_node(nodes: str) -> str:
    """Returns the first node of a list: `gpu-07` of `gpu-[07-12,20],login1`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]  # splits at commas outside of brackets
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first)


def _tasks_of_each(environment: Mapping[str, str]) -> list[int]:
    """Returns the number of tasks of every node: `2(x3),1` gives 2, 2, 2, 1."""
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        number, _, times = part.rstrip(")").partition("(x")
        counts += [int(number)] * int(times or 1)
    return counts


def _port(environment: Mapping[str, str]) -> int:
    """Returns a port that is the same on all nodes, and another one for the next job or step."""
    return _FIRST_PORT + (int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])) % _NUM_PORTS
