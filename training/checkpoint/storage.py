"""Boxes to files and back: PyTorch's distributed checkpoint, in megatron-core's format ``torch_dist``.

Only this module knows the file format. It drives PyTorch's public planners itself: mcore's writer starts a
helper process for every rank, even for a synchronous save, which costs seconds.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
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
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from training.checkpoint.boxes import Box

# mcore's reader insists on this object, a list with one dict; ours neither needs nor reads it.
COMMON_STATE = "common_state/shard_0_1"


def write(folder: Path, boxes: Sequence[Box]) -> None:
    """Write all ranks' boxes into ``folder``, one file per rank. Collective; fails on all ranks if on one.

    The boxes that all ranks write must cover each global tensor exactly once. PyTorch checks it where there
    are several ranks, in time that grows with the square of the boxes per tensor: seconds at 512 ranks.
    """
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True)
    dcp.save({}, storage_writer=writer, planner=_Writing(boxes))


def finish(folder: Path) -> None:
    """On one rank, after ``write``: say to megatron-core what the folder is."""
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


class _Writing(DefaultSavePlanner):
    """Tells PyTorch what this rank writes."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.boxes = {(box.key, torch.Size(box.offset)): box for box in boxes if box.writes}

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(box) for box in self.boxes.values()]
        if self.is_coordinator:
            items.append(WriteItem(index=MetadataIndex(COMMON_STATE), type=WriteItemType.BYTE_IO))
        return SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.offset is None:
            return [{}]
        return self.boxes[index.fqn, index.offset].data


def _write_item(box: Box) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(box.key, torch.Size(box.offset)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(box),
            properties=TensorProperties(dtype=box.data.dtype),
            size=torch.Size(box.global_shape),
        ),
    )


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=box.data.shape)


class Reader:
    """A written folder: its table of contents, read once, and its tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = dcp.FileSystemReader(folder)
        metadata = self._files.read_metadata()
        self._files.set_up_storage_reader(metadata, is_coordinator=False)
        entries = metadata.state_dict_metadata.items()
        self._tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Key -> global shape of every tensor."""
        return {key: tuple(entry.size) for key, entry in self._tensors.items()}

    @torch.no_grad()
    def read(self, boxes: Sequence[Box]) -> None:
        """Fill the boxes' memory, converting to its dtype. No communication.

        Raises RuntimeError before anything is read if the folder does not hold every element of every box;
        PyTorch would leave the rest of it as it was.
        """
        by_key: dict[str, list[Box]] = {}
        for box in boxes:
            by_key.setdefault(box.key, []).append(box)
        items = [item for key, wanted in by_key.items() for item in self._items(key, wanted)]
        self._files.read_data(LoadPlan(items), _Reading(by_key)).wait()

    def _items(self, key: str, wanted: Sequence[Box]) -> list[ReadItem]:
        items = create_read_items_for_chunk_list(key, self._tensors[key], [_chunk(box) for box in wanted])
        found = sum(math.prod(item.lengths) for item in items)
        needed = sum(box.data.numel() for box in wanted)
        if found != needed:
            raise RuntimeError(
                f"{self.folder}: {key} is incomplete: it has {found} of the {needed} elements needed here"
            )
        return items


class _Reading(LoadPlanner):
    """Tells PyTorch where in this rank's memory a piece belongs."""

    def __init__(self, by_key: Mapping[str, Sequence[Box]]) -> None:
        self.by_key = by_key

    def set_up_planner(
        self,
        state_dict: STATE_DICT_TYPE,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to prepare: the reader makes the plan."""

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError("only tensors are read")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.index is not None
        tensor = self.by_key[index.fqn][index.index].data
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the piece was copied to where it belongs."""
