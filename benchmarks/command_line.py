"""How long `slipstream --help` takes: torch is imported only where it is needed.

python -m benchmarks.command_line                  # prints the median, writes results/command_line.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import interleaved, medians, setting, write


def timed(*command: str) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    program = str(Path(sys.executable).with_name("slipstream"))
    contenders = {
        "slipstream --help": lambda: timed(program, "--help"),
        "python -c ''": lambda: timed(sys.executable, "-c", ""),
        "python -c 'import torch'": lambda: timed(sys.executable, "-c", "import torch"),
    }
    rows = medians(interleaved(contenders, repeats=9))
    print({name: round(seconds, 3) for name, seconds in rows.items()})
    print(f"wrote {write('command_line', {'setting': setting(repeats=9), 'seconds': rows})}")


if __name__ == "__main__":
    main()
