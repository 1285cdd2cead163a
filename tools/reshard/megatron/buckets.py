"""Megatron's dp_reshardable optimizer state, to be written: which element of which rank's flat memory is what.

The inverse of ``dp_reshardable``, for sizes that are given. A model chunk's parameters lie in the reverse order of its
modules, each from a multiple of 64 elements on, in buckets; a bucket ends where it has reached its size, around an
embedding that two stages share, and with the memory (megatron-core 0.19.2: distrib_optimizer.py,
_compute_per_buffer_param_layout and sharded_param_state_dp_reshardable; Megatron-LM core_r0.19.0: training.py,
resolve_ddp_bucket_size and get_model). Padding is written as zeros.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.names import checkpoint_key
from models.shapes import GPTShape
from parallel.stages import layers_per_chunk
from program.errors import UserError
from tools.reshard.megatron.dp_reshardable import aligned
from tools.reshard.megatron.job import MegatronJob
from tools.reshard.megatron.params import EMBEDDING, Experts, Site, modules
from tools.reshard.tensors import Rectangle, RowRange, Tensors
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS

_BY_ROWS = {
    "word_embeddings", "output_layer", "eh_proj", "linear_qkv", "linear_q_proj", "linear_q_up_proj",
    "linear_kv_up_proj", "linear_fc1",
}  # fmt: skip
"""Modules whose rows, and biases, are cut over TP ranks (ColumnParallelLinear, VocabParallelEmbedding)."""

_BY_ROWS_LOCALLY = {"linear_q_down_proj", "linear_kv_down_proj"}
"""Cut by local modules; Transformer Engine's are repeated on every TP rank (multi_latent_attention.py)."""

_BY_COLUMNS = {"linear_proj", "linear_fc2"}
"""Modules whose columns are cut (RowParallelLinear); their biases are whole on every rank."""


@dataclass(slots=True, frozen=True)
class HeldParameter:
    """A parameter as one rank holds it."""

    key: str
    """Ours."""
    boxes: tuple[Rectangle, ...]
    """Of the whole tensor, one behind the other in memory."""
    is_shared: bool = False
    """An embedding that another stage has, too: it has a bucket of its own."""

    @property
    def size(self) -> int:
        """Elements."""
        return sum(math.prod(shape) for _, shape in self.boxes)


@dataclass(slots=True, frozen=True)
class Bucket:
    """A stretch of a model chunk's memory that is saved as one tensor for each state."""

    params: tuple[tuple[int, HeldParameter], ...]
    """Each with its first element."""
    unpadded: int
    """Elements that are saved."""
    padded: int
    """Elements that ranks have."""

    @property
    def boxes(self) -> Iterator[tuple[int, Rectangle, str]]:
        """Every rectangle with its first element, and the key that it is of, in order."""
        for start, param in self.params:
            for box in param.boxes:
                yield start, box, param.key
                start += math.prod(box[1])


@dataclass(slots=True, frozen=True)
class FlatMemory:
    """What the data-parallel copies of one rank hold together, for one of the chained optimizers."""

    chained: str
    """Which of the chained optimizers; empty where there is one."""
    number: int
    """Of the ranks' group."""
    buffers: tuple[tuple[Bucket, ...], ...]
    """One for each model chunk that has such parameters."""

    @property
    def prefix(self) -> str:
        """Of its keys."""
        return f"{self.chained and self.chained + '.'}optimizer.distributed.dp_group_idx_{self.number}"

    @property
    def keys(self) -> set[str]:
        """Of its parameters."""
        return {param.key for buffer in self.buffers for bucket in buffer for _, param in bucket.params}


@dataclass(slots=True, frozen=True)
class FlatOrigin:
    """A bucket of one state as something to read: its parameters from wherever they lie, and zeros between."""

    dtype: str
    pieces: tuple[tuple[int, Rectangle, RowRange], ...]
    """First element, the rectangle, and the tensor it is of; in order."""

    def rows_read(self, source: Tensors, rectangle: Rectangle) -> np.ndarray:
        """Elements as words of ``dtype``."""
        (first,), (count,) = rectangle
        words = np.zeros(count, dtype=WORDS[ITEM_BYTES[self.dtype]])
        for start, box, origin in self.pieces:
            low, high = max(first, start), min(first + count, start + math.prod(box[1]))
            if low < high:
                words[low - first : high - first] = _stretch(origin, source, box, low - start, high - start)
        return words


