"""One configuration on meshes of one to eight processes: the losses of 100 steps, in float32.

python -m benchmarks.loss_curves              # writes results/loss_curves.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import few, setting, write

MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
STEPS = 100
BOUND = 1e-5
CONFIGURATION: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "max_position_embeddings": 128,
        }
    },
    "data": {"vocab_size": 512, "validation_fraction": 0},
    "pipeline": {"slices": 4, "num_microbatches": 2},
    "runtime": {"self_check": False},
    "parallel": {"shard": "optimizer", "sequence_parallel": True},
    "optimizer": {"lr": 1e-3, "warmup_steps": 10},
    "training": {"seq_len": 128, "batch_size": 4, "steps": STEPS, "overwrite": True},
}


def losses(mesh: tuple[int, int, int], folder: Path) -> list[float]:
    """Trains on a mesh; returns the loss of every step."""
    config, output = folder / "config.yaml", folder / "run"
    config.write_text(yaml.safe_dump(CONFIGURATION))
    text = Path(__file__).parents[1] / "docs"
    axes = [f"--{name}={size}" for name, size in zip(("pp", "dp", "tp"), mesh, strict=True)]
    command = [sys.executable, "-m", "slipstream", "train", str(config), *axes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [
            *command,
            f"--data.files=[{text}]",
            f"--training.output={output}",
            f"--training.steps={len(few(range(STEPS), 2))}",
        ],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mesh in few(MESHES, 2):
            name = "pp{} dp{} tp{}".format(*mesh)
            curves[name] = losses(mesh, Path(folder))
            one = curves["pp1 dp1 tp1"]
            apart = max(abs(a - b) for a, b in zip(curves[name], one, strict=True))
            print(f"{name}: {curves[name][0]:.4f} to {curves[name][-1]:.4f}, at most {apart:.1e} apart", flush=True)
    largest = max(abs(a - b) for curve in curves.values() for a, b in zip(curve, one, strict=True))
    report = {"setting": setting(steps=STEPS), "configuration": CONFIGURATION, "largest": largest, "losses": curves}
    print(f"wrote {write('loss_curves', report)}; largest difference {largest:.1e}, wanted at most {BOUND}")


if __name__ == "__main__":
    main()
