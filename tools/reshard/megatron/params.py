"""The parameters that ranks held, as a Megatron checkpoint's weights tell them: rectangles, and the order of modules.

``.metadata`` lists a weight's chunks: one for each tensor-parallel rank, of a gated linear_fc1 two, the gate's rows and
the other ones, which the rank holds one behind the other.
"""

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from models.costs.parameters import parameters
from models.names import canonical, checkpoint_key
from models.shapes import GPTShape
from tools.reshard.megatron.files import ChunkPlace, TorchDist
from tools.reshard.megatron.keys import Style, ours
from tools.reshard.tensors import Rectangle
from tools.shared.dtypes import cast
from training.checkpoint.format.pieces import ITEM_BYTES
from training.checkpoint.format.reader import WORDS

SAMPLE = 1024
"""Elements at each end of a parameter by which it is looked for. What is found is compared whole afterwards."""

Site = tuple[str, int | None]
"""A parameter's place in the model: its canonical name, and which expert it is of."""

EMBEDDING: Site = ("word_embeddings.weight", None)
Norms = Literal["before", "inside"]
Experts = Literal["by expert", "by layer"]

_ORDERS: Mapping[Norms, tuple[str, ...]] = {
    "before": (
        "enorm.", "hnorm.", "eh_proj.", "input_layernorm.", "self_attention.linear_qkv.layer_norm_",
        "self_attention.linear_proj.", "self_attention.linear_q_proj.", "self_attention.linear_qkv.",
        "self_attention.linear_q_down_proj.", "self_attention.linear_q_up_proj.", "self_attention.linear_kv_down_proj.",
        "self_attention.linear_kv_up_proj.", "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.linear_kv_up_proj.layer_norm_", "self_attention.q_layernorm.", "self_attention.k_layernorm.",
        "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.", "mlp.router.", "mlp.experts.",
        "mlp.shared_experts.linear_fc1.", "mlp.shared_experts.linear_fc2.", "mlp.linear_fc1.", "mlp.linear_fc2.",
        "final_layernorm.",
    ),
    "inside": (
        "enorm.", "hnorm.", "eh_proj.", "input_layernorm.", "self_attention.linear_proj.",
        "self_attention.linear_q_proj.", "self_attention.linear_qkv.layer_norm_", "self_attention.linear_qkv.",
        "self_attention.linear_q_down_proj.", "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.linear_q_up_proj.", "self_attention.linear_kv_down_proj.",
        "self_attention.linear_kv_up_proj.layer_norm_", "self_attention.linear_kv_up_proj.",
        "self_attention.q_layernorm.", "self_attention.k_layernorm.", "pre_mlp_layernorm.", "mlp.router.",
        "mlp.experts.", "mlp.shared_experts.linear_fc1.", "mlp.shared_experts.linear_fc2.",
        "mlp.linear_fc1.layer_norm_", "mlp.linear_fc1.", "mlp.linear_fc2.", "final_layernorm.",
    ),
}  # fmt: skip
"""A block's modules in the order in which megatron-core 0.19.2 makes them: norms are modules of their own (local and
torch's), or inside the linear layer behind them (Transformer Engine). The longest name that fits counts.

"before" has run against megatron-core's own saving. "inside" and experts "by layer" have been read, not run, for want
of Transformer Engine: megatron-core's attention.py (linear_proj, linear_qkv, q_layernorm, k_layernorm),
multi_latent_attention.py, moe_layer.py (router, experts, shared_experts), experts.py (TEGroupedMLP: linear_fc1,
linear_fc2) and multi_token_prediction.py; Transformer Engine's main branch of 2026-08-22 (d0067d0):
pytorch/module/layernorm_linear.py registers layer_norm_weight, layer_norm_bias, weight, bias, and grouped_linear.py
weight0, weight1, ... Not covered: --moe-single-grouped-weight, latent attention's fused down projections."""


@dataclass(slots=True, frozen=True)
class Param:
    """A parameter as one tensor-parallel rank holds it."""

    site: Site
    key: str
    """Of the saved weight."""
    dtype: str
    boxes: tuple[Rectangle, ...]
    """Rectangles of the saved weight, one behind the other in the rank's memory."""
    tp: tuple[int, int]
    """Which slice of how many."""

    @property
    def size(self) -> int:
        """Elements."""
        return sum(math.prod(shape) for _, shape in self.boxes)


