"""A rank that ends while something still refers to its pipeline; its last line says which threads it then has."""

from __future__ import annotations

import atexit
from pathlib import Path

import torch
import torch.distributed as dist


def say_threads() -> None:
    names = sorted(task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
    print(f"threads at the end: {names}\n", end="", flush=True)


atexit.register(say_threads)  # the first to be registered is the last to run

from slipstream import make_mesh  # noqa: E402
from support.architectures import ARCHITECTURES  # noqa: E402
from support.pipelines import make_pipe  # noqa: E402

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipe = make_pipe(ARCHITECTURES["llama"], mesh=make_mesh(pp=2), slices=2)
    tokens = torch.arange(16).unsqueeze(0)
    pipe.step(tokens, tokens)
    pipe.timeline()
    dist.destroy_process_group()
