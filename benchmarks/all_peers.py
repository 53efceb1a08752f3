"""Seconds and memory of a step on two processes by every way to spread it: the table of the README.

    python -m benchmarks.all_peers                # prints the table, writes results/all_peers.json
    python -m benchmarks.all_peers --case 4x1024  # measures this case anew, and keeps the record of the others
    python -m benchmarks.all_peers --page         # writes the README's table from that record

Every contender computes the same loss and gradients of the benchmarks' Llama, in the same rounds: Slipstream, which
plans itself by measured costs or, with nothing given, by counted operations, or shares every sequence (cp=2),
PyTorch's pipelines with a microbatch for each sequence, two replicas, context parallelism by torch alone (tokens are
exchanged for heads in attention), and ZeRO-3. A way that can't divide one sequence is left out there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import HeadsForTokens, Ours, Peer, Replicas, Unsliced
from benchmarks.harness import (
    costs_kept_in,
    few,
    interleaved,
    is_trial,
    medians,
    recorded,
    restart_in_environment,
    setting,
    write,
)
from benchmarks.isolated import Contender, build_all
from benchmarks.peers import SCHEDULES, model_config
from benchmarks.zero3 import Zero3

NAME = "all_peers"
README = Path(__file__).parents[1] / "README.md"
CASES = [(1, 2048), (1, 4096), (4, 1024), (8, 1024)]  # sequences, tokens of each
OURS, SHARED, ONE, PEER = "Slipstream", "Slipstream, cp=2", "one process", "context parallelism"
COUNTED = "Slipstream, unmeasured"  # nothing is given but the microbatches, and nothing is "auto"
BEGIN, END = "<!-- from benchmarks/results/all_peers.json -->", "<!-- end -->"
_SHOWN = {f"torch {name}": f"PyTorch's {name}" for name in SCHEDULES}


def long_contenders(sequences: int, length: int) -> list[Contender]:
    """Returns the pipeline that plans itself, and both ways to share every sequence."""
    case = model_config(length), sequences, length
    auto = {"slices": "auto", "schedule": "auto", "num_microbatches": sequences}
    sharing = {"mesh": {"cp": 2}, "slices": 1, "num_microbatches": sequences}
    return [
        Contender(OURS, Ours, *case, auto),
        Contender(SHARED, Ours, *case, sharing),
        Contender(PEER, HeadsForTokens, *case),
    ]


def contenders_of(sequences: int, length: int) -> list[Contender]:
    """Returns every way that can run this many sequences on two processes."""
    case = model_config(length), sequences, length
    counted = {"seq_len": None, "num_microbatches": sequences}
    found = [
        *long_contenders(sequences, length),
        Contender(COUNTED, Ours, *case, counted),
        Contender(ONE, Unsliced, *case, num_processes=1),
    ]
    for name in SCHEDULES:
        if sequences > 1 or name != "1f1b":  # which refuses a single microbatch on two stages
            found.append(Contender(f"torch {name}", Peer, name, sequences, sequences, length))
    if sequences > 1:
        found.append(Contender("two replicas (DDP)", Replicas, *case))
        found.append(Contender("ZeRO-3 (FSDP2)", Zero3, sequences, length))
    return found


def compare(contenders: Sequence[Contender], sequences: int, length: int, rounds: dict[str, int]) -> dict[str, Any]:
    """Returns a case's seconds, losses and peak memory of each contender, of every process of it."""
    build_all(contenders)
    rests = {each.name: each.rest for each in contenders}
    seconds = interleaved({each.name: each.run for each in contenders}, **rounds, rests=rests)
    row: dict[str, Any] = {
        "sequences": sequences,
        "tokens": length,
        "medians": medians(seconds),
        "seconds": seconds,
        "peak_memory": {each.name: each.peak_memory() for each in contenders},
        "losses": {each.name: each.losses for each in contenders},
    }
    if COUNTED in row["medians"]:
        row["of auto"] = row["medians"][OURS] / row["medians"][COUNTED]
    for each in contenders:
        each.close()
    losses = [loss for found in row["losses"].values() for loss in found]
    assert max(losses) - min(losses) < 1e-3, row["losses"]
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Returns seconds of a step and gigabytes of the fullest process, by way and case, as Markdown."""
    names = list(dict.fromkeys(name for row in reversed(rows) for name in row["medians"]))
    heads = [f"{row['sequences']} x {row['tokens']}" for row in rows]
    lines = [" | ".join(["| sequences x tokens", *heads, ""]), "| --- " * (1 + len(rows)) + "|"]
    for name in names:
        cells = []
        for row in rows:
            fastest = row["medians"].get(name) == min(row["medians"].values())
            text = f"{row['medians'][name]:.2f} s" if name in row["medians"] else "-"
            memory = f", {max(row['peak_memory'][name]) / 1e9:.1f} GB" if name in row["medians"] else ""
            cells.append(f"**{text}**{memory}" if fastest else text + memory)
        lines.append(" | ".join([f"| {_SHOWN.get(name, name)}", *cells, ""]))
    return "\n".join(line.rstrip() for line in lines)


def write_page(path: Path = README) -> None:
    """Puts the recorded table between its marks."""
    found = recorded(NAME)
    assert found is not None
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{table(found['rows'])}\n\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the README's table from the record and end")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", action="append", choices=[*map(case_name, CASES)], help="may be given several times")
    options = parser.parse_args()
    if options.page:
        write_page()
        return
    restart_in_environment()
    rounds = {"repeats": 1 if is_trial() else options.repeats, "warmups": 1, "steps": 2}
    rows = kept_rows(setting(**rounds)) if options.case else {}
    asked = [case for case in CASES if not options.case or case_name(case) in options.case]
    with costs_kept_in(None):
        for case in few([(2, 64)] if is_trial() else asked, len(asked)):
            rows[case] = compare(contenders_of(*case), *case, rounds)
            ordered = [rows[case] for case in sorted(rows, key=[*CASES, *rows].index)]
            print(table(ordered), flush=True)
            print(f"wrote {write(NAME, {'setting': setting(**rounds), 'rows': ordered})}", flush=True)


def case_name(case: tuple[int, int]) -> str:
    return f"{case[0]}x{case[1]}"


def kept_rows(now: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """Returns the record's rows by case, with the commit; they must have been measured in the same setting."""
    found = recorded(NAME)
    if found is None:
        return {}
    then = found["setting"]
    if different := sorted(name for name in now if name != "load_average" and now[name] != then.get(name)):
        raise SystemExit(f"the record was measured with other {', '.join(different)}: measure all cases")
    measured_at = {"measured at": found["of"]["commit"]}
    return {(row["sequences"], row["tokens"]): measured_at | row for row in found["rows"]}


if __name__ == "__main__":
    main()
