"""`slipstream timeline`: what a schedule would do, before any model exists."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.schedule import Schedule


def timeline(
    schedule: Annotated[str, typer.Argument(help="gpipe, 1f1b, or a file that holds a schedule's text.")],
    stages: Annotated[int, typer.Option(help="Pipeline stages.", min=1)] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.", min=1)] = 1,
    slices: Annotated[int, typer.Option(help="Token slices of a sequence.", min=1)] = 8,
    forward: Annotated[float, typer.Option(help="Seconds of a slice's forward on a stage.")] = 1.0,
    backward: Annotated[float, typer.Option(help="Seconds of a slice's backward on a stage.")] = 2.0,
    link: Annotated[float, typer.Option(help="Seconds of a message between stages.")] = 0.0,
    output: Annotated[
        Path | None, typer.Option(help="A .png or .svg picture, or a .json trace for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Simulate SCHEDULE and show who works when, and how long everybody waits."""
    from slipstream.cost import UnitCost
    from slipstream.simulator import simulate

    if output is not None and output.suffix not in (".png", ".svg", ".json"):
        raise SlipstreamError(f"--output={output} must end in .png, .svg or .json")
    plan = _find_schedule(schedule, stages, microbatches, slices)
    cost = UnitCost(forward=forward, backward=backward, link=link)
    result = simulate(plan, cost)
    if output is None:
        print(result.to_text())
    elif output.suffix == ".json":
        result.save_perfetto(output)
    else:
        result.draw(output)
    print(f"{plan.name}: {result.makespan:g} s, {result.idle_fraction:.1%} idle")


def _find_schedule(name: str, num_stages: int, num_microbatches: int, num_slices: int) -> Schedule:
    from slipstream.schedule import GENERATORS, Schedule, validate

    if name in GENERATORS:
        return GENERATORS[name](num_stages, num_microbatches, num_slices)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        known = ", ".join(GENERATORS)
        raise SlipstreamError(f"there is no schedule {name!r}; choose {known}, or name a file") from error
    plan = Schedule.parse(text)
    validate(plan)
    return plan
