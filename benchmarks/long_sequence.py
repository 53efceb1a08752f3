"""Memory and seconds of a step over the length of its one sequence, with and without the context on the host.

    python -m benchmarks.long_sequence          # prints a table, writes results/long_sequence.json
    python -m benchmarks.long_sequence --page   # draws the picture and writes the table of docs/benchmarks.md from it

A Llama of two layers of width 128 takes one step of one sequence, each contender in a new process with one thread:
transformers plain, with gradient checkpointing and with torch's save_on_cpu, which finds all on the host already; and
Slipstream with `recompute: stage` and slices of 1,024 tokens, with its keys and values in memory and on the host.

What a process holds is RssAnon + RssShmem, sampled every 50 ms from outside; pages of files on a disk, which the system
writes back where memory is scarce, are in neither. A row's bytes are the peak of the step less the peak before it. A
contender that reaches 24 GiB, or nearly all that the machine has left, is ended, and takes part in no longer sequence.
The allocator is as the environment has it, which the record names: by default as in a user's own Python, without what
`slipstream train` sets for its ranks, which keep what was freed.

Seconds are those of the first step. At 32,768 tokens both ways of Slipstream take turns after that.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from transformers import LlamaConfig

from benchmarks import records
from benchmarks.contenders import Ours, Unsliced
from benchmarks.harness import destination, interleaved, is_trial, medians, recorded, setting, write
from benchmarks.isolated import Contender
from benchmarks.long_sequence_page import HOST, MEMORY, PICTURE, draw, megabytes, table
from benchmarks.peers import VOCABULARY
from slipstream import Memory

NAME = "long_sequence"
SECONDS_BETWEEN = 0.05  # samples of a process's memory
MOST_BYTES = 24 << 30
MOST_SHARE = 0.9  # of the memory that the machine has left
MOST_GROWTH = 64  # bytes a token
MOST_RATIO = 1.15  # of a step with the context on the host to one with it in memory
IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}  # file systems
Row = dict[str, Any]


class Sizes(NamedTuple):
    """The lengths of the sequences and of their slices, in tokens."""

    shared: Sequence[int]  # for every contender
    alone: Sequence[int]  # with the context on the host alone
    growth: tuple[int, int]  # between which the growth is judged
    slice: int


FULL = Sizes((8_192, 16_384, 32_768), (65_536, 131_072), (16_384, 131_072), 1_024)
TOY = Sizes((128, 256), (512,), (128, 512), 64)


def model_config(length: int) -> LlamaConfig:
    """Returns the Llama of two layers of width 128."""
    return LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
        tie_word_embeddings=False,
    )


def contender(name: str, length: int, slice_length: int) -> Contender:
    """Returns a contender, whose process has begun to import."""
    config = model_config(length)
    if name in OURS:
        memory = Memory(recompute="stage", context=OURS[name])
        settings = {"schedule": "1f1b", "slices": length // slice_length, "memory": memory}
        return Contender(name, Ours, config, 1, length, settings, num_processes=1)
    return Contender(name, Unsliced, config, 1, length, *THEIRS[name], num_processes=1)


THEIRS: dict[str, tuple[bool, ...]] = {
    "transformers": (),
    "transformers, checkpointing": (True,),
    "transformers, save_on_cpu": (False, True),
}
OURS = {MEMORY: "device", HOST: "host"}


class ResidentMemory:
    """The memory of a process that no file on a disk has, sampled from outside.

    Args:
        process_id: the system's number of the process.
        limit: bytes from which on the process is killed.
    """

    def __init__(self, process_id: int, limit: float) -> None:
        self.peak = 0
        self.was_killed = False
        self._process_id = process_id
        self._limit = limit
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the sampling."""
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(SECONDS_BETWEEN):
            self.peak = max(self.peak, resident_bytes(self._process_id))
            if self.peak >= self._limit:
                self.was_killed = True
                os.kill(self._process_id, signal.SIGKILL)
                return


def resident_bytes(process_id: int) -> int:
    """Returns RssAnon + RssShmem of a process; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes = dict(line.split(":", 1) for line in lines)
    return sum(1024 * int(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem") if name in sizes)


@contextmanager
def sampled(process_id: int, limit: float) -> Iterator[ResidentMemory]:
    memory = ResidentMemory(process_id, limit)
    try:
        yield memory
    finally:
        memory.close()


def measure(runs: Contender, length: int, limit: float) -> Row:
    """Returns a contender's seconds and bytes of a step, or why it has none."""
    row: Row = {"contender": runs.name, "tokens": length}
    with sampled(runs.process_ids[0], limit) as memory:
        try:
            runs.wait()
            before = memory.peak
            seconds = runs.run()
            row |= {
                "seconds": round(seconds, 3),
                "before": before,
                "bytes": memory.peak - before,
                "losses": runs.losses,
            }
        except RuntimeError as error:
            row["not run"] = f"more than {megabytes(limit)}" if memory.was_killed else str(error)
    return row


