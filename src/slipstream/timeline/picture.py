"""Draws timelines with matplotlib, one beneath the other on one time axis, with legends below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.schedule import Action, Op
from slipstream.timeline import colors as palette
from slipstream.timeline.idle_causes import find_waits
from slipstream.timeline.lanes import MemoryScale, Scale, draw_lanes, draw_memory
from slipstream.timeline.spans import Timeline
from slipstream.units import duration_unit

_WIDTH = 13.33  # inches: a 16:9 slide
_LEFT, _RIGHT = 0.077, 0.921  # the lanes' edges, as shares of the width
_EDGE, _TITLE, _MEMORY, _BETWEEN, _AXIS, _LEGEND = 0.12, 0.48, 1.3, 0.22, 0.62, 0.3  # inches: heights
_FONT = 11


@dataclass(frozen=True)
class _Panel:
    """One timeline and its place, in inches from the top of the picture."""

    timeline: Timeline
    top: float
    lane: float

    @property
    def lanes(self) -> float:
        return self.lane * self.timeline.num_ranks

    @property
    def shows_memory(self) -> bool:
        return any(self.timeline.peak_memory)

    @property
    def memory(self) -> float:
        """The top of the memory's axes."""
        return self.top + _TITLE + self.lanes + 0.1

    @property
    def bottom(self) -> float:
        return self.memory + _MEMORY if self.shows_memory else self.top + _TITLE + self.lanes


def draw_timelines(
    path: str | Path, *timelines: Timeline, memory_unit: str = "B", memory_name: str = "activations"
) -> None:
    """Draws ranks as lanes over time with their memory below; several timelines share one time axis.

    Args:
        path: where the picture goes; its suffix, .png, .svg or .pdf, says in which format.
        timelines: drawn one below the other; their times are in seconds.
        memory_unit: "B" where the timelines count memory in bytes, else the name of what they count.
        memory_name: what the memory holds, for the axis.

    Raises:
        SlipstreamError: the path has another suffix.
    """
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise SlipstreamError(f"Can't draw to {path}: give a path that ends in .png, .svg or .pdf.")
    from matplotlib.figure import Figure

    panels = _stack(timelines)
    rows = _legend_rows(timelines)
    height = panels[-1].bottom + _AXIS + _LEGEND * len(rows) + _EDGE
    figure = Figure(figsize=(_WIDTH, height), dpi=150)
    longest = float(max(timeline.makespan for timeline in timelines))
    per_second, unit = duration_unit(longest)
    span = longest * per_second or 1.0
    scale = Scale(per_second, unit, _WIDTH * (_RIGHT - _LEFT) / span, panels[0].lane)
    memory = MemoryScale.of([size for timeline in timelines for size in timeline.peak_memory], memory_unit, memory_name)
    axes: list[Any] = []
    for panel in panels:
        axes += _draw_panel(figure, panel, scale, memory, axes)
    for one in axes:
        one.set_xlim(0, span)
        one.tick_params(axis="x", labelbottom=one is axes[-1], bottom=one is axes[-1], labelsize=_FONT)
    axes[-1].set_xlabel(f"time ({unit})", fontsize=_FONT)
    for number, (name, swatches) in enumerate(rows):
        _draw_legend(figure, name, swatches, 1 - (panels[-1].bottom + _AXIS + _LEGEND * (number + 0.5)) / height)
    figure.savefig(path, facecolor="white")


def _stack(timelines: Sequence[Timeline]) -> list[_Panel]:
    """Returns the panels from top to bottom; the more lanes there are, the lower they are."""
    num_lanes = sum(timeline.num_ranks for timeline in timelines)
    lane = 0.5 if num_lanes <= 8 else 0.38 if num_lanes <= 16 else 0.29
    panels: list[_Panel] = []
    for timeline in timelines:
        top = panels[-1].bottom + _BETWEEN if panels else _EDGE
        panels.append(_Panel(timeline, top, lane))
    return panels


def _draw_panel(figure: Any, panel: _Panel, scale: Scale, memory: MemoryScale, above: list[Any]) -> list[Any]:
    """Draws title, lanes and memory. Returns their axes, which share the time axis of those above."""
    timeline, height = panel.timeline, figure.get_figheight()

    def place(top: float, inches: float) -> Any:
        corner = (_LEFT, 1 - (top + inches) / height, _RIGHT - _LEFT, inches / height)
        return figure.add_axes(corner, sharex=(above or [None])[0])

    _draw_title(figure, timeline, 1 - (panel.top + 0.22) / height)
    lanes = place(panel.top + _TITLE, panel.lanes)
    draw_lanes(lanes, timeline, scale)
    if not panel.shows_memory:
        return [lanes]
    beneath = place(panel.memory, _MEMORY)
    draw_memory(beneath, lanes, timeline, scale, memory)
    return [lanes, beneath]


