"""A DeepSpeed folder under our keys.

global_step100/mp_rank_00_model_states.pt                       ZeRO-1, 2: names, shapes, rounded weights
global_step100/zero_pp_rank_R_mp_rank_00_model_states.pt        ZeRO-3: the same without weights, for each rank
global_step100/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    each rank's fp32 weights and moments
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from models.resolve import resolve
from program.errors import UserError
from program.untrusted import regular_descriptor
from tools.reshard.assembled import AssembledFiles, AssembledTensor, assembled
from tools.reshard.checkpoint_source import CheckpointSource
from tools.reshard.deepspeed.partitions import Piece, Shapes, of_groups, of_ranks
from tools.reshard.inert_pickle import Size
from tools.reshard.model_recipe import foreign_source, model_recipe, with_vocab_size
from tools.reshard.named_source import check_numbers, matched, origins, state_of
from tools.reshard.options import ReshardOptions
from tools.reshard.tensors import BLOCK_BYTES, rectangles
from tools.reshard.torch_file import StridedView, TorchFile, read_view
from tools.shared.dtypes import cast
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS

_MODEL = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
_OPTIMIZER = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_LAYERS = re.compile(r"^(layer_\d+|expert_\d+|layer_\d+_expert_\d+).*_states\.pt$")
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class DeepSpeedFiles(AssembledFiles):
    """Tensors by parameter names: fp32 weights, ``NAME.exp_avg``, ``NAME.exp_avg_sq``."""

    rounded: Mapping[str, AssembledTensor] = field(default_factory=dict)
    """The model's own weights, where they are there: each is the rounded fp32 one."""

    def check(self) -> None:
        """Checksums; and that the fp32 weights, as they were found, round to the model's. Raises UserError."""
        super().check()
        other = AssembledFiles(self.folder, self.rounded, self.files)
        try:
            for name, info in self.rounded.items():
                for offset, shape in rectangles(info.shape, 4, BLOCK_BYTES):
                    master = np.empty(shape, dtype=WORDS[ITEM_BYTES[self.tensors[name].dtype]])
                    words = np.empty(shape, dtype=WORDS[ITEM_BYTES[info.dtype]])
                    self.read(name, offset, master)
                    other.read(name, offset, words)
                    if not np.array_equal(cast(master, self.tensors[name].dtype, info.dtype), words):
                        raise UserError(
                            f"{self.folder}: the optimizer's fp32 weights of {name} do not round to the model's. The "
                            "files are of different steps, or DeepSpeed has laid them out otherwise."
                        )
        finally:
            other.close()


@dataclass(frozen=True)
class RankFiles:
    """What is needed of the folder's files."""

    names: tuple[str, ...]
    models: Sequence[dict[str, Any]]
    optimizers: Sequence[dict[str, Any]]


def open_source(folder: Path, options: ReshardOptions) -> CheckpointSource:
    """Raises UserError for whatever of it is not covered, by name."""
    config, vocab_size = model_recipe(options, folder, "a DeepSpeed folder")
    shape = resolve(config.model, vocab_size)
    files = _rank_files(folder)
    tensors, rounded = _tensors(files, folder, weights_alone=options.drop_optimizer)
    found = matched(tensors, shape, folder)
    check_numbers(tensors, found, folder)
    opened = DeepSpeedFiles(folder, tensors, files.names, rounded=rounded)
    made = origins(tensors, found, folder, weights_alone=options.drop_optimizer)
    step = _step(files, folder) if files.optimizers and not options.drop_optimizer else None
    said = files.models[0]
    iteration, samples = (said.get(key) for key in ("global_steps", "global_samples"))
    iteration = iteration if isinstance(iteration, int) else 0
    notes = (
        [] if files.optimizers or options.drop_optimizer else [f"{folder}: weights alone: it has no optim_states.pt."]
    )
    state = state_of(iteration, samples if isinstance(samples, int) else 0, step)
    config, program = with_vocab_size(config, vocab_size), f"deepspeed, {found.naming.label}"
    return foreign_source(folder, opened, made, state, config, program, opened.fingerprint(), notes)