def measure_all(
    sizes: Sizes, limit: float, keep: Callable[[list[Row]], None]
) -> tuple[list[Row], dict[str, Contender]]:
    """Measures every contender at each length, the shortest first; calls `keep` with the rows after each.

    Returns the rows, and both ways of Slipstream at the last length that all have, ready for further steps.
    """
    rows: list[Row] = []
    ready: dict[str, Contender] = {}
    lengths = {length: [*THEIRS, *OURS] for length in sizes.shared} | {length: [HOST] for length in sizes.alone}
    for length, names in lengths.items():
        for name in names:
            failed = next((row for row in rows if row["contender"] == name and "not run" in row), None)
            if failed is None:
                runs = contender(name, length, sizes.slice)
                rows.append(measure(runs, length, limit))
                if length == sizes.shared[-1] and name in OURS:
                    ready[name] = runs
                else:
                    runs.close()
            else:
                reason = f"at {failed['tokens']:,} tokens: {failed['not run']}"
                rows.append({"contender": name, "tokens": length, "not run": reason})
            print(rows[-1], flush=True)
            keep(rows)
        losses = [loss for row in rows if row["tokens"] == length for loss in row.pop("losses", [])]
        assert not losses or max(losses) - min(losses) < 1e-3, losses
    return rows, ready


def take_turns(contenders: Mapping[str, Contender], repeats: int) -> Row:
    """Returns the seconds of steps of both ways of Slipstream, one after the other, and ends them."""
    seconds = interleaved({name: each.run for name, each in contenders.items()}, repeats, warmups=0)
    for each in contenders.values():
        each.close()
    found = medians(seconds)
    return {"seconds": seconds, "medians": found, "ratio": found[HOST] / found[MEMORY]}


def growth(rows: Sequence[Row], between: tuple[int, int]) -> float:
    """Returns the bytes a token by which the step with its context on the host grows."""
    found = {row["tokens"]: row["bytes"] for row in rows if row["contender"] == HOST and "bytes" in row}
    first, last = between
    return float(found[last] - found[first]) / (last - first)


def verdicts(rows: Sequence[Row], turns: Row, between: tuple[int, int]) -> dict[str, bool]:
    """Returns whether the targets are reached."""
    first, last = between
    return {
        f"on the host a step grows by at most {MOST_GROWTH} bytes a token from {first:,} to {last:,} tokens": growth(
            rows, between
        )
        <= MOST_GROWTH,
        f"it takes at most {MOST_RATIO} of one with its context in memory": turns["ratio"] <= MOST_RATIO,
    }


def file_system(folder: str) -> str:
    """Returns the type of the file system that a folder is on, such as ext4."""
    number = os.stat(folder).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        if place.split()[2] == device:
            return kind.split()[0]
    return "unknown"


def available_bytes() -> int:
    """Returns the memory that the system can give without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def write_page() -> None:
    """Draws the picture of the record, and writes the tables of the page."""
    found = recorded(NAME)
    assert found is not None, f"no record yet: python -m benchmarks.{NAME}"
    draw(found, destination(PICTURE))
    if not is_trial():
        records.PAGE.write_text(records.with_tables(records.PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", action="store_true", help="draw the picture, write the page from the record, and end")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of both ways of Slipstream")
    options = parser.parse_args()
    if options.page:
        write_page()
        return
    folder = tempfile.gettempdir()
    files = file_system(folder)
    if files in IN_MEMORY and not is_trial():
        parser.error(
            f"{folder} is a {files}, whose files take memory. Give a folder on a disk: "
            f"TMPDIR=/var/tmp python -m benchmarks.{NAME}"
        )
    sizes = TOY if is_trial() else FULL
    limit = min(MOST_BYTES, MOST_SHARE * available_bytes())
    more = setting(repeats=options.repeats, slice=sizes.slice, limit_bytes=round(limit), files=files)
    more["threads_per_process"] = 1

    def keep(rows: list[Row]) -> None:
        write(NAME, {"setting": more, "rows": rows})

    rows, ready = measure_all(sizes, limit, keep)
    turns = take_turns(ready, options.repeats)
    report = {
        "setting": more,
        "targets": verdicts(rows, turns, sizes.growth),
        "bytes a token": round(growth(rows, sizes.growth), 1),
        "turns": turns,
        "rows": rows,
    }
    print(table(report), report["targets"], sep="\n")
    print(f"wrote {write(NAME, report)}")
    write_page()


if __name__ == "__main__":
    main()
