"""Names of weights in checkpoints by parameter (PyTorch DCP, DeepSpeed), and which of them a model may have.

A naming is that of transformers' files or modules, from the tables of ``models.hf``, or torchtitan's.
"""

from collections.abc import Iterator

from models.hf.shapes import write_config
from models.hf.tables import TABLES, Entry, constants, copies, entries
from models.shapes import GPTShape
from parallel.errors import UserError
from tools.reshard.module_names import module_name
from tools.reshard.named_weights import Geometry, NamedWeight, Names, Naming, RowRun, renamed
from tools.reshard.torchtitan_names import ROTATES_NEIGHBOURS, interleaved, torchtitan_name, without_versions

WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module", "module")
"""Segments that wrappers of modules put into names."""


def namings(shape: GPTShape) -> Iterator[Naming]:
    """Those that such a model may have."""
    seen: set[tuple[str, ...]] = set()
    for model_type in (*_own_type(shape), *TABLES):
        try:
            found = list(namings_of(model_type, shape))
        except UserError:
            continue  # no model of this type has such parameters
        for each in found:
            names = tuple(sorted(each.shapes))
            if names not in seen:
                seen.add(names)
                yield each


def _own_type(shape: GPTShape) -> list[str]:
    """The model_type that such a model is exported as: of equal names, its rows count."""
    try:
        return [write_config(shape)[0]]
    except (UserError, KeyError, ValueError):
        return []


def namings_of(model_type: str, shape: GPTShape) -> Iterator[Naming]:
    """Those of one model_type. Raises UserError for a parameter that it does not have."""
    naming = _of_files(model_type, shape, list(entries(model_type, shape)))
    yield naming
    if bare := TABLES[model_type].bare:
        yield renamed(naming, lambda name: (name.removeprefix(bare), None))
    yield renamed(naming, module_name(model_type, naming))
    if (titan := _of_torchtitan(naming, model_type, shape)) is not None:
        yield titan


def written_naming(family: Names, shape: GPTShape) -> Naming:
    """That of the newest version's modules. Raises UserError for a model that they do not have."""
    model_type, _ = write_config(shape)
    naming = _of_files(model_type, shape, list(entries(model_type, shape)))
    if family == "transformers":
        return renamed(naming, module_name(model_type, naming))
    if (titan := _of_torchtitan(naming, model_type, shape)) is None:
        raise UserError(
            f"--names {family}: it has no model like this one, which is transformers' {model_type}. It has those of "
            f"{', '.join(ROTATES_NEIGHBOURS)}. Use --names transformers."
        )
    return titan


def _of_torchtitan(naming: Naming, model_type: str, shape: GPTShape) -> Naming | None:
    if model_type not in ROTATES_NEIGHBOURS:
        return None
    titan = renamed(naming, torchtitan_name, "torchtitan's", "torchtitan")
    turned = ROTATES_NEIGHBOURS[model_type] and not shape.qk_layernorm  # a table may be shared
    return interleaved(titan, shape) if turned else titan


def _of_files(model_type: str, shape: GPTShape, found: list[Entry]) -> Naming:
    weights: list[NamedWeight] = []
    shapes: dict[str, tuple[int, ...]] = {}
    padded: set[str] = set()
    for entry in found:
        runs = tuple(RowRun(strip.name, strip.start, strip.row, strip.rows, strip.step) for strip in entry.strips)
        geometry = Geometry(entry.transposed, entry.vectors, entry.unsqueezed)
        weights.append(NamedWeight(entry.key, entry.shape, runs, entry.padded, geometry))
        shapes |= entry.their_shapes()
        padded |= {strip.name for strip in entry.strips if entry.padded}
    label = f"transformers' {model_type}"
    return Naming(
        label, "transformers", tuple(weights), shapes, tuple(copies(model_type, shape)), padded,
        constants(model_type, shape), TABLES[model_type].computed,
    )  # fmt: skip


def known_name(key: str) -> str:
    """A key without wrappers' segments, and as this package spells torchtitan's names."""
    segments = key.split(".")
    if not set(segments).isdisjoint(WRAPPERS):
        key = ".".join(segment for segment in segments if segment not in WRAPPERS)
    return without_versions(key)
