"""A step's actions over time, measured or simulated: spans, idle intervals with their causes, pictures, traces."""

from slipstream.timeline.chrome_trace import chrome_trace, load_trace, save_trace
from slipstream.timeline.picture import draw_timelines
from slipstream.timeline.spans import Cause, Message, Span, Timeline, TimelineWindow, Wait, find_waits, idle_by_cause
