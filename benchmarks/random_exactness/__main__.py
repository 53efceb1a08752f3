"""How random combinations of models, cuts, batches and meshes compare with the unsplit model in float64.

    python -m benchmarks.random_exactness                      # an hour; writes results/random_exactness.json
    python -m benchmarks.random_exactness --cases 100 --seed 7 # so many, from this seed on; writes nothing
    python -m benchmarks.random_exactness --case 4711          # one of them, with what was drawn and its traceback
    python -m benchmarks.random_exactness --context host       # 200 with keys and values on the host, or some of them;
                                                               # writes results/random_context.json
    python -m benchmarks.random_exactness --meshes             # 200 with ranks that share slices or experts; writes
                                                               # results/random_meshes.json

A case is drawn from its number alone, as a user from outside would combine things: a causal LM, what was done to it, or
layers of one's own; schedule, stages, slices, microbatches, documents, adapters, memory, preferences, ranks in one
process or several processes. It is exact, refused by name, silently different, or ends in a raw error. Seeds that once
found a fault are kept in `kept_seeds.txt` and come first.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import setting, write
from benchmarks.random_exactness import cuts
from benchmarks.random_exactness.causal import CausalCase, changes
from benchmarks.random_exactness.comparison import (
    BOUND,
    Numbers,
    Step,
    Subject,
    largest_difference,
    perturbed,
    recorded,
    rounding_error,
    train,
)
from benchmarks.random_exactness.cuts import PREFIX, Family, Place, place_of
from benchmarks.random_exactness.preferences import PreferenceCase
from benchmarks.random_exactness.sequences import SequenceCase
from benchmarks.random_exactness.trainers import TrainerCase
from benchmarks.zoo.outcomes import Verdict
from benchmarks.zoo.trial import described, ended_by
from benchmarks.zoo.workers import Limits, Result, Send, run_forked
from slipstream import SlipstreamError
from slipstream.comm import TransportError
from slipstream.errors import LostRankError
from slipstream.model.toy import float64_masks, full_precision, quiet_transformers

NAME, OF_MESHES, OF_CONTEXT = "random_exactness", "random_meshes", "random_context"
NUM_OF_ONE_KIND = 200
KEPT = Path(__file__).with_name("kept_seeds.txt")
LIMITS = Limits(seconds=90, memory=4 << 30)
LARGEST_ROUNDING = 1e-4  # below it an error may be what the case itself makes of rounding, which is then measured
# Messages wait for longer than any rank may take, so that a rank that others wait for is named, and not they.
MESSAGE_SECONDS = 2 * LIMITS.patience * LIMITS.seconds
ORDER = [Verdict.WRONG, Verdict.CRASH, Verdict.OUT_OF_LIMITS, Verdict.REFUSED, Verdict.NOT_BUILT, Verdict.EXACT]
_HAS_RUN = "execution/executor.py"  # in the traceback of an error after something has run, which no refusal waits for
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="for which new cases are begun")
    parser.add_argument("--cases", type=int, help="in place of a time; writes no record")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--case", help="run this one alone and print what was drawn")
    parser.add_argument("--workers", type=int, default=2, help="cases at a time")
    parser.add_argument("--meshes", action="store_true", help="cases on meshes with cp or ep alone")
    parser.add_argument("--context", choices=["host"], help="where all keep keys and values, or some of them")
    parser.add_argument("--kept", action="store_true", help="run the kept seeds alone")
    options = parser.parse_args()
    prepare()
    cuts.ON_HOST = options.context == "host"
    if options.case is not None:
        seeds: Iterator[str] = iter([options.case])
    else:
        is_one_kind = options.meshes or options.context is not None
        seeds = chain(() if is_one_kind else kept_seeds(), () if options.kept else _numbers(options))
    rows = list[Row]()
    began = time.monotonic()
    for row in run(seeds, options.workers):
        rows.append(row)
        show(row, len(rows), time.monotonic() - began)
        if not (options.case or options.cases or options.kept):
            keep(rows, options, time.monotonic() - began)
    if options.case:
        print(json.dumps(rows[0]["axes"], indent=1), *rows[0].get("ranks", []), rows[0].get("traceback", ""), sep="\n")
    counts = Counter(row["verdict"] for row in rows)
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.most_common()))
    if any(counts[each.value] for each in ORDER[:3]):
        raise SystemExit(1)


def _numbers(options: argparse.Namespace) -> Iterator[str]:
    ends = time.monotonic() + 60 * options.minutes
    cases = options.cases or NUM_OF_ONE_KIND * (options.meshes or options.context is not None)
    for number in count(options.seed):
        is_over = number - options.seed >= cases if cases else time.monotonic() > ends
        if is_over:
            return
        yield f"{PREFIX * options.meshes}{number}"


def kept_seeds() -> list[str]:
    """Returns the seeds of cases that once failed."""
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def prepare() -> None:
    """Imports and sets what every case needs, before any is forked."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # children end with it
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "SLIPSTREAM_STALL_LIMIT": "off", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    changes()
    gc.collect()
    gc.freeze()  # the collectors of children needn't look at what was imported


