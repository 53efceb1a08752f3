"""The files of a run's folder: their names, and the list of what runs made. Nothing else is ever replaced.

output/
  slipstream-run/      the list of the files that runs made here, whose folder it is while a run is going on, its files
                       in the making, the lines of its terminal since nobody reads them there any more, and in lost/
                       a file for each local rank that is lost
  config.yaml          the settings it ran with
  reference.safetensors  with preference, how probable each answer was before the training, on which every loss depends
  inputs/              the tokens, the tokenizer and the model's configuration; beside/, the files beside the
                       model's weights, for exports; new_tokens.json, the tokens that the model's own tokenizer
                       hasn't, where there are any; run_id, by which ranks see that they share the folder
  plan.yaml            the plan that was made where the configuration left it open, as a configuration of another run
  plan.txt             the planned order, which plan.yaml names
  metrics.jsonl        one line per start, step, validation and checkpoint
  failures.jsonl       one line for each time that numbers were not finite
  schedule.txt         the order in which the last steps ran, sends and receives included
  timeline.png         the last step as it was measured
  timeline.json        the same for ui.perfetto.dev and chrome://tracing
  comparison.json      seconds per step of one process alone, where asked for
  checkpoints/         where asked for, to resume the run from
  tensorboard/         event files, where asked for
  model-step-100/      exports at intervals
  model/               the trained model and its tokenizer
  adapter/             with lora, the trained adapter

The list of what runs made in a folder: nothing else in it is ever replaced or removed.

output/slipstream-run/files.json
    {"files": ["config.yaml", "inputs/", "model/config.json", ...]}    a slash: a folder with everything inside
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.foreign_text import parse_json, read_text
from slipstream.own_files import OwnFolder
from slipstream.train.folder_lock import FOLDER, work_folder


class RunFolder:
    """The paths inside the folder at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own = OwnFolder(path)
        self.log = path / FOLDER / "output.log"
        self.lost = path / FOLDER / "lost"
        self.config = path / "config.yaml"
        self.inputs = path / "inputs"
        self.beside = self.inputs / "beside"
        self.new_tokens = self.inputs / "new_tokens.json"
        self.run_id = self.inputs / "run_id"
        self.reference = path / "reference.safetensors"
        self.plan = path / "plan.yaml"
        self.planned_schedule = path / "plan.txt"
        self.metrics = path / "metrics.jsonl"
        self.failures = path / "failures.jsonl"
        self.schedule = path / "schedule.txt"
        self.timeline = path / "timeline.png"
        self.perfetto = path / "timeline.json"
        self.comparison = path / "comparison.json"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"
        self.adapter = path / "adapter"
        self.listed = ListedFiles(path)

    @property
    def work(self) -> Path:
        """The folder in which this process writes files that a rename then puts in place."""
        return work_folder(self.path)

    @contextmanager
    def replaced(self, path: Path) -> Iterator[Path]:
        """Yields where to write a file that then gets its place at `path`, whole or not at all. Raises OSError where
        another run has the folder by now."""
        # The writers of pictures choose a format by the end of the name.
        part = self.work / f"part.{path.name}"
        yield part
        self.own.move(part, path)

    def model_at(self, step: int) -> Path:
        """Returns the folder of the export after a step."""
        return self.path / f"model-step-{step}"

    def find_result(self) -> Path | None:
        """Returns something that a run made and that would be missed; None where there is nothing."""
        results = [*self.exports(), self.metrics, self.checkpoints]
        return next((path for path in results if path.exists()), None)

    def find_unlisted(self, adopts_checkpoints: bool) -> Path | None:
        """Returns something in the way that no run has listed as its own, or a model that somebody put here; None where
        there is nothing. `adopts_checkpoints`: whether those that were copied here are to be resumed from."""
        model_files = [self.path / "config.json", *sorted(self.path.glob("*.safetensors"))]
        # Resumed runs go on with the checkpoints.
        if adopts_checkpoints:
            model_files = [file for file in model_files if file != self.reference]
        folders = [*self.exports(), self.inputs, self.tensorboard, *([] if adopts_checkpoints else [self.checkpoints])]
        results = (self.schedule, self.timeline, self.perfetto, self.comparison)
        files = (self.config, self.plan, self.planned_schedule, self.metrics, self.failures, *results)
        paths = [*model_files, *files, *folders]
        return next((unlisted for path in paths if (unlisted := self.listed.find_unlisted(path))), None)

    def find_link(self) -> Path | None:
        """Returns a link behind which the run would move, remove or write something; None where there is none.

        A link with the name of a file that a rename puts in place is none of those: it is replaced itself.
        """
        return self.own.find_link(
            self.log, self.lost, self.failures, self.checkpoints, self.tensorboard, *self.listed.folders()
        )

    def finished_model(self) -> Path | None:
        """Returns the model, or the adapter, that a run has exported at its end; None where none is there, or it was
        still being written."""
        models = [self.model, self.adapter]
        return next((path for path in models if path.is_dir() and not self.listed.has(path)), None)

    def exports(self) -> list[Path]:
        """Returns the folders of exported models that are there, and of a killed run's unfinished ones."""
        patterns = [f"{kind}{rest}" for kind in ("model", "adapter") for rest in ("-step-*", "*.part")]
        folders = [self.model, self.adapter, *sorted({export for p in patterns for export in self.path.glob(p)})]
        return [path for path in folders if path.exists()]


