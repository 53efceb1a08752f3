"""A SlipstreamTrainer goes on from a checkpoint on any other mesh, and its ranks may share every layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.architectures import no_rounding_inside
from support.forked import launch
from support.paths import WORKERS
from support.trainer_resuming import CHECKPOINT, check_end, slipstream_trainer, write_expected


def run(folder: Path, num_processes: int, *meshes: str) -> None:
    ended = launch(num_processes, WORKERS / "transformers_trainer/trainer_meshes.py", folder, *meshes)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.more
def test_stages_and_tensor_ranks_train_and_other_processes_go_on(tmp_path: Path) -> None:
    """Of two processes' checkpoints two replicas, tensor ranks, ranks that share slices, and one process go on."""
    write_expected(tmp_path)
    run(tmp_path, 2, "begin:stages", "begin:tensors", "go-on:replicas", "go-on:tensors", "go-on:slices")
    for saved in (CHECKPOINT, "tensors/checkpoint-2"):
        with no_rounding_inside():
            alone = slipstream_trainer(tmp_path / "alone")
            alone.train(resume_from_checkpoint=str(tmp_path / saved))
            check_end(alone, tmp_path, resumed=True)


@pytest.mark.more
def test_replicas_of_stages_go_on(tmp_path: Path) -> None:
    """Ranks that share batches aren't those that share layers."""
    write_expected(tmp_path)
    run(tmp_path, 2, "begin:stages")
    run(tmp_path, 4, "go-on:both")
