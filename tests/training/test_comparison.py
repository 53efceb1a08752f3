"""The closing line of a run compares its own steps with those of one process."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.train.comparison import compare, steps_of
from slipstream.train.run_folder import RunFolder


def start(num_ranks: int, seconds: float, num_steps: int = 5) -> str:
    step = {"step_seconds": seconds, "peak_memory": [1] * num_ranks}
    lines = [{"num_parameters": 7}, *[step] * num_steps, {"validation_loss": 1.0}]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_run_that_was_gone_on_with_counts_its_own_steps_only(tmp_path: Path) -> None:
    output = RunFolder(tmp_path)
    output.metrics.write_text(start(4, 3.0) + start(2, 0.5))
    output.comparison.write_text(json.dumps({"unsliced": 0.75, "sliced": 1.0}))
    assert compare(output) == (
        "2 ranks: 500 ms per step; one process: unsliced 750 ms, sliced 1.00 s\n"
        "1.50x the best single process (unsliced)"
    )
    assert json.loads(output.comparison.read_text())["num_ranks"] == 2


def test_steps_in_which_auto_tried_count_where_there_are_no_others(tmp_path: Path) -> None:
    output = RunFolder(tmp_path)
    trials = [{"step_seconds": 9.0, "peak_memory": [1], "trial": True}] * 3
    begin = "".join(json.dumps(line) + "\n" for line in [{"num_parameters": 7}, *trials])
    output.metrics.write_text(begin)
    assert steps_of(output) == trials
    output.metrics.write_text(begin + json.dumps({"step_seconds": 0.5, "peak_memory": [1]}) + "\n")
    assert [step["step_seconds"] for step in steps_of(output)] == [0.5]


def test_a_run_that_had_come_to_its_end_has_no_steps(tmp_path: Path) -> None:
    output = RunFolder(tmp_path)
    output.metrics.write_text(start(2, 0.5) + start(2, 0.0, num_steps=0))
    assert steps_of(output) == []
