"""The timeline's picture as SVG in the report; of a long step, its beginning and its end."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from slipstream.timeline import Timeline, TimelineWindow, draw_timelines
from slipstream.units import seconds_text

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
