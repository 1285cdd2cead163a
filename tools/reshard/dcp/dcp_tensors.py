"""Which tensors ``--format dcp`` writes, by the names of transformers' modules or torchtitan's, and from what."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.resolve import resolve
from tools.reshard.checkpoint_source import STATE, CheckpointSource
from tools.reshard.named_weights import PLAIN, Geometry, MappedOrigin, NamedWeight, Naming, RowRun, SourceTensor
from tools.reshard.naming import newest_torchtitan, written_naming
from tools.reshard.options import ReshardOptions
from tools.reshard.plan import KEEPS_DTYPE, ReshardPlan, repadded
from tools.reshard.tensors import Rectangle, RowRange, SourceRows, TargetTensor, Tensors
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True, frozen=True)
class ConstantOrigin:
    """One number. Implements ``tensors.RowRange``."""

    number: float
    dtype: str = "float32"

    def rows_read(self, source: Tensors, rectangle: Rectangle) -> np.ndarray:
        """A rectangle as words of ``dtype``."""
        return np.full(rectangle[1], self.number, dtype=np.float32).view(WORDS[ITEM_BYTES[self.dtype]])


@dataclass(slots=True, frozen=True)
class LaidOutOrigin:
    """Rows in the dims that theirs has. Implements ``tensors.RowRange``."""

    inner: RowRange
    geometry: Geometry
    """Of theirs."""

    @property
    def dtype(self) -> str:
        """Torch's name."""
        return self.inner.dtype

    def rows_read(self, source: Tensors, rectangle: Rectangle) -> np.ndarray:
        """A rectangle as words of ``dtype``."""
        offset, shape = (self.geometry.core(dims) for dims in rectangle)
        words = self.inner.rows_read(source, (self._ours(offset), self._ours(shape)))
        words = words.swapaxes(-1, -2) if self.geometry.transposed else words
        return np.ascontiguousarray(words).reshape(rectangle[1])

    def _ours(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        return (*dims[:-2], dims[-1], dims[-2]) if self.geometry.transposed else dims


def plan(source: CheckpointSource, options: ReshardOptions) -> ReshardPlan:
    """A DCP checkpoint from a source. Raises UserError for a model that their classes do not have.

    Weights are the optimizer's fp32 ones, as FSDP keeps them; another dtype rounds them alone.
    """
    config = repadded(source, options)
    vocab_size = source.real_vocab_size
    shape = resolve(config.model, vocab_size)
    naming = written_naming(options.names, shape)
    weights = source.weights()
    prefix = "" if naming.family == "torchtitan" else "model."
    step = float(_step(source))
    targets: list[TargetTensor] = []
    for name, parts in _by_name(naming).items():
        size = naming.shapes[name]
        spelled = newest_torchtitan(name, shape) if naming.family == "torchtitan" else name
        targets.append(_target(prefix + spelled, size, parts, weights, options.dtype))
        states = [] if options.drop_optimizer else list(_states(source, parts))
        for moment, origins in states:
            targets.append(_target(f"optimizer.state.{spelled}.{moment}", size, parts, origins, None))
        if states:
            key = f"optimizer.state.{spelled}.step"
            targets.append(TargetTensor(key, "float32", (), (ConstantOrigin(step),)))
    targets += [
        TargetTensor(prefix + name, options.dtype or "float32", (), (ConstantOrigin(number),))
        for name, number in naming.constants.items()
    ]
    state = dataclasses.replace(source.state, optimizer={}) if options.drop_optimizer else source.state
    return ReshardPlan(groups=tuple((target,) for target in targets), state=state, config=config)


def _step(source: CheckpointSource) -> int:
    step = source.state.optimizer.get("step")
    return int(step) if isinstance(step, int | float) else source.state.progress.iteration


def _by_name(naming: Naming) -> dict[str, list[tuple[NamedWeight, RowRun]]]:
    """What each of their tensors is made of."""
    found: dict[str, list[tuple[NamedWeight, RowRun]]] = {name: [] for name in naming.shapes}
    for weight in naming.weights:
        for run in weight.runs:
            found[run.name].append((weight, run))
    return found


def _states(
    source: CheckpointSource, parts: Sequence[tuple[NamedWeight, RowRun]]
) -> Iterator[tuple[str, Mapping[str, SourceRows]]]:
    """Moments of one of their tensors, if there are any."""
    keys = {weight.key for weight, _ in parts}
    for moment in MOMENTS:
        found = {key: source.states(key).get(f"{STATE}{moment}.{key}") for key in keys}
        if all(found.values()):
            yield moment, {key: origin for key, origin in found.items() if origin is not None}


def _target(
    key: str,
    size: tuple[int, ...],
    parts: Sequence[tuple[NamedWeight, RowRun]],
    origins: Mapping[str, SourceRows],
    dtype: str | None,
) -> TargetTensor:
    """One of their tensors, made of our rows."""
    sources = {weight.key: SourceTensor(weight.shape, origins[weight.key]) for weight, _ in parts}
    runs = sorted((RowRun(weight.key, run.row, run.start, run.rows, run.step) for weight, run in parts), key=_row)
    geometry, ours = parts[0][0].geometry, parts[0][0].key
    own = next(iter(sources.values())).origin.dtype
    core = geometry.core(size)
    shape = (*core[:-2], core[-1], core[-2]) if geometry.transposed else core
    apart = max(run.step for run in runs) - 1
    mapped = MappedOrigin(own, shape, tuple(runs), sources, Geometry(vectors=geometry.vectors), scatters=apart)
    origin: RowRange = mapped if geometry == PLAIN else LaidOutOrigin(mapped, geometry)
    rounded = dtype if dtype is not None and not ours.endswith(KEEPS_DTYPE) else own
    return TargetTensor(key, rounded, size, (origin,))


def _row(run: RowRun) -> int:
    return run.row
