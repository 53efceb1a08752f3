"""Draws a timeline with matplotlib: ranks as lanes over time, activation memory beneath."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.schedule.action import Action, Op

if TYPE_CHECKING:
    from slipstream.timeline import Timeline

# The lightest and the darkest shade of each op: slices go from one to the other.
_SHADES = {
    Op.F: ("#d6e6f7", "#1d5fa6"),
    Op.B: ("#fde3c8", "#c25a12"),
    Op.I: ("#fbd5d5", "#b3262f"),
    Op.W: ("#d5efdb", "#1f7a43"),
    Op.R: ("#e6dcf3", "#6a3d9a"),
}
_OTHER = ("#dddddd", "#777777")
_WORDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.R: "recompute",
}
_WIDTH = 13.33  # inches: a 16:9 slide
_LEFT, _RIGHT = 0.071, 0.921  # the lanes' edges, as shares of the width
_LANE, _MEMORY, _TOP, _BOTTOM = 0.5, 1.5, 1.0, 0.6  # inches: heights
_FONT, _GREY = 11, "#555555"
_UNITS = ("B", "kB", "MB", "GB", "TB")
_IDLE: dict[str, Any] = {"facecolor": "#f7f7f7", "edgecolor": "#d0d0d0", "hatch": "////", "linewidth": 0}
_MESSAGE: dict[str, Any] = {"color": "#444444", "linewidth": 0}


def draw(timeline: Timeline, path: Path) -> None:
    """Write the picture; matplotlib takes the format from the path's suffix."""
    from matplotlib.figure import Figure

    has_memory = any(timeline.memory)
    lanes_height = _LANE * max(timeline.num_ranks, 2)
    height = _TOP + lanes_height + _BOTTOM + (_MEMORY + 0.2 if has_memory else 0)
    figure = Figure(figsize=(_WIDTH, height), dpi=150)
    lanes = figure.add_axes((_LEFT, 1 - (_TOP + lanes_height) / height, _RIGHT - _LEFT, lanes_height / height))
    scale, unit = _time_unit(timeline.makespan)
    _draw_lanes(lanes, timeline, scale)
    _draw_titles(figure, timeline, 1 - 0.42 / height, 1 - 0.75 / height)
    _draw_legend(figure, timeline, 1 - 0.6 / height)
    lowest = lanes
    if has_memory:
        lowest = figure.add_axes((_LEFT, _BOTTOM / height, _RIGHT - _LEFT, _MEMORY / height), sharex=lanes)
        _draw_memory(lowest, lanes, timeline, scale)
        lanes.tick_params(labelbottom=False, bottom=False)
    lowest.set_xlabel(f"time ({unit})", fontsize=_FONT)
    lowest.tick_params(axis="x", labelsize=_FONT)
    figure.savefig(path, facecolor="white")


def _time_unit(seconds: float) -> tuple[float, str]:
    return next(((s, u) for s, u in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if seconds * s >= 1), (1e6, "µs"))


def _power(size: float) -> int:
    """Which of _UNITS suits: thousands of bytes to this power."""
    return next((power for power in range(len(_UNITS)) if size < 1000 ** (power + 1)), len(_UNITS) - 1)


def _draw_lanes(axes: Any, timeline: Timeline, scale: float) -> None:
    """A lane a rank from the top: idle time hatched, actions as boxes, messages on their way beneath."""
    from matplotlib.collections import PatchCollection

    makespan, ranks = float(timeline.makespan) * scale, range(timeline.num_ranks)
    for rank in ranks:
        axes.add_patch(_box(rank - 0.36, 0, makespan, **_IDLE))
    _draw_actions(axes, timeline, scale)
    in_flight = [
        _box(m.receive.rank + 0.39, float(m.start - timeline.start) * scale, float(m.seconds) * scale, 0.08)
        for m in timeline.messages
    ]
    axes.add_collection(PatchCollection(in_flight, **_MESSAGE))
    axes.set_xlim(0, makespan or 1)
    axes.set_ylim(timeline.num_ranks - 0.45, -0.45)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=_FONT)
    for rank, label in enumerate(axes.get_yticklabels()):
        label.set_color(_rank_color(rank, timeline.num_ranks))
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "right", "top", "bottom"]].set_visible(False)


