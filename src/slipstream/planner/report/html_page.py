"""The report of a plan: one HTML file that needs no network and no scripts."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from html import escape
from math import isfinite
from pathlib import Path
from xml.etree import ElementTree

from slipstream.html_parts import Bar, NumberText, bar_chart, details, fact_tiles, html_list, html_page, section, table
from slipstream.planner.plans import Plan
from slipstream.planner.report import wording
from slipstream.simulator import MemoryKind
from slipstream.timeline import Timeline, TimelineWindow, draw_timelines
from slipstream.units import bytes_text, count_text, seconds_text, share_text

MOST_RANKS = 16
MOST_SPANS = 3000  # as many as a browser shows without delay
_XLINK = "{http://www.w3.org/1999/xlink}"
_NAMESPACE = re.compile(r"^\{.*\}")
# Text stays text in the page's font, and the names of clip paths are the same in every run.
_PLAIN_TEXT = {
    "svg.fonttype": "none",
    "svg.hashsalt": "slipstream",
    "font.family": "sans-serif",
    "axes.facecolor": "none",
}
_ROOT = {  # what matplotlib sets for the whole page, and what the picture is
    "stroke-linejoin": "round",
    "stroke-linecap": "butt",
    "role": "img",
    "aria-label": "timeline of the step",
}


def timeline_svg(timeline: Timeline) -> tuple[str, str]:
    """Returns the picture, and a sentence that says what it shows, or "" where it shows everything."""
    from matplotlib import rc_context

    parts, left_out = shown_parts(timeline)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder, rc_context(_PLAIN_TEXT):
        path = Path(folder) / "timeline.svg"
        draw_timelines(path, *parts, memory_name="memory")
        return _inline(path.read_text(encoding="utf-8")), left_out


def shown_parts(timeline: Timeline) -> tuple[tuple[Timeline, ...], str]:
    """Returns the timeline, or if it is long, the first and the last part of its first ranks."""
    num_ranks, cut = min(timeline.num_ranks, MOST_RANKS), TimelineWindow.cut
    spans = [span for span in timeline.compute_spans if span.rank < num_ranks]
    is_long = len(spans) > MOST_SPANS
    if num_ranks == timeline.num_ranks and not is_long:
        return (timeline,), ""
    ranks = f"the first {num_ranks} of {timeline.num_ranks} ranks" if num_ranks < timeline.num_ranks else "all ranks"
    start, end = timeline.start, timeline.start + timeline.makespan
    if not is_long:
        return (cut(timeline, num_ranks, start, end, timeline.title),), f"The picture shows {ranks}."
    # the seconds at each end in which as many actions run as can be shown
    starts, ends = sorted(span.start for span in spans), sorted(span.end for span in spans)
    half = MOST_SPANS // 2
    width = min(starts[half] - start, end - ends[-half - 1], timeline.makespan / 2)
    shown, whole = seconds_text(width), seconds_text(timeline.makespan)
    parts = (
        cut(timeline, num_ranks, start, start + width, f"{timeline.name}, the step's first {shown} of {whole}"),
        cut(timeline, num_ranks, end - width, end, f"{timeline.name}, its last {shown}"),
    )
    return parts, f"The picture shows {ranks} in the first and the last {shown} of {whole}, with their times and peaks."


def _inline(text: str) -> str:
    """Returns the `svg` element for use in a page: without namespaces, metadata and style for the whole page."""
    root = ElementTree.fromstring(text)
    for parent in list(root.iter()):
        parent.tag = _NAMESPACE.sub("", str(parent.tag))
        for name in [name for name in parent.attrib if name.startswith("{")]:
            value = parent.attrib.pop(name)
            if name.startswith(_XLINK):
                parent.set(name.removeprefix(_XLINK), value)
        for child in list(parent):
            if _NAMESPACE.sub("", str(child.tag)) in ("metadata", "style"):
                parent.remove(child)
    for background in root.findall("./g/g[@id='patch_1']"):  # the page has a background
        background.set("display", "none")
    root.attrib.update(_ROOT)
    for name in ("width", "height"):  # the view box stays, and the page sets the size
        root.attrib.pop(name, None)
    return ElementTree.tostring(root, encoding="unicode")


def write_report(plan: Plan, path: Path) -> None:
    """Writes the report of a plan as one HTML file without scripts; an existing file is replaced."""
    path.write_text(report_page(plan), encoding="utf-8")


def report_page(plan: Plan) -> str:
    """Returns the HTML of the report."""
    sections = (_headline, _table, _time, _timeline, _memory, _reasons, _cuts, _notes)
    body = "\n".join(each(plan) for each in sections)
    return html_page(f"Plan: {plan.model} on {plan.cluster}", body, "slipstream plan")


def _headline(plan: Plan) -> str:
    best = plan.best
    room = f"of {bytes_text(best.memory_limit)}" if isfinite(best.memory_limit) else "no known limit"
    facts = [
        ("Step", seconds_text(best.step_seconds), "predicted"),
        ("Tokens per second", count_text(best.tokens_per_second), "over all devices"),
        ("MFU", share_text(best.mfu), "of the devices' peak" if best.mfu is not None else "unknown peak"),
        ("Idle", share_text(best.idle_fraction), "of the ranks' time"),
        ("Memory", bytes_text(best.peak_memory), f"rank {best.fullest_rank}, {room}"),
    ]
    tokens, sequences = wording.plural(plan.seq_len, "token"), wording.plural(plan.global_batch, "sequence")
    task = f"{wording.plural(plan.num_devices, 'device')}, {tokens} per sequence, {sequences} per step"
    return (
        f"<h1>{escape(plan.model)} on {escape(plan.cluster)}</h1>\n<p class='soft'>{escape(task)}</p>\n"
        f"<p>Best: <strong>{escape(wording.configuration_text(best.configuration))}</strong></p>\n"
        f"{fact_tiles(facts)}"
    )


def _table(plan: Plan) -> str:
    shared = wording.shared_choices(plan.predictions)
    columns = {name: cell for name, cell in wording.COLUMNS.items() if name not in shared}
    columns["memory"] = lambda prediction: bytes_text(prediction.peak_memory)  # the headline has the limit, too
    cells = [[cell(prediction) for cell in columns.values()] for prediction in plan.predictions]
    rows = [(f"plan {number}", *row) for number, row in enumerate(cells, 1)]
    more = f"<p class='soft'>{escape(wording.shared_text(shared))}</p>" if shared else ""
    return section("The best plans", table(["", *columns], rows, best=0) + more)


def _time(plan: Plan) -> str:
    bars = [Bar(f"plan {number}", each.seconds_by_cause) for number, each in enumerate(plan.predictions, 1)]
    chart = bar_chart(bars, "time of a step on the rank that ends last", seconds_text)
    causes = list(dict.fromkeys(cause for bar in bars for cause in bar.parts))
    return section("Where the step's time goes", chart + _numbers(bars, causes, "step", seconds_text))


def _timeline(plan: Plan) -> str:
    picture, left_out = timeline_svg(plan.timeline)
    after = plan.best.step_seconds - plan.timeline.makespan
    follows = f"Gradient reduction and the optimizer take the last {seconds_text(after)} of the step."
    more = f"{left_out} {follows if after > 0 else ''}".strip()
    below = f"<p class='soft'>{escape(more)}</p>" if more else ""
    return section("The step of the best plan", f"<div class='scroll timeline'>{picture}</div>{below}")


def _memory(plan: Plan) -> str:
    ranks = plan.best.memory
    kinds = [kind for kind in MemoryKind if any(held.get(kind) for held in ranks)]
    bars = [Bar(f"rank {rank}", {k: held[k] for k in kinds if k in held}) for rank, held in enumerate(ranks)]
    chart = bar_chart(bars, "peak memory of a device", bytes_text, plan.best.memory_limit, "limit")
    return section("Memory of the best plan's ranks", chart + _numbers(bars, kinds, "total", bytes_text))


def _numbers(bars: Sequence[Bar], parts: Sequence[str], total: str, text: NumberText) -> str:
    """Returns the table behind a chart."""
    rows = [(bar.name, *(text(bar.parts.get(part, 0.0)) for part in parts), text(bar.total)) for bar in bars]
    return details("All numbers", table(["", *parts, total], rows))


def _reasons(plan: Plan) -> str:
    if not plan.alternatives:
        return section("Why it is the best", "<p>There was no other choice.</p>")
    intro = "<p class='soft'>The best plan found with another value of one choice, and how much longer it takes.</p>"
    return section("Why it is the best", intro + html_list(wording.reasons(plan)))


def _cuts(plan: Plan) -> str:
    best = plan.best
    stages = enumerate(zip(best.placement, best.partition, strict=True))
    rows = [(f"stage {stage}", f"rank {rank}", f"{layers:g}") for stage, (rank, layers) in stages]
    layers = details(f"Layers of {len(rows)} stages", table(["", "on", "layers"], rows))
    sequences = wording.plural(best.configuration.microbatch_size, "sequence")
    batch = f"{wording.plural(best.num_microbatches, 'microbatch')} of {sequences} in each pipeline"
    texts = [f"{batch}.", *wording.cut_lines(best)]
    return section("Stages, slices and microbatches", "".join(f"<p>{escape(text)}</p>" for text in texts) + layers)


def _notes(plan: Plan) -> str:
    return section(
        "What the numbers are based on", html_list([*plan.notes, f"The planner {wording.search_text(plan)}."])
    )
