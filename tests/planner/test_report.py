"""Every number in the report of a plan is the plan's, nothing is fetched, and long steps stay readable."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread

from slipstream.html_parts import Bar, axis_ticks, bar_chart
from slipstream.planner.plan_report import Alternative, PlanReport
from slipstream.planner.report import (
    MOST_RANKS,
    MOST_SPANS,
    legend,
    reasons,
    report_page,
    search_text,
    shared_choices,
    shown_columns,
    shown_parts,
    slices_text,
    timeline_svg,
    write_report,
)
from slipstream.simulator import MemoryKind
from slipstream.timeline import Cause, idle_by_cause
from slipstream.units import bytes_text, seconds_text
from support.browser import browse
from support.hand_made_plan import make_plan
from support.parameters import each_once

UNITS = {"s": 1, "ms": 1e-3, "µs": 1e-6, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "%": 1e-2, "": 1}


@pytest.fixture(scope="module")
def plan() -> PlanReport:
    return make_plan()


@pytest.fixture(scope="module")
def page(plan: PlanReport) -> ElementTree.Element:
    return ElementTree.fromstring(report_page(plan))


def number(text: str) -> float:
    """What a reader takes `12.3 GB` for."""
    found = re.fullmatch(r"([\d,.]+) ?(%|[a-zA-Z]*)", text)
    assert found, text
    return float(found[1].replace(",", "")) * UNITS[found[2]]


def tables(page: ElementTree.Element) -> list[list[list[str]]]:
    return [[["".join(cell.itertext()) for cell in row] for row in table.iter("tr")] for table in page.iter("table")]


def close(value: float) -> object:
    """Equal in the three digits that are shown."""
    return pytest.approx(value, rel=5.1e-3)


def test_the_page_needs_nothing_else(plan: PlanReport) -> None:
    text = report_page(plan)
    assert "http" not in text
    assert "<script" not in text
    assert not re.search(r"@import|url\((?!#)", text)
    tree = ElementTree.fromstring(text)
    names = {f"#{each.get('id')}" for each in tree.iter()}
    uses = [each.get("href") for each in tree.iter("use")]
    assert uses
    assert {each.get(name) for each in tree.iter() for name in ("src", "href")} - {None} <= names
    assert set(uses) <= names
    assert set(re.findall(r"url\((.*?)\)", text)) <= names
    assert report_page(plan) == text  # the same plan gives the same page


def test_what_others_named_is_text(plan: PlanReport, page: ElementTree.Element) -> None:
    assert page.findtext("./head/title") == "Plan: llama <16 layers> & more on h100-dgx"
    assert "Times are <computed>, not measured." in [item.text for item in page.iter("li")]


def test_the_table_says_what_was_predicted(plan: PlanReport, page: ElementTree.Element) -> None:
    heading, *rows = tables(page)[0]
    assert heading == ["", "tp x cp x pp x dp (ep)", "schedule", "slices", "step", "tokens/s", "MFU", "idle", "memory"]
    assert shared_choices(plan.predictions)["microbatches"] == "2 of 1"
    assert len(rows) == len(plan.predictions)
    for row, predicted in zip(rows, plan.predictions, strict=True):
        cells = dict(zip(heading, row, strict=True))
        assert cells["schedule"] == predicted.plan.schedule
        assert int(cells["slices"]) == predicted.plan.num_slices
        assert number(cells["step"]) == close(predicted.step_seconds)
        assert number(cells["tokens/s"]) == close(predicted.tokens_per_second)
        assert number(cells["MFU"]) == close(predicted.mfu or 0)
        assert number(cells["idle"]) == close(predicted.idle_fraction)
        assert number(cells["memory"]) == close(predicted.peak_memory)


def test_headline_is_that_of_the_best(plan: PlanReport, page: ElementTree.Element) -> None:
    tiles = {tile.findtext("dt"): tile.find("dd").text for tile in page.findall(".//dl/div")}
    best = plan.best
    assert number(tiles["Step"]) == close(best.step_seconds)
    assert number(tiles["Tokens per second"]) == close(best.tokens_per_second)
    assert number(tiles["Memory"]) == close(best.peak_memory)
    (limit,) = (note.text.split(" of ")[1] for note in page.findall(".//dl/div/dd/small") if " of 80" in note.text)
    assert number(limit) == 80e9
    assert number(tiles["Idle"]) == close(best.idle_fraction)


def test_times_and_bytes_add_up_as_in_the_plan(plan: PlanReport, page: ElementTree.Element) -> None:
    _, time, memory, layers = tables(page)
    for row, predicted in zip(time[1:], plan.predictions, strict=True):
        assert number(row[-1]) == close(predicted.step_seconds)
        shown = {cause: number(cell) for cause, cell in zip(time[0][1:-1], row[1:-1], strict=True)}
        assert shown == {cause: close(seconds) for cause, seconds in predicted.seconds_by_cause.items()}
    for row, held in zip(memory[1:], plan.best.memory, strict=True):
        shown = {MemoryKind(kind): number(cell) for kind, cell in zip(memory[0][1:-1], row[1:-1], strict=True)}
        assert shown == {kind: close(size) for kind, size in held.items()}
        assert number(row[-1]) == close(sum(held.values()))
    assert [int(row[2]) for row in layers[1:]] == list(plan.best.plan.partition)


def test_bars_are_as_long_as_their_numbers(plan: PlanReport) -> None:
    bars = [Bar("a", {"one": 3.0, "two": 1.0}), Bar("b", {"two": 2.0})]
    chart = ElementTree.fromstring(f"<div>{bar_chart(bars, 'seconds', seconds_text, 5.0, 'limit')}</div>")
    pieces = [
        (each.get("class"), float(each.get("x", "")[:-1]), float(each.get("width", "")[:-1]))
        for each in chart.iter("rect")
    ]
    per_second = pieces[0][2] / 3
    assert [name for name, _, _ in pieces] == ["c0", "c1", "c1"]
    assert [(x, width) for _, x, width in pieces] == [
        (0, pytest.approx(3 * per_second)),
        (pytest.approx(3 * per_second, abs=1e-3), pytest.approx(per_second, abs=1e-3)),
        (0, pytest.approx(2 * per_second, abs=1e-3)),
    ]
    limits = [float(line.get("x1", "")[:-1]) for line in chart.iter("line") if line.get("class") == "limit"]
    assert limits == [pytest.approx(5 * per_second, abs=1e-3)] * 2
    assert [each.text for each in chart.iter("p")] == ["seconds"]
    assert [each.text for each in chart.iter("text")] == ["0 s", "1 s", "2 s", "3 s", "4 s", "5 s"]
    halves = ElementTree.fromstring(f"<div>{bar_chart([Bar('a', {'one': 14e9})], 'bytes', bytes_text)}</div>")
    assert [each.text for each in halves.iter("text")] == ["0 B", "2.5 GB", "5 GB", "7.5 GB", "10 GB", "12.5 GB"]


@pytest.mark.parametrize("most", [1e-6, 0.7, 1.0, 3.0, 99.0, 8e10])
def test_ticks_are_few_and_round(most: float) -> None:
    ticks = axis_ticks(most)
    assert 4 <= len(ticks) <= 7
    assert ticks[0] == 0
    assert most / 2 < ticks[-1] <= most * 1.001


def test_a_long_step_is_shown_at_both_ends() -> None:
    timeline = make_plan(16, 16, 16).timeline
    assert len(timeline.compute_spans) > 2 * MOST_SPANS
    (first, last), left_out = shown_parts(timeline)
    assert "first and the last" in left_out
    assert 0.8 * MOST_SPANS < len(first.compute_spans) + len(last.compute_spans) <= 1.2 * MOST_SPANS
    assert first.start == timeline.start
    assert last.start + last.makespan == pytest.approx(timeline.start + timeline.makespan)
    for part in (first, last):
        end = part.start + part.makespan
        inside = [span for span in timeline.compute_spans if span.start >= part.start and span.end <= end]
        assert set(inside) <= set(part.compute_spans)
        for rank, idle in enumerate(idle_by_cause(part)):
            assert part.busy(rank) + sum(idle.values()) == pytest.approx(part.makespan)
    assert any(Cause.FILL in idle for idle in idle_by_cause(first))
    assert any(Cause.DRAIN in idle for idle in idle_by_cause(last))
    held = [max(size for time, size in steps if time <= first.makespan) for steps in timeline.memory]
    assert first.peak_memory == pytest.approx(held)


def test_many_ranks_are_shown_in_part_and_said_to_be() -> None:
    plan = make_plan(16, 1, 1)
    wide = replace(plan.timeline, num_ranks=MOST_RANKS + 1, memory=())
    (part,), left_out = shown_parts(wide)
    assert part.num_ranks == MOST_RANKS
    assert left_out == f"The picture shows the first {MOST_RANKS} of {MOST_RANKS + 1} ranks."
    assert timeline_svg(wide)[1] == left_out
    assert shown_parts(plan.timeline) == ((plan.timeline,), "")


def test_reasons_name_the_choice_the_time_and_where_it_goes(plan: PlanReport) -> None:
    best = plan.best
    other = replace(
        best,
        plan=replace(best.plan, tensor_parallel=4, data_parallel=2, recompute="stage"),
        step_seconds=best.step_seconds * 1.071,
        seconds_by_cause={
            **best.seconds_by_cause,
            "computing": best.seconds_by_cause["computing"] - 2.1,
            "waiting": 12.3,
        },
    )
    found = reasons(replace(plan, alternatives=(Alternative("tensor_parallel", other),)))
    size = f"{seconds_text(other.step_seconds)}, {bytes_text(best.peak_memory)}"
    told = f"a step takes 7.1% longer ({size}): 12.3 s more waiting, 2.10 s less computing."
    assert [reason.lines for reason in found] == [
        [f"With tensor parallel 4 instead of 1 {told}", "That plan also has data parallel 2, recompute stage."]
    ]
    both = (Alternative("tensor_parallel", other), Alternative("data_parallel", other))
    (reason,) = reasons(replace(plan, alternatives=both))
    assert str(reason) == (
        f"With tensor parallel 4 instead of 1 and data parallel 2 instead of 1 {told} That plan also has recompute "
        "stage."
    )
    same = replace(best, plan=replace(best.plan, offload=0.5))
    (reason,) = reasons(replace(plan, alternatives=(Alternative("offload", same),)))
    size = f"{seconds_text(best.step_seconds)}, {bytes_text(best.peak_memory)}"
    assert str(reason) == f"With offload 50% instead of none a step takes as long ({size})."


def test_reasons_about_the_pipeline_its_slices_and_the_other_degrees_come_first(plan: PlanReport) -> None:
    """Of choices that are best in one plan, those are named, and the others are differences."""
    best = plan.best
    fewer = replace(best, step_seconds=best.step_seconds * 0.9, plan=replace(best.plan, recompute="full", num_slices=2))
    spread = replace(best, plan=replace(best.plan, vocabulary="spread"))
    wider = replace(best, plan=replace(best.plan, context_parallel=2))
    of_plans = {"vocabulary": spread, "recompute": fewer, "context_parallel": wider, "num_slices": fewer}
    found = reasons(replace(plan, alternatives=tuple(Alternative(*each) for each in of_plans.items())))
    assert [reason.choices for reason in found] == [("recompute", "num_slices"), ("context_parallel",), ("vocabulary",)]
    assert found[0].claim.startswith("With slices 2 instead of 4 a step takes 10.0% less (")
    assert found[0].others == "That plan also has recompute full"


def test_the_legend_and_the_reasons_of_the_page_have_a_line_each(plan: PlanReport) -> None:
    (alternative, _) = plan.alternatives
    other = replace(alternative.prediction, plan=replace(alternative.prediction.plan, recompute="full"))
    page = ElementTree.fromstring(report_page(replace(plan, alternatives=(Alternative("schedule", other),))))
    items = [[*item.itertext()] for item in page.iter("li")]
    columns = shown_columns(plan.predictions)
    assert [[line] for line in legend(columns)] == [item for item in items if item[0].partition(":")[0] in columns]
    (reason,) = reasons(replace(plan, alternatives=(Alternative("schedule", other),)))
    assert len(reason.lines) == 2
    assert reason.lines in items


def test_the_search_says_what_it_may_have_missed(plan: PlanReport) -> None:
    assert search_text(plan) == (
        "searched 12,345 configurations on 7 of 9 meshes in 1.50 s: 678 too large for the memory, 3 simulated; one of "
        "the others could be faster by 1.2% at most"
    )
    assert search_text(replace(plan, gap=0.0)).endswith("no other one can be faster")


def test_slices_in_words() -> None:
    assert slices_text((8, 8)) == "2 slices of 8 tokens"
    assert slices_text((1024, 8)) == "2 slices of 1024, 8 tokens"
    assert slices_text([*range(81, 0, -1)]) == "81 slices of 81, 80, 79, 78, ..., 3, 2, 1 tokens"


def test_without_limit_or_peak_nothing_is_made_up(plan: PlanReport) -> None:
    unknown = tuple(replace(each, mfu=None, memory_limit=float("inf")) for each in plan.predictions)
    text = report_page(replace(plan, predictions=unknown, alternatives=(), notes=()))
    page = ElementTree.fromstring(text)
    assert "inf" not in " ".join(page.find("body").itertext()).replace("information", "").lower().split()
    assert "limit" not in [line.get("class") for line in page.iter("line")]
    assert tables(page)[0][1][-3] == "-"
    assert "There was no other choice." in text


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "theme", "page_color"), each_once([500, 1200], [("light", "#fbfbfa"), ("dark", "#15171b")])
)
def test_a_browser_shows_it(plan: PlanReport, tmp_path: Path, theme: str, page_color: str, width: int) -> None:
    """In the page's colours, and no wider than the window: only tables and the timeline scroll, inside their frames."""
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    write_report(plan, page)
    dark = ["--force-dark-mode"] if theme == "dark" else []
    browse(page, tmp_path, f"--screenshot={picture}", "--hide-scrollbars", f"--window-size={width},2600", *dark)
    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    expected = [int(page_color[i : i + 2], 16) for i in (1, 3, 5)]
    assert pixels.shape[1] == width
    assert pixels[5, 2].tolist() == expected
    assert (pixels[:, -2] == expected).all()  # the margin on the right is empty
    first_bar = {"light": [0x3B, 0x75, 0xAF], "dark": [0x5B, 0x98, 0xD8]}[theme]
    assert (pixels == first_bar).all(axis=-1).sum() > 1000


def test_a_browser_reads_the_whole_page(plan: PlanReport, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    write_report(plan, page)
    found = browse(page, tmp_path, "--dump-dom")
    assert found.count("<h2>") == 7
    assert found.count('class="bar"') == len(plan.predictions) + len(plan.best.memory)
    assert "1f1b, simulated" in found
    assert found.rstrip().endswith("</html>")
