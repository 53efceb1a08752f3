"""Draws the three walks of docs/architecture.md, a box per file: `python -m tools.walks`."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH, GAP, LINE, PADDING, ARROW = 880, 16, 18, 10, 44  # pixels
BOX, BORDER, TEXT, ARROWS = "#eef2f8", "#5b7db1", "#1b2430", "#808a99"  # opaque boxes read on light and dark pages
SANS, MONO = "system-ui, sans-serif", "ui-monospace, monospace"
LETTER = 7.6  # pixels, on average


@dataclass(frozen=True)
class Box:
    """A file of src/slipstream and what happens there."""

    file: str
    text: str

    @property
    def path(self) -> str:
        return f"src/slipstream/{self.file}"


@dataclass(frozen=True)
class Row:
    """Boxes that the box above calls, and what it hands to them."""

    given: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Walk:
    """A way through the sources, from the top down."""

    title: str
    rows: tuple[Row, ...]

    @property
    def boxes(self) -> list[Box]:
        return [box for row in self.rows for box in row.boxes]

    @property
    def paths(self) -> list[str]:
        return [box.path for box in self.boxes]


WALKS = {
    "step": Walk(
        "Tokens through Pipeline.step to loss and gradients",
        (
            Row("", (Box("pipeline/pipeline.py", "step(inputs, targets): moves the batch to the device."),)),
            Row("WholeBatch", (Box("pipeline/engine.py", "Splits the batch, runs it, returns the loss."),)),
            Row(
                "length and batch",
                (
                    Box("pipeline/tuning/step_settings.py", "Schedule and slice lengths of this step."),
                    Box("pipeline/families/causal_lm.py", "Checks token ids and length."),
                    Box("pipeline/batch.py", "Rows to microbatches, tokens to slices, labels shifted."),
                ),
            ),
            Row(
                "Schedule and SplitBatch",
                (Box("pipeline/execution/executor.py", "Runs this process's ranks: a handler for each operation."),),
            ),
            Row(
                "one slice",
                (
                    Box("comm/transport.py", "Sends and receives activations and gradients."),
                    Box("model/causal_lm_stage.py", "Runs the stage's layers: the model's own code."),
                    Box("model/cross_entropy.py", "On the last stage: sum and count."),
                ),
            ),
            Row(
                "queries, keys, values",
                (Box("attention/slice_attention.py", "Attends to this slice and to those before it."),),
            ),
            Row(
                "gradients of the stage",
                (Box("pipeline/parameters.py", "Sums them over replicas and tied weights, into .grad."),),
            ),
        ),
    ),
    "train": Walk(
        "A configuration file through slipstream train",
        (
            Row("", (Box("cli/train.py", "slipstream train config.yaml --section.setting=value"),)),
            Row("path and overrides", (Box("train/config/run_config.py", "Reads and checks all settings."),)),
            Row("Config", (Box("train/start_training.py", "Starts local ranks, or joins a launcher's."),)),
            Row(
                "Config",
                (
                    Box("train/preflight/all_checks.py", "Checks the run; writes model and text to its folder."),
                    Box("launch/local_ranks.py", "Starts a process for each rank and watches it."),
                ),
            ),
            Row("the saved configuration", (Box("train/training_rank.py", "One rank: device, process group."),)),
            Row(
                "Config and device",
                (
                    Box("train/configured_pipeline.py", "Builds this rank's Pipeline."),
                    Box("train/trainer.py", "The loop: resumes, steps, validates, saves, exports."),
                ),
            ),
            Row(
                "sequences of a step",
                (
                    Box("train/training_step.py", "Pipeline.step, clip, update."),
                    Box("train/metrics/reporter.py", "Writes a line for each step."),
                    Box("checkpoint/checkpoints.py", "Saves in the background, finds, loads."),
                ),
            ),
            Row("at the end", (Box("train/run_results.py", "Timeline, exported model, sample text."),)),
        ),
    ),
    "plan": Walk(
        "A request through slipstream plan",
        (
            Row("", (Box("cli/plan.py", "slipstream plan MODEL CLUSTER --seq-len ... --global-batch ..."),)),
            Row(
                "model, cluster, options",
                (Box("planning/plan_model.py", "Checks the request, reads the model, starts the search."),),
            ),
            Row(
                "model and hardware",
                (
                    Box("profile/counting.py", "Counts its operations on meta tensors."),
                    Box("cost/sources.py", "Seconds and bytes of stages and messages."),
                ),
            ),
            Row(
                "CostSource",
                (Box("planner/search/plan_search.py", "Bounds all configurations, simulates the promising ones."),),
            ),
            Row(
                "one configuration",
                (
                    Box("planner/search/plan_space.py", "All that divide: partition, slices, bounds."),
                    Box("planner/search/simulated_configuration.py", "Makes its schedule and costs."),
                ),
            ),
            Row(
                "Schedule and costs",
                (
                    Box("simulator/action_graph.py", "Start and end of every action."),
                    Box("simulator/memory_account.py", "Bytes of every rank at its fullest moment."),
                ),
            ),
            Row(
                "Plan",
                (
                    Box("planner/report.py", "The plan in words, for terminal and report."),
                    Box("planning/plan_file.py", "plan.yaml, which slipstream train takes."),
                ),
            ),
        ),
    ),
}


def picture(name: str) -> Path:
    """Returns where the picture of a walk is."""
    return IMAGES / f"walk-{name}.svg"


def draw(walk: Walk) -> str:
    """Returns the SVG of a walk: rows of boxes, arrows downwards, and on each arrow what is handed over."""
    parts: list[str] = []
    y = 0
    for index, row in enumerate(walk.rows):
        if index:
            parts += _arrow(y, row.given)
            y += ARROW
        width = (WIDTH - GAP * (len(row.boxes) - 1)) // len(row.boxes)
        lines = [textwrap.wrap(box.text, int((width - 2 * PADDING) / LETTER)) for box in row.boxes]
        height = 2 * PADDING + LINE * (1 + max(map(len, lines)))
        for column, (box, wrapped) in enumerate(zip(row.boxes, lines, strict=True)):
            parts += _box(column * (width + GAP), y, width, height, box.file, wrapped)
        y += height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {WIDTH + 2} {y + 2}" '
        f'width="{WIDTH + 2}" height="{y + 2}" font-size="14" role="img">'
    )
    return "\n".join([head, f"<title>{escape(walk.title)}</title>", *parts, "</svg>"]) + "\n"


def _arrow(y: int, given: str) -> list[str]:
    x, end = WIDTH // 2, y + ARROW - 4
    return [
        f'<path d="M{x} {y + 4}V{end}M{x - 5} {end - 7}L{x} {end}L{x + 5} {end - 7}" '
        f'fill="none" stroke="{ARROWS}" stroke-width="2"/>',
        f'<text x="{x + 14}" y="{y + ARROW // 2 + 5}" font-family="{SANS}" fill="{ARROWS}">{escape(given)}</text>',
    ]


def _box(x: int, y: int, width: int, height: int, file: str, lines: list[str]) -> list[str]:
    left, top = x + PADDING, y + PADDING + 13
    texts = [
        f'<text x="{left}" y="{top + LINE * (row + 1)}" font-family="{SANS}" fill="{TEXT}">{escape(line)}</text>'
        for row, line in enumerate(lines)
    ]
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{BOX}" stroke="{BORDER}"/>',
        f'<text x="{left}" y="{top}" font-family="{MONO}" font-size="13" font-weight="bold" fill="{TEXT}">'
        f"{escape(file)}</text>",
        *texts,
    ]


if __name__ == "__main__":
    for name, walk in WALKS.items():
        picture(name).write_text(draw(walk), encoding="utf-8")
