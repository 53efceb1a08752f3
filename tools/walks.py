"""Draws the three walks of docs/architecture.md from recorded calls: `python -m tools.walks`.

A walk is a program and some functions on its way, its stations. The program runs, and what is recorded of each station
is the station from which it was called first. A picture shows that, and the first sentences of the docstrings.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "slipstream"
IMAGES = ROOT / "docs" / "images"
WIDTH, INDENT, GAP, LINE, PADDING = 880, 26, 10, 17, 8  # pixels
BOX, BORDER, TEXT, LINES = "#eef2f8", "#5b7db1", "#1b2430", "#808a99"  # opaque boxes read on light and dark pages
SANS, MONO = "system-ui, sans-serif", "ui-monospace, monospace"
LETTER = 7.4  # pixels, on average


@dataclass(frozen=True)
class Walk:
    """A way through the sources."""

    title: str
    run: Callable[[Path], None]
    """Runs what is recorded, in a folder of its own."""
    stations: tuple[str, ...]
    """Functions as file:name, of which each is called; the walk begins with the first."""


def run_step(_: Path) -> None:
    import torch
    from transformers import LlamaConfig

    from slipstream import Pipeline, Runtime

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 97}
    config = LlamaConfig(**sizes, num_hidden_layers=4, max_position_embeddings=64)
    pipe = Pipeline.from_config(config, num_ranks=2, slices=4, runtime=Runtime(self_check=False))
    inputs = torch.zeros(1, 32, dtype=torch.int64)
    pipe.step(inputs, inputs)


def run_train(folder: Path) -> None:
    text = folder / "text.txt"
    text.write_text("A pipeline passes tokens on, slice by slice, to the ranks that have the next layers.\n" * 200)
    model = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model |= {"num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 64}
    settings = {
        "model": {"config": model},
        "data": {"files": [str(text)], "vocab_size": 300, "validation_fraction": 0},
        "pipeline": {"num_ranks": 1, "slices": 2},
        "runtime": {"self_check": False},
        "training": {"seq_len": 64, "batch_size": 2, "steps": 2, "output": str(folder / "run")},
        "checkpoint": {"every": 1},
    }
    import yaml

    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    _command("train", str(config))


def run_plan(folder: Path) -> None:
    model = '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, '
    model += '"num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 512}'
    (folder / "config.json").write_text(model)
    options = ["--seq-len", "512", "--global-batch", "8", "--output", str(folder / "plan.yaml")]
    options += ["--pipeline-parallel", "2", "--tensor-parallel", "1", "--recompute", "none", "--offload", "0"]
    options += ["--report", str(folder / "plan.html")]
    _command("plan", str(folder / "config.json"), "a100-dgx", *options)


def _command(*arguments: str) -> None:
    from slipstream.cli import main

    sys.argv = ["slipstream", *arguments]
    main()


WALKS = {
    "step": Walk(
        "Tokens through Pipeline.step to loss and gradients",
        run_step,
        (
            "pipeline/pipeline.py:Pipeline.step",
            "pipeline/batch.py:given_batch",
            "pipeline/runtime.py:PipelineRuntime.step",
            "pipeline/step_plans.py:StepPlans.plan_to_train",
            "pipeline/families/causal_lm.py:CausalLMFamily.split",
            "pipeline/cut_batch.py:cut_batch",
            "pipeline/agreement.py:BatchAgreement.agree",
            "pipeline/parameters.py:Parameters.begin",
            "pipeline/execution/executor.py:run_together",
            "pipeline/execution/rank_program.py:program_of",
            "pipeline/execution/executor.py:Executor._forward",
            "model/causal_lm_stage.py:CausalLMStage.compute",
            "attention/slice_attention.py:attend",
            "pipeline/execution/step_state.py:StageMessages.send",
            "comm/transport.py:LocalTransport.send",
            "pipeline/execution/step_state.py:StageMessages.take",
            "pipeline/execution/losses.py:SliceLosses.compute",
            "model/cross_entropies.py:causal_cross_entropy",
            "pipeline/execution/executor.py:Executor._backward_input",
            "pipeline/execution/step_state.py:backward",
            "pipeline/execution/executor.py:Executor._backward_weights",
            "pipeline/execution/losses.py:LossDivisor.find",
            "pipeline/parameters.py:Parameters.end",
            "parallel/gradients.py:GradientReduction.finish",
        ),
    ),
    "train": Walk(
        "A configuration file through slipstream train",
        run_train,
        (
            "cli/train.py:train",
            "train/config/config_file.py:load_config",
            "train/start_training.py:start_training",
            "train/preflight/all_checks.py:preflight",
            "train/preflight/run_inputs.py:RunInputs.write",
            "train/start_training.py:launch_with_restarts",
            "launch/local_ranks.py:launch_ranks",
            "launch/forked_ranks.py:_run",
            "train/training_rank.py:main",
            "train/trainer.py:Trainer.__init__",
            "train/configured_pipeline.py:make_pipeline",
            "pipeline/runtime.py:PipelineRuntime.__init__",
            "train/trainer.py:Trainer.run",
            "train/run_checkpoints.py:RunCheckpoints.find_start",
            "train/training_step.py:train_step",
            "pipeline/pipeline.py:Pipeline.step",
            "train/metrics/reporter.py:Reporter.report",
            "train/run_checkpoints.py:RunCheckpoints.save",
            "checkpoint/checkpoints.py:Checkpoints.save",
            "train/run_results.py:draw_last_step",
            "train/run_results.py:export",
            "train/run_results.py:write_sample",
        ),
    ),
    "plan": Walk(
        "A request through slipstream plan",
        run_plan,
        (
            "cli/plan.py:plan",
            "cluster_plans/plan_model.py:plan",
            "cluster_plans/plan_model.py:choose_costs",
            "profile/counting.py:count_model",
            "planner/search/plan_search.py:search_meshes",
            "planner/search/joint_plans.py:JointCandidates.without_limit",
            "planner/joint/joint_search.py:search_placements",
            "planner/search/plan_space.py:PlanSpace.evaluate",
            "simulator/simulation.py:end_times",
            "simulator/memory_account.py:OrderBytes.rank_memory",
        ),
    ),
}


@dataclass(frozen=True)
class Call:
    """The first call of a station, and the station from which it came; None for the first one."""

    station: str
    caller: str | None


def run_anew(name: str, trace: Path) -> subprocess.CompletedProcess[str]:
    """Runs a walk's program in a new process of its own, which writes to the file."""
    command = [sys.executable, "-m", "tools.walks", name, str(trace)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def record(name: str, run: Callable[[str, Path], subprocess.CompletedProcess[str]] = run_anew) -> list[Call]:
    """Runs a walk's program in a process of its own; returns the calls of its stations, in order.

    Raises RuntimeError where the program fails, or doesn't come to a station.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        ran = run(name, trace)
        lines = trace.read_text(encoding="utf-8").splitlines() if trace.exists() else []
        if ran.returncode:
            raise RuntimeError(f"the program of the walk {name!r} failed:\n{ran.stdout}\n{ran.stderr}")
    calls: dict[str, Call] = {}
    for line in lines:
        station, _, caller = line.partition(" ")
        calls.setdefault(station, Call(station, caller or None))
    found = [*calls.values()]
    check_stations(WALKS[name], found)
    return found


def check_stations(walk: Walk, calls: list[Call]) -> None:
    """Raises RuntimeError where the program of a walk doesn't come to one of its stations."""
    came = {call.station for call in calls}
    if missing := [station for station in walk.stations if station not in came]:
        raise RuntimeError(f"the walk {walk.title!r} doesn't come to {', '.join(missing)}")


def trace_calls(stations: tuple[str, ...], file: Path) -> None:
    """Writes the first call of each station to a file from now on, also in processes that this one forks."""
    wanted, seen = set(stations), set[str]()
    names: dict[CodeType, str] = {}  # the station of each function that was called; "" for others

    def station_of(code: CodeType) -> str:
        if code not in names:
            file = code.co_filename.removeprefix(f"{SOURCES}/")
            name = f"{file}:{code.co_qualname}"
            names[code] = name if name in wanted else ""
        return names[code]

    def note(frame: FrameType, event: str, _: Any) -> None:
        station = station_of(frame.f_code)
        if not station or event != "call" or station in seen or not (seen or station == stations[0]):
            return
        seen.add(station)
        caller, outer = "", frame.f_back
        while outer is not None and not caller:
            caller, outer = station_of(outer.f_code), outer.f_back
        with file.open("a", encoding="utf-8") as trace:
            trace.write(f"{station} {caller}\n")
        if seen == wanted:
            sys.setprofile(None)

    sys.setprofile(note)


def sentence_of(station: str) -> str:
    """Returns the first sentence of a station's docstring."""
    file, _, name = station.partition(":")
    node: Any = ast.parse((SOURCES / file).read_text(encoding="utf-8"))
    for part in name.split("."):
        node = next(each for each in node.body if getattr(each, "name", None) == part)
    text = " ".join((ast.get_docstring(node) or "").split())
    return re.split(r"(?<=[^.]\.) ", text, maxsplit=1)[0]


def picture(name: str) -> Path:
    """Returns where the picture of a walk is."""
    return IMAGES / f"walk-{name}.svg"


def draw(walk: Walk, calls: list[Call]) -> str:
    """Returns the SVG of a walk: a box per station in the order of first calls, below the one that calls it."""
    depths: dict[str | None, int] = {None: -1}
    bottoms: dict[str, int] = {}  # of the boxes, or of the line to the last one that a box calls
    parts: list[str] = []
    y = 0
    for call in _in_tree_order(calls):
        depths[call.station] = depth = depths[call.caller] + 1
        x = depth * INDENT
        lines = textwrap.wrap(sentence_of(call.station), int((WIDTH - x - 2 * PADDING) / LETTER))
        height = 2 * PADDING + LINE * (1 + len(lines))
        if call.caller is not None:
            bend = x - INDENT // 2
            parts.append(
                f'<path d="M{bend} {bottoms[call.caller]}V{y + LINE}H{x}" fill="none" stroke="{LINES}" '
                'stroke-width="1.5"/>'
            )
        parts += _box(x, y, WIDTH - x, height, call.station, lines)
        bottoms[call.station] = y + height
        y += height + GAP
    y -= GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {WIDTH + 2} {y + 2}" '
        f'width="{WIDTH + 2}" height="{y + 2}" font-size="13" role="img">'
    )
    return "\n".join([head, f"<title>{escape(walk.title)}</title>", *parts, "</svg>"]) + "\n"


