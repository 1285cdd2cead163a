"""Before anything is written: each of their tensors is used, and each of our rows filled, once."""

import math
from collections.abc import Iterable, Iterator

import numpy as np

from models.hf.row_layouts import Strip
from models.hf.shapes import read_shape, unread
from models.hf.tables import Entry, constants, copies, entries, is_computed
from models.shapes import GPTShape
from program.errors import UserError, printable
from program.printing import some
from tools.shared.dtypes import FLOATS, FP8_BLOCK, to_numbers
from tools.shared.hf_folder.headers import DTYPES, THEIR_DTYPES
from tools.shared.hf_folder.row_blocks import BLOCK_BYTES
from tools.shared.hf_folder.source import SCALE, HfFolder, names_in
from training.checkpoint.format.coverage import covered_once

MOST_WRONG = 1000
"""Runs of rows for which a folder lacks the right tensor, from which on no more are looked for."""


def check(source: HfFolder, model_type: str, shape: GPTShape) -> list[str]:
    """Each of their tensors is used, and each of our rows filled, once: notes for the user.

    Raises UserError with the tensors that are missing, left over, of another shape, or unequal where they must not be,
    and with fp8 matrices whose scales are not theirs.
    """
    names = names_in(source, model_type)
    wanted, is_all = _wanted(source, names, model_type, shape)
    equals = copies(model_type, shape)
    missing = [name for name in wanted if name not in names]
    left = [name for name in names if name not in wanted and name not in equals]
    computed = [name for name in left if is_computed(model_type, name)]
    used = [name for name in names if name in wanted or name in equals]
    scales = {name + SCALE for name in used}
    extra = sorted(set(left) - set(computed) - scales)
    reshaped = [
        f"{name} {list(source.places[names[name]].shape)}, expected {list(shape_)}"
        for name, shape_ in wanted.items()
        if name in names and source.places[names[name]].shape != shape_
    ]
    for what, found in (("lacks", missing), ("has shapes that differ:", reshaped), ("has no place here for", extra)):
        if found:
            more = f" and {'' if is_all else 'at least '}{len(found) - 5} more" if len(found) > 5 else ""
            raise UserError(f"{source.folder}: this {model_type} {what} {', '.join(found[:5])}{more}.")
    for place, name in ((source.places[names[name]], names[name]) for name in used):
        if place.dtype not in THEIR_DTYPES:
            raise UserError(f"{place.file}: {name} is {place.dtype}; expected one of {', '.join(DTYPES)}.")
    _check_constants(source, names, model_type, shape)
    check_scales(source, [names[name] for name in used])
    _check_copies(source, names, {name: of for name, of in equals.items() if name in names}, model_type, shape)
    fixed = constants(model_type, shape)
    return list(_notes(source, model_type, shape, [name for name in computed if name not in fixed]))


def _wanted(
    source: HfFolder, names: dict[str, str], model_type: str, shape: GPTShape
) -> tuple[dict[str, tuple[int, ...]], bool]:
    """The tensors that the shape is made of, with their own shapes, and whether these are all.

    They are not where too much of it is missing or has other shapes: a configuration may claim thousands of blocks of
    thousands of experts, which would take hours to list.
    """
    wanted: dict[str, tuple[int, ...]] = {}
    wrong = 0
    for entry in entries(model_type, shape):
        theirs = entry.their_shapes()
        wanted |= theirs
        if all(_has(source, names, name, size) for name, size in theirs.items()):
            _check_coverage(entry, shape)  # whose time goes by the size, which the files have
        else:
            wrong += len(entry.strips)
        if wrong >= MOST_WRONG:
            return wanted, False
    return wanted, True


def _has(source: HfFolder, names: dict[str, str], name: str, shape: tuple[int, ...]) -> bool:
    return name in names and source.places[names[name]].shape == shape


def _check_coverage(entry: Entry, shape: GPTShape) -> None:
    """A table that leaves rows out is a bug, found here rather than in training."""
    rows = shape.vocab_size if entry.padded else entry.rows
    ours = covered_once((rows,), (((strip.row,), (strip.rows,)) for strip in entry.strips))
    theirs = all(_is_each_once(strips) for strips in entry.by_their_name().values())
    if not ours or not theirs:
        raise AssertionError(f"{entry.name}: the table does not give each row once")


