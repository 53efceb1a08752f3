"""In a real browser the page shows what the pointer and the keys are at, zooms, moves, and fits its window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from slipstream.extras.run_page import write_run_page
from support.browser import ask, browse
from support.run_folders import make_run, measured

HELPERS = """
const line = document.querySelector(".step-timeline"), view = line.timeline, whole = view.data.length;
const key = (on, name, more) => on.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true, ...more}));
const seen = () => [view.from / whole, view.length / whole];
const point = (on, type, x, y, more) =>
  on.dispatchEvent(new PointerEvent(type, {clientX: x, clientY: y, bubbles: true, ...more}));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return write_run_page(make_run(folder / "a").path)[0]


@pytest.fixture(scope="module")
def answers(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was seen after each gesture, of one visit."""
    script = (
        HELPERS
        + """
    await until(() => document.querySelector(".lanes rect"));
    const found = {}, charts = [...document.querySelectorAll("figure.curves")], loss = charts[0];
    const told = (chart) => chart.querySelector("output").textContent;
    found.untouched = getComputedStyle(loss.querySelector("line.cursor")).display;
    const frame = loss.querySelector("svg.lines").getBoundingClientRect();
    point(loss.querySelector("svg.lines"), "pointermove", frame.left + frame.width * 0.41, frame.top + 5);
    found.hover = charts.map(told);
    found.cursor = loss.querySelector("line.cursor").getAttribute("x1");
    key(loss, "ArrowRight"); found.right = told(loss);
    key(loss, "Home"); found.home = told(loss);
    key(loss, "End"); found.end = told(loss);
    found.value = loss.getAttribute("aria-valuenow");
    const caption = charts[1].querySelector("figcaption").getBoundingClientRect();
    found.overlap = caption.bottom - charts[1].querySelector("svg.values text:last-child").getBoundingClientRect().top;

    found.whole = seen();
    found.boxes = document.querySelectorAll(".lanes rect").length;
    line.querySelector("[data-do=in]").click(); found.zoomed = seen();
    line.querySelector("[data-do=later]").click(); found.later = seen();
    const lanes = line.querySelector(".lanes svg"), from = lanes.getBoundingClientRect();
    point(lanes, "pointerdown", from.left + 300, from.top + 10, {buttons: 1});
    point(lanes, "pointermove", from.left + 300 + view.width / 2, from.top + 10, {buttons: 1});
    found.dragged = seen();
    point(lanes, "pointermove", from.left + 10, from.top + 10, {buttons: 0});
    found.released = seen();
    lanes.dispatchEvent(new WheelEvent("wheel", {deltaY: -300, clientX: from.left + 400}));
    found.scrolled = seen();
    lanes.dispatchEvent(new WheelEvent("wheel", {deltaY: -300, ctrlKey: true, clientX: from.left + 64}));
    found.wheeled = seen();
    key(line, "0"); found.reset = seen();
    key(line, "ArrowRight"); found.first = told(line);
    key(line, "ArrowRight"); found.second = told(line);
    key(line, "ArrowDown"); found.down = told(line);
    found.chosen = document.querySelectorAll(".lanes rect.chosen").length;
    key(line, "+"); found.plus = seen()[1];
    key(line, "ArrowRight", {shiftKey: true}); found.moved = seen()[0];
    key(line, "+", {ctrlKey: true}); found.browsers_own = seen()[1];
    key(line, "0");
    const box = document.querySelector(".lanes rect");
    point(box, "pointermove", 0, 0); found.over = told(line);
    found.title = box.querySelector("title").textContent;
    return found;"""
    )
    return dict(ask(run, tmp_path_factory.mktemp("visit"), script))


def test_all_charts_show_the_step_under_the_pointer(answers: dict[str, Any]) -> None:
    assert answers["untouched"] == "none"
    assert answers["hover"][0] == "training 3.7000 at step 3, validation 3.8500"
    assert answers["hover"][1:3] == ["0.001 at step 3", "0.5 at step 3"]
    assert answers["cursor"] == "400"


def test_keys_move_along_a_chart(answers: dict[str, Any]) -> None:
    assert answers["right"] == "training 3.6000 at step 4, validation 3.8500 at step 3"
    assert answers["home"].startswith("training 3.9000 at step 1")
    assert answers["end"] == "training 3.4000 at step 6, validation 3.7000"
    assert answers["value"] == "6"


def test_the_top_number_stays_below_the_caption(answers: dict[str, Any]) -> None:
    assert answers["overlap"] <= 0


def test_the_timeline_is_zoomed_and_moved_by_buttons_pointer_and_wheel(answers: dict[str, Any]) -> None:
    timeline = measured()
    assert answers["whole"] == [0, 1]
    assert answers["boxes"] >= len(timeline.compute_spans)
    assert answers["zoomed"] == [0.25, 0.5]
    assert answers["later"] == [0.375, 0.5]
    assert answers["dragged"] == answers["released"] == pytest.approx([0.125, 0.5])
    assert answers["scrolled"] == answers["released"]  # the wheel alone scrolls the page
    assert answers["wheeled"] == pytest.approx([0.125, 0.5 / 2.718281828])


def test_the_timeline_is_read_by_keys(answers: dict[str, Any]) -> None:
    assert answers["reset"] == [0, 1]
    assert answers["first"].startswith("rank 0, ")
    assert "forward, stage 0, microbatch 0, slice 0" in answers["first"]
    assert "forward, stage 0, microbatch 0, slice 1" in answers["second"]
    assert answers["down"].startswith("rank 1, ")
    assert answers["chosen"] == 1
    assert answers["plus"] == answers["browsers_own"] == 0.5
    assert answers["moved"] > 0
    assert answers["over"].endswith(answers["title"])


def test_a_link_of_the_overview_opens_its_run_and_nothing_is_too_wide(folder: Path, run: Path, tmp_path: Path) -> None:
    make_run(folder / "b")
    script = """
    const isOpen = () => [...document.querySelectorAll("article > details")].map((each) => each.open);
    const found = {before: isOpen()}, table = document.querySelector(".scroll");
    found.table = table.scrollWidth - table.clientWidth;
    document.querySelectorAll("table.runs a")[1].click();
    const boxes = () => document.querySelectorAll("#run-2 .lanes rect").length;
    await until(boxes); // it is drawn once it is seen
    found.after = isOpen();
    found.boxes = boxes();
    found.wider = document.documentElement.scrollWidth - innerWidth;
    return found;"""
    found = ask(write_run_page(folder)[0], tmp_path, script, width=1000)
    assert (found["before"], found["after"]) == ([False, False], [False, True])
    assert found["boxes"] > 0
    assert found["table"] <= 0  # no column has to be scrolled to
    assert found["wider"] <= 0


def test_in_a_dark_and_narrow_window_it_is_dark_and_no_wider(run: Path, tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    options = ("--hide-scrollbars", "--window-size=500,2600", "--force-dark-mode")
    browse(run, tmp_path, f"--screenshot={picture}", *options)
    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    page, curve = [0x15, 0x17, 0x1B], [0x5B, 0x98, 0xD8]
    assert pixels[5, 2].tolist() == page
    assert (pixels[:, -2] == page).all()  # the margin on the right is empty
    assert (pixels == curve).all(axis=-1).sum() > 500