def _box(y: float, start: float, width: float, height: float = 0.72, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((start, y), width, height, **style)


def _draw_actions(axes: Any, timeline: Timeline, scale: float) -> None:
    from matplotlib.collections import PatchCollection

    boxes, colors = [], []
    inch = _WIDTH * (_RIGHT - _LEFT) / (float(timeline.makespan) * scale or 1)
    for span in timeline.compute_spans:
        start, width = float(span.start - timeline.start) * scale, float(span.seconds) * scale
        color = _color(span.action, timeline.schedule.num_slices)
        boxes.append(_box(span.rank - 0.36, start, width))
        colors.append(color)
        label = _number(span.action, timeline)
        if width * inch > 0.075 * len(label) + 0.03:
            style = {"ha": "center", "va": "center", "fontsize": 8.5}
            ink = "white" if sum(color) < 1.65 else "#222222"
            axes.text(start + width / 2, span.rank, label, color=ink, **style)
    edge = 0.6 if len(boxes) < 120 * timeline.num_ranks else 0  # edges would cover narrow boxes
    axes.add_collection(PatchCollection(boxes, facecolors=colors, edgecolors="white", linewidths=edge))


def _number(action: Action, timeline: Timeline) -> str:
    """What stands in a box: the microbatch where there are several, else the slice."""
    if action.op not in _SHADES:
        return ""
    return str(action.microbatch if timeline.schedule.num_microbatches > 1 else action.slice)


def _color(action: Action, num_slices: int) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    light, dark = map(to_rgb, _SHADES.get(action.op, _OTHER))
    share = action.slice / (num_slices - 1) if num_slices > 1 else 0.45
    red, green, blue = (a + (b - a) * share for a, b in zip(light, dark, strict=True))
    return red, green, blue


def _rank_color(rank: int, num_ranks: int) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](0.75 * rank / max(num_ranks - 1, 1))


def _draw_titles(figure: Any, timeline: Timeline, top: float, below: float) -> None:
    schedule = timeline.schedule
    scale, unit = _time_unit(timeline.makespan)
    makespan, idle = float(timeline.makespan) * scale, float(timeline.idle_fraction)
    title = f"{timeline.name or 'timeline'}: {makespan:.4g} {unit}, {idle:.1%} idle"
    figure.text(_LEFT, top, title, fontsize=17, fontweight="bold")
    counts = {
        ("rank", "ranks"): timeline.num_ranks,
        ("microbatch", "microbatches"): schedule.num_microbatches,
        ("slice", "slices"): schedule.num_slices,
    }
    words = ", ".join(f"{n} {one if n == 1 else more}" for (one, more), n in counts.items())
    figure.text(_RIGHT, top, words, fontsize=_FONT, color=_GREY, ha="right")
    number = "microbatch" if schedule.num_microbatches > 1 else "slice"
    figure.text(_RIGHT, below, f"number: {number}", fontsize=_FONT, color=_GREY, ha="right")


def _draw_legend(figure: Any, timeline: Timeline, top: float) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    num_slices = timeline.schedule.num_slices
    shades = sorted({k * (num_slices - 1) // 3 for k in range(4)})
    ops = {span.action.op for span in timeline.compute_spans}
    swatches: dict[str, Any] = {
        word: tuple(Patch(color=_color(Action(op, 0, 0, i), num_slices)) for i in shades)
        for op, word in _WORDS.items()
        if op in ops
    }
    swatches["idle"] = Patch(**_IDLE)
    if timeline.messages:
        swatches["message"] = Patch(**_MESSAGE)
    place = {"loc": "upper left", "bbox_to_anchor": (_LEFT, top), "borderaxespad": 0, "borderpad": 0}
    style = {"ncols": len(swatches), "frameon": False, "fontsize": _FONT, "handlelength": 2.2}
    gradient = {tuple: HandlerTuple(ndivide=None, pad=0)}
    figure.legend([*swatches.values()], [*swatches], handler_map=gradient, **place, **style)


def _draw_memory(axes: Any, lanes: Any, timeline: Timeline, scale: float) -> None:
    """Held bytes over time in the rank's colour, and each rank's peak at the end of its lane."""
    peaks = timeline.peak_memory
    top = max(peaks) or 1
    power = _power(top)
    beside = lanes.get_yaxis_transform()
    lanes.text(1.01, -0.55, "peak", transform=beside, fontsize=_FONT, color=_GREY)
    for rank, steps in enumerate(timeline.memory):
        color = _rank_color(rank, timeline.num_ranks)
        times = [0.0, *(float(time - timeline.start) * scale for time, _ in steps)]
        sizes = [0.0, *(float(size) / 1000**power for _, size in steps)]
        axes.step(times, sizes, where="post", color=color, linewidth=1.8)
        peak = f"{float(peaks[rank]) / 1000**power:.3g} {_UNITS[power]}"
        lanes.text(1.01, rank, peak, transform=beside, fontsize=_FONT, color=color, va="center")
    axes.set_ylim(0, float(top) / 1000**power * 1.1)
    axes.set_ylabel(f"activations\n({_UNITS[power]})", fontsize=_FONT)
    axes.tick_params(axis="y", labelsize=_FONT)
    axes.spines[["right", "top"]].set_visible(False)
