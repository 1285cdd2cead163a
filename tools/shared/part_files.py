"""A checkpoint's tensors in files of bounded size, which are written, and written again, one by one."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from tools.shared import resumable
from training.checkpoint.format.manifest import DamagedError, read_manifest
from training.checkpoint.format.writer import TABLE


class Sized(Protocol):
    """What is written in one go."""

    @property
    def bytes(self) -> int:
        """Of all of it."""


def in_parts[B: Sized](blocks: Iterable[B], max_file_bytes: int) -> list[list[B]]:
    """Blocks by the file that they go into; the same whatever the number of workers."""
    found: list[list[B]] = []
    size = max_file_bytes
    for block in blocks:
        if size + block.bytes > max_file_bytes:
            found.append([])
            size = 0
        found[-1].append(block)
        size += block.bytes
    return found


def part_name(number: int) -> str:
    """Of a part's file, without its ending."""
    return f"part_{number:05d}"


def is_done(folder: Path, number: int) -> bool:
    """Whether a part's file is complete: its table is written last."""
    return (folder / f"{part_name(number)}{TABLE}").is_file()


def write_parts(
    job: resumable.ConversionJob, folder: Path, parts: Sequence[Sequence[Sized]], workers: int, title: str
) -> list[str]:
    """All parts that are not done yet: the names of all of them. Raises UserError where a worker did, or died."""
    sizes = [sum(block.bytes for block in part) for part in parts]
    done = sum(size for number, size in enumerate(sizes) if is_done(folder, number))
    if done < sum(sizes):
        resumable.run(job, max(1, min(workers, len(sizes))), sum(sizes), done, title)
    return [part_name(number) for number in range(len(sizes))]


def is_committed(folder: Path) -> bool:
    """Whether an earlier run came as far as the manifest."""
    try:
        read_manifest(folder)
    except DamagedError:
        return False
    return True
