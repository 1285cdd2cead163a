"""Which tensors ``--format dcp`` writes, by the names of transformers' modules or torchtitan's, and from what."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from models.hf.shapes import write_config
from models.resolve import resolve
from models.shapes import GPTShape
from parallel.errors import UserError
from tools.reshard.checkpoint_source import STATE, CheckpointSource
from tools.reshard.mapped import MappedOrigin, SourceTensor
from tools.reshard.naming import PLAIN, Geometry, Naming, RowRun, namings_of, newest_torchtitan
from tools.reshard.options import ReshardOptions
from tools.reshard.plan import ReshardPlan, repadded
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
class TransposedOrigin:
    """Columns for rows. Implements ``tensors.RowRange``."""

    inner: RowRange

    @property
    def dtype(self) -> str:
        """Torch's name."""
        return self.inner.dtype

    def rows_read(self, source: Tensors, rectangle: Rectangle) -> np.ndarray:
        """A rectangle as words of ``dtype``."""
        (first, second), (rows, columns) = rectangle
        return np.ascontiguousarray(self.inner.rows_read(source, ((second, first), (columns, rows))).T)


def plan(source: CheckpointSource, options: ReshardOptions) -> ReshardPlan:
    """A DCP checkpoint from a source. Raises UserError for a model that their classes do not have.

    Weights are the optimizer's fp32 ones, as FSDP keeps them; another dtype rounds them alone.
    """
    config = repadded(source, options)
    vocab_size = source.real_vocab_size
    shape = resolve(config.model, vocab_size)
    naming = _naming(shape, options)
    weights = source.weights()
    prefix = "" if naming.family == "torchtitan" else "model."
    step = float(_step(source))
    targets: list[TargetTensor] = []
    for name, size in naming.shapes.items():
        spelled = newest_torchtitan(name, shape) if naming.family == "torchtitan" else name
        targets.append(_target(prefix + spelled, name, size, naming, weights, options.dtype))
        states = [] if options.drop_optimizer else list(_states(source, name, naming))
        for moment, origins in states:
            targets.append(_target(f"optimizer.state.{spelled}.{moment}", name, size, naming, origins, None))
        if states:
            key = f"optimizer.state.{spelled}.step"
            targets.append(TargetTensor(key, "float32", (), (ConstantOrigin(step),)))
    state = dataclasses.replace(source.state, optimizer={}) if options.drop_optimizer else source.state
    return ReshardPlan(groups=tuple((target,) for target in targets), state=state, config=config)


def _naming(shape: GPTShape, options: ReshardOptions) -> Naming:
    """Of transformers, that of its modules rather than of its files."""
    model_type, _ = write_config(shape)
    found = [naming for naming in namings_of(model_type, shape) if naming.family == options.names]
    if not found:
        raise UserError(f"--names {options.names}: it has no model like this one, which is transformers' {model_type}.")
    stacked = [naming for naming in found if any(name.endswith("experts.gate_up_proj") for name in naming.shapes)]
    return (stacked or found)[0]


def _step(source: CheckpointSource) -> int:
    step = source.state.optimizer.get("step")
    return int(step) if isinstance(step, int | float) else source.state.progress.iteration


def _states(source: CheckpointSource, name: str, naming: Naming) -> Iterator[tuple[str, Mapping[str, SourceRows]]]:
    """Moments of one of their tensors, if there are any."""
    keys = [weight.key for weight in naming.weights if any(run.name == name for run in weight.runs)]
    for moment in MOMENTS:
        found = {key: source.states(key).get(f"{STATE}{moment}.{key}") for key in keys}
        if all(found.values()):
            yield moment, {key: origin for key, origin in found.items() if origin is not None}


def _target(
    key: str,
    name: str,
    size: tuple[int, ...],
    naming: Naming,
    origins: Mapping[str, SourceRows],
    dtype: str | None,
) -> TargetTensor:
    """One of their tensors, made of our rows."""
    runs: list[RowRun] = []
    sources: dict[str, SourceTensor] = {}
    transposed = False
    for weight in naming.weights:
        for run in weight.runs:
            if run.name == name:
                sources.setdefault(weight.key, SourceTensor(weight.shape, origins[weight.key]))
                runs.append(RowRun(weight.key, run.row, run.start, run.rows, run.step))
                transposed = weight.geometry.transposed
                matrix = weight.geometry == Geometry(transposed=True) and len(size) == 2
                if weight.geometry != PLAIN and not matrix:
                    raise UserError(f"--format dcp: {name}: a tensor of this form is read and not written.")
    own = next(iter(sources.values())).origin.dtype
    runs.sort(key=lambda run: run.row)
    shape = (size[1], size[0]) if transposed else size
    mapped = MappedOrigin(own, shape, tuple(runs), sources, scatters=any(run.step > 1 for run in runs))
    origin: RowRange = TransposedOrigin(mapped) if transposed else mapped
    rounded = dtype if dtype is not None and not key.endswith(("expert_bias_E", "e_score_correction_bias")) else own
    return TargetTensor(key, rounded, size, (origin,))
