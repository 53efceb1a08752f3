"""Draws the ranks of a timeline as lanes over time, and the memory they hold."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from slipstream.schedule import Action, Op
from slipstream.timeline import colors as palette
from slipstream.timeline.idle_causes import Cause, find_waits
from slipstream.timeline.spans import Timeline
from slipstream.units import BYTE_UNITS, bytes_unit

# A lane is one unit high, its middle at the rank's number: actions from _TOP to _BOTTOM, transfers beneath.
_TOP, _BOTTOM, _STRIPE, _GAP, _BAR = -0.38, 0.36, 0.1, 0.03, 0.07
_SMALLEST = 5.5  # points: a smaller number is not written


@dataclass(frozen=True)
class Scale:
    """The scale of a panel: how seconds become positions and inches; `unit` names what positions count."""

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
    """The scale of memory: `size` bytes are one `unit`, and `most` is the highest peak of what `name` says."""

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
        label.set_color(palette.rank_color(rank, timeline.num_ranks))
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "right", "top", "bottom"]].set_visible(False)


def _box(start: float, width: float, top: float, bottom: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((start, top), width, bottom - top)


def _draw_waits(axes: Any, timeline: Timeline, scale: Scale) -> None:
    from matplotlib.collections import PatchCollection

    boxes: defaultdict[Cause, list[Any]] = defaultdict(list)
    for wait in find_waits(timeline):
        start, width = scale.at(wait.start - timeline.start), scale.at(wait.seconds)
        boxes[wait.cause].append(_box(start, width, wait.rank + _TOP, wait.rank + _BOTTOM))
    for cause, patches in boxes.items():
        axes.add_collection(PatchCollection(patches, **palette.IDLE[cause][1], linewidth=0))


def _draw_actions(axes: Any, timeline: Timeline, scale: Scale) -> None:
    """Draws boxes in the colour of op and slice; if ranks hold several stages, a stripe above says which."""
    from matplotlib.collections import PatchCollection

    position = palette.positions(timeline)
    num_positions = 1 + max(position.values(), default=0)
    top = _TOP + (_STRIPE + _GAP if num_positions > 1 else 0)
    drawn: defaultdict[str, list[tuple[Any, palette.Color]]] = defaultdict(list)  # boxes with their colours
    for span in timeline.compute_spans:
        start, width = scale.at(span.start - timeline.start), scale.at(span.seconds)
        color = palette.color(span.action, timeline.schedule.num_slices)
        kind = "hatched" if span.action.op in palette.HATCHED else "plain"
        drawn[kind].append((_box(start, width, span.rank + top, span.rank + _BOTTOM), color))
        if num_positions > 1:
            stripe = _box(start, width, span.rank + _TOP, span.rank + _TOP + _STRIPE)
            drawn["stripe"].append((stripe, palette.stage_color(position[span.action.stage], num_positions)))
        label = _number(span.action, timeline)
        font = min(scale.label_font, width * scale.inches / (0.0088 * len(label) + 0.002))
        if label and font >= _SMALLEST:
            where = start + width / 2, span.rank + (top + _BOTTOM) / 2 + 0.02
            plain = {"boxstyle": "square,pad=0.1", "facecolor": color, "linewidth": 0} if kind == "hatched" else None
            axes.text(*where, label, color=palette.ink_on(color), bbox=plain, ha="center", va="center", fontsize=font)
    edge = 0.6 if len(timeline.compute_spans) < 120 * timeline.num_ranks else 0  # edges would cover narrow boxes
    for kind, hatch in (("plain", None), ("hatched", "////"), ("stripe", None)):
        boxes, colors = [box for box, _ in drawn[kind]], [color for _, color in drawn[kind]]
        look: dict[str, Any] = {"facecolors": colors, "edgecolors": "white", "linewidths": edge, "hatch": hatch}
        axes.add_collection(PatchCollection(boxes, **look))


def _number(action: Action, timeline: Timeline) -> str:
    """Returns the number in a box: the microbatch if there are several, else the slice."""
    if action.op not in palette.WORK or action.op is Op.REDUCE_GRAD:
        return ""
    return str(action.microbatch if timeline.schedule.num_microbatches > 1 else action.slice)


def _draw_transfers(axes: Any, timeline: Timeline, scale: Scale) -> None:
    """Draws thin bars under the lane of the rank that receives the message, or copies."""
    from matplotlib.collections import PatchCollection

    transfers = [(m.receive.action.op, m.receive.rank, m.start, m.seconds) for m in timeline.messages]
    copies = (span for span in timeline.spans if span.action.op in (Op.OFFLOAD, Op.RELOAD))
    transfers += [(span.action.op, span.rank, span.start, span.seconds) for span in copies]
    for color, ops in palette.TRANSFERS.values():
        boxes = [
            _box(scale.at(start - timeline.start), scale.at(seconds), top := rank + _BOTTOM + _GAP, top + _BAR)
            for op, rank, start, seconds in transfers
            if op in ops
        ]
        axes.add_collection(PatchCollection(boxes, facecolor=color, linewidth=0))


def draw_memory(axes: Any, lanes: Any, timeline: Timeline, scale: Scale, memory: MemoryScale) -> None:
    """Draws memory over time in the rank's colour, and each rank's peak at the end of its lane."""
    axis = lanes.get_yaxis_transform()
    lanes.text(1.012, -0.72, "peak", transform=axis, fontsize=scale.font, color=palette.GREY, va="center")
    for rank, (steps, peak) in enumerate(zip(timeline.memory, timeline.peak_memory, strict=True)):
        color = palette.rank_color(rank, timeline.num_ranks)
        times = [0.0, *(scale.at(time - timeline.start) for time, _ in steps), scale.at(timeline.makespan)]
        held = [0.0, *(memory.at(size) for _, size in steps)]
        width = 1.6 if timeline.num_ranks <= 8 else 1.0
        axes.step(times, [*held, held[-1]], where="post", color=color, linewidth=width)
        lanes.text(1.012, rank, memory.text(peak), transform=axis, fontsize=scale.font, color=color, va="center")
    axes.set_ylim(0, memory.at(memory.most) * 1.1)
    axes.set_ylabel(f"{memory.name}\n({memory.unit})", fontsize=10.5)
    axes.tick_params(axis="y", labelsize=10)
    axes.spines[["right", "top"]].set_visible(False)
