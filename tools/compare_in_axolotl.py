"""Trains a YAML in axolotl twice, as it is and with the plugin, and compares the losses of their steps:
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


def losses(settings: dict[str, Any], folder: Path) -> list[float]:
    """Returns the loss of each step that axolotl logs."""
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train

    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(settings | {"output_dir": str(folder / "out"), "logging_steps": 1}))
    cfg = load_cfg(str(file))
    *_, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def main() -> None:
    """Prints both runs' losses, and ends with an error where they differ by more than 1e-4."""
    settings = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = []
    for plugins in ([], [PLUGIN]):
        given = settings | ({"plugins": plugins} if plugins else {})
        # A process each, as axolotl replaces code of transformers, which the second run would find.
        with TemporaryDirectory() as folder, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(pool.submit(losses, given, Path(folder)).result())
        print("with the plugin" if plugins else "axolotl alone", found[-1])
    if len(found[0]) != len(found[1]) or any(abs(a - b) > 1e-4 * abs(a) for a, b in zip(*found, strict=True)):
        sys.exit("the losses differ")


if __name__ == "__main__":
    main()
