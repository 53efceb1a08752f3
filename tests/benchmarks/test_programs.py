"""Every benchmark is listed, and each record names one; grids, sweeps and contenders keep to their rules."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.__main__ import FOLDER, ON_REQUEST, TRIALS, first_line
from benchmarks.auto_grid import ALONE, AUTO, best_of, judged, row_of
from benchmarks.auto_grid_models import DEFAULT, MODELS, grid
from benchmarks.auto_planned import COMPARED, row
from benchmarks.contenders import OwnReport, PlannedStep
from benchmarks.harness import interleaved
from benchmarks.isolated import Contender
from benchmarks.records import SUBJECTS
from benchmarks.zoo.page import short_reason
from benchmarks.zoo.workers import Limits, Send, run_forked

from benchmarks import auto_grid, records
from slipstream import Schedule, Timeline
from support.paths import ROOT, TESTS, WORKERS, with_path
from support.timeouts import LIMIT, SOON
from workers.benchmarks.isolated import Counts

PAGES = {"records", "papers.page", "gpipe.page", "soak.page"}  # programs that write pages


def programs() -> set[str]:
    """Returns the modules that run as programs."""
    found = set()
    for path in FOLDER.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body):
            found.add(".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix("__main__").rstrip("."))
    return found - {""}


def test_every_program_is_listed_with_a_trial() -> None:
    assert programs() == set(TRIALS) | PAGES
    assert set(TRIALS) >= ON_REQUEST


def test_every_record_is_of_a_listed_program() -> None:
    assert {subject.program for subject in SUBJECTS.values()} <= set(TRIALS)


@pytest.mark.parametrize("name", TRIALS)
def test_a_program_says_what_it_measures_and_takes_options(name: str) -> None:
    path = FOLDER.joinpath(*name.split("."))
    source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert first_line(name)
    assert "ArgumentParser(" in source.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MODELS)
def test_a_grid_has_many_settings_that_fit_the_model(name: str) -> None:
    model = MODELS[name]
    settings = grid(model)
    assert model.config().get_text_config().num_hidden_layers == model.num_layers
    assert next(iter(settings)) == DEFAULT
    assert len({str(each) for each in settings.values()}) == len(settings) >= 24
    for each in settings.values():
        partition, slices = each.get("partition", "auto"), each["slices"]
        assert partition == "auto" or (sum(partition) == model.num_layers and len(partition) % 2 == 0)
        assert isinstance(slices, int) or sum(slices) == model.length


def test_a_quick_screening_times_each_setting_once_and_leaves_more_to_the_rounds() -> None:
    names = [name for name in grid(MODELS["deep"]) if not name.startswith("auto")]
    found = {name: {"seconds": float(index)} for index, name in enumerate(names)}
    for quick, steps, best in ((False, 2, 4), (True, 1, 6)):
        row = row_of("deep", {}, quick) | {"grid": found}
        assert row["screening"] == {"timed steps": steps, "best": best}
        assert [*best_of(MODELS["deep"], row)] == names[:best]


def test_errors_of_starts_do_not_cancel() -> None:
    found = row("deep", [{"planned over measured": ratio} for ratio in (0.98, 1.02, 1.0)])
    assert found["planned over measured"] == 1.0
    assert found["mean error"] == pytest.approx(0.04 / 3)
    assert found["tokens"] == COMPARED["deep"].length


def test_auto_is_judged_by_medians_of_all_rounds() -> None:
    seconds = {AUTO: [2.0, 1.0, 3.0], DEFAULT: [3.0, 0.5, 3.0], "by hand": [2.5, 2.5, 1.9]}
    seconds |= {key: [4.0, 4.0, 4.0] for key in ALONE}
    plan = PlannedStep(seconds=1.9, with_own_times=2.0, ideal=1.8, table="a table")
    nothing = Schedule("none", ((),), (0,), 1, 1)
    found = judged(seconds, OwnReport(Timeline((), 1), nothing, "order", [1], [1.0], plan))
    assert found["best of the grid"] == "by hand"
    ratios = [found[key] for key in ("over the best of the grid", "over the default", "over one process")]
    assert ratios == [1.25, 1.5, 2.0]
    assert found["rounds behind the default"] == 1
    assert found["planned over measured"] == 0.95


def test_a_models_row_goes_on_only_where_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources, machine and screening; the rows of other models are nobody's business."""
    row = row_of("deep", {}, quick=False)
    assert row_of("deep", {"deep": row, "words": {"of": {}}}, quick=False) is row
    assert row_of("words", {"deep": row}, quick=False)["grid"] == {}
    older = row | {"of": row["of"] | {"sha256": "other"}}
    elsewhere = row | {"setting": row["setting"] | {"cpu": "another"}}
    for other, quick in ((older, False), (elsewhere, False), (row, True)):
        assert row_of("deep", {"deep": other}, quick) is not other
    busier = row | {"setting": row["setting"] | {"load_average": [9.0, 9.0, 9.0]}}
    assert row_of("deep", {"deep": busier}, quick=False) is busier


