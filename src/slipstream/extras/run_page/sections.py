"""The sections of one run's page, and the overview of several runs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from slipstream.extras.run_page.charts import Curve, Mark, finite, line_chart, step_timeline
from slipstream.extras.run_page.run_record import Record, RunRecord
from slipstream.html_parts import NUM_COLORS, Bar, bar_chart, details, fact_tiles, html_list, section, table
from slipstream.units import bytes_text, count_text, long_duration_text, plural, seconds_text, share_text

RECENT = 20  # steps in a median


def run_sections(run: RunRecord) -> str:
    """Returns the sections of a run as HTML; one about which nothing is known is left out."""
    marks = happenings(run)
    parts = (
        _headline(run),
        _what_happened(run, marks),
        section("Loss", loss_chart(run, marks)) if run.steps else "",
        section("Optimizer", _chart(run, marks, "learning rate", "", "lr", _short) + _norm(run, marks))
        if run.steps
        else "",
        section("Speed", _speed(run, marks)) if run.steps else "",
        _samples(run),
        section("The last step, measured", step_timeline(run.timeline)) if run.timeline is not None else "",
        _phases(run),
        _memory(run, marks),
        section("Configuration", f"<div class='scroll'><pre>{escape(run.settings_text)}</pre></div>")
        if run.settings_text
        else "",
        _environment(run),
    )
    return "\n".join(filter(None, parts))


def recent(run: RunRecord, name: str) -> float | None:
    """Returns the median of a number over the last steps; None where it isn't known."""
    known = [value for step in run.steps[-RECENT:] if (value := finite(step.get(name))) is not None]
    return statistics.median(known) if known else None


def peak_memory(run: RunRecord) -> list[int]:
    """Returns the most bytes that each rank has held, as its last step says; empty where that isn't known."""
    return list(run.steps[-1].get("peak_memory") or []) if run.steps else []


def text_or_dash(value: float | None, text: Callable[[float], str]) -> str:
    """Returns a number as text, or a dash where it isn't known."""
    return "-" if value is None else text(value)


def loss_text(value: float) -> str:
    """Returns a loss."""
    return f"{value:.4f}"


def _short(value: float) -> str:
    return f"{value:.4g}"


def _headline(run: RunRecord) -> str:
    held_out = [finite(validation.get("validation_loss")) for validation in run.validations]
    known = [loss for loss in held_out if loss is not None]
    seconds = sum(finite(step.get("step_seconds")) or 0.0 for step in run.steps)
    last = finite(run.steps[-1].get("loss")) if run.steps else None
    facts = [
        ("Loss", text_or_dash(last, loss_text), f"of the last step, {run.loss_unit}"),
        ("Validation", text_or_dash(held_out[-1] if held_out else None, loss_text), _best(known)),
        ("Tokens per second", text_or_dash(recent(run, "tokens_per_second"), count_text), "all ranks, median"),
        ("Idle", share_text(recent(run, "idle_fraction")), "of the ranks' time, median"),
        ("MFU", share_text(recent(run, "mfu")), "of the devices' peak, median"),
        ("Memory", text_or_dash(max(peak_memory(run), default=None), bytes_text), "of the fullest rank"),
        ("Time", long_duration_text(seconds) if seconds else "-", "in steps"),
    ]
    tiles = [fact for fact in facts if fact[1] != "-"]
    return (
        f"<p><span class='state'>{escape(run.state)}</span> <span class='soft'>in {escape(str(run.path))}</span></p>"
        + (fact_tiles(tiles) if tiles else "")
    )


def _best(known: Sequence[float]) -> str:
    return f"the last of {len(known)}; best {loss_text(min(known))}" if known else "held-out text"


def _what_happened(run: RunRecord, marks: Sequence[Mark]) -> str:
    kinds = [kind for kind in NAMES if any(mark.kind == kind for mark in marks)]
    legend = "".join(f'<li><i class="{kind}"></i>{NAMES[kind]}</li>' for kind in kinds)
    lines = [*listed(marks), *run.unread]
    if not lines:
        return ""
    inner = html_list(lines) if len(lines) <= 8 else details(f"{len(lines)} lines", html_list(lines))
    return section("What happened", (f'<ul class="legend">{legend}</ul>' if legend else "") + inner)


