"""Two processes on long sequences: token slices against torch.distributed.pipelining and against one process.

    python -m benchmarks.token_slices                  # prints tables, writes results/token_slices.json
    python -m benchmarks.token_slices --lengths 4096 --sequences --ours auto turns --apart --name auto_4096 --add

A step is forward and backward, its time the slower rank's. Every contender has separate processes. They take
turns of a few steps, so that other load on the machine affects all of them alike; ratios are of medians. With `--add`
the rounds are added to those that the record has from the same sources, so that many of them can be run in parts; with
--costs "auto" measures once for all parts, and has one plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import CUT, Ours, OwnReport, Peer, Unsliced
from benchmarks.harness import (
    costs_kept_in,
    interleaved,
    medians,
    record,
    restart_in_environment,
    setting,
    write,
)
from benchmarks.isolated import Contender, build_all
from benchmarks.peers import model_config
from benchmarks.waterfall import bound, waterfall

TURNS_CUT = [0, 0.5, 2, 3, 2.5, 0]  # three stages a rank, in turns: the embedding alone, ..., the head alone
TURNS_SLICES = [6, 10, 11, 5]  # 32nds of the sequence
ONE_STAGE = ("torch gpipe", "torch 1f1b")
INTERLEAVED = "torch interleaved 1f1b"
ZERO_BUBBLE = "torch interleaved zero-bubble"
AT_ONCE = "two processes, a sequence each"
SLICED_AT_ONCE = "two processes, a sequence each in 8 slices"


def ours(length: int) -> dict[str, dict[str, object]]:
    """Returns the ways to run one sequence. "auto" gives nothing: cut, placement, slices and order are planned."""
    slices = [length * part // 32 for part in TURNS_SLICES]
    return {
        "whole": {"slices": 8, "partition": CUT},
        "auto": {"slices": "auto", "schedule": "auto"},
        "turns": {"slices": slices, "schedule": "auto", "stages_per_rank": 3, "partition": TURNS_CUT},
    }


def alone(batch: int, length: int, slices: Sequence[int]) -> list[Contender]:
    """Returns the contenders in one process: unsliced by transformers, and in slices by Slipstream."""
    model = model_config(length), batch, length
    contenders = [Contender("one process, unsliced", Unsliced, *model, num_processes=1)]
    for count in slices:
        settings = {"slices": count, "schedule": "gpipe", "num_microbatches": batch}
        contenders.append(Contender(f"one process, {count} slices", Ours, *model, settings, num_processes=1))
    return contenders


def one_sequence(length: int, ways: Sequence[str], apart: bool) -> list[Contender]:
    """Returns all contenders on one sequence; torch's 1F1B is missing, as it refuses one microbatch on two stages."""
    model = model_config(length), 1, length
    contenders = [
        Contender(name, Peer, name.removeprefix("torch "), 1, 1, length)
        for name in ("torch gpipe", INTERLEAVED, ZERO_BUBBLE)
    ]
    contenders += alone(1, length, (4,))
    if apart:
        contenders += [
            Contender(AT_ONCE, Unsliced, *model, apart=True),  # they share no data: what the cores cost each other
            Contender(SLICED_AT_ONCE, Ours, *model, {"slices": 8, "schedule": "gpipe"}, apart=True),
        ]
    return contenders + [Contender(f"slipstream, {way}", Ours, *model, ours(length)[way]) for way in ways]


def several_sequences(batch: int, length: int, fewer: Sequence[int]) -> list[Contender]:
    """Returns all with one microbatch per sequence, and torch without zero-bubble also with the numbers in `fewer`."""
    names = (*ONE_STAGE, INTERLEAVED, ZERO_BUBBLE)
    contenders = [Contender(name, Peer, name.removeprefix("torch "), batch, batch, length) for name in names]
    contenders += [
        Contender(f"{name}, microbatches: {count}", Peer, name.removeprefix("torch "), count, batch, length)
        for name in names[:-1]
        for count in fewer
        if count > 1 or name != "torch 1f1b"  # which refuses a single one on two stages
    ]
    model = model_config(length), batch, length
    auto = {"slices": "auto", "schedule": "auto", "num_microbatches": batch}
    contenders.append(Contender("one process, unsliced", Unsliced, *model, num_processes=1))
    return [*contenders, Contender("slipstream, auto", Ours, *model, auto)]


