"""A checkpoint as it is read, into the shards of a run or, by `torch.distributed.checkpoint`, any program's tensors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from slipstream.checkpoint.files import DamagedError, verify_file
from slipstream.checkpoint.manifest import MANIFEST, Box, Manifest, TensorShard, dtype_name, entry_name
from slipstream.errors import SlipstreamError
from slipstream.parallel import RankGroup

_MOST_LISTED = 5  # differences in one message


class BoxLoadPlanner(DefaultLoadPlanner):
    """Plans the load into a state dict whose values are lists of boxes with their memory, whichever boxes were saved.

    PyTorch's planner knows tensors and DTensors; a rank's share of a packed weight, or its rows of an optimizer's
    state, is neither.
    """

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self._boxes: dict[str, list[tuple[Box, Tensor]]] = state_dict
        self._stored: dict[str, TensorStorageMetadata] = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, boxes in self._boxes.items():
            if boxes:
                wanted = [box.as_chunk() for box, _ in boxes]
                items += create_read_items_for_chunk_list(key, self._stored[key], wanted)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns the memory of a box, by its place: offsets don't identify it, as two shards may have the same box."""
        assert index.index is not None
        return self._boxes[index.fqn][index.index][1]


class CheckpointReader(StorageReader):
    """Reads a checkpoint of `slipstream train` into any state dict, by `torch.distributed.checkpoint` (`dcp`).

        dcp.load({"model": model.state_dict()}, storage_reader=CheckpointReader("checkpoints/step-00000012"))

    The keys of the state's tensors, plain ones or DTensors, are `model.` and the names of the model's parameters, and
    `optimizer.exp_avg.` and the like with the same names for the optimizer's. Before a file is read, its size and its
    checksum are verified.

    Args:
        folder: the folder of a step.
        manifest: its contents, where all of the checkpoint has been verified already.

    Raises:
        SlipstreamError: if a file differs from the one written, or `folder` isn't a checkpoint.
    """

    def __init__(self, folder: str | PathLike[str], manifest: Manifest | None = None) -> None:
        self._is_verified = manifest is not None
        self._folder = Path(folder)
        self._manifest = manifest or _read_manifest(Path(folder))

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
            if not self._is_verified:
                with _damage_refused(self._folder):
                    verify_file(self._folder / name, self._manifest.files[name])
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
        # PyTorch takes a path alone for a checkpoint in its own format.
        return False


@dataclass(frozen=True)
class SavedCheckpoint:
    """A verified checkpoint."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.manifest.step

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that were saved next to the tensors."""
        return self.manifest.facts

    def check_model(self, model: Mapping[str, Any]) -> None:
        """Raises SlipstreamError, with the names of the fields, where `facts["model"]` differs from `model`."""
        if differences := self.describe_other_model(model):
            raise self.unfit(f"is a checkpoint of another model: {differences}")

    def describe_other_model(self, model: Mapping[str, Any]) -> str:
        """Returns in which fields `facts["model"]` differs from `model`; "" where it doesn't."""
        here = json.loads(json.dumps(model))
        return _some(list(_differences("", self.facts.get("model", {}), here)))

    def unfit(self, why: str) -> SlipstreamError:
        """Returns the error of a checkpoint that can't be used here."""
        return SlipstreamError(
            f"{self.folder} {why}. Start with the settings it was saved with, or train in another folder."
        )

    def describe_misfits(self, shards: Sequence[TensorShard]) -> str:
        """Returns which shards can't be filled from this checkpoint and why; "" where all can."""
        return _some([f"{shard.key} {why}" for shard in shards for why in self._misfit(shard)])

    def load(self, shards: Sequence[TensorShard], world: RankGroup) -> None:
        """Fills the tensors of the shards in place. Collective.

        Raises:
            CheckpointException: on all ranks, if one of them can't read its files.
        """
        boxes: dict[str, list[tuple[Box, Tensor]]] = {}
        for shard in shards:
            boxes.setdefault(shard.key, []).extend(shard.boxes())
        ignore_lone_process_warning()
        reader = CheckpointReader(self.folder, self.manifest)
        group = world.process_group
        load(boxes, storage_reader=reader, planner=BoxLoadPlanner(), process_group=group, no_dist=world.size == 1)

    def _misfit(self, shard: TensorShard) -> Iterator[str]:
        tensor = self.manifest.tensors.get(shard.key)
        if tensor is None:
            # A tensor without elements is not saved.
            if prod(shard.share.shape):
                yield "isn't in it"
        elif tensor.shape != shard.share.shape:
            yield f"has shape {tensor.shape} in it and {shard.share.shape} here"
        elif tensor.dtype != (dtype := dtype_name(shard.tensor)):
            yield f"is {tensor.dtype} in it and {dtype} here"
        elif sum(prod(box.sizes) for box, _ in shard.boxes() if box.is_inside(tensor.shape)) != shard.tensor.numel():
            yield "isn't all in it"


def ignore_lone_process_warning() -> None:
    """Silences PyTorch's warning about a process that loads alone, for good: threads share their filters."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def _read_manifest(folder: Path) -> Manifest:
    if not (folder / MANIFEST).is_file():
        steps = ", ".join(sorted(path.name for path in folder.glob("step-*"))) or "no checkpoints either"
        raise SlipstreamError(
            f"{folder} isn't a checkpoint, which has a {MANIFEST}. Give the folder of a step; in this one there "
            f"are: {steps}."
        )
    with _damage_refused(folder):
        return Manifest.read(folder)


@contextmanager
def _damage_refused(folder: Path) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise SlipstreamError(f"the checkpoint {folder} {error.what}: {error}. Take another one.") from None


def _elements(file: Any, item: ReadItem) -> Any:
    name = entry_name(item.storage_index.fqn, item.storage_index.offset or ())
    if not item.lengths:
        return file.get_tensor(name)  # a scalar
    ranges = zip(item.storage_offsets, item.lengths, strict=True)
    return file.get_slice(name)[tuple(slice(start, start + length) for start, length in ranges)]


def _differences(name: str, saved: Any, here: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(here, dict):
        for key in sorted({*saved, *here}):
            yield from _differences(f"{name}.{key}" if name else key, saved.get(key), here.get(key))
    elif saved != here:
        yield f"{name} is {json.dumps(saved)} in it and {json.dumps(here)} here"


def _some(reasons: Sequence[str]) -> str:
    more = len(reasons) - _MOST_LISTED
    return "; ".join(reasons[:_MOST_LISTED]) + (f"; and {more} more" if more > 0 else "")
