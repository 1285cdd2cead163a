"""A checkpoint becomes a Hugging Face folder: our rows into sharded safetensors."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.tokenizers import base
from models.hf.files import CARRIED, CARRIED_BYTES, present, read_configuration
from models.hf.row_layouts import Strip
from models.hf.shapes import without_effect, write_config
from models.hf.tables import Entry, constants, copies, entries
from models.resolve import resolve
from models.shapes import GPTShape
from program.durable import replace_file
from program.errors import UserError
from program.schema import shown
from program.untrusted import JSON_BYTES, read_bytes, read_text
from tools.convert.generation import more_files, with_ends
from tools.shared import resumable
from tools.shared.carried_tokenizer import own_ends
from tools.shared.checked_checkpoint import CheckedReader, check_files, check_is_checkpoint, read_config
from tools.shared.dtypes import TORCH_DTYPES, cast, from_numbers
from tools.shared.hf_folder.headers import INDEX, SINGLE, encode_header
from tools.shared.hf_folder.row_blocks import BLOCK_BYTES
from tools.shared.part_files import in_parts
from tools.shared.written import check_new
from training.checkpoint.chosen_weights import ChosenWeights, prefix_of
from training.checkpoint.format import tables
from training.checkpoint.format.manifest import MANIFEST
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS, asked_ahead
from training.checkpoint.format.writer import WriteBack
from training.checkpoint.state import read_state
from training.config.run_config import RunConfig

MASTER = "optimizer.state.param."
"""The optimizer's fp32 weights; where they are, a checkpoint has no others."""

OTHER = ("optimizer.", "rng.", "fp8.")
"""What keys of tensors that are no weights begin with."""


@dataclass(slots=True, frozen=True)
class ExportedTensor:
    """One tensor of theirs, and where its rows are in ours."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    entry: Entry
    strips: Sequence[Strip]
    """By their rows."""
    constant: float | None = None
    """What it holds, where it is a number of the architecture and no weight."""

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]


class Weights:
    """A checkpoint's weights by row, wherever they are in it; none that is damaged. Close, or use as a context.

    prefix: of those that are trained (training/checkpoint/chosen_weights.py).
    """

    def __init__(self, folder: Path, prefix: str = MASTER) -> None:
        self.reader, self.prefix = CheckedReader(folder), prefix

    def stored(self, entry: Entry) -> str:
        """The key under which a parameter lies. Raises UserError where it does not, or has another shape."""
        for key in (entry.key, self.prefix + entry.key):
            if key in self.reader.tensors:
                if (found := self.reader.tensors[key].shape) != entry.shape:
                    raise UserError(
                        f"{self.reader.folder}: {key} is {list(found)}; its config.toml means {list(entry.shape)}."
                    )
                return key
        raise UserError(f"{self.reader.folder}: has no {entry.key}, which its config.toml means.")

    def dtype(self, entry: Entry) -> str:
        """As it is stored."""
        return self.reader.tensors[self.stored(entry)].dtype

    def rows(self, entry: Entry, first: int, count: int, dtype: str) -> np.ndarray:
        """Rows of a parameter, counted over all dims but the last, as words of ``dtype``: [count, columns].

        They lie within one expert, or are whole experts.
        """
        key = self.stored(entry)
        stored = self.reader.tensors[key].dtype
        words = np.empty((count, entry.columns), dtype=WORDS[ITEM_BYTES[stored]])
        offset, rectangle = entry.rectangle(first, count)
        self.reader.read(key, offset, words.reshape(rectangle))
        return cast(words, stored, dtype)

    def ask_for(self, target: ExportedTensor) -> None:
        """Have the disk fetch what ``rows`` will be asked for."""
        for strip in target.strips:
            rectangle = target.entry.rectangle(strip.row, strip.rows)
            self.reader.ask_for(self.stored(target.entry), *rectangle)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()


@dataclass(kw_only=True, frozen=True)
class ExportPlan:
    """One export, as every worker works it out from the same checkpoint."""

    source: Path
    folder: Path
    """The unfinished folder."""
    prefix: str
    """As of ``Weights``."""
    model_type: str
    shape: GPTShape
    dtype: str
    max_shard_bytes: int

    @cached_property
    def shards(self) -> list[list[ExportedTensor]]:
        """Tensors by the file that they go into; the same whatever the number of workers."""
        with Weights(self.source, self.prefix) as weights:
            found = list(targets(self.model_type, self.shape, weights, self.dtype))
        beside = constant_targets(self.model_type, self.shape, self.dtype, found[0])
        return in_parts([*found, *beside], self.max_shard_bytes)

    def name(self, number: int) -> str:
        """Of a shard's file."""
        count = len(self.shards)
        return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def is_done(self, number: int) -> bool:
        """Whether a shard is complete: only then it has its name."""
        return (self.folder / self.name(number)).is_file()

    def run_worker(self, worker: int, workers: int, report: resumable.Report) -> None:
        """Every ``workers``-th shard from number ``worker`` on, but for those that are done."""
        with Weights(self.source, self.prefix) as weights:
            for number, shard in list(enumerate(self.shards))[worker::workers]:
                if not self.is_done(number):
                    write_shard(self.folder / self.name(number), shard, weights, report)