def held_params(
    files: TorchDist, keys: Collection[str], shape: GPTShape, style: Style, moe: Collection[int | None]
) -> Iterator[Param]:
    """What ranks held of the weights ``keys``. What is no parameter of the model, is left out."""
    known = {each.name: each for each in parameters(shape)}
    for key in keys:
        info = files.tensors[key]
        try:
            names = [canonical(our) for our, _ in ours(key, style, info.shape[0] if info.shape else 0, moe)]
        except (KeyError, ValueError):
            continue
        if not names or names[0] not in known:
            continue
        parameter = known[names[0]]
        lead = len(info.shape) - len(parameter.shape) + parameter.of_experts
        for leading, chunks in _by_offset(info.chunks, lead).items():
            name = names[leading[0]] if len(names) > 1 else names[0]
            site = (name, leading[-1] if parameter.of_experts else None)
            gated = shape.gated and ".linear_fc1." in name and "layer_norm" not in name
            slices = _slices(chunks, info.shape[lead] // 2 if gated else None, lead)
            for number, boxes in enumerate(slices):
                yield Param(site, key, info.dtype, boxes, (number, len(slices)))


def _by_offset(chunks: Sequence[ChunkPlace], lead: int) -> dict[tuple[int, ...], list[ChunkPlace]]:
    """Chunks in order, by the layer and the expert that they are of."""
    found: dict[tuple[int, ...], list[ChunkPlace]] = {}
    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        found.setdefault(chunk.offset[:lead], []).append(chunk)
    return found


def _slices(chunks: Sequence[ChunkPlace], half: int | None, axis: int) -> list[tuple[Rectangle, ...]]:
    """Each rank's chunks; of a gated matrix those of both halves, where the halves were saved apart."""
    boxes: list[Rectangle] = [(chunk.offset, chunk.shape) for chunk in chunks]
    if half is not None:
        gate, other = ([box for box in boxes if (box[0][axis] < half) == first] for first in (True, False))
        if len(gate) == len(other):
            return list(zip(gate, other, strict=True))
    return [(box,) for box in boxes]


def modules(shape: GPTShape, norms: Norms, experts: Experts) -> list[Site]:
    """Every parameter in the order of a model's modules, and last the output layer's copy of a tied embedding."""
    found: list[Site] = []
    for each in parameters(shape):
        found += [(each.name, number) for number in range(each.shape[0])] if each.of_experts else [(each.name, None)]
    found.sort(key=lambda site: _rank(site, _ORDERS[norms], experts))
    return found if shape.untie_embeddings_and_output_weights else [*found, EMBEDDING]


def _rank(site: Site, order: Sequence[str], experts: Experts) -> tuple[int, ...]:
    name, expert = site
    kind, _, rest = name.partition(".")
    sections = ("word_embeddings", "position_embeddings", "layers", "final_layernorm", "mtp", "output_layer")
    section, is_bias = sections.index(kind), int(name.endswith("bias"))
    if kind not in ("layers", "mtp"):
        return section, is_bias
    block, _, rest = rest.partition(".")
    module = max((len(prefix), number) for number, prefix in enumerate(order) if rest.startswith(prefix))[1]
    if expert is None:
        return section, int(block), module, is_bias
    layer = int("linear_fc2" in rest)
    return section, int(block), module, *((expert, layer) if experts == "by expert" else (layer, expert)), is_bias


def weight_sample(files: TorchDist, param: Param) -> bytes:
    """What tells a parameter from others: a hash of its ends."""
    count = min(SAMPLE, param.size)
    head, tail = _end(files, param, 0, count), _end(files, param, -1, count)
    return _digest(param.dtype, param.size, head, tail)


def _end(files: TorchDist, param: Param, which: int, count: int) -> np.ndarray:
    """The first or the last ``count`` elements, or as many as the first or the last box has."""
    offset, shape = param.boxes[which]
    axis = next((number for number, length in enumerate(shape) if length > 1), len(shape) - 1)
    rows = min(shape[axis], -(-count // math.prod(shape[axis + 1 :])))
    first = 0 if which == 0 else shape[axis] - rows
    start = (*offset[:axis], offset[axis] + first, *offset[axis + 1 :])
    words = np.empty((*shape[:axis], rows, *shape[axis + 1 :]), dtype=WORDS[ITEM_BYTES[param.dtype]])
    files.read(param.key, start, words)
    flat = words.reshape(-1)
    return flat[:count] if which == 0 else flat[-count:]


def flat_sample(files: TorchDist, key: str, start: int, param: Param) -> bytes:
    """The same of flat memory, rounded to the weight's dtype, if it were this parameter's."""
    dtype = files.tensors[key].dtype
    ends = [math.prod(param.boxes[which][1]) for which in (0, -1)]
    head, tail = (min(SAMPLE, param.size, end) for end in ends)
    parts = []
    for at, count in ((start, head), (start + param.size - tail, tail)):
        words = np.empty(count, dtype=WORDS[ITEM_BYTES[dtype]])
        files.read(key, (at,), words)
        parts.append(cast(words, dtype, param.dtype))
    return _digest(param.dtype, param.size, *parts)


def _digest(dtype: str, size: int, head: np.ndarray, tail: np.ndarray) -> bytes:
    data = head.tobytes() + tail.tobytes()
    return hashlib.blake2b(f"{dtype} {size} ".encode() + data, digest_size=16).digest()


def key_of(site: Site) -> str:
    """Our key, for messages."""
    name, expert = site
    return checkpoint_key(name) + ("" if expert is None else f" (expert {expert})")
