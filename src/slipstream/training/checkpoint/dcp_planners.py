"""Planners that let `torch.distributed.checkpoint` save and load shards, each of which is boxes of one tensor.

PyTorch's planners know tensors and DTensors; a rank's share of a packed weight, or its rows of an optimizer's state,
is neither.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slipstream.training.checkpoint.snapshot import SnapshotEntry
from slipstream.training.checkpoint.tensor_shard import dtype_name


class BoxSavePlanner(SavePlanner):
    """Plans the save of a state dict whose values are lists of `SnapshotEntry`: those that this rank writes."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._entries: dict[str, list[SnapshotEntry]] = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(entry) for entries in self._entries.values() for entry in entries])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Raises ValueError where the boxes of all ranks don't cover each element of a tensor exactly once."""
        _check_each_once([item for plan in all_plans for item in plan.items])
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        return next(entry.view for entry in self._entries[index.fqn] if entry.box.offsets == index.offset)


class ShardLoadPlanner(LoadPlanner):
    """Plans the load into a state dict whose values are lists of `TensorShard`, whichever boxes were saved."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._metadata = metadata
        self._boxes = {
            key: [found for shard in shards for found in shard.boxes()] for key, shards in state_dict.items()
        }

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, boxes in self._boxes.items():
            if boxes:
                stored = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[key])
                items += create_read_items_for_chunk_list(key, stored, [box.as_chunk() for box, _ in boxes])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("a checkpoint of slipstream holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Returns a view of the memory of a shard."""
        place = read_item.dest_index.index  # offsets don't identify a view: two shards may have the same box
        assert place is not None
        _, view = self._boxes[read_item.dest_index.fqn][place]
        part: Tensor = view[indices(read_item.dest_offsets, read_item.lengths)]
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # it is in place


def indices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    """Returns the index of a part of a tensor."""
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))


def _write_item(entry: SnapshotEntry) -> WriteItem:
    properties = TensorProperties(dtype=entry.view.dtype)
    data = TensorWriteData(entry.box.as_chunk(), properties, torch.Size(entry.shape))
    return WriteItem(MetadataIndex(entry.key, entry.box.offsets), WriteItemType.SHARD, tensor_data=data)


def _check_each_once(items: Sequence[WriteItem]) -> None:
    writes: dict[str, list[TensorWriteData]] = {}
    for item in items:
        assert item.tensor_data is not None
        writes.setdefault(item.index.fqn, []).append(item.tensor_data)
    for key, parts in writes.items():
        kinds = dict.fromkeys((dtype_name(data.properties.dtype), tuple(data.size)) for data in parts)
        if len(kinds) > 1:
            raise ValueError(f"{key} is {' on one rank and '.join(map(str, kinds))} on another")
        if len({tuple(data.chunk.offsets) for data in parts}) < len(parts):
            raise ValueError(f"several ranks write the same elements of {key}")
        written, size = sum(prod(data.chunk.sizes) for data in parts), prod(parts[0].size)
        if written != size:
            raise ValueError(f"the ranks write {written:,} elements of {key}, which has {size:,}")
