"""The mesh of a run whose number of processes changes: which one so many can form, and which local ones are lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.train.config import Config


def choose_mesh(config: Config, num_processes: int) -> Config:
    """Returns the configuration with the mesh that so many processes form, at most the configured one.

    Replicas go first. Then there are fewer stages, by what divides their number, unless something says how many there
    are. Ranks that share layers or tokens stay as many. Some processes may be left over.

    Raises:
        SlipstreamError: where there is no such mesh.
    """
    pipeline, parallel = config.pipeline, config.parallel
    sharing = config.num_processes // (pipeline.num_ranks * parallel.data)
    for stages in _stage_counts(config):
        replicas = min(parallel.data, num_processes // (stages * sharing))
        if replicas == parallel.data or (replicas and pipeline.microbatches is None):
            return _with_mesh(config, stages, replicas)
    pinned = " and ".join((*_stage_pins(config), *_other_pins(config)))
    form = "processes form" if num_processes > 1 else "process forms"
    raise SlipstreamError(
        f"{num_processes} {form} no mesh of this run: its largest is {config.mesh_text}"
        + (f", and {pinned} {'stay' if ' and ' in pinned else 'stays'}" if pinned else "")
    )


def mesh_settings(config: Config) -> list[str]:
    """Returns the settings that `choose_mesh` decides, as they are typed."""
    settings = config.mesh_text.split()
    if config.pipeline.microbatches is None:
        settings.append(f"--pipeline.num_microbatches={config.pipeline.num_microbatches}")
    return settings


def _stage_counts(config: Config) -> Iterator[int]:
    """Yields numbers of pipeline ranks, the largest first."""
    most = config.pipeline.num_ranks
    yield most
    if not any(_stage_pins(config)):
        yield from (number for number in range(most - 1, 0, -1) if most % number == 0)


def _stage_pins(config: Config) -> Iterator[str]:
    """Yields the settings that say how many stages there are, besides their number."""
    pipeline = config.pipeline
    if pipeline.partition != "auto":
        yield f"pipeline.partition={pipeline.partition}"
    if pipeline.schedule.endswith(".txt"):
        yield f"pipeline.schedule={pipeline.schedule}"


def _other_pins(config: Config) -> Iterator[str]:
    if config.parallel.tensor > 1:
        yield f"parallel.tensor={config.parallel.tensor}"
    if config.pipeline.microbatches is not None and config.parallel.data > 1:
        yield f"parallel.data={config.parallel.data} by pipeline.microbatches"


def _with_mesh(config: Config, stages: int, replicas: int) -> Config:
    parallel = {"data": replicas}
    if replicas == 1:  # nothing is left to shard over, and the checkpoints are the same
        parallel |= {"shard_optimizer": False, "shard_parameters": False}
    pipeline = {"num_ranks": stages, "num_microbatches": _num_microbatches(config, replicas)}
    sections = {
        "parallel": config.parallel.model_copy(update=parallel),
        "pipeline": config.pipeline.model_copy(update=pipeline),
    }
    return config if (stages, replicas) == _size(config) else config.model_copy(update=sections)


def _size(config: Config) -> tuple[int, int]:
    return config.pipeline.num_ranks, config.parallel.data


def _num_microbatches(config: Config, replicas: int) -> int:
    """Returns how many microbatches a replica has, so that each has about as many rows as with all replicas: what a
    rank holds, and what an auxiliary loss is a mean over, stay the same."""
    pipeline, rows = config.pipeline, config.training.batch_size
    given = pipeline.num_microbatches
    if config.training.batch_tokens is not None or pipeline.schedule.endswith(".txt"):
        return given
    most = -(-rows // replicas)
    wanted = -(-most * given * config.parallel.data // rows)
    flushes = config.memory.num_flushes
    return max(given, min(wanted, rows // replicas) // flushes * flushes)


def described_change(
    config: Config,
    facts: Mapping[str, Any],
    mesh: Mapping[str, int],
    slices: Sequence[int] | int | str,
    steps: Sequence[str],
) -> str:
    """Returns a table of what is another than before the checkpoint with these facts, if its mesh was; "" if it wasn't.

    Args:
        config: of the run now.
        facts: of the checkpoint.
        mesh: the ranks of each axis now.
        slices: the tokens of each slice now.
        steps: how long a step took before, and how long it will.
    """
    if (was := facts["mesh"]) == mesh:
        return ""
    before, now = facts["settings"]["pipeline"], config.pipeline
    slices_before = (facts["tuned"] or {}).get("slices", before["slices"])
    given = before["microbatches"] is not None, now.microbatches is not None
    microbatches = [str(each["num_microbatches"]) for each in (before, now.model_dump())]
    rows = [
        ("mesh", _mesh_text(was), _mesh_text(mesh)),
        ("rows of a replica", *(_rows_text(config, each.get("dp", 1)) for each in (was, mesh))),
        (
            "microbatches of a replica",
            *("as given" if each else n for each, n in zip(given, microbatches, strict=True)),
        ),
        ("slices", str(slices_before), str(slices)),
        ("seconds of a step", *steps),
    ]
    return table_of_changes("", rows)


def with_mesh_of(config: Config, facts: Mapping[str, Any]) -> Config:
    """Returns the configuration with the mesh and the microbatches that a checkpoint's facts have."""
    before, mesh = facts["settings"]["pipeline"], facts["mesh"]
    pipeline = {"num_ranks": mesh["pp"], "num_microbatches": before["num_microbatches"]}
    sections = {
        "pipeline": config.pipeline.model_copy(update=pipeline),
        "parallel": config.parallel.model_copy(update={"data": mesh.get("dp", 1), "tensor": mesh.get("tp", 1)}),
    }
    return config.model_copy(update=sections)


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def _rows_text(config: Config, replicas: int) -> str:
    size = config.training.batch_size
    if config.training.batch_tokens is not None or config.data.packing == "none":
        return "by their tokens"
    return str(size // replicas) if size % replicas == 0 else f"{size // replicas} or {size // replicas + 1}"


def table_of_changes(what: str, changes: Sequence[tuple[str, ...]]) -> str:
    """Returns the lines of a table of names, values before and values now, each after a line break."""
    rows = [(what, "before", "now"), *changes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"\n  {line.rstrip()}" for line in lines)


class LocalPlaces:
    """The places of local ranks, each with a GPU where there are any. A place whose process was killed is lost, until
    somebody removes the file that says so.

    output/slipstream-run/lost/2    how and when the process at place 2 was lost
    """

    def __init__(self, folder: Path, number: int) -> None:
        """Takes the folder of the files. Every place is there at the beginning."""
        self._folder, self._number = folder, number
        self._lost = set[int]()
        for left in folder.glob("*"):
            left.unlink()

    @property
    def there(self) -> list[int]:
        """The places that aren't lost."""
        self._lost = {place for place in self._lost if self.file(place).exists()}
        with suppress(OSError):
            self._folder.rmdir()  # once it is empty
        return [place for place in range(self._number) if place not in self._lost]

    def file(self, place: int) -> Path:
        """Returns the file that says that a place is lost."""
        return self._folder / str(place)

    def lose(self, places: Sequence[int], why: str) -> None:
        """Notes that the processes at these places were killed. Raises OSError where the files can't be written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for place in places:
            self.file(place).write_text(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {why}\n")
        self._lost |= {*places}
