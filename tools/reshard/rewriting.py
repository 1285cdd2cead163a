"""The work: blocks into parts of bounded size, by workers, resumable part by part."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from program.errors import UserError
from program.printing import some
from tools.reshard import plan
from tools.reshard.checkpoint_source import CheckpointSource
from tools.reshard.dcp import dcp_tensors as dcp_plan
from tools.reshard.megatron import megatron_tensors as megatron_plan
from tools.reshard.options import Format, ReshardOptions
from tools.reshard.plan import ReshardPlan
from tools.reshard.sources import open_source
from tools.reshard.tensors import BLOCK_BYTES, TargetTensor, TensorBlock, Tensors, blocks, rectangles
from tools.shared import resumable
from tools.shared.part_files import in_parts, is_done, part_name, write_parts
from training.checkpoint.format.pieces import ITEM_BYTES, TensorGroup
from training.checkpoint.format.writer import FileWriter


class Writer(Protocol):
    """One part's file; ``format.writer.FileWriter`` is one."""

    def add(
        self, group: TensorGroup, offset: tuple[int, ...], shape: tuple[int, ...], buffers: Sequence[memoryview]
    ) -> None:
        """Append a piece."""


@dataclass(kw_only=True, frozen=True)
class Rewriting:
    """One rewriting, as every worker works it out from the same source."""

    source: Path
    folder: Path
    """The unfinished target."""
    options: ReshardOptions

    def run_worker(self, worker: int, workers: int, report: resumable.Report) -> None:
        """Every ``workers``-th part from number ``worker`` on, but for those that are done."""
        source = open_source(self.source, self.options)
        try:
            parts = parts_of(planned(source, self.options), self.options.max_file_bytes)
            for number, part in list(enumerate(parts))[worker::workers]:
                if not is_done(self.folder, number):
                    self._write(number, part, source.files, report)
        finally:
            source.files.close()

    def _write(self, number: int, part: Sequence[TensorBlock], files: Tensors, report: resumable.Report) -> None:
        with writer_of(self.options)(self.folder, part_name(number)) as file:
            for block in part:
                rectangle = (block.offset, block.shape)
                words = [target.words(files, rectangle) for target in block.targets]
                first = block.targets[0]
                group = TensorGroup(tuple(target.key for target in block.targets), first.dtype, first.shape)
                file.add(group, *rectangle, [memoryview(each.reshape(-1).view(np.uint8)) for each in words])
                report(block.bytes)


def rewrite(
    source: CheckpointSource, planned: ReshardPlan, folder: Path, options: ReshardOptions, workers: int
) -> list[str]:
    """Write every part that is not done yet: the names of all of them, without their endings."""
    job = Rewriting(source=source.folder, folder=folder, options=options)
    return write_parts(job, folder, parts_of(planned, options.max_file_bytes), workers, "reshard")


PLANS: dict[Format, Callable[[CheckpointSource, ReshardOptions], ReshardPlan]] = {
    "triplane": plan.plan,
    "megatron": megatron_plan.plan,
    "dcp": dcp_plan.plan,
}


def planned(source: CheckpointSource, options: ReshardOptions) -> ReshardPlan:
    """What to write, in the form that is asked for. Raises UserError for the state of a user's own optimizer."""
    own = source.config.optimizer.optimizer
    if own != "adam" and not options.drop_optimizer:
        raise UserError(
            f'{source.folder}: optimizer.optimizer is "{own}", and tools.reshard rewrites AdamW\'s state only. Add '
            "--drop_optimizer for the weights alone."
        )
    return PLANS[options.format](source, options)


def writer_of(options: ReshardOptions) -> Callable[[Path, str], AbstractContextManager[Writer]]:
    """Of the form's files. Others' need torch, so it is imported where it is wanted."""
    if options.format == "triplane":
        return FileWriter
    from tools.reshard.megatron.blobs import BlobWriter

    return BlobWriter


def parts_of(plan: ReshardPlan, max_file_bytes: int) -> list[list[TensorBlock]]:
    """Blocks by the file that they go into; the same whatever the number of workers."""
    return in_parts(_blocks(plan, max_file_bytes), max_file_bytes)


def _blocks(plan: ReshardPlan, max_file_bytes: int) -> Iterator[TensorBlock]:
    for group in plan.groups:
        yield from blocks(group, min(BLOCK_BYTES, max_file_bytes))


def job_of(source: CheckpointSource, options: ReshardOptions) -> dict[str, Any]:
    """What an unfinished folder is made from."""
    return {"source": str(source.folder.resolve()), "files": source.fingerprint, **options.as_json(), "version": 1}


# ---- the target against the source, element by element, moments included


STEP_BYTES = 24 << 20
"""Of a rectangle that is compared: other ones than were written, so that an error at their edges shows."""


def verify(source: CheckpointSource, plan: ReshardPlan, files: Tensors, target: Path) -> str:
    """That the target has each planned tensor, no other, and the source's numbers in it: a sentence on what it found.

    files: the target, opened by the reader of its format. Raises UserError with the tensors that differ.
    """
    wanted = {each.key: each for group in plan.groups for each in group}
    found = files.tensors
    differing = [f"{key} (missing)" for key in wanted if key not in found]
    differing += [f"{key} (not of the source)" for key in found if key not in wanted]
    for key, each in wanted.items():
        if key in found:
            info = found[key]
            if (info.dtype, tuple(info.shape)) != (each.dtype, each.shape):
                differing.append(f"{key} ({info.dtype} {list(info.shape)}, expected {each.dtype} {list(each.shape)})")
            elif (at := _first_difference(each, source.files, files)) is not None:
                differing.append(f"{key} (from {list(at)} on)")
    if differing:
        raise UserError(f"{target} differs from {source.folder} in {some(differing)}. Do not use it.")
    return f"verified: {len(wanted):,} tensors of {target} are those of {source.folder}, bit by bit."


def _first_difference(target: TargetTensor, source: Tensors, files: Tensors) -> tuple[int, ...] | None:
    item = ITEM_BYTES[target.dtype]
    for offset, shape in rectangles(target.shape, item, STEP_BYTES, apart=int(target.stacked)):
        expected = target.words(source, (offset, shape))
        found = np.empty(shape, dtype=expected.dtype)
        files.read(target.key, offset, found)
        if not np.array_equal(expected, found):
            return offset
    return None
