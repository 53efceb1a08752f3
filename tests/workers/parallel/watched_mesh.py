"""A mesh is watched for deaths alone until the Pipeline says how long ranks may wait: watched_mesh.py."""

from __future__ import annotations

import os

import torch.distributed as dist

from slipstream import Pipeline, Runtime, make_mesh
from slipstream.watchdog import board, is_watched
from slipstream.watchdog.board import StallPolicy
from support.architectures import ARCHITECTURES
from support.pipelines import make_pipe

del os.environ["SLIPSTREAM_STALL_LIMIT"]  # which the tests' launcher switches off


def policy() -> StallPolicy:
    mine = board()
    assert mine is not None
    return mine.look().policy


mesh = make_mesh(pp=2)
assert is_watched(provisionally=True)
assert not is_watched()
assert policy() is StallPolicy.ANY_LENGTH
make_mesh(pp=2)  # not twice
Pipeline.from_config(ARCHITECTURES["llama"], mesh=mesh, runtime=Runtime(self_check=False, stall_limit=300))
assert is_watched()
assert policy() is StallPolicy.COUNTED
make_pipe(ARCHITECTURES["llama"], mesh=make_mesh(pp=2))
assert policy() is StallPolicy.COUNTED
dist.destroy_process_group()
print("watched")