def loss_chart(run: RunRecord, marks: Sequence[Mark] = ()) -> str:
    """Returns the curves of the training loss and of the validation's, where there was one."""
    curves = [Curve("training", _points(run.steps, "loss"))]
    if run.validations:
        curves.append(Curve("validation", _points(run.validations, "validation_loss"), dots=True))
    chart = line_chart("loss", run.loss_unit, curves, loss_text, marks)
    return chart or "<p>No loss is finite.</p>"


def _points(records: Iterable[dict[str, object]], name: str) -> list[tuple[float, float | None]]:
    return [(float(record["step"]), finite(record.get(name))) for record in records]  # type: ignore[arg-type]


def _chart(
    run: RunRecord, marks: Sequence[Mark], title: str, unit: str, name: str, text: Callable[[float], str]
) -> str:
    return line_chart(title, unit, [Curve(title, _points(run.steps, name))], text, marks)


def _norm(run: RunRecord, marks: Sequence[Mark]) -> str:
    limit = (run.settings.get("optimizer") or {}).get("clip_norm")
    unit = f"before clipping at {limit:g}" if isinstance(limit, (int, float)) else "of the whole model"
    return _chart(run, marks, "gradient norm", unit, "grad_norm", _short)


def _speed(run: RunRecord, marks: Sequence[Mark]) -> str:
    return "".join(
        (
            _chart(run, marks, "tokens per second", "all ranks together", "tokens_per_second", count_text),
            _chart(run, marks, "idle", "share of the ranks' time", "idle_fraction", share_text),
            _chart(run, marks, "MFU", "share of the devices' peak", "mfu", share_text),
        )
    )


def _samples(run: RunRecord) -> str:
    """Returns the model's continuations of the prompt, the newest first."""
    texts = [f"<h3>step {row['step']:,}</h3><pre>{escape(str(row['sample']))}</pre>" for row in run.samples[::-1]]
    return (
        section("Samples", texts[0] + (details("earlier ones", "".join(texts[1:])) if texts[1:] else ""))
        if texts
        else ""
    )


def _phases(run: RunRecord) -> str:
    """Returns where a step's time goes, in the median step of each quarter of the run."""
    steps = [step for step in run.steps if step.get("phases")]
    if not steps:
        return ""
    size = -(-len(steps) // 4)
    parts = [steps[begin : begin + size] for begin in range(0, len(steps), size)]
    bars = [Bar(_range(part), _medians([step["phases"] for step in part])) for part in parts]
    chart = bar_chart(bars, "seconds of a step, as the mean over ranks and the median over steps", seconds_text)
    return section("Where the time goes", chart)


def _range(part: Sequence[dict[str, object]]) -> str:
    first = part[0]["step"]
    last = part[-1]["step"]
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _medians(phases: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for step in phases for name in step)
    return {name.replace("_", " "): statistics.median(step.get(name) or 0.0 for step in phases) for name in names}


def _memory(run: RunRecord, marks: Sequence[Mark]) -> str:
    ranks = peak_memory(run)
    if not ranks:
        return ""
    points = [(float(step["step"]), finite(max(step.get("peak_memory") or [0]))) for step in run.steps]
    over_time = line_chart("fullest rank", "most held so far", [Curve("memory", points)], bytes_text, marks)
    limit = finite((run.settings.get("memory") or {}).get("limit"))
    bars = [Bar(f"rank {rank}", {"held": float(size)}) for rank, size in enumerate(ranks)]
    known = {} if limit is None else {"limit": limit, "limit_name": "memory.limit"}
    chart = bar_chart(bars, "peak of each rank", bytes_text, **known)  # type: ignore[arg-type]
    return section("Memory", over_time + chart + _allocators(run))


def _allocators(run: RunRecord) -> str:
    """Returns a table of the memory of PyTorch's allocator on each rank's GPU in the last step; "" without GPUs."""
    by_rank = [(rank, memory) for rank, memory in enumerate(run.steps[-1].get("gpu_memory") or []) if memory]
    rows = [
        (
            f"rank {rank}",
            *(bytes_text(memory.get(name) or 0) for name in ("allocated", "reserved", "between")),
            *(str(memory.get(name, "-")) for name in ("retries", "failures")),
        )
        for rank, memory in by_rank
    ]
    heads = ["GPU of", "tensors at most", "reserved at most", "free between tensors", "gave all back", "ran out"]
    return table(heads, rows) if rows else ""


def _environment(run: RunRecord) -> str:
    if not run.starts:
        return ""
    rows = []
    for start in run.starts:
        hosts = Counter(start.get("hosts") or [])
        places = ", ".join(f"{host} ({plural(ranks, 'rank')})" for host, ranks in hosts.items())
        versions = ", ".join(f"{name} {version}" for name, version in (start.get("versions") or {}).items())
        rows.append(
            (
                str(start.get("time", "-")),
                str(start["started_after"]),
                _mesh_text(start) or "-",
                places,
                str(start.get("device")),
                versions,
            )
        )
    return section("Environment", table(["start", "after step", "mesh", "ranks", "device", "versions"], rows))


_HEADINGS = ("run", "state", "loss", "validation", "tokens/s", "idle", "memory", "started")


def overview(runs: Sequence[RunRecord]) -> str:
    """Returns the table of the runs, whose names lead to theirs on the page, and the charts of their losses."""
    head = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
    rows = "\n".join(_row(row, run) for row, run in enumerate(runs, 1))
    with_steps = [run for run in runs if run.steps]
    shown = with_steps[:NUM_COLORS]
    losses = [Curve(run.name, _points(run.steps, "loss")) for run in shown]
    # Also of a run without validations: it has one colour in both charts.
    held_out = [Curve(run.name, _points(run.validations, "validation_loss"), dots=True) for run in shown]
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
        # A start's time is cut to the minute.
        str(run.starts[0].get("time", "-"))[:16].replace("T", " ") if run.starts else "-",
    )
    link = f'<a href="#run-{number}">{escape(run.name)}</a>'
    return f"<tr><td>{link}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


