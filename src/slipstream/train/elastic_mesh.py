"""The mesh of a run whose number of processes changes: the one that they can form, and which local ones are lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from slipstream.errors import SlipstreamError
from slipstream.planner import OPEN
from slipstream.train.config import MESH_SETTINGS, Config, dump_config, parse_config
from slipstream.train.recorded_plan import recorded_plan
from slipstream.train.run_folder import RunFolder
from slipstream.units import table_text


def mesh_of_processes(config: Config, num_processes: int) -> Config:
    """Returns the configuration with the mesh that this number of processes forms, at most the configured one.

    Replicas go first, then there are fewer stages, by what divides their number: the first mesh that the configuration
    allows. Ranks that share layers or tokens stay as many. Some processes may be left over.

    Raises:
        SlipstreamError: where there is no such mesh.
    """
    if num_processes >= config.num_processes:
        return config
    problem = ""
    for stages, replicas in _smaller_sizes(config, num_processes):
        mesh = config.on_mesh({"pp": stages, "dp": replicas}, _num_microbatches(config, replicas))
        try:
            parse_config(yaml.safe_load(dump_config(mesh)))
        except SlipstreamError as error:
            problem = problem or f", and of smaller ones: {error}"
        else:
            return mesh
    form = "process forms" if num_processes == 1 else "processes form"
    raise SlipstreamError(f"{num_processes} {form} no mesh of this run: its largest is {config.mesh_text}{problem}")


def mesh_settings(config: Config) -> list[str]:
    """Returns the settings that `mesh_of_processes` decides, as they are typed."""
    settings = config.mesh_text.split()
    if config.pipeline.microbatches is None:
        settings.append(f"--pipeline.num_microbatches={config.pipeline.num_microbatches}")
    return settings


def _smaller_sizes(config: Config, num_processes: int) -> Iterator[tuple[int, int]]:
    """Yields numbers of pipeline ranks and of replicas for which there are enough processes, the best first."""
    most = config.pipeline.num_ranks
    replicas = config.parallel.data
    sharing = config.num_processes // (most * replicas)
    for stages in (divisor for divisor in range(most, 0, -1) if most % divisor == 0):
        for num_replicas in range(min(replicas, num_processes // (stages * sharing)), 0, -1):
            yield stages, num_replicas


def _num_microbatches(config: Config, replicas: int) -> int:
    """Returns how many microbatches a replica has, so that each has about as many rows as with all replicas: a rank's
    memory, and the rows of an auxiliary loss's mean, stay the same."""
    pipeline = config.pipeline
    rows = config.training.batch_size
    configured = pipeline.num_microbatches
    if config.training.batch_tokens is not None or pipeline.names_file:
        return configured
    most = -(-rows // replicas)
    wanted = -(-most * configured * config.parallel.data // rows)
    flushes = config.memory.num_flushes
    return max(configured, min(wanted, rows // replicas) // flushes * flushes)


def described_change(
    config: Config,
    facts: Mapping[str, Any],
    mesh: Mapping[str, int],
    slices: Sequence[int] | int | str | None,
    steps: Sequence[str],
) -> str:
    """Returns a table of the changes since the checkpoint with these facts, if its mesh was; "" if it wasn't.

    Args:
        config: of the run now.
        facts: of the checkpoint.
        mesh: the ranks of each axis now.
        slices: the tokens of each slice now.
        steps: how long a step took before, and how long it will.
    """
    if (was := facts["mesh"]) == mesh:
        return ""
    before = facts["settings"]["pipeline"]
    now = config.pipeline
    slices_before = before["slices"]
    if facts["tuned"]:
        plan = recorded_plan(facts["tuned"])
        slices_before = plan.num_slices if plan.slices is OPEN else [*plan.slices]
    are_given = before["microbatches"] is not None, now.microbatches is not None
    microbatches = [str(section["num_microbatches"]) for section in (before, now.model_dump())]
    rows = [
        ("mesh", _mesh_text(was), _mesh_text(mesh)),
        ("rows of a replica", *(_rows_text(config, sizes.get("dp", 1)) for sizes in (was, mesh))),
        (
            "microbatches of a replica",
            *("as given" if is_given else n for is_given, n in zip(are_given, microbatches, strict=True)),
        ),
        ("slices", str(slices_before), str(slices)),
        ("seconds of a step", *steps),
    ]
    return table_of_changes("", rows)


def with_mesh_of(config: Config, facts: Mapping[str, Any]) -> Config:
    """Returns the configuration with the mesh and the microbatches that a checkpoint's facts have."""
    sizes = {axis: facts["mesh"].get(axis, 1) for axis in MESH_SETTINGS}
    return config.on_mesh(sizes, facts["settings"]["pipeline"]["num_microbatches"])


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
    return "\n" + indent(table_text(rows), "  ")


class LocalPlaces:
    """The places of local ranks, each with a GPU where there are any. A place whose process was killed is lost, until
    somebody removes the file that says so.

    output/slipstream-run/lost/2    how and when the process at place 2 was lost
    """

    def __init__(self, run: RunFolder, number: int) -> None:
        self._own = run.own
        self._folder = run.lost
        self._number = number
        self._lost = set[int]()
        self._unwritten = set[int]()
        self._sizes = dict[int, int]()  # the size of the mesh by the number of processes
        self.forget()

    def forget(self) -> None:
        """Takes every place to be there, as it is of no use to whoever comes next which weren't."""
        self._lost.clear()
        with suppress(OSError):
            self._own.remove(self._folder)

    @property
    def there(self) -> list[int]:
        """The places that aren't lost."""
        self._lost = {place for place in self._lost if place in self._unwritten or self.file(place).exists()}
        with suppress(OSError):
            self._own.remove_empty(self._folder)
        return [place for place in range(self._number) if place not in self._lost]

    def have_room_for_more(self, config: Config, used: Sequence[int]) -> bool:
        """Returns whether lost places are back with which the mesh would be larger than that of the used ones."""
        num_there = len(self.there)
        if num_there not in self._sizes:
            self._sizes[num_there] = mesh_of_processes(config, num_there).num_processes
        return self._sizes[num_there] > len(used)

    def file(self, place: int) -> Path:
        """Returns the file that says that a place is lost."""
        return self._folder / str(place)

    def lose(self, places: Sequence[int], why: str) -> None:
        """Notes that the processes at these places were killed. Where the disk is full they don't come back."""
        self._lost |= {*places}
        for place in places:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with self._own.open(self.file(place), "w") as file:
                    file.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {why}\n")
            except OSError:
                self._unwritten.add(place)
