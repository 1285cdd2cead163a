"""Our weights, or their gradients, as transformers' files name and arrange them: by the exporter's own table."""

import torch
from torch import Tensor

from models.hf.shapes import write_config
from models.hf.tables import Entry, entries
from models.shapes import GPTShape

State = dict[str, Tensor]


def exported(ours: State, shape: GPTShape) -> State:
    """ours: whole tensors by canonical names. Raises AssertionError where one has no place there.

    Copies that their files hold beside, such as a tied output layer, are left out: they have no gradient of their own.
    """
    model_type, _ = write_config(shape)
    found, left = State(), set(ours)
    for entry in entries(model_type, shape):
        if entry.name in ours:
            left.discard(entry.name)
            found |= _theirs(entry, ours[entry.name])
    assert not left, f"transformers' {model_type} has no place for {', '.join(sorted(left))}"
    return found


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