def test_the_page_says_of_each_model_whether_it_is_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now: dict[str, Any] = row_of("deep", {}, quick=False)
    older = now | {"of": now["of"] | {"sha256": "other", "commit": "abc"}}
    (tmp_path / "auto_grid.json").write_text(json.dumps({"of": now["of"], "models": {"deep": now, "words": older}}))
    for name in ("plan_search", "plan_lengths"):  # which the page has sentences of
        (tmp_path / f"{name}.json").write_bytes((records.RESULTS / f"{name}.json").read_bytes())
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    page = records.tables()["records"].splitlines()
    deep, words = (line for line in page if line.startswith("| `auto_grid`, "))
    assert deep.startswith("| `auto_grid`, deep |")
    assert deep.endswith("| unchanged |")
    assert words.endswith("| `abc` | changed: **older** |")
    assert auto_grid.summary({"deep": now | {"judged": JUDGED}, "words": older | {"judged": JUDGED}})["older"] == [
        "words"
    ]


JUDGED = {"over the best of the grid": 1.0, "over the default": 1.0, "planned over measured": 1.0}


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


def state(pid: int) -> str:
    """As the system has it: "T" is stopped; "" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def becomes(pid: int, wanted: tuple[str, ...]) -> bool:
    deadline = time.monotonic() + SOON
    while state(pid) not in wanted:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.more
def test_contenders_that_wait_are_stopped() -> None:
    contender = Contender("counts", Counts)
    contender.start()
    pids = [process.pid for process in contender._processes]
    assert all(becomes(pid, ("T",)) for pid in pids)
    contender.wait()
    assert all(becomes(pid, ("T",)) for pid in pids)
    assert contender.run() < SOON
    assert contender.losses == [1.0, 1.0]
    assert all(becomes(pid, ("T",)) for pid in pids)
    assert contender.report() == 1
    contender.rest()
    assert all(becomes(pid, ("T",)) for pid in pids)
    contender.close()
    assert not any(process.is_alive() for process in contender._processes)


@pytest.mark.more
@pytest.mark.parametrize("how", ["killed", "fail"])
def test_stopped_contenders_end_with_the_benchmark(how: str, tmp_path: Path) -> None:
    # no pipes, which a contender that lives on would hold open
    with (tmp_path / "pid").open("w") as told, (tmp_path / "errors").open("w") as errors:
        subprocess.run(
            [sys.executable, WORKERS / "benchmarks/isolated.py", how],
            env=with_path(TESTS, ROOT),
            stdout=told,
            stderr=errors,
            timeout=LIMIT,
        )
    pid = int((tmp_path / "pid").read_text().split()[0])
    ended = becomes(pid, ("", "Z"))
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert ended


def test_the_first_step_of_a_turn_and_the_first_rounds_do_not_count() -> None:
    numbers = iter(range(100))
    assert interleaved({"a": lambda: next(numbers) / 1000}, repeats=2, warmups=1, steps=3) == {
        "a": [0.004, 0.005, 0.007, 0.008]
    }
    numbers = iter(range(100))
    assert interleaved({"a": lambda: next(numbers) / 1000}, repeats=2, warmups=1) == {"a": [0.001, 0.002]}


def test_contenders_rest_after_a_turn_of_several_steps() -> None:
    happened: list[str] = []
    run = {name: lambda name=name: happened.append(name) or 0.0 for name in "ab"}  # type: ignore[misc,func-returns-value]
    rests = {"a": lambda: happened.append("rest")}
    interleaved(run, repeats=1, warmups=0, steps=2, rests=rests)
    assert happened == ["a", "a", "rest", "b", "b"]
    happened.clear()
    interleaved(run, repeats=1, warmups=0, rests=rests)
    assert happened == ["a", "b"]
