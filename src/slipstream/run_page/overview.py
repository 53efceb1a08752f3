"""The overview of several runs: a table with a link to each, and their losses next to each other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from slipstream.html_parts import NUM_COLORS
from slipstream.run_page.line_charts import Curve, finite, line_chart
from slipstream.run_page.run_record import RunRecord
from slipstream.run_page.run_sections import loss_text, peak_memory, recent, text_or_dash
from slipstream.units import bytes_text, count_text, share_text

_HEADINGS = ("run", "state", "loss", "validation", "tokens/s", "idle", "memory", "started")


def overview(runs: Sequence[RunRecord]) -> str:
    """Returns the table of the runs, whose names lead to theirs on the page, and the charts of their losses."""
    head = "".join(f"<th>{each}</th>" for each in _HEADINGS)
    rows = "\n".join(_row(number, run) for number, run in enumerate(runs, 1))
    with_steps = [run for run in runs if run.steps]
    shown = with_steps[:NUM_COLORS]
    losses = [Curve(run.name, [(step["step"], finite(step.get("loss"))) for step in run.steps]) for run in shown]
    held_out = [
        Curve(run.name, [(each["step"], finite(each.get("validation_loss"))) for each in run.validations], dots=True)
        for run in shown  # also one without: a run has one colour in both charts
    ]
    unit = ", or ".join(sorted({run.loss_unit for run in shown}))
    charts = line_chart("training loss", unit, losses, loss_text)
    charts += line_chart("validation loss", unit, held_out, loss_text)
    left_out = (
        f"<p class='soft'>The curves are of the first {NUM_COLORS} runs.</p>" if len(shown) < len(with_steps) else ""
    )
    return (
        f"<section class='overview'><div class='card'><div class='scroll'><table class='runs'><thead><tr>{head}</tr>"
        f"</thead><tbody>{rows}</tbody></table></div></div>\n<h2>Losses</h2>\n<div class='card'>"
        f"{charts or '<p>No run has taken a step.</p>'}{left_out}</div></section>"
    )


def _row(number: int, run: RunRecord) -> str:
    last = finite(run.steps[-1].get("loss")) if run.steps else None
    held_out = finite(run.validations[-1].get("validation_loss")) if run.validations else None
    cells = (
        run.state,
        text_or_dash(last, loss_text),
        text_or_dash(held_out, loss_text),
        text_or_dash(recent(run, "tokens_per_second"), count_text),
        share_text(recent(run, "idle_fraction")),
        text_or_dash(max(peak_memory(run), default=None), bytes_text),
        str(run.starts[0].get("time", "-"))[:16].replace("T", " ") if run.starts else "-",  # to the minute
    )
    link = f'<a href="#run-{number}">{escape(run.name)}</a>'
    return f"<tr><td>{link}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