MOST_LISTED = 40  # lines of a kind
NAMES = {"restart": "restart", "bad": "bad step", "straggler": "slow rank", "failure": "failure"}


def happenings(run: RunRecord) -> list[Mark]:
    """Returns the events of a run, in the order of steps."""
    return sorted(_happenings(run), key=lambda mark: mark.step)


def _happenings(run: RunRecord) -> Iterator[Mark]:
    for start in run.restarts:
        after = start.get("started_after", 0)
        when = f", at {start['time']}" if start.get("time") else ""
        yield Mark(after, "restart", f"started again after step {after:,}{when}{_change(start)}")
    for step in run.steps:
        step_number = step["step"]
        if bad := step.get("bad"):
            yield Mark(step_number, "bad", f"step {step_number:,} was bad: {bad.get('why')}; {bad.get('done')}")
        elif finite(step.get("loss")) is None:
            yield Mark(step_number, "bad", f"the loss of step {step_number:,} isn't finite")
        for line in step.get("stragglers") or ():
            yield Mark(step_number, "straggler", str(line))
    for failure in run.failures:
        step_number = failure["step"]
        yield Mark(step_number, "failure", f"the run failed in step {step_number:,}: its numbers weren't finite")


def listed(marks: Sequence[Mark]) -> list[str]:
    """Returns the lines of a list; of many of one kind the first and how many more there are."""
    lines = []
    for kind, name in NAMES.items():
        texts = [mark.text for mark in marks if mark.kind == kind]
        lines += texts[:MOST_LISTED]
        if len(texts) > MOST_LISTED:
            lines.append(f"... and {len(texts) - MOST_LISTED:,} more of the kind {name!r}")
    return lines


def _mesh_text(start: Record) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in (start.get("mesh") or {}).items())


def _change(start: Record) -> str:
    """Returns the steps that a start cost, and the mesh with which the run went on."""
    repeated = start.get("repeated_steps")
    seconds = finite(start.get("change_seconds"))
    parts = [_mesh_text(start)]
    if repeated is not None:
        parts.append(f"{plural(repeated, 'step')} repeated")
    if seconds is not None:
        parts.append(f"{long_duration_text(seconds)} until the next step")
    return "".join(f"; {part}" for part in parts if part)
