"""The report of a plan: one HTML file that needs no network and no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from math import isfinite
from pathlib import Path

from slipstream.planner.plans import Plan, Prediction
from slipstream.planner.report.bar_charts import Bar, bar_chart
from slipstream.planner.report.timeline_svg import timeline_svg
from slipstream.planner.report.wording import (
    COLUMNS,
    configuration_text,
    plural,
    reasons,
    search_text,
    shared_choices,
    shared_text,
    slices_text,
)
from slipstream.simulator import MemoryKind
from slipstream.units import bytes_text, count_text, seconds_text, share_text


def write_report(plan: Plan, path: Path) -> None:
    """Writes the report of a plan as one HTML file without scripts; an existing file is replaced."""
    path.write_text(report_page(plan), encoding="utf-8")


def report_page(plan: Plan) -> str:
    """Returns the HTML of the report."""
    sections = (_headline, _table, _time, _timeline, _memory, _reasons, _cuts, _notes)
    body = "\n".join(section(plan) for section in sections)
    title = escape(f"{plan.model} on {plan.cluster}")
    style = resources.files("slipstream.planner.report").joinpath("style.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>Plan: {title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _headline(plan: Plan) -> str:
    best = plan.best
    room = f"of {bytes_text(best.memory_limit)}" if isfinite(best.memory_limit) else "no known limit"
    facts = [
        ("Step", seconds_text(best.step_seconds), "predicted"),
        ("Tokens per second", count_text(best.tokens_per_second), "over all devices"),
        ("MFU", share_text(best.mfu), "of the devices' peak" if best.mfu is not None else "unknown peak"),
        ("Idle", share_text(best.idle_fraction), "of the ranks' time"),
        ("Memory", bytes_text(best.peak_memory), f"rank {best.fullest_rank}, {room}"),
    ]
    tiles = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}<small>{escape(what)}</small></dd></div>"
        for name, value, what in facts
    )
    lengths = f"{plural(plan.seq_len, 'token')} per sequence, {plural(plan.global_batch, 'sequence')} per step"
    task = f"{plural(plan.num_devices, 'device')}, {lengths}"
    return (
        f"<h1>{escape(plan.model)} on {escape(plan.cluster)}</h1>\n<p class='soft'>{escape(task)}</p>\n"
        f"<p>Best: <strong>{escape(configuration_text(best.configuration))}</strong></p>\n"
        f"<dl class='headline'>{tiles}</dl>"
    )


def _table(plan: Plan) -> str:
    shared = shared_choices(plan.predictions)
    columns = {name: cell for name, cell in COLUMNS.items() if name not in shared}
    rows = [
        (f"plan {number}", *(cell(prediction) for cell in columns.values()))
        for number, prediction in enumerate(plan.predictions, 1)
    ]
    more = f"<p class='soft'>{escape(shared_text(shared))}</p>" if shared else ""
    return _section("The best plans", _table_html(["", *columns], rows, best=0) + more)


def _time(plan: Plan) -> str:
    bars = [Bar(f"plan {number}", each.seconds_by_cause) for number, each in enumerate(plan.predictions, 1)]
    chart = bar_chart(bars, "time of a step on the rank that ends last", seconds_text)
    causes = list(dict.fromkeys(cause for bar in bars for cause in bar.parts))
    rows = [
        (bar.name, *(seconds_text(bar.parts.get(cause, 0.0)) for cause in causes), seconds_text(bar.total))
        for bar in bars
    ]
    numbers = _details("All numbers", _table_html(["", *causes, "step"], rows))
    return _section("Where the step's time goes", chart + numbers)


def _timeline(plan: Plan) -> str:
    picture, left_out = timeline_svg(plan.timeline)
    after = plan.best.step_seconds - plan.timeline.makespan
    follows = (
        f"Gradient reduction and the optimizer take the last {seconds_text(after)} of the step." if after > 0 else ""
    )
    more = f"<p class='soft'>{escape(f'{left_out} {follows}'.strip())}</p>" if left_out or follows else ""
    inner = f"<div class='scroll timeline'>{picture}</div>{more}"
    return _section("The step of the best plan", inner)


def _memory(plan: Plan) -> str:
    best = plan.best
    bars = [_memory_bar(best, rank) for rank in range(len(best.memory))]
    chart = bar_chart(bars, "peak memory of a device", bytes_text, best.memory_limit, "limit")
    kinds = [kind for kind in MemoryKind if any(each.get(kind) for each in best.memory)]
    rows = [
        (bar.name, *(bytes_text(held.get(kind, 0.0)) for kind in kinds), bytes_text(bar.total))
        for bar, held in zip(bars, best.memory, strict=True)
    ]
    numbers = _details("All numbers", _table_html(["", *kinds, "total"], rows))
    return _section("Memory of the best plan's ranks", chart + numbers)


def _memory_bar(prediction: Prediction, rank: int) -> Bar:
    """The bar of one rank, with the kinds of memory in the same order on every rank."""
    held = prediction.memory[rank]
    return Bar(f"rank {rank}", {str(kind): held[kind] for kind in MemoryKind if kind in held})


def _reasons(plan: Plan) -> str:
    if not plan.alternatives:
        return _section("Why it is the best", "<p>There was no other choice.</p>")
    intro = "<p class='soft'>The best plan found with another value of one choice, and how much longer it takes.</p>"
    return _section("Why it is the best", intro + _list(reasons(plan)))


def _cuts(plan: Plan) -> str:
    best = plan.best
    rows = [
        (f"stage {stage}", f"rank {rank}", str(layers))
        for stage, (rank, layers) in enumerate(zip(best.placement, best.partition, strict=True))
    ]
    stages = _details(f"Layers of {len(rows)} stages", _table_html(["", "on", "layers"], rows))
    sequences = plural(best.configuration.microbatch_size, "sequence")
    batch = f"{plural(best.num_microbatches, 'microbatch')} of {sequences} in each pipeline"
    return _section(
        "Stages, slices and microbatches", f"<p>{escape(slices_text(best.slices))}; {escape(batch)}.</p>{stages}"
    )


def _notes(plan: Plan) -> str:
    return _section("What the numbers are based on", _list([*plan.notes, f"The planner {search_text(plan)}."]))


def _section(title: str, inner: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n<div class='card'>{inner}</div>\n</section>"


def _list(items: Sequence[str]) -> str:
    return f"<ul class='plain'>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _details(title: str, inner: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def _table_html(headings: Sequence[str], rows: Sequence[Sequence[str]], best: int | None = None) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in headings)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(
        f"<tr class='best'>{line}</tr>" if index == best else f"<tr>{line}</tr>" for index, line in enumerate(lines)
    )
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
