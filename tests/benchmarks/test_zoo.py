"""The sweep over transformers' architectures keeps to its limits, and its page has what the record has."""

from __future__ import annotations

import os
import time

import pytest
from benchmarks.zoo.page import short_reason
from benchmarks.zoo.workers import Limits, Send, run_forked


def test_a_reason_is_one_line_without_what_to_type() -> None:
    message = "model_type 'x' can't be trained in token slices: layer 0 (Block) never | attends. Give whole sequences"
    assert short_reason(message) == "layer 0 (Block) never \\| attends"


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_takes_too_much_loses_its_own_task_only() -> None:
    limits = Limits(seconds=1, memory=1 << 28)
    found = {result.task: result for result in run_forked(["sends", "hangs", "ends", "grows"], _work, 2, limits)}
    assert (found["sends"].sent, found["sends"].ended_by) == (["first", "second"], "")
    assert (found["hangs"].sent, found["hangs"].ended_by) == (["first"], "it waited for more than 8 s")
    assert (found["ends"].sent, found["ends"].ended_by) == (["first"], "the process ended with 3")
    assert found["grows"].ended_by == "it took more than 0.3 GB"


def _work(task: str, send: Send) -> None:
    send("first")
    if task == "sends":
        send("second")
    if task == "hangs":
        time.sleep(60)
    if task == "ends":
        os._exit(3)
    if task == "grows":
        kept: list[bytes] = []
        while True:
            kept += [b"x" * (1 << 26)] * (len(kept) < 20)  # no more, where nobody looks for a while
            time.sleep(0.05)
