"""tools.convert against dd, and how much memory a worker needs for a model that no laptop holds."""

import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from models.families import SHAPES
from models.hf.shapes import write_config
from models.hf.tables import entries
from models.shapes import GPTShape
from tests.benchmarks.checkpoint import disk, memory
from tools.convert.importing import import_folder
from training.checkpoint.format.writer import FileWriter

SHARD_BYTES = 5 * 10**9


def against_dd(shape: GPTShape, folder: Path, rounds: int) -> dict[str, Any]:
    """Medians of a copy by dd, an import and an export with one worker, in turns; sources are not in memory."""
    source = folder / "hf"
    size = write_folder(source, shape, sparse=False)
    found: dict[str, list[float]] = {"dd_copy_s": [], "import_s": [], "export_s": []}
    for number in range(rounds + 1):
        seconds = {
            "dd_copy_s": _copy(source, folder / "copy"),
            "import_s": _convert("import", source, folder / "checkpoint", "--no_logits"),
            "export_s": _convert("export", folder / "checkpoint", folder / "again"),
        }
        for name in ("copy", "checkpoint", "again"):
            shutil.rmtree(folder / name)
        if number:
            for name, value in seconds.items():
                found[name].append(value)
    shutil.rmtree(source)
    return {"bytes": size, **{name: statistics.median(values) for name, values in found.items()}}


def _copy(source: Path, target: Path) -> float:
    disk.forget(source.iterdir())
    target.mkdir()
    return sum(disk.write_s(path, target / path.name) for path in sorted(source.glob("*.safetensors")))


def _convert(direction: str, source: Path, target: Path, *flags: str) -> float:
    """As a user does it: a fresh interpreter and its imports are in it."""
    disk.forget(path for path in source.iterdir())
    began = time.perf_counter()
    command = [sys.executable, "-m", "tools.convert", direction, str(source), str(target), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def worker_memory(shape_name: str, folder: Path) -> dict[str, Any]:
    """An import of a model's shapes by one worker, from files of holes, whose output is dropped after hashing."""
    shape = SHAPES[shape_name]
    size = write_folder(folder / "hf", shape, sparse=True)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_import_and_drop, args=(folder, theirs))
    began = time.perf_counter()
    process.start()
    theirs.close()
    grown = ours.recv()
    process.join()
    shutil.rmtree(folder)
    seconds = time.perf_counter() - began
    return {"shape": shape_name, "bytes": size, "seconds": seconds, "peak_anonymous_bytes": grown}


def _import_and_drop(folder: Path, result: Connection) -> None:
    """In a process of its own: its whole peak, interpreter and libraries included."""
    with mock.patch.object(FileWriter, "_append", _hash_and_drop):
        import_folder(folder / "hf", folder / "checkpoint", dtype=None, workers=1, max_file_bytes=4 * 10**9)
    result.send(memory.resident("VmHWM"))


def _hash_and_drop(self: FileWriter, data: memoryview) -> str:
    import xxhash

    self._position += data.nbytes
    return xxhash.xxh3_64(data).hexdigest()


def write_folder(folder: Path, shape: GPTShape, *, sparse: bool) -> int:
    """A Hugging Face folder in bf16 with every tensor of ``shape``; its bytes. sparse: of holes, which read as 0."""
    folder.mkdir(parents=True)
    model_type, values = write_config(shape)
    (folder / "config.json").write_text(json.dumps(values))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    sizes = {name: size for entry in entries(model_type, shape) for name, size in entry.their_shapes().items()}
    for name, size in sizes.items():
        if filled > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = size
        filled += 2 * int(np.prod(size, dtype=np.int64))
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(_write_shard(folder / name, shard, sparse) for name, shard in zip(names, shards, strict=True))


def _write_shard(path: Path, shard: dict[str, tuple[int, ...]], sparse: bool) -> int:
    """https://huggingface.co/docs/safetensors, "Format": length of the table, table, bytes."""
    table, position = {}, 0
    for name, size in shard.items():
        count = 2 * int(np.prod(size, dtype=np.int64))
        table[name] = {"dtype": "BF16", "shape": size, "data_offsets": [position, position + count]}
        position += count
    header = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        if sparse:
            file.truncate(8 + len(header) + position)
        else:
            random = np.random.default_rng(1)
            for start in range(0, position, 1 << 24):
                words = random.integers(0, 1 << 15, min(1 << 24, position - start) // 2, dtype=np.uint16)
                file.write((words & 0x3FFF).tobytes())  # small positive numbers: no bit pattern is a NaN
    return position