def export_folder(
    source: Path,
    target: Path,
    *,
    dtype: str | None,
    workers: int,
    max_shard_bytes: int,
    like: Path | None,
    chosen: ChosenWeights = "trained",
    accept: resumable.Accept | None = None,
) -> list[str]:
    """Write ``target``, which transformers loads: notes for the user.

    like: the Hugging Face folder to take the tokenizer's files from, where the checkpoint carries none. accept: called
    with the folder before it gets its name; what it says becomes notes. Raises UserError for a model that transformers
    does not have, before anything is written; for a damaged checkpoint, and where ``accept`` raises work.Rejected,
    nothing is left of the folder.
    """
    check_new(target)
    check_is_checkpoint(source)
    check_files(source)
    prefix = prefix_of(chosen, source)
    config = read_config(source)
    shape = resolve(config.model, vocabulary(config, source))
    model_type, theirs = write_config(shape)
    dtype = dtype or default_dtype(source)
    from_folder = like if like is not None else source
    carried = present(from_folder, CARRIED)
    if "tokenizer.tiktoken" in carried:  # whose description is called tokenizer.json; transformers reads neither
        carried = {name: path for name, path in carried.items() if path.stem != "tokenizer"}
    tokenizer = any(name.startswith(("tokenizer.", "vocab", "tekken")) for name in carried)
    if like is not None and not tokenizer:
        raise UserError(f"--like {like}: expected a Hugging Face folder with a tokenizer; found none of its files.")
    kept = without_effect(read_configuration(from_folder), model_type) if "config.json" in carried else {}
    ends, notes = own_ends(source, config, read_state(source).entries) if like is None else (None, [])
    written = with_ends({"pad_token_id": None, **kept, **theirs}, carried, ends)  # its default may be no id
    more = more_files(written, carried, ends)
    fingerprint: dict[str, Any] = {
        "source": str(source.resolve()),
        "manifest": read_text(source / MANIFEST, JSON_BYTES),
        "version": 2,
    }
    fingerprint |= {} if chosen == "trained" else {"weights": chosen}
    fingerprint |= {"dtype": dtype, "max_shard_bytes": max_shard_bytes, "carried": sorted(map(str, carried.values()))}
    with Weights(source, prefix) as weights:
        check(weights, model_type, shape)
    with resumable.unfinished(target, fingerprint) as folder:
        job = ExportPlan(
            source=source,
            folder=folder,
            prefix=prefix,
            model_type=model_type,
            shape=shape,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )
        sizes = [sum(tensor.bytes for tensor in shard) for shard in job.shards]
        done = sum(size for number, size in enumerate(sizes) if job.is_done(number))
        resumable.run(job, min(workers, len(sizes)), sum(sizes), done, "export")
        add_files(job, written, carried, more)
        notes += accept(folder) if accept is not None else []
        resumable.finish(folder, target)
    if not tokenizer:
        notes.append("the checkpoint carries no tokenizer that transformers reads; --like HF_FOLDER takes one along.")
    return notes


def default_dtype(folder: Path) -> str:
    """The dtype that a checkpoint's model computes in, by torch's name."""
    return TORCH_DTYPES[read_config(folder).precision.dtype]


def vocabulary(config: RunConfig, folder: Path) -> int | None:
    """Ids of the run's tokenizer, where the configuration leaves the vocabulary to it."""
    if config.model.vocab_size is not None:
        return None
    return base.load(config.data, folder, lambda _: None).vocab_size


def check(weights: Weights, model_type: str, shape: GPTShape) -> None:
    """Every weight of the checkpoint has a place there. Raises UserError with those that have none."""
    keys = {entry.key for entry in entries(model_type, shape)}
    stored = {key.removeprefix(MASTER) for key in weights.reader.tensors}
    if extra := sorted(key for key in stored - keys if not key.startswith(OTHER)):
        names = ", ".join(shown(key) for key in extra[:5])
        file = weights.reader.folder / tables.INDEX
        raise UserError(f"{file} lists {names}, for which transformers' {model_type} has no place.")


