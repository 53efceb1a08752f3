"""A timeline's numbers, text, picture and Perfetto trace all show the same spans."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.schedule import (
    OPERATIONS,
    Action,
    Op,
    Schedule,
    add_communication,
    forward_only,
    gpipe,
    make_schedule,
    one_f_one_b,
)
from slipstream.simulator import simulate
from slipstream.simulator.costs import UnitCost
from slipstream.timeline import Span, Timeline, chrome_trace, draw_timelines, find_waits, load_trace, save_trace
from slipstream.timeline import picture as palette
from support.pictures import drawn_text


def timeline_of(*texts: str, num_ranks: int = 1, name: str = "") -> Timeline:
    """Of spans as `action start end`, each of the rank that has the number of its stage."""
    words = [text.split() for text in texts]
    spans = [Span(int(text[0]), Action.parse(text), float(start), float(end)) for text, start, end in words]
    return Timeline(tuple(spans), num_ranks, name=name)


def measured() -> Timeline:
    """Two ranks on a clock that was started long ago."""
    texts = "0F0.0 100 103", "0SEND_F0.0 103 105", "0F0.1 103 104", "1RECV_F0.0 99 104.5", "1F0.0 104.5 106"
    return timeline_of(*texts, num_ranks=2, name="run")


def test_numbers() -> None:
    timeline = measured()
    assert timeline.start == 99
    assert timeline.makespan == 7
    assert [timeline.busy(rank) for rank in (0, 1)] == [4, 1.5]
    assert timeline.idle_fraction == 1 - 5.5 / 14
    assert timeline.peak_memory == ()
    (message,) = timeline.messages
    assert (message.start, message.seconds) == (103, 1.5)
    empty = Timeline((), num_ranks=2)
    assert (empty.makespan, empty.idle_fraction, empty.to_text()) == (0, 0, "rank 0\nrank 1")
    exact = simulate(gpipe(3, 2, 2), UnitCost(Fraction(1, 3), Fraction(2, 3)))
    assert exact.makespan == 6
    assert isinstance(exact.idle_fraction, Fraction)


def test_what_computes_all_the_time_is_never_less_than_idle() -> None:
    overlapping = timeline_of("0F0 0 1", "0F1 0.999999 2")  # as clocks round
    assert f"{overlapping.idle_fraction:.1%}" == "0.0%"


V = "schedule: v\nplacement: 0 1 1 0\nmicrobatches: 1\nslices: 1\nrank 0: 0F0 3F0 3B0 0B0\nrank 1: 1F0 2F0 2B0 1B0"


@pytest.mark.parametrize(
    ("timeline", "width", "text"),
    [
        (
            simulate(gpipe(2, 1, 2), UnitCost()),
            None,
            "rank 0  F0.0 F0.1                B0.1----- B0.0-----\nrank 1       F0.0 F0.1 B0.1----- B0.0-----",
        ),
        (
            simulate(Schedule.parse(V), UnitCost(backward=1)),
            None,
            "rank 0  0F0         3F0 3B0         0B0\nrank 1      1F0 2F0         2B0 1B0",
        ),
        (
            measured(),
            70,
            "rank 0            F0.0------------------------- F0.1-----\n"
            "rank 1                                                         F0.0----------",
        ),
        (measured(), 10, "rank 0   F0.0 F\nrank 1          FF"),
    ],
    ids=["longer backwards", "several stages of a rank", "uneven times, scaled to the width", "narrow"],
)
def test_text(timeline: Timeline, width: int | None, text: str) -> None:
    assert timeline.to_text(width) == text


@pytest.mark.parametrize("width", [None, 50])
def test_text_is_no_wider_than_it_may_be(width: int | None) -> None:
    assert max(map(len, measured().to_text(width).splitlines())) <= (width or 100) + len("rank 0  ")


@pytest.mark.parametrize("lowered", [False, True])
def test_perfetto(lowered: bool, tmp_path: Path) -> None:
    schedule = one_f_one_b(3, 2, 2)
    timeline = simulate(add_communication(schedule) if lowered else schedule, UnitCost(link=Fraction(1, 4)))
    save_trace(tmp_path / "trace.json", timeline)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == chrome_trace(timeline)
    events = trace["traceEvents"]
    assert {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"} == {
        (0, "rank 0"),
        (1, "rank 1"),
        (2, "rank 2"),
    }
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(threads.values()) == {"compute", "waits"} | ({"messages"} if lowered else set())

    waits = [e for e in events if e.get("cat") == "wait"]
    assert len(waits) == len(find_waits(timeline))
    for event, wait in zip(waits, find_waits(timeline), strict=True):
        assert threads[event["pid"], event["tid"]] == "waits"
        assert (event["pid"], event["ts"], event["name"]) == (wait.rank, float(wait.start) * 1e6, str(wait.cause))
        assert event["args"]["cause"] == str(wait.cause)
        assert event["args"].get("awaits") == (wait.before and str(wait.before))
        assert event["args"].get("of rank") == wait.source
    boxes = [e for e in events if e["ph"] == "X" and e["cat"] != "wait"]
    assert len(boxes) == len(timeline.spans)
    for span in timeline.spans:
        (box,) = [e for e in boxes if (e["pid"], e["name"]) == (span.rank, str(span.action))]
        assert box["ts"] == float(span.start) * 1e6
        assert box["dur"] == float(span.seconds) * 1e6
        assert threads[box["pid"], box["tid"]] == ("compute" if span.computes else "messages")
        assert box["args"] == {
            "stage": span.action.stage,
            "microbatch": span.action.microbatch,
            "slice": span.action.slice,
            "start": float(span.start),
            "end": float(span.end),
            "number": timeline.spans.index(span),
        }
    for thread in threads:  # boxes of one thread follow each other; viewers drop what overlaps
        ends = sorted((e["ts"], e["ts"] + e["dur"]) for e in boxes if (e["pid"], e["tid"]) == thread)
        assert all(first[1] <= second[0] for first, second in pairwise(ends))

    def box_at(event: dict) -> str:
        (name,) = [
            e["name"]
            for e in boxes
            if (e["pid"], e["tid"]) == (event["pid"], event["tid"]) and e["ts"] <= event["ts"] < e["ts"] + e["dur"]
        ]
        return name

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends)
    arrows = {(box_at(starts[i]), box_at(ends[i])) for i in starts}
    units = [(m, i) for m in range(2) for i in range(2)]
    up, down = (("SEND_F", "RECV_F") if lowered else ("F", "F"), ("SEND_B", "RECV_B") if lowered else ("B", "B"))
    assert arrows == {(f"{g}{up[0]}{m}.{i}", f"{g + 1}{up[1]}{m}.{i}") for g in (0, 1) for m, i in units} | {
        (f"{g + 1}{down[0]}{m}.{i}", f"{g}{down[1]}{m}.{i}") for g in (0, 1) for m, i in units
    }
    assert all(starts[i]["ts"] <= ends[i]["ts"] for i in starts)
    counters = [e for e in events if e["ph"] == "C"]
    assert [max(e["args"]["bytes"] for e in counters if e["pid"] == rank) for rank in range(3)] == [4, 3, 2]


def test_perfetto_of_one_rank_alone() -> None:
    """A rank may only know its own spans; arrows to others are left out."""
    timeline = simulate(add_communication(one_f_one_b(3, 2, 2)), UnitCost())
    own = Timeline(tuple(span for span in timeline.spans if span.rank == 1), 3)
    events = chrome_trace(own)["traceEvents"]
    assert len([e for e in events if e["ph"] == "X" and e["cat"] != "wait"]) == len(own.spans)
    assert not [e for e in events if e["ph"] in "sf"]


TIMELINES = {
    "one sequence": simulate(add_communication(one_f_one_b(2, 1, 8)), UnitCost(link=Fraction(1, 9), activation=3e8)),
    "whole microbatches": simulate(one_f_one_b(8, 4), UnitCost(1e-3, 2e-3)),
    "evaluation": simulate(forward_only(gpipe(2, 2)), UnitCost(1e-6)),
    "measured": measured(),
    "empty": Timeline((), 1),
}
UNITS = {
    "one sequence": ["1f1b, simulated: 27.", " s, ", "time (s)", "2.4 GB", "number: slice"],
    "whole microbatches": [
        "1f1b, simulated: 33 ms",
        "8 ranks, 4 microbatches, 1 slice",
        "time (ms)",
        "number: microbatch",
    ],
    "evaluation": ["gpipe, simulated: 3 µs", "time (µs)"],
}


@pytest.mark.parametrize("name", TIMELINES)
def test_picture(name: str, tmp_path: Path) -> None:
    """A PNG of the width of a page, and an SVG that says its units, how much is idle, and the peak."""
    timeline = TIMELINES[name]
    draw_timelines(tmp_path / "picture.png", timeline)
    header = (tmp_path / "picture.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width == 1999
    assert 250 < height < 1200
    draw_timelines(str(tmp_path / "picture.svg"), timeline)
    drawn = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    ranks = [f"<!-- rank {rank} -->" for rank in range(timeline.num_ranks)]
    words = [*ranks, f"{float(timeline.idle_fraction):.1%} idle", *UNITS.get(name, ())]
    assert [word for word in words if word not in drawn] == []
    assert ("<!-- peak -->" in drawn) == bool(any(timeline.memory))


def test_a_picture_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"ends in \.png, \.svg or \.pdf"):
        draw_timelines(tmp_path / "picture.txt", measured())
    draw_timelines(tmp_path / "picture.pdf", measured())
    assert [path.name for path in tmp_path.iterdir()] == ["picture.pdf"]


PLAIN = {"forward", "backward", "not yet fed (fill)", "another rank computes", "nothing left (drain)"}
SPLIT = {"input gradient", "weight gradient", "message on its way", "message", "stripe: the rank's stages, in order"}
COPIES = {"forward", "backward", "recompute", "copy to or from host", "executor", "offload", "reload"}


@pytest.mark.parametrize(
    ("timeline", "names"),
    [
        (simulate(one_f_one_b(2, 1, 2), UnitCost(activation=0)), PLAIN),
        (
            simulate(add_communication(make_schedule("zb-v", 2, 2, 2, 2)), UnitCost(link=0.25)),
            (PLAIN | SPLIT) - {"backward"},
        ),
        (timeline_of("0F0 0 1", "0OFFLOAD0 1 2", "0RELOAD0 2 3", "0R0 3 4", "0B0 4.5 6"), COPIES),
    ],
    ids=["plain", "split and lowered", "copies"],
)
def test_a_pictures_legend_names_what_is_on_it_and_nothing_else(
    timeline: Timeline, names: set[str], tmp_path: Path
) -> None:
    named = [operation.label for operation in OPERATIONS.values() if operation.label]
    named += [word for word, _ in palette.IDLE.values()]
    draw_timelines(tmp_path / "picture.svg", timeline)
    legend = {*named, *palette.transfers_by_name(), "stripe: the rank's stages, in order"}
    assert drawn_text(tmp_path / "picture.svg") & legend == names


def test_two_timelines_on_one_picture_share_their_axis(tmp_path: Path) -> None:
    """Each has its title; the ticks reach to the end of the longer one; memory stands under the one that has it."""
    simulated = simulate(one_f_one_b(2, 1, 2), UnitCost(activation=5e6))
    run = Timeline(simulate(one_f_one_b(3, 1, 8), UnitCost(2, 4)).spans, 3, name="run", measured=True)
    draw_timelines(tmp_path / "picture.svg", simulated, run)
    drawn = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    words = [word for word in re.findall(r"<!-- (.*?) -->", drawn) if word not in "0123456789"]
    titles = ["1f1b, simulated: 9 s, 33.3% idle", "run, measured: 60 s, 20.0% idle"]
    assert [word for word in words if word in titles] == titles
    assert [word for word in words if word.startswith("rank ")] == ["rank 0", "rank 1", "rank 0", "rank 1", "rank 2"]
    assert words.count("peak") == words.count("10 MB") / 2 == 1
    assert "60" in words
    assert words.count("time (s)") == words.count("forward") == 1


def test_sizes_are_in_the_cost_models_unit_where_it_has_one(tmp_path: Path) -> None:
    timeline = simulate(one_f_one_b(2, 2, 2), UnitCost(activation=0.5))
    draw_timelines(tmp_path / "picture.svg", timeline, memory_unit="microbatches")
    assert {"(microbatches)", "1.5", "peak"} <= drawn_text(tmp_path / "picture.svg")


@pytest.mark.parametrize("lowered", [False, True])
def test_a_saved_timeline_is_read_back_exactly(lowered: bool, tmp_path: Path) -> None:
    schedule = make_schedule("interleaved-1f1b", 3, 3, 2, 2)
    cost = UnitCost(0.1, 0.3, link=1 / 3, activation=1e9 / 7)
    simulated = simulate(add_communication(schedule) if lowered else schedule, cost)
    late = tuple(replace(span, start=span.start + 1e6 / 3, end=span.end + 1e6 / 3) for span in simulated.spans)
    run = Timeline(late, 3, name="a run\nof two lines", measured=True)
    for saved in ((simulated,), (run,), (simulated, run), (Timeline((), 2),)):
        first, *others = saved
        save_trace(tmp_path / "trace.json", first, *others)
        assert load_trace(tmp_path / "trace.json") == saved
    assert run.schedule.num_stages == 6


def test_several_timelines_in_one_trace_are_groups_of_processes() -> None:
    simulated = simulate(one_f_one_b(2, 1, 2), UnitCost())
    events = chrome_trace(simulated, replace(simulated, measured=True))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    groups = ["1f1b, simulated: rank 0", "1f1b, simulated: rank 1", "1f1b, measured: rank 0", "1f1b, measured: rank 1"]
    assert names == dict(enumerate(groups))
    arrows = [e for e in events if e["ph"] == "s"]
    assert len({e["id"] for e in arrows}) == len(arrows) == 8
    assert {e["pid"] for e in events} == {0, 1, 2, 3}


def first_box(trace: dict[str, Any]) -> dict[str, Any]:
    return next(event for event in trace["traceEvents"] if event["ph"] == "X")


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (None, "can't read the timeline"),
        ("{", "it is not JSON"),
        ("[]", "it lacks otherData.format"),
        ('{"traceEvents": []}', "it lacks otherData.format"),
        ('{"otherData": {"format": "slipstream timeline 1"}}', "damaged timeline: KeyError"),
        (lambda trace: trace["otherData"]["timelines"][0].update(num_ranks=1), ""),
        (lambda trace: trace["otherData"]["timelines"][0].update(num_ranks="2"), ""),
        (lambda trace: first_box(trace).update(cat="Z"), ""),
        (lambda trace: first_box(trace)["args"].update(end=-1), ""),
        (lambda trace: first_box(trace)["args"].pop("stage"), ""),
    ],
)
def test_a_file_that_is_no_timeline_or_a_damaged_one(
    file: str | Callable[[dict[str, Any]], object] | None, problem: str, tmp_path: Path
) -> None:
    if callable(file):
        trace = chrome_trace(simulate(one_f_one_b(2, 1, 2), UnitCost()))
        file(trace)
        file, problem = json.dumps(trace), r"trace\.json is a damaged timeline"
    if file is not None:
        (tmp_path / "trace.json").write_text(file)
    with pytest.raises(SlipstreamError, match=problem):
        load_trace(tmp_path / "trace.json")


def test_the_schedule_that_ran_is_the_schedule() -> None:
    lowered = add_communication(one_f_one_b(3, 2, 2))
    ran = simulate(lowered, UnitCost()).schedule
    assert ran.name == "1f1b"
    compute = [tuple(a for a in row if a.op in (Op.F, Op.B)) for row in ran.actions]
    assert compute == [tuple(a for a in row if a.op in (Op.F, Op.B)) for row in lowered.actions]
    assert (ran.placement, ran.num_microbatches, ran.num_slices) == ((0, 1, 2), 2, 2)
