"""Presents a plan to people: its wording, and the HTML report."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import inf, isfinite
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from slipstream.html_parts import Bar, NumberText, bar_chart, details, fact_tiles, html_list, html_page, section, table
from slipstream.planner.plan import CHOICES, Plan
from slipstream.planner.plan_fields import PLAN_FIELDS, PlanField
from slipstream.planner.plan_report import Alternative, PlanReport, Prediction
from slipstream.simulator import MemoryKind
from slipstream.timeline import Timeline, TimelineWindow, draw_timelines
from slipstream.units import bytes_text, count_text, numbers_text, plural, seconds_text, share_text

_SMALL = 0.05  # of the largest change: smaller ones aren't named as reasons,
_TINY = 5e-4  # nor those below this share of the step
_MOST_CAUSES = 3  # of a reason
MOST_REASONS = 3  # in the text; the report has all
_WORTH_FUSING = 0.02  # the share of the step that fused kernels must save to be advised
_MOST_NUMBERS = 16  # in a list of them


# --- a plan --------------------------------------------------------------------------------------------------------


def slices_text(slices: Sequence[int]) -> str:
    """Returns the number of slices and their lengths."""
    lengths = f"{slices[0]:,}" if len(set(slices)) == 1 else numbers_text(slices)
    return f"{plural(len(slices), 'slice')} of {lengths} tokens"


def _numbers(numbers: Sequence[float]) -> str:
    """Returns the numbers, of many the first and the last."""
    words = [f"{number:g}" for number in numbers]
    return " ".join(words if len(words) <= _MOST_NUMBERS else [*words[: _MOST_NUMBERS // 2], "...", words[-1]])


def cut_lines(prediction: Prediction) -> list[str]:
    """Returns which rank has which stage, how many layers stages have, and the gain over the exact slices."""
    ranks, layers = (_numbers(row) for row in (prediction.plan.placement, prediction.plan.partition))
    lines = [f"The best has its stages on ranks {ranks}, with layers {layers}; {slices_text(prediction.plan.slices)}."]
    joint = prediction.joint
    if joint is not None and joint.exact is not None and joint.exact.slices != joint.slices:
        gain = joint.exact.seconds / joint.seconds - 1
        lines.append(
            f"The {plural(len(joint.exact.slices), 'slice')} of the dynamic program for equal stages, with the best "
            f"cut for them, take {gain:.1%} longer."
        )
    return lines


def fused_advice(gain: float, option: str) -> str:
    """Returns by how much fused kernels would shorten the plan's step, and the option to type; "" where that is
    little."""
    if gain < _WORTH_FUSING:
        return ""
    return f"With fused norms, activations and rotary embeddings the step would be {gain:.1%} shorter: add {option}"


class Column(NamedTuple):
    """A column of the table of predictions."""

    text: Callable[[Prediction], str]  # a cell's text
    meaning: str = ""  # the legend's words; "" for a heading that needs none


def _chosen(field: PlanField) -> Column:
    """Returns the column of a field of the predictions' plans."""
    return Column(lambda prediction: field.in_column(prediction.plan), field.meaning)


_CHOSEN = {field.title: _chosen(field) for field in PLAN_FIELDS.values() if field.title}

COLUMNS: Mapping[str, Column] = _CHOSEN | {
    "step": Column(lambda p: seconds_text(p.step_seconds), "seconds of an optimizer step"),
    "tokens/s": Column(lambda p: count_text(p.tokens_per_second), "of all devices together"),
    "MFU": Column(lambda p: share_text(p.mfu), "the share of the devices' peak that the model's own FLOPs take"),
    "idle": Column(lambda p: share_text(p.idle_fraction), "the share of the ranks' time without computation"),
    "memory": Column(lambda p: memory_text(p), "of the fullest rank"),
    "host memory": Column(lambda p: bytes_text(p.peak_host_memory), "of the fullest rank's host, for that rank alone"),
}
"""The columns of the table of predictions, by their headings: first what is chosen, then what is predicted."""


