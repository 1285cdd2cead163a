"""Megatron's ``mp_rank`` folders: weights by our keys, from the files of all ranks.

    iter_0001000/mp_rank_00/model_optim_rng.pt            TP rank
    iter_0001000/mp_rank_00_001/model_optim_rng.pt        TP rank, PP rank; or TP rank, EP rank
    iter_0001000/mp_rank_00_001_002/model_optim_rng.pt    TP rank, PP rank, EP rank

(megatron/training/checkpointing.py of core_r0.19.0: get_checkpoint_name, generate_state_dict,
fix_query_key_value_ordering.) A rank's model chunks are model, or model0, model1, ...: chunk c of PP rank p is the
(c x PP + p)-th that activations pass through. How a tensor is cut over TP ranks follows from its shape in the whole
model. The optimizer's state is not read: of the distributed optimizer it lies in other files, without names.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.resolve import resolve
from models.shapes import GPTShape
from parallel.layout import Layout
from program.errors import UserError
from program.printing import some
from tools.reshard.assembled import AssembledFiles, AssembledTensor, assembled
from tools.reshard.checkpoint_source import CheckpointSource, real_vocab_size
from tools.reshard.megatron import mp_rank_names
from tools.reshard.megatron.files import Namespace
from tools.reshard.megatron.keys import style_of
from tools.reshard.megatron.mp_rank_names import RankTensor, layer_count, weights_of
from tools.reshard.megatron.source import RECIPE_WANTED, check_model, expected, plain_state
from tools.reshard.model_recipe import carried_files
from tools.reshard.options import ReshardOptions
from tools.reshard.plan import is_of_vocabulary
from tools.reshard.tensors import Origin
from tools.reshard.torch_file import StridedView, TorchFile
from training.config.recipe import load

_RANK = re.compile(r"^mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")
NAMES = ("model_optim_rng.pt", "model_rng.pt")
"""The second where the distributed optimizer has its own file, before megatron-core 0.4."""
_TIED = "output_layer.weight"

Piece = tuple[tuple[int, ...], StridedView]


def _rank_files(path: Path) -> dict[str, tuple[int | None, ...]]:
    """Each rank's file, and the numbers that its folder's name says."""
    found: dict[str, tuple[int | None, ...]] = {}
    for folder in sorted(path.iterdir()) if path.is_dir() else []:
        match = _RANK.match(folder.name)
        name = next((name for name in NAMES if match and (folder / name).exists()), None)
        if match and name:
            found[f"{folder.name}/{name}"] = tuple(None if part is None else int(part) for part in match.groups())
    return found


@dataclass(frozen=True)
class RankFile:
    """What is needed of one rank's file."""

    tp: int
    pp: int
    ep: int
    chunks: tuple[dict[str, tuple[StridedView, bool]], ...]
    version: float
    said: Mapping[str, Any]
    """Of the file, but for the model and the optimizer."""
    has_optimizer: bool