def run(seeds: Iterator[str], num_workers: int) -> Iterator[Row]:
    """Yields what became of each case, as they end."""
    with tempfile.TemporaryDirectory() as folder:
        work = partial(try_case, folder=folder)
        for result in run_forked(seeds, work, num_workers, LIMITS, lambda seed: place_of(seed).num_processes):
            yield summary(result)


def summary(result: Result) -> Row:
    """Returns the row of a case, whose ranks have each sent what they found."""
    place = place_of(result.task)
    axes = next((each["axes"] for each in reversed(result.sent) if "axes" in each), {})
    found = [each for each in result.sent if "verdict" in each]
    row = {"seed": result.task, "family": place.family.value, "processes": place.num_processes, "axes": axes}
    if result.ended_by:
        row |= {"verdict": Verdict.OUT_OF_LIMITS.value, "reason": result.ended_by}
        row |= {"ranks": [f"{each['verdict']}: {each['reason']}" for each in found]}
        own = [each for each in found if not _is_of_another(each["reason"])]
        worst = [each for each in own if each["verdict"] in (Verdict.WRONG.value, Verdict.CRASH.value)]
        return row | worst[0] if worst else row
    assert found, result
    verdicts = [each.value for each in ORDER]
    own = [each for each in found if not _is_of_another(each["reason"])]  # not another's end
    row |= min(own or found, key=lambda each: verdicts.index(each["verdict"]))
    if place.num_processes > 1 and len({each["verdict"] for each in found}) > 1:
        row["ranks"] = [f"{each['verdict']}: {each['reason']}"[:300] for each in found]
    return row


def _is_of_another(reason: str) -> bool:
    """Returns whether a rank only says that another one has ended."""
    return reason.startswith((LostRankError.__name__, TransportError.__name__)) and "onnection" in reason


def try_case(seed: str, send: Send, rank: int, folder: str) -> None:
    """Runs one rank of a case; sends what was drawn, and what became of it."""
    place = place_of(seed)
    began = time.process_time()
    warnings.simplefilter("ignore")
    with float64_masks(), quiet_transformers():
        try:
            found = outcome(seed, place, rank, f"{folder}/{seed}", send)
        except Exception as error:
            found = ended_by(error) | {"traceback": traceback.format_exc()[-6000:]}
            is_late = found["verdict"] is Verdict.REFUSED and _HAS_RUN in found["traceback"]
            found["verdict"] = (Verdict.CRASH if is_late else found["verdict"]).value
    send({"reason": "", "error": 0.0, **found, "seconds": round(time.process_time() - began, 1)})
    os._exit(0)  # no rank waits for another's end


def outcome(seed: str, place: Place, rank: int, store: str, send: Send) -> Row:
    """Returns the verdict on one rank of a case; `store` is a path for the files of its ranks, by which they also meet
    unless they are in a group already. Raises what the Pipeline raises."""
    if place.family in (Family.TRAINER, Family.PREFERENCES):
        alone = TrainerCase(seed, place) if place.family is Family.TRAINER else PreferenceCase(seed, place)
        send({"axes": alone.axes})
        with full_precision():
            return _verdict(*alone.compare(), BOUND)
    kind: Any = CausalCase if place.family is Family.CAUSAL else SequenceCase
    case = None
    try:
        case = kind(seed, place, Path(f"{store} model"))
        whole, given = case.models()
        case.draw_cut(whole)
        whole = case.own_start(whole)
        steps = case.steps()
        send({"axes": case.axes} if rank == 0 else {})
        if case.has_dropout and place.family is Family.CAUSAL:
            with torch.no_grad():  # what can't run at all is told here: the reference is a Pipeline
                whole(input_ids=torch.ones(1, 4, dtype=torch.int64))
        expected = None if case.has_dropout else _trained(case.unsplit(whole), steps)
    except SlipstreamError:
        raise
    except Exception as error:  # of transformers and PyTorch: there is nothing to compare with
        send({"axes": case.axes} if rank == 0 and case else {})
        return {"verdict": Verdict.NOT_BUILT.value, "reason": described(error), "traceback": traceback.format_exc()}
    if expected is None:
        with _wide_kernels(case.settings):
            expected = _trained(case.piped(case.pipeline(whole, is_reference=True)), steps)
    if place.has_processes and not dist.is_initialized():
        where = {"rank": rank, "world_size": place.num_processes, "init_method": f"file://{store}"}
        dist.init_process_group("gloo", timeout=timedelta(seconds=MESSAGE_SECONDS), **where)
    with _wide_kernels(case.settings):
        piped = case.piped(case.pipeline(given))
        with full_precision():
            found = largest_difference(expected, train(piped, steps), piped)
    if place.has_processes:
        dist.barrier()
    bound = BOUND
    if bound < found[0] < LARGEST_ROUNDING and not case.has_dropout:
        twin = kind(seed, place, Path(f"{store} twin"))
        other, _ = twin.models()
        twin.draw_cut(other)
        other = perturbed(twin.own_start(other))
        with full_precision():
            bound = max(bound, 10 * rounding_error(expected, train(twin.unsplit(other), twin.steps())))
    return _verdict(*found, bound)


