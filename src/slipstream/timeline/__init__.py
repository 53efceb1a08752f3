"""What ran when, measured or simulated: spans, idle intervals with their causes, pictures and traces."""

from __future__ import annotations

from slipstream.timeline.idle_causes import Cause, Wait
from slipstream.timeline.spans import Span, Timeline

__all__ = [
    "Cause",
    "Span",
    "Timeline",
    "Wait",
]
