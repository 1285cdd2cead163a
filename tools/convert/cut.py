"""A Hugging Face folder cut down to one block of each kind, for logits that any machine can compute.

Its configuration is the folder's own but for what the architecture's writer says otherwise of the cut shape: blocks,
rows of the vocabulary, experts. Its weights are the folder's own: of the first block of each kind, of the first ids, of
the first experts of each group.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from models.families import ARCHITECTURES, TABLES
from models.hf.config_parts import freq, skip_freq
from models.hf.other_keys import TOKEN_IDS
from models.hf.shapes import differing_fields, read_shape, write_config
from models.hf.tables import Entry, constants, entries
from models.shapes import GPTShape
from program.errors import UserError
from tools.shared.dtypes import from_numbers
from tools.shared.hf_folder.headers import SINGLE, encode_header
from tools.shared.hf_folder.row_blocks import BLOCK_BYTES
from tools.shared.hf_folder.source import HfFolder, names_in
from training.checkpoint.format.pieces import ITEM_BYTES

IDS = 1024
"""Rows of the vocabulary that stay."""
CODE = ("auto_map", "quantization_config")
"""What is not of the cut: classes that lie elsewhere, and a rounding that its weights have no more."""


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
    beside = _constants(source, cut, names)
    with (folder / SINGLE).open("wb") as file:
        header = [(name, dtype, shape) for _, name, shape, dtype in found]
        file.write(encode_header([*header, *((name, dtype, ()) for name, dtype, _ in beside)]))
        for entry, name, shape, dtype in found:
            if entry.unsqueezed == 0:  # of experts, side by side
                words = source.rows(names[whole_name(name, cut)], 0, 1, dtype)[:, list(cut.experts)]
                file.write(_bytes_of(words))
                continue
            for rows in _rows(entry, shape, cut):
                file.write(_words(source, names[whole_name(name, cut)], rows, dtype))
        for _, _, word in beside:
            file.write(word)


def _constants(source: HfFolder, cut: Cut, names: dict[str, str]) -> list[tuple[str, str, memoryview]]:
    """Name, dtype and word of each number that lies beside weights: the folder's own, or else the table's."""
    found = []
    for name, value in constants(cut.model_type, cut.shape).items():
        own = names.get(whole_name(name, cut))
        dtype = source.dtype(own) if own is not None else "float32"
        words = source.rows(own, 0, 1, dtype) if own is not None else from_numbers(np.array([[value]]), dtype)
        found.append((name, dtype, _bytes_of(words)))
    return found


def cut_config(config: dict[str, Any], cut: Cut) -> dict[str, Any]:
    """A configuration of the cut model, which reads as its shape.

    The folder's own wherever it can be, since transformers is to say what the folder's keys mean: with what the
    architecture's writer says otherwise of the cut than of the whole. Where that does not read as the cut, as of keys
    that say a number of blocks or experts by names that no writer has, the writer's alone. Raises UserError where the
    architecture has no writing of it.
    """
    model_type, written = write_config(cut.shape)
    no_ids = dict.fromkeys(TOKEN_IDS, 0) | {"pad_token_id": None}  # not every class takes None for each
    for candidate in _own_configs(config, cut, written):
        if _means(candidate | no_ids, model_type, cut.shape):
            return candidate | no_ids
    return written | no_ids


def _own_configs(config: dict[str, Any], cut: Cut, written: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The folder's own with what the cut changes, in keys that it has itself; then in all that the writer has."""
    whole = read_shape(config)[1]
    try:
        before = write_config(dataclasses.replace(whole, hf_model_type=cut.shape.hf_model_type))[1]
    except UserError:  # it can be imported, and not exported
        return
    named = {key: written[key] for key in ("model_type", "architectures")}
    aliases = ARCHITECTURES[cut.model_type].aliases
    names = {key: next((name for name in (key, aliases.get(key)) if name in config), key) for key in written}
    changed = {names[key]: value for key, value in written.items() if key not in before or before[key] != value}
    kept = {key: value for key, value in config.items() if key not in CODE and (key in written or key not in before)}
    kept = {key: _of_blocks(value, whole.num_layers, cut.blocks) for key, value in kept.items()} | named
    yield kept | {key: value for key, value in changed.items() if key in config}
    yield kept | changed


def _of_blocks(value: Any, layers: int, blocks: tuple[int, ...]) -> Any:
    """Of a list with one entry for each block, those of the blocks that stay."""
    return [value[block] for block in blocks] if isinstance(value, list) and len(value) == layers else value


def _means(config: dict[str, Any], model_type: str, shape: GPTShape) -> bool:
    try:
        found, read = read_shape(config)
    except UserError:
        return False
    return found == model_type and not any(differing_fields(shape, read))


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
    return _bytes_of(words)


def _bytes_of(words: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(words).reshape(-1).view(np.uint8))