def _rank_files(folder: Path) -> RankFiles:
    """Every rank's. Raises UserError where one is missing, and for tensor and pipeline parallelism."""
    names = sorted(path.name for path in folder.iterdir())
    if layers := [name for name in names if _LAYERS.match(name)]:
        raise UserError(
            f"{folder}: {layers[0]}: of DeepSpeed's pipeline or of its own experts, which is not read. Export the "
            "model to a Hugging Face folder, and python -m tools.convert import that."
        )
    models = {match: name for name in names if (match := _MODEL.match(name))}
    optimizers = {match: name for name in names if (match := _OPTIMIZER.match(name))}
    if any(int(match[2]) for match in (*models, *optimizers)):
        raise UserError(f"{folder}: of several tensor-parallel ranks of DeepSpeed (mp_rank_01), which are not read.")
    if not models:
        raise UserError(f"{folder}: no model_states.pt. Copy all ranks' files.")
    by_rank = {int(match[1]): name for match, name in optimizers.items()}
    missing = sorted(set(range(len(by_rank))) - by_rank.keys())
    states = [_dict(folder, by_rank[rank]) for rank in sorted(by_rank)] if not missing else []
    sizes = [_count(state.get("optimizer_state_dict", {}).get("partition_count")) for state in states[:1]]
    if missing or any(size not in (0, len(by_rank)) for size in sizes):
        raise UserError(
            f"{folder}: {len(by_rank)} optim_states.pt of {max([*sizes, max(by_rank, default=0) + 1])}. Copy all "
            "ranks' files."
        )
    kept = sorted(models, key=lambda match: int(match[1] or 0))
    return RankFiles(
        (*models.values(), *by_rank.values()), [_dict(folder, models[match]) for match in kept],
        [state.get("optimizer_state_dict", {}) for state in states],
    )  # fmt: skip


def _dict(folder: Path, name: str) -> dict[str, Any]:
    value = TorchFile(folder, name).value
    if not isinstance(value, dict):
        raise UserError(f"{folder / name}: expected a dict; not what DeepSpeed writes.")
    return value


def _count(value: Any) -> int:
    """Of ranks: one number, or one for each group."""
    found = max(value, default=0) if isinstance(value, list) else value
    return found if isinstance(found, int) else 0


def _tensors(
    files: RankFiles, folder: Path, *, weights_alone: bool
) -> tuple[dict[str, AssembledTensor], dict[str, AssembledTensor]]:
    """By names: what is read, and the model's own weights to compare with."""
    try:
        shapes = [_shapes(group) for group in _list(files.models[0].get("param_shapes"))]
        pieces = _weights(files, shapes, folder)
        if not weights_alone and files.optimizers:
            for moment in MOMENTS:
                merged = _merged(files, shapes, [_moments(state, moment) for state in files.optimizers], folder)
                pieces |= {f"{name}.{moment}": each for name, each in merged.items()}
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{folder}: not what DeepSpeed writes ({type(error).__name__}: {error}).") from None
    size_of = {name: size for group in shapes for name, size in group.items()}
    tensors = {}
    for key, found in pieces.items():
        base = key.removesuffix(f".{MOMENTS[0]}").removesuffix(f".{MOMENTS[1]}")
        tensors[key] = assembled(key, size_of.get(base) or found[0][1].shape, found, folder)
    module = files.models[0].get("module")
    rounded = {
        name: AssembledTensor(view.dtype, view.shape, (((0,) * len(view.shape), view),))
        for name, view in (module.items() if isinstance(module, dict) else ())
        if isinstance(view, StridedView) and name in tensors and view.shape == tensors[name].shape and files.optimizers
    }
    shared = files.models[0].get("shared_params")
    for name, owner in shared.items() if isinstance(shared, dict) else ():
        for ending in ("", *(f".{moment}" for moment in MOMENTS)):
            if f"{owner}{ending}" in tensors:
                tensors[f"{name}{ending}"] = tensors[f"{owner}{ending}"]
    return tensors, rounded


