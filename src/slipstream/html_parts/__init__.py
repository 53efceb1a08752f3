"""The parts of HTML reports: the page and its style, sections, tables and bar charts. No torch."""

from slipstream.html_parts.elements import (
    GENERATOR,
    NUM_COLORS,
    Bar,
    NumberText,
    axis_ticks,
    bar_chart,
    details,
    fact_tiles,
    html_list,
    html_page,
    round_numbers,
    section,
    table,
)
