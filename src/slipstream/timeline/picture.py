"""Draws timelines with matplotlib, one beneath the other on one time axis, with legends below.

The colours of a timeline's picture: a hue per op, a shade per slice, a hatch per cause of waiting.

Readers who see no difference between red and green can tell the hues apart; every cause has a different pattern.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.schedule import OPERATIONS, RECEIVES, Action, Lane, Op, operations_on
from slipstream.timeline.spans import Cause, Timeline, find_waits
from slipstream.units import BYTE_UNITS, bytes_unit, duration_unit

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
        memory_unit: "B" where the timelines count memory in bytes, else the name of their unit.
        memory_name: the memory's name on the axis.

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
    for row, (name, swatches) in enumerate(rows):
        _draw_legend(figure, name, swatches, 1 - (panels[-1].bottom + _AXIS + _LEGEND * (row + 0.5)) / height)
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
    timeline = panel.timeline
    height = figure.get_figheight()

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
    labelled = "microbatch" if schedule.num_microbatches > 1 else "slice"
    right = f"{words}   |   number: {labelled}"
    inches = 16 * 0.0078 * len(title) + _FONT * 0.0075 * len(right)  # approximate width of the letters
    fit = min(1.0, (_WIDTH * (_RIGHT - _LEFT) - 0.3) / inches)
    figure.text(_LEFT, y, title, fontsize=16 * fit, fontweight="bold", va="center", color=INK)
    figure.text(_RIGHT, y, right, fontsize=_FONT * fit, color=GREY, ha="right", va="center")


def _legend_rows(timelines: Sequence[Timeline]) -> list[tuple[str, dict[str, Any]]]:
    """Returns name and swatches of each line of the legend, only for the colours on the picture."""
    from matplotlib.patches import Patch

    causes = {wait.cause for timeline in timelines for wait in find_waits(timeline)}
    ops = {span.action.op for timeline in timelines for span in timeline.spans}
    rows: dict[str, dict[str, Any]] = {
        "work": _work(timelines, ops),
        "idle": {word: Patch(**look, linewidth=0.5) for c, (word, look) in IDLE.items() if c in causes},
        "transfers": {word: Patch(color=color) for word, (color, moved) in transfers_by_name().items() if moved & ops},
    }
    return [(name, swatches) for name, swatches in rows.items() if swatches]


def _work(timelines: Sequence[Timeline], ops: set[Op]) -> dict[str, Any]:
    from matplotlib.patches import Patch

    num_slices = max(timeline.schedule.num_slices for timeline in timelines)
    shades = sorted({k * (num_slices - 1) // 3 for k in range(4)})

    def swatch(op: Op, shade: int) -> Patch:
        color = action_color(Action(op, 0, 0, shade), num_slices)
        if OPERATIONS[op].is_hatched:
            return Patch(facecolor=color, edgecolor="white", hatch="////", linewidth=0)
        return Patch(color=color)

    shown = [(op, OPERATIONS[op].label) for op in operations_on(Lane.RANK) if op in ops]
    swatches: dict[str, Any] = {word: tuple(swatch(op, shade) for shade in shades) for op, word in shown}
    num_positions = 1 + max(position for t in timelines for position in positions(t).values())
    if num_positions > 1:
        colors = [stage_color(position, num_positions) for position in range(num_positions)]
        swatches["stripe: the rank's stages, in order"] = tuple(Patch(color=color) for color in colors)
    return swatches


def _draw_legend(figure: Any, name: str, swatches: dict[str, Any], y: float) -> None:
    """Draws one line: its name under the names of the ranks, its swatches under the lanes."""
    from matplotlib.legend_handler import HandlerTuple

    figure.text(_LEFT - 0.007, y, name, fontsize=_FONT, color=GREY, ha="right", va="center")
    place = {"loc": "center left", "bbox_to_anchor": (_LEFT, y), "borderaxespad": 0, "borderpad": 0}
    style = {"ncols": len(swatches), "frameon": False, "fontsize": _FONT, "handlelength": 2.2, "columnspacing": 1.6}
    gradient = {tuple: HandlerTuple(ndivide=None, pad=0)}
    figure.legend([*swatches.values()], [*swatches], handler_map=gradient, **place, **style)


# A lane is one unit high, its middle at the rank's number: actions from _TOP to _BOTTOM, transfers beneath.
_TOP = -0.38
_BOTTOM = 0.36
_STRIPE = 0.1
_GAP = 0.03
_BAR = 0.07
_SMALLEST = 5.5  # points; smaller numbers are left out


@dataclass(frozen=True)
class Scale:
    """The scale of a panel: how seconds become positions and inches; `unit` names the unit of positions."""

    per_second: float
    unit: str
    inches: float  # per position
    lane: float  # height in inches

    def at(self, seconds: float) -> float:
        return float(seconds) * self.per_second

    @property
    def font(self) -> float:
        """The size in points of the names of ranks and of peaks."""
        return min(11.0, 28 * self.lane)

    @property
    def label_font(self) -> float:
        """The size in points of the numbers inside the boxes."""
        return min(9.0, 22 * self.lane)


@dataclass(frozen=True)
class MemoryScale:
    """The scale of memory: `size` bytes are one `unit`, and `most` is the highest peak of `name`."""

    size: float
    unit: str
    most: float
    name: str

    @classmethod
    def of(cls, peaks: list[float], unit: str, name: str) -> MemoryScale:
        """Makes the scale for these peaks, in bytes unless `unit` is another word."""
        most = float(max(peaks, default=0))
        return cls(*(bytes_unit(most) if unit == "B" else (1.0, unit)), most, name)

    def at(self, size: float) -> float:
        return float(size) / self.size

    def text(self, size: float) -> str:
        return f"{self.at(size):.3g}{f' {self.unit}' if self.unit in BYTE_UNITS else ''}"


def draw_lanes(axes: Any, timeline: Timeline, scale: Scale) -> None:
    """Draws a lane per rank from the top: waits by cause, actions as boxes, messages and copies beneath."""
    _draw_waits(axes, timeline, scale)
    _draw_actions(axes, timeline, scale)
    _draw_transfers(axes, timeline, scale)
    ranks = range(timeline.num_ranks)
    axes.set_ylim(timeline.num_ranks - 0.45, -0.5)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=scale.font)
    for rank, label in enumerate(axes.get_yticklabels()):
        label.set_color(rank_color(rank, timeline.num_ranks))
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "right", "top", "bottom"]].set_visible(False)


def _box(start: float, width: float, top: float, bottom: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((start, top), width, bottom - top)


def _draw_waits(axes: Any, timeline: Timeline, scale: Scale) -> None:
    from matplotlib.collections import PatchCollection

    boxes: defaultdict[Cause, list[Any]] = defaultdict(list)
    for wait in find_waits(timeline):
        start = scale.at(wait.start - timeline.start)
        width = scale.at(wait.seconds)
        boxes[wait.cause].append(_box(start, width, wait.rank + _TOP, wait.rank + _BOTTOM))
    for cause, patches in boxes.items():
        axes.add_collection(PatchCollection(patches, **IDLE[cause][1], linewidth=0))


def _draw_actions(axes: Any, timeline: Timeline, scale: Scale) -> None:
    """Draws boxes in the colour of op and slice; if ranks hold several stages, a stripe above says which."""
    from matplotlib.collections import PatchCollection

    position = positions(timeline)
    num_positions = 1 + max(position.values(), default=0)
    top = _TOP + (_STRIPE + _GAP if num_positions > 1 else 0)
    drawn: defaultdict[str, list[tuple[Any, Color]]] = defaultdict(list)  # boxes with their colours
    for span in timeline.compute_spans:
        start = scale.at(span.start - timeline.start)
        width = scale.at(span.seconds)
        color = action_color(span.action, timeline.schedule.num_slices)
        kind = "hatched" if OPERATIONS[span.action.op].is_hatched else "plain"
        drawn[kind].append((_box(start, width, span.rank + top, span.rank + _BOTTOM), color))
        if num_positions > 1:
            stripe = _box(start, width, span.rank + _TOP, span.rank + _TOP + _STRIPE)
            drawn["stripe"].append((stripe, stage_color(position[span.action.stage], num_positions)))
        label = _number(span.action, timeline)
        font = min(scale.label_font, width * scale.inches / (0.0088 * len(label) + 0.002))
        if label and font >= _SMALLEST:
            where = start + width / 2, span.rank + (top + _BOTTOM) / 2 + 0.02
            plain = {"boxstyle": "square,pad=0.1", "facecolor": color, "linewidth": 0} if kind == "hatched" else None
            axes.text(*where, label, color=ink_on(color), bbox=plain, ha="center", va="center", fontsize=font)
    # Edges would cover narrow boxes.
    edge = 0.6 if len(timeline.compute_spans) < 120 * timeline.num_ranks else 0
    for kind, hatch in (("plain", None), ("hatched", "////"), ("stripe", None)):
        boxes, colors = [box for box, _ in drawn[kind]], [color for _, color in drawn[kind]]
        look: dict[str, Any] = {"facecolors": colors, "edgecolors": "white", "linewidths": edge, "hatch": hatch}
        axes.add_collection(PatchCollection(boxes, **look))


def _number(action: Action, timeline: Timeline) -> str:
    """Returns the number in a box: the microbatch if there are several, else the slice."""
    if OPERATIONS[action.op].lane is not Lane.RANK or action.op is Op.REDUCE_GRAD:
        return ""
    return str(action.microbatch if timeline.schedule.num_microbatches > 1 else action.slice)


def _draw_transfers(axes: Any, timeline: Timeline, scale: Scale) -> None:
    """Draws thin bars under the lane of the rank that receives the message, or copies."""
    from matplotlib.collections import PatchCollection

    transfers = [(m.receive.action.op, m.receive.rank, m.start, m.seconds) for m in timeline.messages]
    copies = (span for span in timeline.spans if OPERATIONS[span.action.op].lane is Lane.COPIES)
    transfers += [(span.action.op, span.rank, span.start, span.seconds) for span in copies]
    for color, ops in transfers_by_name().values():
        boxes = [
            _box(scale.at(start - timeline.start), scale.at(seconds), top := rank + _BOTTOM + _GAP, top + _BAR)
            for op, rank, start, seconds in transfers
            if op in ops
        ]
        axes.add_collection(PatchCollection(boxes, facecolor=color, linewidth=0))


def draw_memory(axes: Any, lanes: Any, timeline: Timeline, scale: Scale, memory: MemoryScale) -> None:
    """Draws memory over time in the rank's colour, and each rank's peak at the end of its lane."""
    axis = lanes.get_yaxis_transform()
    lanes.text(1.012, -0.72, "peak", transform=axis, fontsize=scale.font, color=GREY, va="center")
    for rank, (steps, peak) in enumerate(zip(timeline.memory, timeline.peak_memory, strict=True)):
        color = rank_color(rank, timeline.num_ranks)
        times = [0.0, *(scale.at(time - timeline.start) for time, _ in steps), scale.at(timeline.makespan)]
        held = [0.0, *(memory.at(size) for _, size in steps)]
        width = 1.6 if timeline.num_ranks <= 8 else 1.0
        axes.step(times, [*held, held[-1]], where="post", color=color, linewidth=width)
        lanes.text(1.012, rank, memory.text(peak), transform=axis, fontsize=scale.font, color=color, va="center")
    axes.set_ylim(0, memory.at(memory.most) * 1.1)
    axes.set_ylabel(f"{memory.name}\n({memory.unit})", fontsize=10.5)
    axes.tick_params(axis="y", labelsize=10)
    axes.spines[["right", "top"]].set_visible(False)


Color = tuple[float, ...]

INK, GREY = "#222222", "#595959"

IDLE: dict[Cause, tuple[str, dict[str, Any]]] = {
    Cause.FILL: ("not yet fed (fill)", {"facecolor": "#f6f6f6", "edgecolor": "#c9c9c9", "hatch": "..."}),
    Cause.COMPUTE: ("another rank computes", {"facecolor": "#f3f3f3", "edgecolor": "#b0b0b0", "hatch": "////"}),
    Cause.MESSAGE: ("message on its way", {"facecolor": "#f7d04a", "edgecolor": "#b98a00", "hatch": "\\\\\\\\"}),
    Cause.COPY: ("copy to or from host", {"facecolor": "#e2dcf2", "edgecolor": "#8c7bbd", "hatch": "xxxx"}),
    Cause.OVERHEAD: ("executor", {"facecolor": "#3d3d3d", "edgecolor": "#3d3d3d"}),
    Cause.DRAIN: ("nothing left (drain)", {"facecolor": "#f6f6f6", "edgecolor": "#dedede"}),
}


def transfers_by_name() -> dict[str, tuple[str, frozenset[Op]]]:
    """Returns the colours and the ops of the bars under a lane, by their names: of messages, and of each copy."""
    copies = {OPERATIONS[op].label: (OPERATIONS[op].colors[1], frozenset({op})) for op in operations_on(Lane.COPIES)}
    return {"message": ("#a87d00", RECEIVES)} | copies


def mix(light: str, dark: str, share: float) -> Color:
    """Returns the colour at `share` of the way from light to dark."""
    from matplotlib.colors import to_rgb

    return tuple(a + (b - a) * share for a, b in zip(to_rgb(light), to_rgb(dark), strict=True))


def action_color(action: Action, num_slices: int) -> Color:
    """Returns the op's hue in the slice's shade."""
    light, dark = OPERATIONS[action.op].colors
    return mix(light, dark, action.slice / (num_slices - 1) if num_slices > 1 else 0.45)


def ink_on(background: Color) -> str:
    """Returns the colour of text on a background: white on dark ones."""
    red, green, blue = background
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.58 else INK


def rank_color(rank: int, num_ranks: int) -> Any:
    """Returns the colour of a rank's name and memory."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.75 * rank / max(num_ranks - 1, 1))


def stage_color(position: int, num_stages: int) -> Color:
    """Returns the colour of the stripe of a rank's first, second, ... stage: from black to light grey."""
    return mix("#111111", "#c8c8c8", position / max(num_stages - 1, 1))


def positions(timeline: Timeline) -> dict[int, int]:
    """Returns which of its rank's stages each stage is: 0, 1, ... in the model's order."""
    placement = timeline.schedule.placement
    return {stage: placement[:stage].count(rank) for stage, rank in enumerate(placement)}
