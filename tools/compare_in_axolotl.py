"""Trains a YAML in axolotl twice, as it is and with the plugin, and compares losses and gradient norms of the steps:
`python -m tools.compare_in_axolotl train.yaml`. Outside of CI, as axolotl pins other versions than the lock."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

PLUGIN = "slipstream.extras.axolotl_plugin.SlipstreamPlugin"


def trained(settings: dict[str, Any], folder: Path) -> list[float]:
    """Returns the loss and the gradient norm of each step that axolotl logs."""
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train
    from transformers import set_seed

    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(settings | {"output_dir": str(folder / "out"), "logging_steps": 1}))
    cfg = load_cfg(str(file))
    set_seed(settings.get("seed", 42))  # axolotl makes adapters without one
    *_, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return [float(step[name]) for step in steps for name in ("loss", "grad_norm")]


def main() -> None:
    """Prints both runs' numbers and how far they differ, and ends with an error where that is more than 1e-4."""
    settings = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = []
    for plugins in ([], [PLUGIN]):
        given = settings | ({"plugins": plugins} if plugins else {})
        # A process each, as axolotl replaces code of transformers, which the second run would find.
        with TemporaryDirectory() as folder, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(pool.submit(trained, given, Path(folder)).result())
        print("with the plugin" if plugins else "axolotl alone", found[-1])
    if len(found[0]) != len(found[1]):
        sys.exit("the numbers of steps differ")
    worst = max(abs(a - b) / abs(a) for a, b in zip(*found, strict=True))
    print(f"the largest relative difference is {worst:.1e}")
    if worst > 1e-4:
        sys.exit("the runs differ")


if __name__ == "__main__":
    main()
