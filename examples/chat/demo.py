"""The whole way to a model that answers: pre-train, adapt by LoRA, be interrupted, go on to the bit, and ask.

`make demo-chat` runs it from the repository's root. Each line that begins with $ is a command you could type.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
QUESTION = "user:\nshout owl\nassistant:\n"
INTERRUPTED_AFTER = 30  # steps, which lie between two checkpoints


def main() -> None:
    """Runs the demo in a folder for its runs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="The folder for the four runs.")
    runs = parser.parse_args().runs
    base, adapted, undisturbed = (runs / name for name in ("chat-base", "chat-lora", "chat-lora-undisturbed"))
    adapt = ["train", str(HERE / "lora.yaml"), f"--model.path={base / 'model'}"]
    anew = "--training.overwrite=true"

    say("A small Llama learns Python")
    slipstream("train", str(HERE / "pretrain.yaml"), f"--training.output={base}", anew)
    say(f"An adapter learns to answer, until Ctrl-C after step {INTERRUPTED_AFTER}")
    interrupt(*adapt, f"--training.output={adapted}", anew, metrics=adapted / "metrics.jsonl")
    say("It goes on from its newest checkpoint")
    slipstream(*adapt, f"--training.output={adapted}", "--checkpoint.resume=latest")
    say("The same once more, without an interruption, to compare")
    slipstream(*adapt, f"--training.output={undisturbed}", "--lora.export=adapter", "--sample.prompt=null", anew)
    compare(adapted, undisturbed)
    say("The exported model is asked")
    slipstream("generate", str(adapted), QUESTION, "--max-new-tokens=20")


def say(text: str) -> None:
    """Prints what comes next."""
    print(f"\n=== {text} ===", flush=True)


def command_line(*arguments: str) -> list[str]:
    """Returns the command with its arguments, and prints it."""
    print("$ slipstream", *(repr(each) if "\n" in each else each for each in arguments), flush=True)
    return [sys.executable, "-m", "slipstream", *arguments]


def slipstream(*arguments: str) -> None:
    """Runs the command; ends this program where it fails."""
    if code := subprocess.run(command_line(*arguments), check=False).returncode:
        sys.exit(code)


def interrupt(*arguments: str, metrics: Path) -> None:
    """Runs the command, and interrupts it as Ctrl-C does, which every process of the terminal's group receives."""
    started = time.time()
    process = subprocess.Popen(command_line(*arguments), process_group=0)
    while process.poll() is None and newest_step(metrics, started) < INTERRUPTED_AFTER:
        time.sleep(0.05)
    if process.poll() is not None:
        sys.exit(f"the run ended with code {process.returncode} before it could be interrupted")
    os.killpg(process.pid, signal.SIGINT)
    process.wait()


def newest_step(metrics: Path, started: float) -> int:
    """Returns the last step that a run has written since it started, 0 where there is none."""
    if not metrics.exists() or metrics.stat().st_mtime < started:  # it is an earlier run's
        return 0
    lines = metrics.read_text().splitlines(keepends=True)
    steps = [json.loads(line).get("step", 0) for line in lines if line.endswith("\n")]
    return max(steps, default=0)


def compare(resumed: Path, undisturbed: Path) -> None:
    """Ends this program unless both runs have left the same adapter."""
    mine, other = (each / "adapter" / "adapter_model.safetensors" for each in (resumed, undisturbed))
    if mine.read_bytes() != other.read_bytes():
        sys.exit(f"{mine} and {other} differ: a resumed run should be the same to the bit")
    print(f"\n{mine} is, to the bit, what the undisturbed run has left")


if __name__ == "__main__":
    main()
