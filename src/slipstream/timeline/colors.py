"""The colours of a timeline's picture: a hue per op, a shade per slice, a hatch per cause of waiting.

Readers who see no difference between red and green can tell the hues apart; every cause has a different pattern.
"""

from __future__ import annotations

from typing import Any

from slipstream.schedule import Action, Op
from slipstream.timeline.idle_causes import Cause
from slipstream.timeline.spans import Timeline

Color = tuple[float, ...]

INK, GREY = "#222222", "#595959"

# The name of each op, and its lightest and darkest shade: slices go from one to the other.
WORK = {
    Op.F: ("forward", "#d3e5f6", "#1f63a8"),
    Op.B: ("backward", "#fde2c3", "#c45f10"),
    Op.I: ("input gradient", "#f6c6c3", "#a5202b"),
    Op.W: ("weight gradient", "#d6f5ea", "#36a98c"),
    Op.R: ("recompute", "#d3e5f6", "#1f63a8"),  # a forward again: hatched
    Op.V: ("vocabulary part", "#e4daf4", "#6a4bb0"),
    Op.L: ("loss of all parts", "#8b8b8b", "#8b8b8b"),
    Op.VW: ("weight gradient of the part", "#efe3b8", "#a08a2c"),
    Op.E: ("embedding part", "#f3d9ea", "#a2437f"),
    Op.EW: ("gradient of the embedding part", "#e6dfd2", "#7d6b4a"),
    Op.REDUCE_GRAD: ("gradient reduction", "#b9a7dd", "#b9a7dd"),
}
_OTHER = ("", "#dddddd", "#777777")
IDLE: dict[Cause, tuple[str, dict[str, Any]]] = {
    Cause.FILL: ("not yet fed (fill)", {"facecolor": "#f6f6f6", "edgecolor": "#c9c9c9", "hatch": "..."}),
    Cause.COMPUTE: ("another rank computes", {"facecolor": "#f3f3f3", "edgecolor": "#b0b0b0", "hatch": "////"}),
    Cause.MESSAGE: ("message on its way", {"facecolor": "#f7d04a", "edgecolor": "#b98a00", "hatch": "\\\\\\\\"}),
    Cause.COPY: ("copy to or from host", {"facecolor": "#e2dcf2", "edgecolor": "#8c7bbd", "hatch": "xxxx"}),
    Cause.OVERHEAD: ("executor", {"facecolor": "#3d3d3d", "edgecolor": "#3d3d3d"}),
    Cause.DRAIN: ("nothing left (drain)", {"facecolor": "#f6f6f6", "edgecolor": "#dedede"}),
}
HATCHED = frozenset({Op.R})
TRANSFERS: dict[str, tuple[str, frozenset[Op]]] = {
    "message": ("#a87d00", frozenset({Op.RECV_F, Op.RECV_B})),
    "offload": ("#8c7bbd", frozenset({Op.OFFLOAD})),
    "reload": ("#c3b6e3", frozenset({Op.RELOAD})),
}


def mix(light: str, dark: str, share: float) -> Color:
    """Returns the colour at `share` of the way from light to dark."""
    from matplotlib.colors import to_rgb

    return tuple(a + (b - a) * share for a, b in zip(to_rgb(light), to_rgb(dark), strict=True))


def color(action: Action, num_slices: int) -> Color:
    """Returns the op's hue in the slice's shade."""
    _, light, dark = WORK.get(action.op, _OTHER)
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
