"""GPipe Table 2: normalised throughput of K partitions and M microbatches, predicted with nothing fitted.

The simulator runs GPipe's schedule with recomputation on equal partitions: forward 1, backward 2, and a
recomputation of 1 that starts before the gradient arrives, all over K M. Every partition recomputes, the last one too,
as each stores the outputs at its boundaries alone (section 2.3).
"""

from __future__ import annotations

from fractions import Fraction

from benchmarks.papers.tables import errors, read
from slipstream.planner.search.schedule_shape import with_every_replay
from slipstream.schedule import make_schedule
from slipstream.simulator import UnitCost, simulate


def step(num_partitions: int, num_microbatches: int) -> Fraction:
    """Returns the simulated seconds of a batch whose forward takes 1 on one device."""
    share = Fraction(1, num_partitions * num_microbatches)
    schedule = with_every_replay(make_schedule("gpipe", num_partitions, num_microbatches))
    return Fraction(simulate(schedule, UnitCost(forward=share, backward=2 * share)).makespan)  # type: ignore[arg-type]


def table_2() -> dict[str, object]:
    found: list[dict[str, object]] = []
    for row in read("gpipe_table2_throughput"):
        partitions, microbatches, paper = int(row["K"]), int(row["M"]), float(row["throughput"])
        predicted = float(step(2, 1) / step(partitions, microbatches))
        found.append(
            {
                "model": row["model"],
                "K": partitions,
                "M": microbatches,
                "paper": paper,
                "predicted": predicted,
                "error": predicted / paper - 1,
            }
        )
    by_model = {name: errors([r for r in found if r["model"] == name]) for name in {str(r["model"]) for r in found}}
    return {"rows": found, **by_model}