def _weights(files: RankFiles, shapes: Sequence[Shapes], folder: Path) -> dict[str, list[Piece]]:
    """fp32 ones of the optimizer; frozen ones and buffers of the model; without an optimizer all of the model's."""
    pieces: dict[str, list[Piece]] = {}
    if files.optimizers:
        pieces |= _merged(files, shapes, [_masters(state) for state in files.optimizers], folder)
    frozen = files.models[0].get("frozen_param_shapes") or {}
    if _is_stage_3(files) and frozen:
        parts = [[model["frozen_param_fragments"][name] for name in frozen] for model in files.models]
        pieces |= of_ranks(_shapes(frozen), [[_flat(view) for view in part] for part in parts], folder)
    trained = {name for group in shapes for name in group}
    for name, view in files.models[0].get("module", {}).items():
        if not isinstance(view, StridedView) or not math.prod(view.shape):  # of ZeRO-3 they are empty
            continue
        if name not in pieces and not (name in trained and files.optimizers):
            pieces[name] = [((0,) * len(view.shape), view)]
    return pieces


def _merged(
    files: RankFiles, shapes: Sequence[Shapes], parts: Sequence[Sequence[StridedView]], folder: Path
) -> dict[str, list[Piece]]:
    """The pieces of all trained tensors. parts: each rank's flat tensors."""
    if _is_stage_3(files):
        merged = {name: size for group in shapes for name, size in group.items()}
        return of_ranks(merged, [[_flat(view) for view in part] for part in parts], folder)
    paddings = files.optimizers[0].get("param_alignment_paddings")
    found: dict[str, list[Piece]] = {}
    for number, group in enumerate(shapes):
        own = _list(paddings[number]) if isinstance(paddings, list) else [0] * len(group)
        found |= of_groups(group, [int(each) for each in own], [_flat(part[number]) for part in parts], folder)
    return found


def _is_stage_3(files: RankFiles) -> bool:
    return bool(files.optimizers) and "fp32_flat_groups" in files.optimizers[0]


def _masters(state: dict[str, Any]) -> list[StridedView]:
    return _list(state["fp32_flat_groups"] if "fp32_flat_groups" in state else state["single_partition_of_fp32_groups"])


def _moments(state: dict[str, Any], moment: str) -> list[StridedView]:
    """Of each group, in the order of the fp32 weights: by number as torch's optimizers have them, or as a list."""
    inner = state.get("optimizer_state_dict") or state["base_optimizer_state"]
    if isinstance(inner, dict):
        by_number = inner["state"]
        return [by_number[number][moment] for number in sorted(by_number)]
    return [group[moment] for group in _list(inner)]


def _step(files: RankFiles, folder: Path) -> int:
    """Steps that Adam has taken."""
    state = files.optimizers[0]
    inner = state.get("optimizer_state_dict") or state.get("base_optimizer_state")
    steps = sorted({int(step) for step in _steps(inner, folder)})
    if len(steps) > 1:
        raise UserError(f"{folder}: its parameter groups have taken different numbers of steps: {steps}.")
    others = (state.get("base_optimizer_state_step"), files.models[0].get("global_steps"))
    return next(iter([*steps, *(step for step in others if isinstance(step, int))]), 0)


def _steps(value: Any, folder: Path) -> Iterator[float]:
    """Every ``step`` in an optimizer's state."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "step" and isinstance(each, int | float):
                yield each
            elif key == "step" and isinstance(each, StridedView) and math.prod(each.shape) == 1:
                yield _number(each, folder)
            elif key != "step":
                yield from _steps(each, folder)
    elif isinstance(value, list):
        for each in value:
            yield from _steps(each, folder)


def _number(view: StridedView, folder: Path) -> float:
    words = np.empty(view.shape, dtype=WORDS[ITEM_BYTES[view.dtype]])
    descriptor = regular_descriptor(folder / view.file)
    try:
        read_view(descriptor, view, words, str(folder / view.file))
    finally:
        os.close(descriptor)
    return float(words.reshape(-1).view({"float32": np.float32, "int64": np.int64}.get(view.dtype, np.float32))[0])


def _shapes(group: Any) -> dict[str, tuple[int, ...]]:
    return {str(name): size.value if isinstance(size, Size) else tuple(map(int, size)) for name, size in group.items()}


def _flat(view: StridedView) -> StridedView:
    """Raises ValueError for what is no stretch of memory."""
    if not view.is_contiguous:
        raise ValueError("a partition with gaps")
    return view.reshaped((math.prod(view.shape),), (1,))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return list(value)