def open_source(folder: Path, options: ReshardOptions) -> CheckpointSource:
    """Raises UserError for whatever of it is not covered, by name."""
    if options.recipe is None:
        raise UserError(f"{folder}: {RECIPE_WANTED}")
    config = load(options.recipe)
    vocab_size = real_vocab_size(config, options.recipe.parent)
    shape = resolve(config.model, vocab_size)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))
    if "M" in shape.hybrid_layer_pattern or any(shape.linear_blocks):
        raise UserError(
            f"{folder}: the model of --recipe has mixers (Mamba-2, gated delta nets), whose matrices each "
            "tensor rank's file has in an order of its own: such mp_rank folders are not read. Save the checkpoint "
            "with Megatron-LM's --ckpt-format torch_dist, which is read."
        )
    ranks = _ranks(folder)
    tensors = _Assembly(folder, shape, ranks).tensors()
    origins = {key: Origin(key, tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
    check_model(origins, [], shape, folder)
    said = ranks[0].said
    state = plain_state(said)
    iteration = state.progress.iteration
    notes = [
        f"{folder}: the weights alone are read; the optimizer's state of mp_rank folders is not."
    ] if not options.drop_optimizer and any(rank.has_optimizer for rank in ranks) else []  # fmt: skip
    carried = carried_files(config, folder)
    return CheckpointSource(
        folder=folder,
        files=AssembledFiles(folder, tensors, tuple(_rank_files(folder))),
        origins=origins,
        state=dataclasses.replace(state, optimizer={}),
        config=config,
        about={"source": "megatron", "iteration": iteration, "layout": str(Layout())},
        carried=carried.copies,
        texts=carried.texts,
        tokenizer=carried.name,
        pads_as_configured=False,
        fingerprint=AssembledFiles(folder, tensors, tuple(_rank_files(folder))).fingerprint(),
        notes=tuple(notes),
    )


def _ranks(folder: Path) -> list[RankFile]:
    """Every rank's file, in the order of TP, PP and EP ranks. Raises UserError where one is missing."""
    found = [_rank(TorchFile(folder, name), numbers, folder / name) for name, numbers in _rank_files(folder).items()]
    found.sort(key=lambda rank: (rank.tp, rank.pp, rank.ep))
    there = {(rank.tp, rank.pp, rank.ep) for rank in found}
    sizes = [1 + max(numbers) for numbers in zip(*there, strict=True)]
    said = found[0].said.get("args")
    fields = said.state if isinstance(said, Namespace) and isinstance(said.state, dict) else {}
    for number, (axis, name) in enumerate((("TP", "tensor"), ("PP", "pipeline"))):
        size = fields.get(f"{name}_model_parallel_size")
        if isinstance(size, int) and size > sizes[number]:
            raise UserError(f"{folder}: its args say {axis} {size}, but the ranks there are {sizes[number]}.")
    for tp, pp, ep in itertools.product(*map(range, sizes)):
        if (tp, pp, ep) not in there:
            raise UserError(
                f"{folder}: no mp_rank folder of TP rank {tp}, PP rank {pp}, EP rank {ep}; there are {len(there)} of "
                f"{math.prod(sizes)}. Copy all of them."
            )
    return found


def _rank(file: TorchFile, numbers: tuple[int | None, ...], path: Path) -> RankFile:
    value = file.value
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a dict with a model; found something else.")
    chunks = [value["model"]] if "model" in value else []
    while f"model{len(chunks)}" in value:
        chunks.append(value[f"model{len(chunks)}"])
    if not chunks:
        raise UserError(f"{path}: has no model; it has {', '.join(map(str, value)) or 'nothing'}.")
    tp, pp, ep = (number or 0 for number in numbers)
    args = value.get("args")
    fields = args.state if isinstance(args, Namespace) and isinstance(args.state, dict) else {}
    if numbers[2] is None and pp and fields.get("pipeline_model_parallel_size") == 1:
        pp, ep = 0, pp  # with experts in parallel, and no pipeline
    version = value.get("checkpoint_version", 0)
    return RankFile(
        tp, pp, ep, tuple(map(weights_of, chunks)), float(version) if isinstance(version, int | float) else 0.0,
        {key: each for key, each in value.items() if not str(key).startswith("model") and key != "optimizer"},
        has_optimizer="optimizer" in value,
    )  # fmt: skip


class _Assembly:
    """Puts the ranks' tensors together."""

    def __init__(self, folder: Path, shape: GPTShape, ranks: Sequence[RankFile]) -> None:
        self._folder, self._shape, self._ranks = folder, shape, ranks
        self._expected = expected(shape)
        self._tp = 1 + max(rank.tp for rank in ranks)
        self._pp = 1 + max(rank.pp for rank in ranks)
        self._ep = 1 + max(rank.ep for rank in ranks)

    def tensors(self) -> dict[str, AssembledTensor]:
        """By our keys. Raises UserError for a name that the model does not have."""
        pieces: dict[str, dict[Any, Piece]] = {}
        for rank, tensor in self._rank_tensors():
            found = pieces.setdefault(tensor.key, {})
            for offset, view in self._placed(rank, tensor):
                found.setdefault((offset, view.shape), (offset, view))  # of copies, the first rank's
        return {
            key: assembled(key, self._whole(key, found.values()), tuple(found.values()), self._folder)
            for key, found in pieces.items()
        }

    def _whole(self, key: str, pieces: Any) -> tuple[int, ...]:
        """A tensor's shape: of the vocabulary, with the rows that are there."""
        wanted = self._expected[key]
        if not is_of_vocabulary(key):
            return wanted
        return (max(offset[0] + view.shape[0] for offset, view in pieces), *wanted[1:])

    def _rank_tensors(self) -> Iterator[tuple[RankFile, RankTensor]]:
        extra: list[str] = []
        by_sublayer = not any(style_of(chunk) == "per_block" for rank in self._ranks for chunk in rank.chunks)
        for rank in self._ranks:
            for number, chunk in enumerate(rank.chunks):
                first = self._first_layer(number * self._pp + rank.pp)
                for name, (view, is_old) in chunk.items():
                    if name == _TIED and self._shape.tied:
                        continue  # the embedding's copy on the last stage
                    try:
                        for tensor in mp_rank_names.ours(name, view, is_old, first, by_sublayer, self._expected):
                            yield rank, tensor
                    except KeyError:
                        extra.append(name)
        if extra:
            listed = some(sorted(set(extra)))
            raise UserError(f"{self._folder}: the model of --recipe has no place for {listed}. Mend the recipe.")

    def _first_layer(self, chunk: int) -> int:
        """Layers of the chunks before one."""
        first_rank = {rank.pp: rank for rank in reversed(self._ranks)}
        counts = (
            layer_count(first_rank[before % self._pp].chunks[before // self._pp])
            for before in range(chunk)
            if before // self._pp < len(first_rank[before % self._pp].chunks)
        )
        return sum(counts)

    def _placed(self, rank: RankFile, tensor: RankTensor) -> Iterator[Piece]:
        """Where a rank's tensor lies in the whole one. Raises UserError where it does not fit."""
        view, whole = tensor.view, self._expected[tensor.key]
        if tensor.expert is not None:
            local = self._shape.num_moe_experts // self._ep
            expert = (rank.ep * local + tensor.expert,)
            if tensor.expert >= local:
                raise self._misfit(tensor, whole)
            for offset, part in self._cut(rank, tensor, view, whole[1:]):
                yield (*expert, *offset), part.reshaped((1, *part.shape), (0, *part.strides))
            return
        if tensor.is_old and rank.version < 2.0 and ".linear_qkv." in tensor.key and "layer_norm" not in tensor.key:
            for offset, part in self._old_qkv(view, rank.version, tensor, whole):
                yield (offset[0] + rank.tp * view.shape[0], *offset[1:]), part
            return
        yield from self._cut(rank, tensor, view, whole)

    def _cut(self, rank: RankFile, tensor: RankTensor, view: StridedView, whole: tuple[int, ...]) -> Iterator[Piece]:
        """By the shape: whole on every rank, or cut along the one dim that differs."""
        own = view.shape
        if len(own) != len(whole):
            raise self._misfit(tensor, whole)
        zeros = (0,) * len(own)
        differing = [dim for dim, (a, b) in enumerate(zip(own, whole, strict=True)) if a != b]
        if is_of_vocabulary(tensor.key) and own[1:] == whole[1:]:
            yield (rank.tp * own[0], *zeros[1:]), view
        elif not differing:
            yield zeros, view
        elif len(differing) > 1 or own[differing[0]] * self._tp != whole[differing[0]]:
            raise self._misfit(tensor, whole)
        else:
            (axis,) = differing
            parts = 2 if self._shape.gated and ".linear_fc1." in tensor.key and axis == 0 else 1
            size = tuple(length // parts if dim == axis else length for dim, length in enumerate(own))
            for part in range(parts):
                inner = tuple(part * size[axis] if dim == axis else 0 for dim in range(len(own)))
                start = part * (whole[axis] // parts) + rank.tp * size[axis]
                yield tuple(start if dim == axis else 0 for dim in range(len(own))), view.part(inner, size)

    def _old_qkv(
        self, view: StridedView, version: float, tensor: RankTensor, whole: tuple[int, ...]
    ) -> Iterator[Piece]:
        """Rows of before checkpoint_version 2: [3, heads, channels] (0) or [heads, channels, 3] (1), which are
        [heads, 3, channels] since."""
        channels = self._shape.kv_channels
        heads, rest = divmod(view.shape[0], 3 * channels)
        if rest or view.shape[0] * self._tp != whole[0] or view.shape[1:] != whole[1:] or version not in (0.0, 1.0):
            raise self._misfit(tensor, whole)
        row, zeros = view.strides[0], (0,) * (len(whole) - 1)
        for head in range(heads):
            for kind in range(3):
                first = (kind * heads + head) * channels if version == 0 else head * channels * 3 + kind
                step = row if version == 0 else 3 * row
                part = view.part((first, *zeros), (channels, *whole[1:]))
                yield ((head * 3 + kind) * channels, *zeros), part.reshaped(part.shape, (step, *part.strides[1:]))

    def _misfit(self, tensor: RankTensor, whole: tuple[int, ...]) -> UserError:
        return UserError(
            f"{self._folder}: the model of --recipe differs in {tensor.key}: a rank of {self._tp} (TP) holds "
            f"{list(tensor.view.shape)} of {list(whole)}. Mend the recipe."
        )