def _stretch(origin: RowRange, source: Tensors, box: Rectangle, first: int, last: int) -> np.ndarray:
    """Elements [first, last) of a rectangle, row by row; the rows that they are in are read whole."""
    offset, shape = box
    axis = next((number for number, length in enumerate(shape) if length > 1), len(shape) - 1)
    row = math.prod(shape[axis + 1 :])
    low, high = first // row, -(-last // row)
    start = (*offset[:axis], offset[axis] + low, *offset[axis + 1 :])
    words = origin.rows_read(source, (start, (*shape[:axis], high - low, *shape[axis + 1 :])))
    return words.reshape(-1)[first - low * row : last - low * row]


def memories(job: MegatronJob, shape: GPTShape, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[FlatMemory]:
    """Every rank's memory, but for data-parallel copies.

    shapes: of the weights, by our key, with the vocabulary's padding. Raises UserError for sizes that do not fit.
    """
    _check(job, shape)
    layout, apart = job.layout, job.has_experts_apart and bool(shape.num_moe_experts)
    chunks = [chunk_sites(job, shape, number) for number in range(layout.chunks)]
    held = _RectangleCutter(job, shape, shapes)
    for pp in range(layout.pp):
        mine = chunks[pp :: layout.pp]
        for tp in range(layout.tp):
            sites = [[site for site in chunk if site[1] is None or not apart] for chunk in mine]
            params = [[held.param(site, tp, layout.tp) for site in chunk] for chunk in sites]
            buffers = _buffers(job, params, pp, layout.dp * layout.cp)
            yield FlatMemory("chained_0" if apart else "", tp + layout.tp * pp, buffers)
        for ep, etp in ((ep, etp) for ep in range(layout.ep) for etp in range(layout.etp) if apart):
            count = shape.num_moe_experts // layout.ep
            local = range(ep * count, (ep + 1) * count)
            sites = [[site for site in chunk if site[1] in local] for chunk in mine]
            params = [[held.param(site, etp, layout.etp) for site in chunk] for chunk in sites]
            buffers = _buffers(job, params, pp, layout.edp)  # none where the stage has no experts, but numbers
            yield FlatMemory("chained_1", etp + layout.etp * (ep + layout.ep * pp), buffers)


def _check(job: MegatronJob, shape: GPTShape) -> None:
    layout, apart = job.layout, job.pipeline_model_parallel_size > 1
    if shape.num_moe_experts % layout.ep or (layout.ep > 1 and not shape.num_moe_experts):
        raise UserError(
            f"--expert_model_parallel_size {layout.ep}: the model has {shape.num_moe_experts} experts. Use a size that "
            "divides them."
        )
    if apart and shape.mtp_num_layers and (shape.tied or shape.position_embedding_type == "learned_absolute"):
        raise UserError(
            "--optimizer_format dp_reshardable: multi-token prediction on a stage without the embedding, of a model "
            "with tied or learned position embeddings, is not written. Use --optimizer_format fully_reshardable."
        )


def chunk_sites(job: MegatronJob, shape: GPTShape, chunk: int) -> list[Site]:
    """The parameters of a model chunk, counted as activations pass through them, in the order of its modules."""
    counts = layers_per_chunk(job.parallel, shape.num_layers)
    first, last = chunk == 0, chunk == len(counts) - 1
    start = sum(counts[:chunk])
    blocks = range(start, start + counts[chunk])
    experts: Experts = (
        "by layer" if job.moe_grouped_gemm and job.transformer_impl == "transformer_engine" else "by expert"
    )
    order = modules(shape, "inside" if job.transformer_impl == "transformer_engine" else "before", experts)
    if shape.tied:
        order.pop()  # the output layer's copy of the embedding
    found: list[Site] = []
    for site in order:
        kind, _, rest = site[0].partition(".")
        if kind == "layers":
            is_here = int(rest.partition(".")[0]) in blocks
        else:
            is_here = first if kind in ("word_embeddings", "position_embeddings") else last
        if is_here:
            found.append(site)
    if last and not first and shape.mtp_num_layers:
        found.insert(0, EMBEDDING)
    elif last and not first and shape.tied:
        found.append(EMBEDDING)
    return found


class _RectangleCutter:
    """Which rectangles of a tensor a rank holds."""

    def __init__(self, job: MegatronJob, shape: GPTShape, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._gated, self._shapes = shape.gated, shapes
        local = job.transformer_impl == "local"
        self._by_rows = _BY_ROWS | _BY_ROWS_LOCALLY if local else _BY_ROWS
        self._is_shared = job.pipeline_model_parallel_size > 1 and bool(shape.tied or shape.mtp_num_layers)

    def param(self, site: Site, rank: int, size: int) -> HeldParameter:
        """A parameter on tensor-parallel rank ``rank`` of ``size``. Raises UserError where it cannot be cut so."""
        name, expert = site
        key = checkpoint_key(name)
        whole = self._shapes[key]
        lead = () if expert is None else (expert,)
        dims = whole[len(lead) :]
        axis, parts = self._cut(name)
        if axis is not None and dims[axis] % (size * parts):
            raise UserError(
                f"--optimizer_format dp_reshardable: {key} {list(whole)} cannot be cut for TP {size}."
                + (
                    " Pad the vocabulary: --make_vocab_size_divisible_by."
                    if "word_emb" in key or "output" in key
                    else ""
                )
            )
        boxes = []
        for part in range(parts):
            offset, extent = [0] * len(dims), list(dims)
            if axis is not None:
                extent[axis] = dims[axis] // (size * parts)
                offset[axis] = part * dims[axis] // parts + rank * extent[axis]
            boxes.append(((*lead, *offset), (*(1 for _ in lead), *extent)))
        return HeldParameter(key, tuple(boxes), self._is_shared and site == EMBEDDING)

    def _cut(self, name: str) -> tuple[int | None, int]:
        """The dim that TP cuts, and how many matrices lie in it: the gate's rows of linear_fc1, then the other ones."""
        *_, module, leaf = name.split(".")
        if leaf in ("weight", "bias") and module in self._by_rows:
            return 0, 2 if module == "linear_fc1" and self._gated else 1
        return (1 if leaf == "weight" and module in _BY_COLUMNS else None), 1


def _buffers(
    job: MegatronJob, chunks: Sequence[Sequence[HeldParameter]], pp: int, data_ranks: int
) -> tuple[tuple[Bucket, ...], ...]:
    """Each model chunk's buckets. The first chunk of the first stage alone has more than it must have."""
    size = None
    if job.overlap_grad_reduce and pp == 0:
        size = job.ddp_bucket_size or max(40_000_000, 1_000_000 * job.layout.dp * job.layout.cp)
    found = [
        tuple(buckets(params, size if number == 0 else None, math.lcm(data_ranks, 128)))
        for number, params in enumerate(chunks)
    ]
    return tuple(filter(None, found))


def buckets(params: Sequence[HeldParameter], size: int | None, divisor: int) -> Iterator[Bucket]:
    """Parameters in the order of their modules, in buckets: of ``size`` elements or a few more; None: one.

    divisor: of the elements that ranks have of each.
    """
    inside: list[tuple[int, HeldParameter]] = []
    end = 0
    for param in reversed(params):
        start = aligned(end)
        if param.is_shared and inside:
            yield _bucket(inside, start, divisor)
            inside, start = [], 0
        inside.append((start, param))
        end = start + param.size
        if param.is_shared or (size is not None and end >= size):
            yield _bucket(inside, end, divisor)
            inside, end = [], 0
    if inside:
        yield _bucket(inside, end, divisor)


def _bucket(params: Sequence[tuple[int, HeldParameter]], unpadded: int, divisor: int) -> Bucket:
    return Bucket(tuple(params), unpadded, aligned(unpadded, divisor))


def flat_origin(bucket: Bucket, origin_of: Mapping[str, RowRange]) -> FlatOrigin:
    """A bucket of one state. origin_of: that state of each weight, by the weight's key."""
    pieces = tuple((start, box, origin_of[key]) for start, box, key in bucket.boxes)
    return FlatOrigin(pieces[0][2].dtype, pieces)