_FILE = "files.json"


class ListedFiles:
    """The list in the folder at `folder`. Only the run that holds the folder's lock changes it, one process at a time.

    Its methods raise OSError where the disk fails, and SlipstreamError where the list can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / FOLDER / _FILE
        self._own = OwnFolder(folder)

    def add(self, *paths: Path) -> None:
        """Lists files that are about to be written; so a run that is killed in between leaves nothing unlisted."""
        self._write(self._names() | {self._name(path) for path in paths})

    def add_folder(self, path: Path) -> None:
        """Lists a folder with everything that is and will be inside."""
        name = f"{self._name(path)}/"
        self._write({entry for entry in self._names() if not entry.startswith(name)} | {name})

    def itemise(self, path: Path) -> None:
        """Replaces a folder in the list by the files inside, now that it is complete: later files are another's."""
        inside = {self._name(file) for file in path.rglob("*") if not file.is_dir()}
        self._write(self._names() - {f"{self._name(path)}/"} | inside)

    def is_itemised(self, path: Path) -> bool:
        """Returns whether the folder at this path was complete when its files were listed, and they are there."""
        name = f"{self._name(path)}/"
        inside = [entry for entry in self._names() if entry.startswith(name)]
        return bool(inside) and name not in inside and all((self._folder / entry).exists() for entry in inside)

    def has(self, path: Path) -> bool:
        """Returns whether a file or a folder is in the list, by itself or as a part of a folder."""
        name = self._name(path)
        parents = [f"{parent}/" for parent in PurePosixPath(name).parents]
        return not self._names().isdisjoint([name, f"{name}/", *parents])

    def find_unlisted(self, path: Path) -> Path | None:
        """Returns the file at this path, or one in the folder there, that isn't in the list; hidden ones may be."""
        if not os.path.lexists(path) or self.has(path):
            return None
        if path.is_symlink() or not path.is_dir():
            return path
        inside = [child for child in sorted(path.iterdir()) if not child.name.startswith(".")]
        return next((unlisted for child in inside if (unlisted := self.find_unlisted(child))), None)

    def folders(self) -> list[Path]:
        """Returns the folders in which listed files and folders are."""
        return [self._folder / parent for parent in self._parents()]

    def remove(self) -> None:
        """Removes all that is listed, and folders that this leaves empty."""
        names = self._names()
        folders = self.folders()
        # No rename leads into this folder once another run has the run's folder.
        removed = work_folder(self._folder) / "removed"
        for name in sorted(names):
            path = self._folder / name
            if path.is_symlink() or (path.is_dir() if name.endswith("/") else path.is_file()):
                removed.mkdir(exist_ok=True)
                self._own.move(path, removed / "it")
                self._own.remove(removed)
        for parent in folders:
            # A folder that isn't empty stays, and one may not be there.
            with suppress(OSError):
                self._own.remove_empty(parent)
        self._write(set())

    def _parents(self) -> list[PurePosixPath]:
        """Returns the folders of the listed files inside of this one, the deepest first."""
        parents = {parent for name in self._names() for parent in [*PurePosixPath(name).parents][:-1]}
        return sorted(parents, key=lambda parent: (-len(parent.parts), parent))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    def _names(self) -> set[str]:
        if not self._file.exists():
            return set()
        try:
            names = parse_json(read_text(self._file))["files"]
            return set(_inside(names))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SlipstreamError(
                f"{self._file} isn't a list of a run's files ({error!r}); choose another folder, or move it away with "
                "the files around it"
            ) from error

    def _write(self, names: set[str]) -> None:
        """Replaces the list in one step, so that it is never half there."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = work_folder(self._folder) / "files.part"
        with part.open("w", encoding="utf-8") as file:
            json.dump({"files": sorted(names)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        self._own.move(part, self._file)


def _inside(names: list[str]) -> Iterator[str]:
    """Yields the names; raises ValueError for one that leads out of the folder."""
    for name in names:
        parts = PurePosixPath(name)
        if not parts.parts or parts.is_absolute() or ".." in parts.parts:
            raise ValueError(f"{name!r} isn't a path inside of the folder")
        yield name


def read_lines(path: Path, damaged: list[Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the records in a file of JSON lines, if it is there; the last may have been cut off when a run ended.

    `damaged` gets the other lines that aren't a record, which are left out.
    """
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        record = None
        # The text may not even be UTF-8.
        with suppress(ValueError):
            record = parse_json(line)
        if isinstance(record, dict) and line.endswith(b"\n"):
            yield record
        elif damaged is not None and line.endswith(b"\n"):
            damaged.append(line)


class TolerantWrites:
    """Writes that may fail while training goes on. `say` gets a line when that begins, and none while it lasts."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._unwritten: set[str] = set()

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Lets an OSError of the block pass, such as that of a full disk; `what` is named."""
        try:
            yield
        except OSError as error:
            if what not in self._unwritten:
                self._say(f"{what} can't be written: {error}. Training goes on")
            self._unwritten.add(what)
        else:
            self._unwritten.discard(what)
