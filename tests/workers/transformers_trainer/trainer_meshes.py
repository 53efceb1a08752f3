"""Each process of test_trainer_checkpoints: meshes train one after another, from the beginning or a checkpoint on."""

from __future__ import annotations

import sys
from pathlib import Path

from slipstream import make_mesh
from support.architectures import no_rounding_inside
from support.trainer_resuming import CHECKPOINT, check_end, slipstream_trainer

MESHES = {
    "stages": {"pp": 2},
    "tensors": {"tp": 2},
    "slices": {"cp": 2},
    "replicas": {"dp": 2},
    "both": {"pp": 2, "dp": 2},
}


def begins(folder: Path, name: str) -> None:
    made = slipstream_trainer(folder / name, make_mesh(**MESHES[name]), save_strategy="steps", save_steps=2)
    made.train()
    check_end(made, folder, resumed=False)


def goes_on(folder: Path, name: str) -> None:
    made = slipstream_trainer(folder / "again", make_mesh(**MESHES[name]))
    made.train(resume_from_checkpoint=str(folder / CHECKPOINT))
    check_end(made, folder, resumed=True)


if __name__ == "__main__":
    with no_rounding_inside():
        for each in sys.argv[2:]:
            action, name = each.split(":")
            {"begin": begins, "go-on": goes_on}[action](Path(sys.argv[1]), name)