def shown_columns(predictions: Sequence[Prediction]) -> dict[str, Column]:
    """Returns the columns of some predictions: without choices that are the same in every row, and without the host
    where nothing is there."""
    left_out = {*shared_choices(predictions)}
    if not any(prediction.peak_host_memory for prediction in predictions):
        left_out.add("host memory")
    return {name: column for name, column in COLUMNS.items() if name not in left_out}


def legend(columns: Mapping[str, Column] = COLUMNS) -> list[str]:
    """Returns a line for each column whose heading doesn't say what is in it."""
    return [f"{name}: {column.meaning}" for name, column in columns.items() if column.meaning]


def memory_text(prediction: Prediction) -> str:
    """Returns the fullest rank's memory, and the limit if there is one."""
    held = bytes_text(prediction.peak_memory)
    return f"{held} of {bytes_text(prediction.memory_limit)}" if isfinite(prediction.memory_limit) else held


def shared_choices(predictions: Sequence[Prediction]) -> dict[str, str]:
    """Returns heading and value of the choices, other than the degrees, that are the same in every row."""
    _, *others = _CHOSEN.items()
    values = {name: {column.text(prediction) for prediction in predictions} for name, column in others}
    return {name: distinct.pop() for name, distinct in values.items() if len(distinct) == 1}


def shared_text(choices: Mapping[str, str]) -> str:
    """Returns a line that replaces the columns left out."""
    return f"In every row: {', '.join(f'{name} {value}' for name, value in choices.items())}."


# --- reasons ---------------------------------------------------------------------------------------------------------


class Reason(NamedTuple):
    """Why the best plan has no other value of one or more choices."""

    choices: tuple[str, ...]  # whose best other values are all in one plan
    claim: str  # how much longer a step of that plan takes
    causes: str = ""  # where the time goes; "" where hardly any is lost or gained
    others: str = ""  # in what else the two plans differ

    @property
    def lines(self) -> list[str]:
        """The reason as sentences: the claim with its causes, then the other differences."""
        claim = f"{self.claim}: {self.causes}." if self.causes else f"{self.claim}."
        return [claim, f"{self.others}."] if self.others else [claim]

    def __str__(self) -> str:
        return " ".join(self.lines)


def reasons(plan: PlanReport) -> list[Reason]:
    """Returns a reason for each plan that is the best with other values of one or more choices.

    Those about the pipeline, its slices and the other degrees come first, as they are what most people choose between.
    """
    groups = dict[Plan, list[Alternative]]()
    for alternative in plan.alternatives:
        groups.setdefault(alternative.prediction.plan, []).append(alternative)
    found = [_reason([each.choice for each in group], group[0], plan.best) for group in groups.values()]
    return sorted(found, key=lambda reason: min(map(_place, reason.choices)))


# The choices that reasons are about first
_FIRST = ("pipeline_parallel", "num_slices", "tensor_parallel", "context_parallel", "data_parallel", "expert_parallel")


def _place(choice: str) -> int:
    """Returns the place of a reason about a choice."""
    return _FIRST.index(choice) if choice in _FIRST else len(_FIRST)


def _reason(choices: Sequence[str], alternative: Alternative, best: Prediction) -> Reason:
    prediction = alternative.prediction
    other, mine = prediction.plan, best.plan
    # Of many choices those that people begin with; the others are among the differences.
    named = sorted((choice for choice in choices if choice in _FIRST), key=_place) or choices
    instead = _listed(
        f"{PLAN_FIELDS[choice].named_value(other)} instead of {PLAN_FIELDS[choice].value(mine)}" for choice in named
    )
    change = prediction.step_seconds / best.step_seconds - 1
    takes = "as long" if abs(change) < _TINY else f"{abs(change):.1%} {'longer' if change > 0 else 'less'}"
    size = f"{seconds_text(prediction.step_seconds)}, {bytes_text(prediction.peak_memory)}"
    causes = [f"{seconds_text(abs(s))} {'more' if s > 0 else 'less'} {c}" for c, s in _main_changes(alternative, best)]
    different = [choice for choice in CHOICES if other.choice(choice) != mine.choice(choice) and choice not in named]
    others = ", ".join(PLAN_FIELDS[choice].named_value(other) for choice in different)
    return Reason(
        tuple(choices),
        f"With {instead} a step takes {takes} ({size})",
        ", ".join(causes),
        f"That plan also has {others}" if others else "",
    )