def compare(
    batch: int, length: int, contenders: Sequence[Contender], rounds: dict[str, int], earlier: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the row of a case: all its rounds, with those of `earlier` before them."""
    build_all(contenders)
    rests = {each.name: each.rest for each in contenders}
    measured = interleaved({each.name: each.run for each in contenders}, **rounds, rests=rests)
    known = earlier.get("seconds", {})
    same = known.keys() == measured.keys()  # the same contenders
    seconds = {name: [*(known[name] if same else []), *found] for name, found in measured.items()}
    middle = medians(seconds)
    mine = {each.name: each.report() for each in contenders if each.name.startswith("slip")}
    row = {
        "tokens": length,
        "sequences": batch,
        "medians": middle,
        "seconds": seconds,
        "losses": {each.name: each.losses for each in contenders},
        "most over one process": most_over_one_process(middle) if AT_ONCE in middle else None,
        "ours": {name: described(report, name, seconds) for name, report in mine.items()},  # type: ignore[arg-type]
    }
    for contender in contenders:
        contender.close()
    return row


def described(report: OwnReport, name: str, seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Returns what one of our ways chose, and what it reaches against the others."""
    middle, timeline, schedule = medians(seconds), report.timeline, report.schedule
    over = ratios(middle, name)
    peers = [each for each in seconds if each.startswith("torch")]
    found = {
        "slices": report.slices,
        "layers": report.layers,
        "schedule": report.order,
        "over": over,
        "ahead of every peer in every round": all(
            mine < theirs for peer in peers for mine, theirs in zip(seconds[name], seconds[peer], strict=True)
        ),
        "bound": bound(timeline, schedule),
        "of the bound": bound(timeline, schedule) / timeline.makespan,  # of the same step
        "waterfall": waterfall(timeline, schedule, middle["one process, unsliced"], seconds[name][-1]),
    }
    if AT_ONCE in middle:
        found["of the most over one process"] = over["one process"] / max(most_over_one_process(middle).values())
    others = {each: middle[each] / middle[name] for each in middle if each.startswith("slip") and each != name}
    found["over ours"] = others
    if (plan := report.planned) is not None:
        found["planned"] = {
            "seconds": plan.seconds,
            "over measured": plan.seconds / middle[name],
            "with own times": plan.with_own_times,
            "ideal": plan.ideal,
            "table": plan.table.splitlines(),
        }
    return found


def ratios(middle: dict[str, float], ours: str) -> dict[str, float]:
    """Returns the ratio of each group's fastest to ours."""
    groups = {
        "torch, one stage a rank": ONE_STAGE,
        "torch gpipe, 1f1b, interleaved 1f1b": (*ONE_STAGE, INTERLEAVED),
        "torch interleaved zero-bubble": (ZERO_BUBBLE,),
        "one process": ("one process",),
    }
    return {
        group: min(seconds for name, seconds in middle.items() if name.startswith(begins)) / middle[ours]
        for group, begins in groups.items()
    }


def most_over_one_process(middle: dict[str, float]) -> dict[str, float]:
    """Returns how much faster than one process a pipeline without a bubble would be on these two cores."""
    best = min(middle[name] for name in middle if name.startswith("one process"))
    return {name: 2 * best / middle[name] for name in (AT_ONCE, SLICED_AT_ONCE)}


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['sequences']} x {row['tokens']} tokens")
    for name, seconds in sorted(row["medians"].items(), key=lambda item: item[1]):
        print(f"  {seconds:7.3f} s  {name}")
    for name, ratio in (row["most over one process"] or {}).items():
        print(f"  {ratio:7.3f} x over one process is the most that both cores can give, by {name}")
    for name, found in row["ours"].items():
        print(f"{name}: layers {found['layers']}, slices {found['slices']}")
        for group, ratio in (found["over"] | found["over ours"]).items():
            print(f"  {ratio:7.3f} x over {group}")
        if "of the most over one process" in found:
            print(f"  {found['of the most over one process']:7.3f} of the most over one process")
        print(f"  {'' if found['ahead of every peer in every round'] else 'not '}ahead of every peer in every round")
        print(f"  {found['of the bound']:7.3f} of the bound {found['bound']:.3f} s")
        for cause, seconds in found["waterfall"].items():
            print(f"  {seconds:7.3f} s  {cause}")
        if planned := found.get("planned"):
            print("\n".join(planned["table"]))
            print(f"  {planned['seconds']:7.3f} s planned, {planned['over measured']:.3f} of what was measured")
            print(f"  {planned['with own times']:7.3f} s with the run's own times", flush=True)


def check_losses(row: dict[str, Any]) -> None:
    """Checks that all contenders computed the same loss."""
    losses = [loss for each in row["losses"].values() for loss in each]
    assert max(losses) - min(losses) < 1e-3, row["losses"]


def contenders_of(batch: int, length: int, options: argparse.Namespace) -> list[Contender]:
    if batch == 1:
        return one_sequence(length, options.ours, options.apart)
    return several_sequences(batch, length, options.fewer)


def measure(options: argparse.Namespace) -> None:
    rounds = {"repeats": options.repeats, "warmups": options.warmups, "steps": options.steps}
    cases = [(1, length) for length in options.lengths]
    cases += [(batch, options.batch_length) for batch in options.sequences]
    known = record(options.name)["rows"] if options.add and record(options.name) else []
    rows = {(row["sequences"], row["tokens"]): row for row in known}
    for case in cases:
        row = rows[case] = compare(*case, contenders_of(*case, options), rounds, rows.get(case, {}))
        show(row)
        check_losses(row)
        path = write(options.name, {"setting": setting(**rounds), "rows": [*rows.values()]})
        print(f"wrote {path}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 4096], help="of the single sequence")
    parser.add_argument("--sequences", type=int, nargs="*", default=[2, 4, 8], help="of --batch-length tokens each")
    parser.add_argument("--batch-length", type=int, default=1024)
    parser.add_argument("--fewer", type=int, nargs="*", default=[], help="microbatches torch may choose from as well")
    parser.add_argument(
        "--ours", nargs="*", default=[*ours(0)], choices=[*ours(0)], help="ways to run the single sequence"
    )
    parser.add_argument("--apart", action="store_true", help="also two processes that share nothing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=3, help="rounds before, which don't count")
    parser.add_argument("--steps", type=int, default=3, help="of a turn; the first of several doesn't count")
    parser.add_argument("--name", default="token_slices", help="of the file in results/")
    parser.add_argument("--costs", type=Path, help="folder that keeps what was measured; default: measured in each run")
    parser.add_argument("--add", action="store_true", help="add the rounds to the record's, if of the same sources")
    options = parser.parse_args()
    restart_in_environment()
    with costs_kept_in(options.costs):
        measure(options)


if __name__ == "__main__":
    main()