def targets(model_type: str, shape: GPTShape, weights: Weights, dtype: str) -> Iterator[ExportedTensor]:
    """Every tensor of theirs, in the order of our parameters."""
    found = {entry.name: entry for entry in entries(model_type, shape)}
    for entry in found.values():
        kept = weights.dtype(entry) if entry.keeps_dtype else dtype
        shapes = entry.their_shapes()
        for name, strips in entry.by_their_name().items():
            yield ExportedTensor(name, shapes[name], kept, entry, strips)
    if shape.mtp_num_layers:  # the tied output layer, in contrast, is not in their files
        for name, ours in copies(model_type, shape).items():
            if ours in found and not name.startswith("lm_head"):
                ((_, their_shape),) = found[ours].their_shapes().items()
                yield ExportedTensor(name, their_shape, dtype, found[ours], found[ours].strips)


def constant_targets(
    model_type: str, shape: GPTShape, dtype: str, any_other: ExportedTensor
) -> Iterator[ExportedTensor]:
    """Numbers beside weights, which transformers would not load without."""
    for name, value in constants(model_type, shape).items():
        yield replace(any_other, name=name, shape=(), dtype=dtype, strips=(), constant=value)


def write_shard(path: Path, shard: Sequence[ExportedTensor], weights: Weights, report: resumable.Report) -> None:
    """One safetensors file: length of the table of contents, the table, the tensors' bytes; named when durable."""
    header = encode_header((target.name, target.dtype, target.shape) for target in shard)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(header)
        disk = WriteBack(file.fileno())
        for words in one_ahead(shard_words(shard, weights)):
            file.write(memoryview(words.reshape(-1).view(np.uint8)))
            disk.reached(file.tell())
            report(words.nbytes)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def shard_words(shard: Sequence[ExportedTensor], weights: Weights) -> Iterator[np.ndarray]:
    """All of a file's tensors, in order, in blocks of rows."""
    for target in asked_ahead(shard, lambda target: target.bytes, weights.ask_for):
        yield from target_words(target, weights)


def one_ahead[T](items: Iterator[T]) -> Iterator[T]:
    """The items, each made by a thread while the one before it is used: reading and hashing beside writing."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


def target_words(target: ExportedTensor, weights: Weights) -> Iterator[np.ndarray]:
    """A tensor of theirs, in order, in blocks of rows."""
    entry = target.entry
    if target.constant is not None:
        yield from_numbers(np.array([[target.constant]], np.float32), target.dtype)
        return
    if entry.all_experts or entry.turned or entry.unsqueezed == 0:
        yield from _turned_words(target, weights)
        return
    step = max(1, BLOCK_BYTES // (target.entry.columns * ITEM_BYTES[target.dtype]))
    for strip in target.strips:
        for start in range(0, strip.rows, step):
            yield weights.rows(target.entry, strip.row + start, min(step, strip.rows - start), target.dtype)


def _turned_words(target: ExportedTensor, weights: Weights) -> Iterator[np.ndarray]:
    """Rows of their file that are not our rows, in blocks of one expert, or all at once."""
    entry = target.entry
    rows = entry.unit if entry.all_experts else math.prod(target.shape) // entry.columns
    count = target.shape[0] if entry.all_experts else 1
    for unit in range(count):
        block = np.empty((rows, entry.columns), dtype=WORDS[ITEM_BYTES[target.dtype]])
        first = unit * rows
        for strip in target.strips:
            if first <= strip.start < first + rows:
                theirs = slice(strip.theirs.start - first, strip.theirs.stop - first, strip.step)
                block[theirs] = weights.rows(entry, strip.row, strip.rows, target.dtype)
        turned = block.T if entry.transposed else block
        yield np.ascontiguousarray(turned).reshape(target.shape[0] // count, -1)


def add_files(job: ExportPlan, config: dict[str, Any], carried: dict[str, Path], more: dict[str, bytes]) -> None:
    """The index of the shards, ``config.json`` and the carried files. more: in place of carried files. The index comes
    last."""
    for name, path in carried.items():
        if name != "config.json" and name not in more:
            replace_file(job.folder / name, read_bytes(path, CARRIED_BYTES))
    for name, data in more.items():
        replace_file(job.folder / name, data)
    text = json.dumps({**config, "dtype": job.dtype, "torch_dtype": job.dtype}, indent=2, sort_keys=True)
    replace_file(job.folder / "config.json", (text + "\n").encode())
    if len(job.shards) > 1:
        files = {target.name: job.name(number) for number, shard in enumerate(job.shards) for target in shard}
        size = sum(target.bytes for shard in job.shards for target in shard)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
        replace_file(job.folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
