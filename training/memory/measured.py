"""Predicted against measured memory, said once after the first steps of every start."""

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from models.costs.cases import MemoryCase
from models.costs.predict import Predicted, of_stage, size
from models.layers.fp8_weights import stored
from models.layers.spec import has_transformer_engine
from models.shapes import GPTShape
from parallel.ddp import Chunks
from parallel.fsdp import FullyShardedChunk
from parallel.groups import Ranks
from program.untrusted import read_text
from training.checkpoint.agreement import gathered_rows
from training.config.run_config import RunConfig
from training.loop import Callback
from training.memory.planned import Modules, as_case
from training.progress import Progress
from training.step import StepResult

AFTER = 3
"""Steps of a start after which it is said: the first allocates the optimizer's moments, allocators settle."""
_RESET_PEAK = "5"
"""proc(5), clear_refs: set the peak resident set to the current one."""


class MeasuredBytes(NamedTuple):
    """Bytes of one rank, -1.0 for what is not known. All floats: they travel in one collective."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """A GPU: the allocator's peak above all else here. A CPU: how far the process grew within a step."""
    workspace: float
    """What CUDA's allocator holds between steps beside the first three: of libraries that allocate by torch, such as
    Transformer Engine's 32 MiB for matrix products."""
    reserved: float
    """By CUDA's allocator."""
    card: float
    host: float = 0.0
    """In the host's memory: what torch has pinned at most, each tensor rounded up to a power of two, and what of the
    optimizer's state is not pinned."""

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + max(0.0, self.activations)