def _listed(words: Iterable[str]) -> str:
    """Returns words with commas and an "and"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _main_changes(alternative: Alternative, best: Prediction) -> list[tuple[str, float]]:
    changes = alternative.why(best)
    least = max(_SMALL * abs(changes[0][1]), _TINY * best.step_seconds) if changes else 0.0
    return [(cause, seconds) for cause, seconds in changes[:_MOST_CAUSES] if abs(seconds) > least]


def refusals(plan: PlanReport) -> list[str]:
    """Returns a sentence for each degree that the model doesn't allow to be more than it is."""
    fields = ((PLAN_FIELDS[choice], reason) for choice, reason in plan.refusals.items())
    return [f"{field.named_value(plan.best.plan)}: {reason}" for field, reason in fields]


def search_text(plan: PlanReport) -> str:
    """Returns how many configurations were searched, and whether a better one may have been missed."""
    faster = f"one of the others could be faster by {plan.gap:.1%} at most"
    gap = faster if plan.gap > 0 else "no other one can be faster"
    return (
        f"searched {plan.num_configurations:,} configurations on {plan.num_bounded_meshes} of "
        f"{plural(plan.num_meshes, 'mesh')} in {seconds_text(plan.seconds)}: {plan.num_too_large:,} "
        f"too large for the memory, {plan.num_simulated:,} simulated; {gap}"
    )


MOST_RANKS = 16
MOST_SPANS = 3000  # as many as a browser shows without delay
_XLINK = "{http://www.w3.org/1999/xlink}"
_NAMESPACE = re.compile(r"^\{.*\}")
# Text stays text in the page's font, and the names of clip paths are the same in every run.
_PLAIN_TEXT = {
    "svg.fonttype": "none",
    "svg.hashsalt": "slipstream",
    "font.family": "sans-serif",
    "axes.facecolor": "none",
}
_ROOT = {  # matplotlib's settings for the whole page, and the kind of picture
    "stroke-linejoin": "round",
    "stroke-linecap": "butt",
    "role": "img",
    "aria-label": "timeline of the step",
}


def timeline_svg(timeline: Timeline) -> tuple[str, str]:
    """Returns the picture, and a sentence on its part of the step, or "" where it shows everything."""
    from matplotlib import rc_context

    parts, left_out = shown_parts(timeline)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder, rc_context(_PLAIN_TEXT):
        path = Path(folder) / "timeline.svg"
        draw_timelines(path, *parts, memory_name="memory")
        return _inline(path.read_text(encoding="utf-8")), left_out


def shown_parts(timeline: Timeline) -> tuple[tuple[Timeline, ...], str]:
    """Returns the timeline, or if it is long, the first and the last part of its first ranks."""
    num_ranks, cut = min(timeline.num_ranks, MOST_RANKS), TimelineWindow.cut
    spans = [span for span in timeline.compute_spans if span.rank < num_ranks]
    is_long = len(spans) > MOST_SPANS
    if num_ranks == timeline.num_ranks and not is_long:
        return (timeline,), ""
    ranks = f"the first {num_ranks} of {timeline.num_ranks} ranks" if num_ranks < timeline.num_ranks else "all ranks"
    start, end = timeline.start, timeline.start + timeline.makespan
    if not is_long:
        return (cut(timeline, num_ranks, start, end, timeline.title),), f"The picture shows {ranks}."
    # the seconds at each end in which as many actions run as can be shown
    starts, ends = sorted(span.start for span in spans), sorted(span.end for span in spans)
    half = MOST_SPANS // 2
    width = min(starts[half] - start, end - ends[-half - 1], timeline.makespan / 2)
    shown, whole = seconds_text(width), seconds_text(timeline.makespan)
    parts = (
        cut(timeline, num_ranks, start, start + width, f"{timeline.name}, the step's first {shown} of {whole}"),
        cut(timeline, num_ranks, end - width, end, f"{timeline.name}, its last {shown}"),
    )
    return parts, f"The picture shows {ranks} in the first and the last {shown} of {whole}, with their times and peaks."


