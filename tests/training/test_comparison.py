"""The closing line of a run: its steps beside those of one process."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.training.comparison import compare
from slipstream.training.output import Output


def test_a_run_that_was_gone_on_with_counts_its_own_steps_only(tmp_path: Path) -> None:
    def start(num_ranks: int, seconds: float) -> list[dict[str, object]]:
        step = {"step_seconds": seconds, "peak_memory": [1] * num_ranks}
        return [{"num_parameters": 7}, *[step] * 5, {"validation_loss": 1.0}]

    output = Output(tmp_path)
    output.metrics.write_text("".join(json.dumps(line) + "\n" for line in [*start(4, 3.0), *start(2, 0.5)]))
    output.comparison.write_text(json.dumps({"unsliced": 0.75, "sliced": 1.0}))
    assert compare(output) == (
        "2 ranks: 500 ms per step; one process: unsliced 750 ms, sliced 1000 ms\n"
        "1.50x the best single process (unsliced)"
    )
    assert json.loads(output.comparison.read_text())["num_ranks"] == 2
