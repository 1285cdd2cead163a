"""Checkpoints without torch: real files of tensors, committed as a run's are, of sizes and contents that a test asks
for."""

import random
from pathlib import Path

from training.checkpoint import committing, folders
from training.checkpoint.committing import FilledFolder
from training.checkpoint.format.pieces import TensorGroup
from training.checkpoint.format.writer import FileWriter


def committed(
    root: Path,
    iteration: int,
    parent: str | None = None,
    *,
    seed: int = 0,
    keep: int = 9,
    sizes: tuple[int, ...] = (700, 500),
    state: str = "",
) -> Path:
    """``root/iter_N`` with a file of random bytes for each of ``sizes``: other bytes for other iterations and seeds."""
    folder = folders.begin_unfinished(root, iteration, f"{seed:08x}")
    draw = random.Random(f"{iteration} {seed}")
    for number, size in enumerate(sizes):
        group = TensorGroup((f"w{number}",), "uint8", (size,))
        data = b"".join(draw.randbytes(min(1 << 24, size - start)) for start in range(0, size, 1 << 24))
        with FileWriter(folder, f"rank_{number:05d}") as file:
            file.add(group, (0,), (size,), [memoryview(data)])
    return committing.commit(
        FilledFolder(
            folder=str(folder), writers=tuple(f"rank_{number:05d}" for number in range(len(sizes))),
            texts={folders.STATE: state or f'{{"seed": {seed}}}\n'}, about={"iteration": iteration}, keep=keep,
            parent=parent,
        )
    )[0]  # fmt: skip