def _inline(text: str) -> str:
    """Returns the `svg` element for use in a page: without namespaces, metadata and style for the whole page."""
    root = ElementTree.fromstring(text)
    for parent in list(root.iter()):
        parent.tag = _NAMESPACE.sub("", str(parent.tag))
        for name in [name for name in parent.attrib if name.startswith("{")]:
            value = parent.attrib.pop(name)
            if name.startswith(_XLINK):
                parent.set(name.removeprefix(_XLINK), value)
        for child in list(parent):
            if _NAMESPACE.sub("", str(child.tag)) in ("metadata", "style"):
                parent.remove(child)
    for background in root.findall("./g/g[@id='patch_1']"):  # the page has a background
        background.set("display", "none")
    root.attrib.update(_ROOT)
    for name in ("width", "height"):  # the view box stays, and the page sets the size
        root.attrib.pop(name, None)
    return ElementTree.tostring(root, encoding="unicode")


def write_report(plan: PlanReport, path: Path) -> None:
    """Writes the report of a plan as one HTML file without scripts; an existing file is replaced."""
    path.write_text(report_page(plan), encoding="utf-8")


def report_page(plan: PlanReport) -> str:
    """Returns the HTML of the report."""
    sections = (_headline, _table, _time, _timeline, _memory, _reasons, _cuts, _notes)
    body = "\n".join(section(plan) for section in sections)
    return html_page(f"Plan: {plan.model} on {plan.cluster}", body, "slipstream plan")


def _headline(plan: PlanReport) -> str:
    best = plan.best
    room = f"of {bytes_text(best.memory_limit)}" if isfinite(best.memory_limit) else "no known limit"
    facts = [
        ("Step", seconds_text(best.step_seconds), "predicted"),
        ("Tokens per second", count_text(best.tokens_per_second), "over all devices"),
        ("MFU", share_text(best.mfu), "of the devices' peak" if best.mfu is not None else "unknown peak"),
        ("Idle", share_text(best.idle_fraction), "of the ranks' time"),
        ("Memory", bytes_text(best.peak_memory), f"rank {best.fullest_rank}, {room}"),
    ]
    tokens, sequences = plural(plan.seq_len, "token"), plural(plan.global_batch, "sequence")
    task = f"{plural(plan.num_devices, 'device')}, {tokens} per sequence, {sequences} per step"
    return (
        f"<h1>{escape(plan.model)} on {escape(plan.cluster)}</h1>\n<p class='soft'>{escape(task)}</p>\n"
        f"<p>Best: <strong>{escape(best.plan.describe())}</strong></p>\n"
        f"{fact_tiles(facts)}"
    )


def _table(plan: PlanReport) -> str:
    shared = shared_choices(plan.predictions)
    shown = shown_columns(plan.predictions)
    columns = {name: column.text for name, column in shown.items()}
    columns["memory"] = lambda prediction: bytes_text(prediction.peak_memory)  # the headline has the limit, too
    cells = [[text(prediction) for text in columns.values()] for prediction in plan.predictions]
    rows = [(f"plan {place}", *row) for place, row in enumerate(cells, 1)]
    lines = [*([shared_text(shared)] if shared else []), *([plan.simpler] if plan.simpler else [])]
    more = "".join(f"<p class='soft'>{escape(line)}</p>" for line in lines)
    meanings = details("What the columns say", html_list(legend(shown)))
    return section("The best plans", table(["", *columns], rows, best=0) + more + meanings)


