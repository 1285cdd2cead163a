"""A Hugging Face folder cut down to one block of each kind, for logits that any machine can compute.

Its configuration is the folder's own but for the numbers that are cut: blocks, rows of the vocabulary, experts. Its
weights are the folder's own: of the first block of each kind, of the first ids, of the first experts of each group.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from models.hf.config_parts import freq, skip_freq
from models.hf.families import ARCHITECTURES, TABLES
from models.hf.shapes import TOKEN_IDS
from models.hf.tables import Entry, entries
from models.shapes import GPTShape
from parallel.untrusted import read_text
from tools.convert.checking import names_in
from tools.convert.headers import SINGLE, encode_header
from tools.convert.row_blocks import BLOCK_BYTES
from tools.convert.source import HfFolder
from training.checkpoint.format.pieces import ITEM_BYTES

IDS = 1024
"""Rows of the vocabulary that stay."""
SIZES = ("num_layers", "vocab_size", "num_moe_experts")
DEPENDENT = (
    "first_k_dense_replace",
    "mlp_only_layers",
    "decoder_sparse_step",
    "num_experts",
    "moe_layer_start_index",
    "moe_layer_end_index",
    "moe_layer_interval",
    "num_nextn_predict_layers",
    "moe_layers",
    "hybrid_override_pattern",
    "num_hidden_layers",
    "n_routed_experts",
    "layer_types",
    "moe_layers",
    "no_rope_layers",
    "moe_layers",
    "max_window_layers",
)
"""Keys of several architectures that go by the number of blocks or experts."""


@dataclasses.dataclass(slots=True, frozen=True)
class Cut:
    """What stays of a model."""

    model_type: str
    shape: GPTShape
    blocks: tuple[int, ...]
    """Their numbers in the whole model."""
    experts: tuple[int, ...]

    @property
    def fp32_bytes(self) -> int:
        """Of all its weights in memory."""
        found = entries(self.model_type, self.shape)
        return 4 * sum(math.prod(shape) for entry in found for shape in entry.their_shapes().values())

    def __str__(self) -> str:
        blocks = " and ".join(map(str, self.blocks))
        cut = [f"block{'s' if len(self.blocks) > 1 else ''} {blocks}"]
        cut += [f"{len(self.experts)} experts"] if self.experts else []
        return ", ".join(cut)


def cut_of(model_type: str, shape: GPTShape) -> Cut:
    """The first block of each kind, in their order; of the experts as many as the router needs to choose among."""
    moe, windowed, no_rope = shape.moe_blocks, shape.window_blocks, shape.no_rope_blocks
    kinds = list(zip(shape.blocks, windowed, no_rope, strict=True))
    blocks = tuple(sorted({kinds.index(kind) for kind in kinds}))
    linear = [int(shape.linear_blocks[block]) for block in blocks]
    experts: tuple[int, ...] = ()
    if shape.num_moe_experts:
        groups, chosen = shape.moe_router_num_groups or 1, shape.moe_router_group_topk or 1
        size = shape.num_moe_experts // groups
        stay = min(size, -(-shape.moe_router_topk // chosen) + 2)
        experts = tuple(group * size + expert for group in range(groups) for expert in range(stay))
    small = dataclasses.replace(
        shape,
        num_layers=len(blocks),
        hybrid_layer_pattern="".join(shape.hybrid_layer_pattern[block : block + 1] for block in blocks),
        vocab_size=min(IDS, shape.vocab_size),
        num_moe_experts=len(experts),
        moe_layer_freq=freq([moe[block] for block in blocks]) if experts else shape.moe_layer_freq,
        window_attn_skip_freq=skip_freq([windowed[block] for block in blocks]),
        no_rope_freq=freq([no_rope[block] for block in blocks]) if any(no_rope) else "0",
        linear_attention_freq=str(linear) if any(linear) else "0",
        mtp_num_layers=0,
    )
    return Cut(model_type, small, blocks, experts)


def write_cut(source: HfFolder, cut: Cut, folder: Path) -> None:
    """Write ``folder``: config.json and one file of weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(cut_config(source.config, cut)))
    names = names_in(source, cut.model_type)
    found = [
        (entry, name, shape, source.dtype(names[whole_name(name, cut)]))
        for entry in entries(cut.model_type, cut.shape)
        for name, shape in entry.their_shapes().items()
    ]
    with (folder / SINGLE).open("wb") as file:
        file.write(encode_header((name, dtype, shape) for _, name, shape, dtype in found))
        for entry, name, shape, dtype in found:
            if entry.unsqueezed == 0:  # of experts, side by side
                words = source.rows(names[whole_name(name, cut)], 0, 1, dtype)[:, list(cut.experts)]
                file.write(memoryview(np.ascontiguousarray(words).reshape(-1).view(np.uint8)))
                continue
            for rows in _rows(entry, shape, cut):
                file.write(_words(source, names[whole_name(name, cut)], rows, dtype))


def cut_config(config: dict[str, Any], cut: Cut) -> dict[str, Any]:
    """A folder's configuration with the numbers of the cut model."""
    architecture = ARCHITECTURES[cut.model_type]
    changed = {key: getattr(cut.shape, ours) for key, ours in architecture.numbers.items() if ours in SIZES}
    for _, write in architecture.parts:
        changed |= {key: value for key, value in write(cut.shape).items() if key in DEPENDENT}
    if "num_local_experts" in config:
        changed["num_local_experts"] = cut.shape.num_moe_experts
    if "layers_block_type" in config:
        changed["layers_block_type"] = [config["layers_block_type"][block] for block in cut.blocks]
        changed.pop("hybrid_override_pattern", None)
        changed.pop("num_hidden_layers", None)
    gone = {"quantization_config", "auto_map", *TOKEN_IDS}
    return {key: value for key, value in (config | changed).items() if key not in gone} | dict.fromkeys(TOKEN_IDS)


def whole_name(name: str, cut: Cut) -> str:
    """A tensor's name in the whole model."""
    prefix = TABLES[cut.model_type].prefix
    if not name.startswith(prefix):
        return name
    block, _, rest = name.removeprefix(prefix).partition(".")
    before, found, behind = rest.partition(".experts.")
    if found and not before.endswith("shared"):
        expert, _, last = behind.partition(".")
        if not expert.isdigit():  # of all experts one tensor
            return f"{prefix}{cut.blocks[int(block)]}.{rest}"
        rest = f"{before}.experts.{cut.experts[int(expert)]}.{last}"
    return f"{prefix}{cut.blocks[int(block)]}.{rest}"


def _rows(entry: Entry, shape: tuple[int, ...], cut: Cut) -> Iterator[range]:
    """Rows of a tensor that stay, in runs; the first ones of all but routers and experts that are one tensor."""
    if ".mlp.router." in entry.name or entry.all_experts:
        yield from (range(expert, expert + 1) for expert in cut.experts)
        return
    step = max(1, BLOCK_BYTES // (8 * math.prod(shape[1:])))
    for first in range(0, shape[0], step):
        yield range(first, min(first + step, shape[0]))


def _words(source: HfFolder, name: str, rows: range, dtype: str) -> memoryview:
    words = source.rows(name, rows.start, len(rows), dtype)
    assert words.itemsize == ITEM_BYTES[dtype]
    return memoryview(np.ascontiguousarray(words).reshape(-1).view(np.uint8))


def available_bytes() -> int:
    """Memory of this machine that programs can have."""
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62  # a kernel that does not say
