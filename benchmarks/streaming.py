"""Memory and data waits of a run that streams a large file of conversations, next to one that streams a small one.

python -m benchmarks.streaming                  # prints two lines, writes results/streaming.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from examples.chat.make_conversations import make_conversations

from benchmarks.harness import setting, write
from slipstream.launch import Progress, launch_ranks
from slipstream.train.config.config_values import parse_config
from slipstream.train.data import train_tokenizer
from slipstream.train.folder_lock import FolderLock
from slipstream.train.preflight import preflight

TEMPLATE = Path("examples/chat/template.jinja")
MODEL = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL = 2  # megabytes
SEEDS = 32  # of conversations
SHUFFLED = 2000  # rows in a block, so that a run goes through several


def write_conversations(path: Path, megabytes: int) -> None:
    """Writes conversations until the file has this size: of some thousands that are made, some of them at a time, in
    random orders."""
    lines = [json.dumps(each) + "\n" for seed in range(SEEDS) for each in make_conversations(seed)]
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1e6:
            file.writelines(draw.sample(lines, len(lines) // SEEDS))


def stream(folder: Path, file: Path, steps: int) -> list[dict[str, Any]]:
    """Trains on a file with two ranks; returns the records of the steps."""
    output = folder / file.stem
    config = parse_config(
        {
            "model": {"config": {"model_type": "llama", "vocab_size": 512, **MODEL}},
            "data": {
                "dataset": str(file),
                "streaming": True,
                "shuffle_rows": SHUFFLED,
                "tokenizer": str(folder),
                "chat_template": str(TEMPLATE),
            },
            "pipeline": {"num_ranks": 2, "schedule": "1f1b", "slices": 4},
            "training": {"output": str(output), "seq_len": 1024, "batch_size": 2, "steps": steps},
        }
    )
    inputs = preflight(config, Progress(None))
    with FolderLock(output, print) as lock:
        inputs.write()
        launch_ranks("slipstream.train.training_rank", [str(output / "config.yaml"), lock.key], 2)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    peaks: dict[int, int] = {}
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [message["content"] for each in make_conversations() for message in each["messages"]]
        train_tokenizer(texts, 512, Progress(None)).save_pretrained(folder)
        for megabytes in (SMALL, options.megabytes):
            file = folder / f"conversations-{megabytes}.jsonl"
            write_conversations(file, megabytes)
            records = stream(folder, file, options.steps)
            peaks[megabytes] = max(records[-1]["peak_memory"])
            waits = sum(each["phases"]["data"] for each in records) / sum(each["step_seconds"] for each in records)
            step = statistics.median(each["step_seconds"] for each in records)
            runs.append({"bytes": file.stat().st_size, "peak_bytes": peaks[megabytes], "step": step, "waits": waits})
            print(
                f"{file.stat().st_size / 1e6:.0f} MB of jsonl: {peaks[megabytes] / 1e6:.0f} MB a rank at most, "
                f"{step:.3f} s a step, data waits {waits:.2%}"
            )
    print(f"{(peaks[options.megabytes] - peaks[SMALL]) / 1e6:.0f} MB more than with {SMALL} MB")
    print(write("streaming", {"setting": setting(**vars(options)), "runs": runs}))


if __name__ == "__main__":
    main()