class MemoryReport(Callback):
    """One line on the rank that holds most, after ``AFTER`` steps or at the end of a shorter start. Collective."""

    def __init__(
        self,
        config: RunConfig,
        shape: GPTShape,
        chunks: Chunks,
        optimizer: MegatronOptimizer,
        ranks: Ranks,
        note: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        """note: keeps both, on rank 0: ``run_dir.history.Note``."""
        self.config, self.shape, self.chunks, self.optimizer, self.ranks = config, shape, chunks, optimizer, ranks
        self.note = note
        self.steps, self.said = 0, False
        self.peak = CardPeak(ranks.device) if ranks.device.type == "cuda" else ProcessPeak()

    def before_step(self, progress: Progress) -> None:
        if not self.said:
            self.peak.before_step(self.steps)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if self.said:
            return
        self.peak.after_step(self.steps)
        self.steps += 1
        if self.steps == AFTER:
            self._say()

    def stop(self, progress: Progress, reason: str) -> None:
        if self.steps and not self.said:
            self._say()

    def _say(self) -> None:
        self.said = True
        held = counted(self.chunks, self.optimizer)
        host = on_the_host(self.optimizer, self.ranks.device)
        own = MeasuredBytes(*map(float, held), *self.peak.read(held.total, staying(self.chunks, held)))._replace(
            host=host
        )
        table = [MeasuredBytes(*row) for row in gathered_rows(own, self.ranks)]
        rank = max(range(len(table)), key=lambda number: (table[number].total, -number))
        stage = self.ranks.layout.coordinates(rank).pp
        expected = of_stage(own_case(self.config, self.shape, self.ranks), self.shape, stage)
        self.ranks.say(sentence(rank, expected, table[rank], cuda=self.ranks.device.type == "cuda"))
        names = ("weights", "gradients", "optimizer", "activations", "workspace", "host")
        predicted = {name: getattr(expected, name) for name in names}
        self.note("memory", rank=rank, stage=expected.stage, predicted=predicted, measured=table[rank]._asdict())


def modules_of(ranks: Ranks) -> Modules:
    """What this rank's blocks are made of."""
    return Modules(cuda=ranks.device.type == "cuda", transformer_engine=has_transformer_engine(ranks.device))


def own_case(config: RunConfig, shape: GPTShape, ranks: Ranks) -> MemoryCase:
    """This run, as bytes are predicted of it."""
    return as_case(config, ranks.layout.world_size, shape, modules_of(ranks))


def sentence(rank: int, expected: Predicted, found: MeasuredBytes, *, cuda: bool) -> str:
    """The line: a sum and a share in percent only of what is the same thing on both sides."""
    names = ("weights", "gradients", "optimizer", "activations")
    predicted = ", ".join(f"{name} {size(getattr(expected, name))}" for name in names)
    line = f"memory of the fullest rank (rank {rank}, stage {expected.stage}): predicted {size(expected.tensors)} "
    line += f"({predicted}), "
    if cuda and found.activations >= 0:
        counts = ", ".join(f"{name} {size(getattr(found, name))}" for name in names)
        line += f"measured {size(found.total)} ({_off(found.total, expected.tensors)}: {counts})"
        line += f", and {size(found.workspace)} of libraries"
        if expected.host:
            line += f"; in the host's memory predicted {size(expected.host)}, measured {size(found.host)}"
        return f"{line}; the allocator keeps {size(found.reserved)} of the card's {size(found.card)}"
    states = expected.tensors - expected.activations
    line += f"measured {size(found.states)} of weights, gradients and optimizer ({_off(found.states, states)})"
    if cuda:
        return f"{line}; its peak came before the first step, so activations are not measured"
    if found.activations < 0:
        return f"{line}; activations are not measured"
    return f"{line}, and the process grew by {size(found.activations)} within a step (activations, libraries)"


def _off(found: float, expected: float) -> str:
    return f"{found / expected - 1:+.1%}"


class CardPeak:
    """CUDA's allocator knows its peak; nothing is reset, since the metrics read the same counter."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before, self.between = device, 0, 0

    def before_step(self, steps: int) -> None:
        if steps == 0:
            self.before = torch.cuda.max_memory_allocated(self.device)

    def after_step(self, steps: int) -> None:
        self.between = torch.cuda.memory_allocated(self.device)

    def read(self, states: int, stays: int) -> Sequence[float]:
        """Activations, workspace, reserved, card. A peak of building or loading tells nothing of activations.

        stays: bytes of the states that are there between steps, too.
        """
        peak, workspace = torch.cuda.max_memory_allocated(self.device), max(0, self.between - stays)
        card = torch.cuda.get_device_properties(self.device).total_memory
        activations = float(peak - states - workspace) if peak > self.before else -1.0
        return activations, workspace, torch.cuda.max_memory_reserved(self.device), card


class ProcessPeak:
    """Largest growth of this process' resident memory within one step, the first aside, by Linux' high-water mark.

    What was freed before is given back to the system first, or growth would fill it unseen; that costs milliseconds.
    """

    def __init__(self) -> None:
        self.before, self.grown = 0, -1

    def before_step(self, steps: int) -> None:
        if steps == 0:
            return
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
            self.before = _resident("VmRSS")
        except (OSError, AttributeError, StopIteration):  # no Linux, no glibc, or a container that forbids it
            self.before = 0

    def after_step(self, steps: int) -> None:
        if self.before:
            self.grown = max(self.grown, _resident("VmHWM") - self.before)

    def read(self, states: int, stays: int) -> Sequence[float]:
        """Activations; there is no allocator to ask."""
        return float(self.grown), -1.0, -1.0, -1.0


def _resident(name: str) -> int:
    lines = read_text(Path("/proc/self/status")).splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Counted(NamedTuple):
    """Bytes of one rank."""

    weights: int
    gradients: int
    """The buffers of DDP, padding included."""
    optimizer: int
    """Main weights that are not the weights themselves, and the moments."""

    @property
    def total(self) -> int:
        return sum(self)


def _of_shards(chunks: Sequence[FullyShardedChunk], optimizer: MegatronOptimizer) -> Counted:
    """fp32 shards are the weights, or the optimizer's main ones where weights are in 16 bits or, in a step, whole."""
    shards = [one.tensor for chunk in chunks for one in chunk.shards.values()]
    held_bytes, dtype = sum(shard.nbytes for shard in shards), chunks[0].config.params_dtype
    whole = sum(param.numel() * dtype.itemsize for chunk in chunks for param in chunk.sharded.values())
    kept = chunks[0].keeps_weights
    if not any(shard.device == chunks[0].device for shard in shards):  # which are on the host, and so is their state
        return Counted(weights=whole * kept, gradients=0, optimizer=0)
    is_main = kept or dtype != torch.float32
    here = (one for one in _optimizer_tensors(optimizer) if one.device == chunks[0].device)  # averages may not be
    return Counted(
        weights=whole if kept else 0 if is_main else held_bytes,
        gradients=held_bytes,
        optimizer=_fresh(here, {_storage(shard) for shard in shards}) + held_bytes * is_main,
    )


def staying(chunks: Chunks, held: Counted) -> int:
    """Bytes of these that are there between steps, too: ZeRO-2 gathers its weights in each."""
    return held.total - held.weights * any(getattr(chunk, "keeps_weights", False) for chunk in chunks)


def counted(chunks: Chunks, optimizer: MegatronOptimizer) -> Counted:
    """From the tensors themselves; views of one storage count once, and as what they are first in this order."""
    parameters = [tensor for chunk in chunks for parameter in chunk.parameters() for tensor in stored(parameter)]
    sharded = [chunk for chunk in chunks if isinstance(chunk, FullyShardedChunk)]
    if sharded:
        return _of_shards(sharded, optimizer)
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gathered = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    shared = {_storage(buffer.grad_data) for buffer in buffers}  # weights in mxfp8 are gathered in gradients' memory
    seen = {_storage(tensor) for tensor in (*parameters, *gathered)} - shared
    gradients = _fresh((buffer.grad_data for buffer in buffers), seen)
    return Counted(
        weights=sum(tensor.nbytes for tensor in parameters),
        gradients=gradients,
        optimizer=_fresh((one for one in _optimizer_tensors(optimizer) if one.device == parameters[0].device), seen),
    )


def on_the_host(optimizer: MegatronOptimizer, device: torch.device) -> float:
    """``MeasuredBytes.host``: on a CPU nothing is elsewhere."""
    if device.type == "cpu":
        return 0.0
    state = [one for one in _optimizer_tensors(optimizer) if one.device.type == "cpu" and not one.is_pinned()]
    return float(torch.cuda.host_memory_stats()["allocated_bytes.peak"] + _fresh(state, set()))


def _fresh(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages that have not been seen yet."""
    found = 0
    for tensor in tensors:
        key = _storage(tensor)
        if key not in seen:
            seen.add(key)
            found += tensor.untyped_storage().nbytes()
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Main weights, state and averages of each optimizer in the chain; those on a rank without parameters have none."""
    chained: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    for one in chained:
        inner = getattr(one, "optimizer", None)
        if inner is None:
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for averages in getattr(one, "averages", {}).values():
            yield from averages.values()
        for state in inner.state.values():
            yield from (piece for value in state.values() if isinstance(value, Tensor) for piece in stored(value))