def _wide_kernels(settings: Mapping[str, Any]) -> AbstractContextManager[object]:
    """Keeps fused kernels in float64, as `full_precision` does what isn't fused."""
    if not settings.get("runtime", {}).get("fused"):
        return nullcontext()
    kept: AbstractContextManager[object] = importlib.import_module("support.fusing").kernels_in_float64()
    return kept


def _trained(subject: Subject, steps: Sequence[Step]) -> list[tuple[str, Numbers]]:
    """Returns what training records in float64; models are made outside, where their tables round as they always do."""
    with full_precision():
        return recorded(train(subject, steps))


def _verdict(error: float, where: str, bound: float) -> Row:
    if error < BOUND:
        return {"verdict": Verdict.EXACT.value, "error": error}
    if error < bound:
        reason = f"{where}; ten times what a few roundings of its weights change in the unsplit model is {bound:.0e}"
        return {"verdict": Verdict.EXACT.value, "error": error, "bound": bound, "reason": reason}
    return {"verdict": Verdict.WRONG.value, "error": error, "reason": where}


def show(row: Row, number: int, seconds: float) -> None:
    """Prints a line for a case; what isn't exact with its reason."""
    axes = row["axes"]
    what = f"{axes.get('architecture') or axes.get('model', '')} {axes.get('mesh', '')}"
    error = f" {row['error']:.0e}" if row.get("error") else ""
    reason = f": {' '.join(str(row['reason']).split())[:300]}" if row.get("reason") else ""
    rate, took = f"{3600 * number / seconds:.0f}/h", f" in {row['seconds']:.0f} s" if "seconds" in row else ""
    print(f"{number} {rate} {row['seed']} {row['family']} {what} {row['verdict']}{error}{took}{reason}", flush=True)


def keep(rows: list[Row], options: argparse.Namespace, seconds: float) -> None:
    """Writes the record: counts by what became of cases and by what was drawn, and all cases that weren't exact, or
    only within a bound of their own rounding."""
    summary = {
        "cases": len(rows),
        "minutes": round(seconds / 60, 1),
        "cases an hour": round(3600 * len(rows) / seconds),
        "first seed": options.seed,
        **Counter(row["verdict"] for row in rows),
        "largest error of an exact case": max((r["error"] for r in rows if r["verdict"] == "exact"), default=0.0),
    }
    kept = [{key: value for key, value in row.items() if key != "traceback"} for row in rows]
    report = {
        "setting": setting(),
        "bound": BOUND,
        "summary": summary,
        "axes": by_axis(rows),
        "exact within a wider bound": [row for row in kept if "bound" in row],
        "not exact": [row for row in kept if row["verdict"] != Verdict.EXACT.value],
    }
    write(OF_CONTEXT if options.context else OF_MESHES if options.meshes else NAME, report)


def by_axis(rows: list[Row]) -> dict[str, dict[str, dict[str, int]]]:
    """Returns, of each value that was drawn, how many cases had which verdict."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for row in rows:
        for axis, value in (row["axes"] | {"family": row["family"], "processes": row["processes"]}).items():
            for each in _values(axis, value):
                found.setdefault(axis, {}).setdefault(each, Counter())[row["verdict"]] += 1
    return {axis: {value: dict(counts) for value, counts in sorted(values.items())} for axis, values in found.items()}


def _values(axis: str, value: Any) -> list[str]:
    """Returns what a value counts as: the kinds of lists of numbers, the parts of records."""
    if isinstance(value, dict):
        return [f"{name}={part}" for name, part in value.items()] or ["defaults"]
    if axis in ("slices", "microbatches") and isinstance(value, list):
        return ["a list"]
    if axis == "partition":
        return ["halves" * any(each % 1 for each in value) or "empty ends" * (0 in value) or "whole layers"]
    if isinstance(value, list):
        return [str(each) for each in value] or ["none"]
    return [str(value)]


if __name__ == "__main__":
    main()