def _time(plan: PlanReport) -> str:
    bars = [Bar(f"plan {place}", prediction.seconds_by_cause) for place, prediction in enumerate(plan.predictions, 1)]
    chart = bar_chart(bars, "time of a step on the rank that ends last", seconds_text)
    causes = list(dict.fromkeys(cause for bar in bars for cause in bar.parts))
    return section("Where the step's time goes", chart + _numbers_table(bars, causes, "step", seconds_text))


def _timeline(plan: PlanReport) -> str:
    picture, left_out = timeline_svg(plan.timeline)
    after = plan.best.step_seconds - plan.timeline.makespan
    follows = f"Gradient reduction and the optimizer take the last {seconds_text(after)} of the step."
    more = f"{left_out} {follows if after > 0 else ''}".strip()
    below = f"<p class='soft'>{escape(more)}</p>" if more else ""
    return section("The step of the best plan", f"<div class='scroll timeline'>{picture}</div>{below}")


def _memory(plan: PlanReport) -> str:
    best = plan.best
    shown = _held_by_kind(best.memory, "peak memory of a device", best.memory_limit)
    if best.peak_host_memory:
        shown += _held_by_kind(best.host_memory, "peak memory of a rank on its host")
    return section("Memory of the best plan's ranks", shown)


def _held_by_kind(ranks: Sequence[Mapping[MemoryKind, float]], axis: str, limit: float = inf) -> str:
    """Returns the chart of what each rank holds, with its numbers."""
    kinds = [kind for kind in MemoryKind if any(held.get(kind) for held in ranks)]
    bars = [Bar(f"rank {rank}", {k: held[k] for k in kinds if k in held}) for rank, held in enumerate(ranks)]
    return bar_chart(bars, axis, bytes_text, limit, "limit") + _numbers_table(bars, kinds, "total", bytes_text)


def _numbers_table(bars: Sequence[Bar], parts: Sequence[str], total: str, text: NumberText) -> str:
    """Returns the table behind a chart."""
    rows = [(bar.name, *(text(bar.parts.get(part, 0.0)) for part in parts), text(bar.total)) for bar in bars]
    return details("All numbers", table(["", *parts, total], rows))


def _reasons(plan: PlanReport) -> str:
    fused = f"<p>{escape(text)}</p>" if (text := fused_advice(plan.fused_gain, "--fused")) else ""
    if not plan.alternatives:
        return section("Why it is the best", "<p>There was no other choice.</p>" + fused)
    intro = "<p class='soft'>The best plan found with another value of one choice, and how much longer it takes.</p>"
    found = ["\n".join(reason.lines) for reason in reasons(plan)] + refusals(plan)
    return section("Why it is the best", intro + html_list(found) + fused)


def _cuts(plan: PlanReport) -> str:
    best = plan.best
    stages = enumerate(zip(best.plan.placement, best.plan.partition, strict=True))
    rows = [(f"stage {stage}", f"rank {rank}", f"{layers:g}") for stage, (rank, layers) in stages]
    layers = details(f"Layers of {plural(len(rows), 'stage')}", table(["", "on", "layers"], rows))
    sequences = plural(best.plan.microbatch_size, "sequence")
    batch = f"{plural(best.plan.num_microbatches, 'microbatch')} of {sequences} in each pipeline"
    texts = [f"{batch}.", *cut_lines(best)]
    return section("Stages, slices and microbatches", "".join(f"<p>{escape(text)}</p>" for text in texts) + layers)


def _notes(plan: PlanReport) -> str:
    return section("What the numbers are based on", html_list([*plan.notes, f"The planner {search_text(plan)}."]))