def _draw_title(figure: Any, timeline: Timeline, y: float) -> None:
    schedule = timeline.schedule
    per_second, unit = duration_unit(float(timeline.makespan))
    idle = f"{float(timeline.idle_fraction):.1%} idle"
    title = f"{timeline.title}: {float(timeline.makespan) * per_second:.4g} {unit}, {idle}"
    slices: int | str = schedule.num_slices
    if schedule.is_ragged:
        slices = f"{min(schedule.slice_counts)} to {schedule.num_slices}"
    counts: dict[tuple[str, str], int | str] = {
        ("rank", "ranks"): timeline.num_ranks,
        ("stage", "stages"): schedule.num_stages if schedule.num_stages != timeline.num_ranks else 0,
        ("microbatch", "microbatches"): schedule.num_microbatches,
        ("slice", "slices"): slices,
    }
    words = ", ".join(f"{n} {one if n == 1 else more}" for (one, more), n in counts.items() if n)
    number = "microbatch" if schedule.num_microbatches > 1 else "slice"
    right = f"{words}   |   number: {number}"
    inches = 16 * 0.0078 * len(title) + _FONT * 0.0075 * len(right)  # about as wide as the letters are
    fit = min(1.0, (_WIDTH * (_RIGHT - _LEFT) - 0.3) / inches)
    figure.text(_LEFT, y, title, fontsize=16 * fit, fontweight="bold", va="center", color=palette.INK)
    figure.text(_RIGHT, y, right, fontsize=_FONT * fit, color=palette.GREY, ha="right", va="center")


def _legend_rows(timelines: Sequence[Timeline]) -> list[tuple[str, dict[str, Any]]]:
    """Returns name and swatches of each line of the legend, only for what is on the picture."""
    from matplotlib.patches import Patch

    causes = {wait.cause for timeline in timelines for wait in find_waits(timeline)}
    ops = {span.action.op for timeline in timelines for span in timeline.spans}
    rows: dict[str, dict[str, Any]] = {
        "work": _work(timelines, ops),
        "idle": {word: Patch(**look, linewidth=0.5) for c, (word, look) in palette.IDLE.items() if c in causes},
        "transfers": {word: Patch(color=color) for word, (color, moved) in palette.TRANSFERS.items() if moved & ops},
    }
    return [(name, swatches) for name, swatches in rows.items() if swatches]


def _work(timelines: Sequence[Timeline], ops: set[Op]) -> dict[str, Any]:
    from matplotlib.patches import Patch

    num_slices = max(timeline.schedule.num_slices for timeline in timelines)
    shades = sorted({k * (num_slices - 1) // 3 for k in range(4)})

    def swatch(op: Op, shade: int) -> Patch:
        color = palette.color(Action(op, 0, 0, shade), num_slices)
        if op in palette.HATCHED:
            return Patch(facecolor=color, edgecolor="white", hatch="////", linewidth=0)
        return Patch(color=color)

    shown = [(op, word) for op, (word, *_) in palette.WORK.items() if op in ops]
    swatches: dict[str, Any] = {word: tuple(swatch(op, shade) for shade in shades) for op, word in shown}
    num_positions = 1 + max(position for t in timelines for position in palette.positions(t).values())
    if num_positions > 1:
        colors = [palette.stage_color(position, num_positions) for position in range(num_positions)]
        swatches["stripe: the rank's stages, in order"] = tuple(Patch(color=color) for color in colors)
    return swatches


def _draw_legend(figure: Any, name: str, swatches: dict[str, Any], y: float) -> None:
    """Draws one line: its name under the names of the ranks, its swatches under the lanes."""
    from matplotlib.legend_handler import HandlerTuple

    figure.text(_LEFT - 0.007, y, name, fontsize=_FONT, color=palette.GREY, ha="right", va="center")
    place = {"loc": "center left", "bbox_to_anchor": (_LEFT, y), "borderaxespad": 0, "borderpad": 0}
    style = {"ncols": len(swatches), "frameon": False, "fontsize": _FONT, "handlelength": 2.2, "columnspacing": 1.6}
    gradient = {tuple: HandlerTuple(ndivide=None, pad=0)}
    figure.legend([*swatches.values()], [*swatches], handler_map=gradient, **place, **style)
