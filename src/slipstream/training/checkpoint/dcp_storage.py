"""Lets `torch.distributed.checkpoint` write and read safetensors files with a manifest.

rank 0   plan | writes its file |  manifest, rename, retention
rank 1   plan | writes its file |
              ^ sizes and checksums go to rank 0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from slipstream.errors import SlipstreamError
from slipstream.training.checkpoint.checkpoint_folder import CheckpointFolder
from slipstream.training.checkpoint.dcp_planners import indices
from slipstream.training.checkpoint.manifest import Manifest, StoredFile, entry_name
from slipstream.training.checkpoint.snapshot import Snapshot
from slipstream.training.checkpoint.tensor_shard import Box
from slipstream.training.checkpoint.verified_files import DamagedError, FileDigest, verify_file

_POLL_SECONDS = 0.05
_SECONDS_TO_APPEAR = 120.0  # for a file that another rank has written, on a network's disk


class SnapshotWriter(StorageWriter):
    """Writes the snapshots of all ranks as one checkpoint; afterwards `retire` removes older ones.

    On rank 0, `not_retired` then says what prevented that, or "".
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        step: int,
        facts: Mapping[str, Any],
        snapshot: Snapshot,
        retire: Callable[[], None],
    ) -> None:
        self.step = step
        self.not_retired = ""
        self._folder, self._facts, self._snapshot, self._retire = folder, facts, snapshot, retire
        self._part = folder.part(step)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        assert checkpoint_id is None  # the folder chooses its names, and only Slipstream writes to it

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._part.mkdir(parents=True, exist_ok=True)  # rank 0 has made it, but a network's disk may not show it yet

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the file of this rank, if it has any, from the snapshot: the planner's tensors may have changed."""
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        stored = StoredFile(self._snapshot.file, self._snapshot.write(self._part))
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, stored) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint, on rank 0."""
        manifest = Manifest.of(self.step, self._facts, metadata, results)
        for name, digest in manifest.files.items():
            _wait_for(self._part / name, digest)
        manifest.write(self._part)
        self._folder.commit(self.step)
        try:
            self._retire()
        except OSError as error:
            self.not_retired = str(error)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return False  # a path alone doesn't say what to write


class CheckpointReader(StorageReader):
    """Reads a checkpoint of `slipstream train` into any state dict, by `torch.distributed.checkpoint` (`dcp`).

        dcp.load({"model": model.state_dict()}, storage_reader=CheckpointReader("checkpoints/step-00000012"))

    The keys of the state's tensors, plain ones or DTensors, are `model.` and the names of the model's parameters, and
    `optimizer.exp_avg.` and the like with the same names for the optimizer's. Before a file is read, its size and its
    checksum are verified.

    Args:
        folder: the folder of a step.
        manifest: what it holds, where all of the checkpoint has been verified already.

    Raises:
        SlipstreamError: if a file isn't what was written, or `folder` isn't a checkpoint.
    """

    def __init__(self, folder: str | PathLike[str], manifest: Manifest | None = None) -> None:
        self._is_verified = manifest is not None
        self._folder, self._manifest = Path(folder), manifest or self._read(Path(folder))

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            raise SlipstreamError(
                f"checkpoint_id={str(checkpoint_id)!r} was given to dcp.load with a CheckpointReader, which has its "
                f"folder already: {self._folder}. Leave checkpoint_id out, or give the reader that folder."
            )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._manifest.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the tensors of a plan; opens each file once."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._metadata.storage_data[item.storage_index], []).append(item)
        for name, items in by_file.items():
            self._verify(name)
            with safe_open(self._folder / name, framework="pt") as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_elements(file, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return False  # PyTorch takes a path alone for its own format

    @staticmethod
    def _read(folder: Path) -> Manifest:
        if not Manifest.is_in(folder):
            steps = ", ".join(sorted(path.name for path in folder.glob("step-*"))) or "no checkpoints either"
            raise SlipstreamError(
                f"{folder} isn't a checkpoint, which has a manifest.json. Give the folder of a step; in this one there "
                f"are: {steps}."
            )
        try:
            return Manifest.read(folder)
        except DamagedError as error:
            raise _damaged(folder, error) from None

    def _verify(self, name: str) -> None:
        if not self._is_verified:
            try:
                verify_file(self._folder / name, self._manifest.files[name])
            except DamagedError as error:
                raise _damaged(self._folder, error) from None


def _damaged(folder: Path, error: DamagedError) -> SlipstreamError:
    return SlipstreamError(f"the checkpoint {folder} is damaged: {error}. Take another one.")


def _elements(file: Any, item: ReadItem) -> Tensor:
    offsets = item.storage_index.offset
    assert offsets is not None
    name = entry_name(item.storage_index.fqn, Box(tuple(offsets), ()))
    if not offsets:
        scalar: Tensor = file.get_tensor(name)
        return scalar
    part: Tensor = file.get_slice(name)[indices(item.storage_offsets, item.lengths)]
    return part


def _wait_for(path: Path, digest: FileDigest) -> None:
    """Waits until a file that a rank has written can be seen here."""
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while not path.exists() or path.stat().st_size < digest.size:
        path.parent.stat()  # raises FileNotFoundError where the folder has gone
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{path} was written by its rank but hasn't appeared for rank 0 within {_SECONDS_TO_APPEAR:.0f} s; the "
                "folder must be on a disk that all ranks share"
            )
        time.sleep(_POLL_SECONDS)
