"""The preprocessing program as a process, what it wrote, and what Megatron's would."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from programs import Program
from training.watchdog.process import lives
from waiting import until

ROOT = Path(__file__).parents[2]


def megatron_files(texts: list[str], encode, eod: int, vocab_size: int, folder: Path) -> tuple[bytes, bytes]:
    """What Megatron's tools/preprocess_data.py --append-eod writes: its loop, with megatron-core's own writer."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    folder.mkdir()
    builder = IndexedDatasetBuilder(str(folder / "x.bin"), dtype=DType.optimal_dtype(vocab_size))
    for text in texts:
        ids = list(encode(text))
        if ids:
            builder.add_document(np.array([*ids, eod]), [len(ids) + 1])
    builder.finalize(str(folder / "x.idx"))
    return (folder / "x.bin").read_bytes(), (folder / "x.idx").read_bytes()


def shard_bytes(prefix: Path) -> tuple[bytes, bytes]:
    """`.bin` and `.idx`."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def results(folder: Path) -> dict[str, bytes]:
    """All files in a folder that are results."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def process(*arguments: object) -> Program:
    """The program, started, in a process of its own."""
    said = Path(tempfile.mkdtemp()) / "said"
    return Program([str(one) for one in arguments], said, module="tools.preprocess")


def interpreter(*arguments: object, **more: object) -> subprocess.Popen:
    """The program, started in an interpreter of its own."""
    command = [sys.executable, "-m", "tools.preprocess", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def wait_for_end(workers: Sequence[psutil.Process]) -> None:
    """A zombie has ended: init may leave it so for a second, and psutil.wait_procs would wait for that."""
    until(lambda: not any(lives(worker.pid, None) for worker in workers), within_s=20)
