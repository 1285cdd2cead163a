"""Our weights, or their gradients, as transformers' files name and arrange them: by the exporter's own table."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from models.families import TABLES
from models.hf.shapes import write_config
from models.hf.tables import Entry, entries
from models.shapes import GPTShape

State = dict[str, Tensor]


def exported(ours: State, shape: GPTShape) -> State:
    """ours: whole tensors by canonical names. Raises AssertionError where one has no place there.

    Copies that their files hold beside, such as a tied output layer, are left out: they have no gradient of their own.
    """
    found, left = State(), set(ours)
    for name, entry in _entries(shape):
        if name in ours:
            left.discard(name)
            found |= _theirs(entry, ours[name])
    for name in [name for name in left if name.startswith("mtp.")]:
        left.discard(name)
        _, depth, rest = name.split(".", 2)
        rest = rest.replace("final_layernorm.", "shared_head.norm.")
        found[f"model.layers.{shape.num_layers + int(depth)}.{rest}"] = ours[name]
    assert not left, f"transformers has no place for {', '.join(sorted(left))}"
    return found


def without_depths(shape: GPTShape) -> GPTShape:
    """The model itself: transformers keeps multi-token prediction apart, and of most families has none in its files."""
    return replace(shape, mtp_num_layers=0)


def _entries(shape: GPTShape) -> Iterator[tuple[str, Entry]]:
    """With their canonical names. A depth's block is named as one more block would be, as DeepSeek's is."""
    model_type = write_config(without_depths(shape))[0]
    if not shape.mtp_num_layers or TABLES[model_type].mtp_copies:
        yield from ((entry.name, entry) for entry in entries(model_type, shape))
        return
    mixtures = list(map(int, shape.moe_blocks))
    mixtures += mixtures[-1:] * shape.mtp_num_layers  # a depth has experts where the last block has
    longer = replace(without_depths(shape), num_layers=len(mixtures))
    longer = replace(longer, moe_layer_freq=str(mixtures)) if any(mixtures) else longer
    for entry in entries(model_type, longer):
        kind, _, rest = entry.name.partition(".")
        number, _, rest = rest.partition(".")
        depth = int(number) - shape.num_layers if kind == "layers" else -1
        yield f"mtp.{depth}.{rest}" if depth >= 0 else entry.name, entry


def _theirs(entry: Entry, whole: Tensor) -> State:
    rows, found = whole.reshape(-1, entry.columns), State()
    shapes = entry.their_shapes()
    for name, strips in entry.by_their_name().items():
        theirs = rows.new_zeros(sum(strip.rows for strip in strips), entry.columns)
        for strip in strips:
            theirs[strip.theirs] = rows[strip.row : strip.row + strip.rows]
        if entry.all_experts and not entry.vectors:
            theirs = theirs.view(entry.shape[0], -1, entry.columns)
        found[name] = (theirs.mT if entry.transposed else theirs).reshape(shapes[name]).contiguous()
    return found


def assembled(parts: list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]) -> State:
    """Whole tensors from (name, global shape, offset, data). Raises AssertionError where an element is missing."""
    found = State()
    for name, shape, offset, data in parts:
        whole = found.setdefault(name, torch.full(shape, torch.nan))
        whole[tuple(slice(start, start + size) for start, size in zip(offset, data.shape, strict=True))] = data
    holes = [name for name, whole in found.items() if whole.isnan().any()]
    assert not holes, f"not all ranks' parts of {', '.join(holes)} are there, or they are not numbers"
    return found