def _is_each_once(strips: list[Strip]) -> bool:
    """Whether the strips of one of their tensors are each of its rows once."""
    counts = np.zeros(sum(strip.rows for strip in strips), dtype=np.uint8)
    for strip in strips:
        if strip.theirs.stop > len(counts):
            return False
        counts[strip.theirs] += 1
    return bool((counts == 1).all())


def _check_copies(
    source: HfFolder, names: dict[str, str], equals: dict[str, str], model_type: str, shape: GPTShape
) -> None:
    originals = {entry.name: entry for entry in entries(model_type, shape) if entry.name in equals.values()}
    for name, ours in equals.items():
        (original,) = originals[ours].their_shapes()
        if not same_rows(source, names[name], names[original]):
            raise UserError(
                f"{source.folder}: {name} differs from {original}, which it must equal in this architecture "
                "(tie_word_embeddings, or multi-token prediction). Only one of the two can be kept."
            )


def _check_constants(source: HfFolder, names: dict[str, str], model_type: str, shape: GPTShape) -> None:
    for name, value in constants(model_type, shape).items():
        if name in names and source.places[names[name]].dtype in FLOATS:
            dtype = source.dtype(names[name])
            found = to_numbers(source.rows(names[name], 0, 1, dtype), dtype).item()
            if not math.isclose(found, value, rel_tol=1e-2):  # bf16 rounds
                raise UserError(f"{source.folder}: {name} is {found:.6g}; expected {value}, which no model trains.")


def same_rows(source: HfFolder, one: str, other: str) -> bool:
    """Whether two tensors hold the same numbers, compared block by block."""
    first, second = source.places[one], source.places[other]
    dtype = source.dtype(one)
    if (first.shape, dtype) != (second.shape, source.dtype(other)):
        return False
    step = max(1, BLOCK_BYTES // max(1, first.row_bytes))
    for row in range(0, first.shape[0], step):
        count = min(step, first.shape[0] - row)
        rows = [source.rows(name, row, count, dtype) for name in (one, other)]
        if not np.array_equal(rows[0], rows[1]):
            return False
    return True


def _notes(source: HfFolder, model_type: str, shape: GPTShape, computed: list[str]) -> Iterator[str]:
    if keys := sorted(unread(source.config)):
        named = printable(some(keys))
        yield f"config.json has keys that say nothing to transformers' {model_type}, nor to Triplane: {named}."
    if computed:
        yield f"{len(computed)} tensors follow from config.json and are no weights: {computed[0]}, ..."
    if read_shape(source.config)[1].mtp_num_layers != shape.mtp_num_layers:
        yield "config.json names multi-token prediction (num_nextn_predict_layers), the files have none: none imported."
    if any(place.dtype == "float8_e4m3fn" for place in source.places.values()):
        yield "fp8 matrices times the scales of their 128 x 128 blocks; exporting writes them without scales."


def check_scales(source: HfFolder, names: Iterable[str]) -> None:
    """names: the files' names of all tensors that are used. Raises UserError with those that cannot be scaled."""
    if problems := [problem for name in names for problem in _problems(source, name)]:
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(
            "\n  ".join([f"{source.folder}: fp8 matrices and their scales do not fit together:", *problems[:5]])
            + f"{more}\nDownload the files again, or those of the model in bfloat16."
        )


def _problems(source: HfFolder, name: str) -> Iterator[str]:
    place, scale = source.places[name], source.places.get(name + SCALE)
    if place.dtype != "float8_e4m3fn":
        if scale is not None:
            yield f"{name + SCALE}: expected scales of an fp8 matrix, but {name} is {place.dtype}, which has none"
    elif len(place.shape) != 2:
        yield f"{name} {list(place.shape)}: expected fp8 in matrices only"
    else:
        expected = [-(-size // FP8_BLOCK) for size in place.shape]
        what = f"{expected}, one for each {FP8_BLOCK} x {FP8_BLOCK} block of {name} {list(place.shape)}"
        if scale is None:
            yield f"{name + SCALE}: expected scales {what}; found none"
        elif list(scale.shape) != expected:
            yield f"{name + SCALE}: expected scales {what}; found {list(scale.shape)}"
        elif scale.dtype not in FLOATS:
            yield f"{name + SCALE}: expected one of {', '.join(FLOATS)}; found {scale.dtype}"
