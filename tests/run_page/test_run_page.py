"""The page of runs tells each state of a run as its files have it, needs nothing else, and replaces nobody's file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.errors import SlipstreamError
from slipstream.extras.run_page import write_run_page
from slipstream.extras.run_page.charts import MOST_POINTS, Curve, line_chart, thinned
from slipstream.extras.run_page.run_record import RunRecord, read_run
from slipstream.html_parts import round_numbers
from slipstream.train.folder_lock import FolderLock
from slipstream.train.metrics.records import ChangeRecord
from slipstream.train.run_checkpoints import FailureLog
from slipstream.train.run_folder import RunFolder
from support.run_folders import make_run, start, step

BAD = {"why": "a <spike>", "samples": [0, 1], "done": "skipped"}
SLOW = "step 5: rank 1 (node7) is slow"


def page_of(run: Path) -> ElementTree.Element:
    """The page of a run, read as XML: every tag is closed, every text escaped."""
    return ElementTree.fromstring(write_run_page(run)[0].read_text(encoding="utf-8"))


def headings(page: ElementTree.Element) -> list[str | None]:
    return [each.text for each in page.iter("h2")]


def happened(page: ElementTree.Element) -> list[str]:
    return ["".join(each.itertext()) for part in page.iter("ul") if part.get("class") == "plain" for each in part]


def marks(page: ElementTree.Element) -> set[str]:
    return {each.get("class", "") for each in page.iter("line") if each.get("class", "").startswith("mark ")}


def tiles(page: ElementTree.Element) -> dict[str | None, str | None]:
    return {each.findtext("dt"): each.find("dd").text for each in page.findall(".//dl/div")}  # type: ignore[union-attr]


def state(page: ElementTree.Element) -> str | None:
    return next(each.text for each in page.iter("span") if each.get("class") == "state")


def test_a_run_on_preferences_has_a_loss_per_pair_and_may_end_by_its_patience(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=6, of=60)
    assert state(page_of(run.path)) == "ended early: step 6 of 60"
    text = run.config.read_text().replace("training:\n", "training:\n  patience: 2\n")
    run.config.write_text(f"{text}preference: {{beta: 0.1}}\n")
    page = page_of(run.path)
    assert state(page) == "finished: 6 steps"
    written = ElementTree.tostring(page, encoding="unicode")
    assert "per pair" in written
    assert "nats per token" not in written


def test_a_finished_run_has_every_section_and_its_numbers(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run").path)
    assert state(page) == "finished: 6 steps"
    assert headings(page) == [
        "Loss", "Optimizer", "Speed", "The last step, measured", "Where the time goes", "Memory", "Configuration",
        "Environment",
    ]  # fmt: skip
    assert tiles(page)["Loss"] == "3.4000"
    assert tiles(page)["Validation"] == "3.7000"
    assert tiles(page)["Idle"] == "12.5%"
    assert tiles(page)["Memory"] == "20.0 MB"
    assert happened(page) == []
    assert "node<1> (2 ranks)" in ["".join(cell.itertext()) for cell in page.iter("td")]


def test_a_run_that_goes_on_says_how_far_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4, of=10, finished=False)
    with FolderLock(run.path, pytest.fail):
        assert state(page_of(run.path)) == "running: step 4 of 10"
    assert state(page_of(run.path)) == "ended early: step 4 of 10"


def test_a_torn_last_line_is_left_out_without_a_word(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", finished=False)
    whole = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(whole) + whole[2].replace(b'"step": 1', b'"step": 7')[:40])
    assert happened(page_of(run.path)) == []
    assert read_run(run.path, "run").last_step == 6


def test_what_is_damaged_is_named_and_the_rest_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(lines[0] + b"xx\n[1]\n" + b"".join(lines[1:]))
    run.perfetto.write_text("{")
    run.config.write_text("a: [")
    page = page_of(run.path)
    lines_of_page = happened(page)
    assert lines_of_page[0] == "2 lines of metrics.jsonl can't be read"
    assert lines_of_page[1].startswith("config.yaml isn't valid YAML")
    assert "timeline.json" in lines_of_page[2]
    assert tiles(page)["Loss"] == "3.4000"
    assert "The last step, measured" not in headings(page)


def test_a_failed_run_says_at_which_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, finished=False)
    FailureLog(run.failures).add(3, started_after=0)
    page = page_of(run.path)
    assert state(page) == "failed: the numbers of step 3 aren't finite"
    assert happened(page) == ["the run failed in step 3: its numbers weren't finite"]


def test_a_resumed_run_marks_its_start_its_bad_step_and_its_slow_rank(tmp_path: Path) -> None:
    bad = step(4, float("nan"), bad=BAD)
    run = make_run(tmp_path / "run", steps=3, extra=(start(3), bad, step(5, stragglers=[SLOW]), step(6)))
    page = page_of(run.path)
    assert happened(page) == [
        "started again after step 3, at 2026-11-25T11:08:00+00:00",
        "step 4 was bad: a <spike>; skipped",
        SLOW,
    ]
    assert marks(page) == {"mark restart", "mark bad", "mark straggler"}
    curve = next(each.get("d", "") for each in page.iter("path") if each.get("class") == "s0")
    assert curve.count("M") == 2  # a gap where the loss isn't finite
    assert read_run(run.path, "run").steps[3]["loss"] is None


def test_a_start_as_another_mesh_says_what_it_cost(tmp_path: Path) -> None:
    smaller = replace(start(3), mesh={"pp": 2, "dp": 1}, repeated_steps=2)
    run = make_run(tmp_path / "run", steps=3, extra=(smaller, ChangeRecord(75.2), step(4), start(4), step(5)))
    page = page_of(run.path)
    assert happened(page) == [
        "started again after step 3, at 2026-11-25T11:08:00+00:00; pp 2 x dp 1; 2 steps repeated; 75 seconds until the "
        "next step",
        "started again after step 4, at 2026-11-25T11:08:00+00:00",
    ]
    (environment,) = (each for each in page.iter("table") if "mesh" in [head.text for head in each.iter("th")])
    assert [row.findall("td")[2].text for row in environment.findall(".//tr") if row.find("td") is not None] == [
        "-",
        "pp 2 x dp 1",
        "-",
    ]


def test_of_a_step_that_ran_again_the_last_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", extra=(start(4), step(5, 9.0), step(6, 8.0)))
    assert [each["loss"] for each in read_run(run.path, "run").steps][-3:] == [3.6, 9.0, 8.0]


def test_an_empty_run_and_one_that_only_prepared_are_shown(tmp_path: Path) -> None:
    empty, prepared = tmp_path / "empty", RunFolder(tmp_path / "prepared")
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    prepared.inputs.mkdir(parents=True)
    prepared.config.write_text("training: {steps: 3}")
    assert (state(page_of(empty)), headings(page_of(empty))) == ("ended before its first step", [])
    assert (state(page_of(prepared.path)), headings(page_of(prepared.path))) == (
        "ended before its first step",
        ["Configuration"],
    )


def test_without_validation_there_is_one_curve_and_no_legend(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", validated=False).path)
    loss = next(page.iter("figure"))
    assert "Validation" not in tiles(page)
    assert [each.get("class") for each in loss.iter("ul")] == []
    assert [each.get("class") for each in loss.iter("path")] == ["s0"]


def test_several_runs_are_next_to_each_other(tmp_path: Path) -> None:
    make_run(tmp_path / "sweep" / "b", steps=3)
    make_run(tmp_path / "a", validated=False)
    (tmp_path / "a" / "checkpoints").mkdir()
    path, number = write_run_page(tmp_path)
    text = path.read_text(encoding="utf-8")
    page = ElementTree.fromstring(text)
    assert (path.name, number) == ("runs.html", 2)
    overview = next(page.iter("table"))
    cells = [["".join(cell.itertext()) for cell in row] for row in overview.iter("tr")]
    assert [row[0] for row in cells] == ["run", "a", "sweep/b"]
    assert cells[1][1:4] == ["finished: 6 steps", "3.4000", "-"]
    assert cells[2][1] == "ended early: step 3 of 6"
    assert cells[1][-1] == "2026-11-25 11:08"
    assert 'class="dot s1"' in text  # a run has one colour in both charts, though the first has no validation
    links = [each.get("href", "")[1:] for each in overview.iter("a")]
    assert links == [each.get("id") for each in page.iter("article")]


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    text = write_run_page(tmp_path)[0].read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]  # a name, which nothing fetches
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|<link|\bsrc=", text)


def test_a_page_is_replaced_and_a_file_of_somebody_else_is_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run").path
    assert write_run_page(run) == write_run_page(run) == (run / "run.html", 1)
    other = tmp_path / "notes.html"
    other.write_text("mine")
    with pytest.raises(SlipstreamError, match=r"notes.html exists and isn't a page of `slipstream runs`"):
        write_run_page(run, other)
    assert other.read_text() == "mine"
    write_run_page(run, other, overwrite=True)
    assert other.read_text() != "mine"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda folder: (folder / "none", None), "there is no folder"),
        (lambda folder: (folder, None), "holds no run"),
        (lambda folder: (make_run(folder / "run").path, folder / "no" / "x.html"), "create it first"),
        (lambda folder: (make_run(folder / "run").path, folder), "exists and isn't a page"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, given: Callable[[Path], tuple[Path, Path | None]], said: str
) -> None:
    with pytest.raises(SlipstreamError, match=said):
        write_run_page(*given(tmp_path))


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run").path
    result = CliRunner().invoke(app, ["runs", str(run)])
    assert (result.exit_code, result.output) == (0, f"wrote {run / 'run.html'} (1 run)\n")


# --- charts ----------------------------------------------------------------------------------------------------------


def test_a_long_curve_keeps_its_ends_its_peaks_and_its_gaps() -> None:
    points: list[tuple[float, float | None]] = [(float(n), 1.0) for n in range(50_000)]
    points[31_234], points[777], points[40_001] = (31_234.0, 99.0), (777.0, -5.0), (40_001.0, None)
    shown = thinned(points)
    assert len(shown) <= 1.3 * MOST_POINTS
    assert {points[n] for n in (0, 777, 31_234, 40_001, 49_999)} <= set(shown)
    assert shown == sorted(shown)


@pytest.mark.parametrize("ends", [(0.0, 1.0), (3.99, 4.01), (-7.0, 1e9), (2.0, 2.0), (0.0, 0.0), (1e-9, 3e-9)])
def test_ticks_are_few_and_around_the_values(ends: tuple[float, float]) -> None:
    ticks = round_numbers(*ends, num_parts=5)
    assert 2 <= len(ticks) <= 7
    step = ticks[1] - ticks[0]
    assert ends[0] - 3 * step < ticks[0] <= ends[0] + step * 1e-6
    assert ends[1] - step * 1e-6 <= ticks[-1] < ends[1] + 3 * step


def test_points_lie_where_their_numbers_say() -> None:
    chart = line_chart("t", "u", [Curve("c", [(10.0, 0.0), (15.0, 5.0), (20.0, 10.0)])], "{:g}".format)
    figure = ElementTree.fromstring(chart)
    assert next(figure.iter("path")).get("d") == "M0.0 200.00L500.0 100.00L1000.0 0.00"
    assert line_chart("t", "u", [Curve("c", [(1.0, None)])], str) == ""


def test_a_record_knows_its_restarts(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path / "run").path, "run")
    later: RunRecord = replace(record, starts=[{"started_after": 8}])
    assert record.restarts == []
    assert later.restarts == [{"started_after": 8}]