def _in_tree_order(calls: list[Call], caller: str | None = None) -> list[Call]:
    """Returns each call followed by those that come from it."""
    return [each for call in calls if call.caller == caller for each in (call, *_in_tree_order(calls, call.station))]


def _box(x: int, y: int, width: int, height: int, station: str, lines: list[str]) -> list[str]:
    left, top = x + PADDING, y + PADDING + 12
    file, _, name = station.partition(":")
    texts = [
        f'<text x="{left}" y="{top + LINE * (row + 1)}" font-family="{SANS}" fill="{TEXT}">{escape(line)}</text>'
        for row, line in enumerate(lines)
    ]
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{BOX}" stroke="{BORDER}"/>',
        f'<text x="{left}" y="{top}" font-family="{MONO}" fill="{TEXT}">'
        f'<tspan font-weight="bold">{escape(name)}</tspan>  {escape(file)}</text>',
        *texts,
    ]


def main(arguments: list[str]) -> None:
    """Draws all pictures, those of the walks that are named; or records one, given its name and a file."""
    if len(arguments) == 2 and arguments[1] not in WALKS:
        name, file = arguments
        with tempfile.TemporaryDirectory() as folder:
            # Before the trace, under which imports take several times as long.
            for station in WALKS[name].stations:
                import_module("slipstream." + station.partition(".py:")[0].replace("/", "."))
            trace_calls(WALKS[name].stations, Path(file))
            WALKS[name].run(Path(folder))
            sys.setprofile(None)
        return
    for name in arguments or WALKS:
        picture(name).write_text(draw(WALKS[name], record(name)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
