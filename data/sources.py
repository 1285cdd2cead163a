"""What there is to train on: named sources with weights, from data.paths, data.blend or data.blend_file."""

import glob
import itertools
from dataclasses import dataclass
from pathlib import Path

from data import bucket_shards, cache
from data.config import MOST_SOURCES, DataConfig, path_of
from data.inputs import Inputs, check_complete, pairs, resolve
from program.buckets.names import is_url
from program.errors import UserError
from program.schema import text_problem
from program.untrusted import InputError, read_text, read_toml


@dataclass(frozen=True, slots=True)
class Named:
    """One source as the configuration names it."""

    name: str
    paths: tuple[str, ...]
    """What the name stands for: itself, or what a glob finds."""
    weight: float


def named(config: DataConfig) -> list[Named]:
    """The sources of a blend, in the order given; without a blend, one that stands for all of data.paths.

    Raises UserError for a file of weights that cannot be read, or a glob that finds nothing.
    """
    weights = dict(config.blend) if config.blend_file is None else read_weights(path_of(config.blend_file))
    if not weights:
        found = (bucket_shards.bring(one, cache.root(config)) if is_url(one) else (one,) for one in config.paths)
        return [Named("data.paths", tuple(itertools.chain(*found)), 1.0)]
    return [Named(name, _globbed(name, config), weight) for name, weight in weights.items()]


def inputs_of(source: Named, config: DataConfig) -> Inputs:
    """Shards and raw files of a source. Raises UserError, which names where the source was given, as ``resolve``."""
    try:
        return resolve(source.paths)
    except UserError as error:
        if source.name == "data.paths":
            raise
        given = f"data.blend_file: {config.blend_file}" if config.blend_file is not None else "data.blend"
        raise UserError(f"{given}: {str(error).removeprefix('data.paths: ')}") from None


def _globbed(name: str, config: DataConfig) -> tuple[str, ...]:
    """Files and prefixes that a name stands for, each once though a glob finds both halves of a pair.

    Raises UserError where nothing fits, or shards are missing that the names of others tell of.
    """
    if is_url(name):
        return tuple(bucket_shards.bring(name, cache.root(config)))
    path = path_of(name)
    if not glob.has_magic(name) or path.is_file() or pairs(path):  # brackets may be its own
        return (name,)
    found = glob.glob(str(path_of(name)), recursive=True)  # noqa: PTH207  absolute too
    files = [Path(one) for one in found if not one.endswith((".json", ".lock")) and Path(one).is_file()]
    files = [one for one in files if ".tmp-" not in one.name]  # what a killed writer leaves beside its shards
    prefixes = {str(one.with_suffix("")) if one.suffix in (".bin", ".idx") else str(one) for one in files}
    if not prefixes:
        raise UserError(f'data.blend: nothing fits "{name}".')
    check_complete(Path(one).absolute() for one in prefixes)
    return tuple(sorted(prefixes))


def read_weights(path: Path) -> dict[str, float]:
    """A file of weights: TOML, or Megatron's pairs of weight and path.

    Raises UserError where it is neither.
    """
    try:
        given = _toml_weights(path) if path.suffix == ".toml" else _pairs(path)
    except OSError as error:
        raise UserError(f"data.blend_file: {path}: {error.strerror}.") from None
    except InputError as error:
        raise UserError(f"data.blend_file: {error}") from None
    return _checked(path, given)


def _pairs(path: Path) -> list[tuple[str, float]]:
    words = read_text(path).split()
    try:
        return [(name, float(weight)) for weight, name in itertools.batched(words, 2)]
    except ValueError as error:
        raise InputError(path, f'expected "weight path weight path …" ({str(error)[:100]}).') from None


def _toml_weights(path: Path) -> list[tuple[str, float]]:
    try:
        weights: dict[str, float] = read_toml(path, dict[str, float])
    except InputError as error:
        raise InputError(
            path, f'{error.problem} A line is a source and its weight, as in "corpus/web" = 0.7.'
        ) from None
    return list(weights.items())


def _checked(path: Path, pairs: list[tuple[str, float]]) -> dict[str, float]:
    weights = dict(pairs)
    if not weights or len(weights) < len(pairs):
        raise UserError(f"data.blend_file: {path}: {'a source is named twice' if weights else 'no source is named'}.")
    if len(weights) > MOST_SOURCES:
        raise UserError(f"data.blend_file: {path}: {len(weights):,} sources; at most {MOST_SOURCES:,} fit a blend.")
    for name, weight in pairs:
        if problem := text_problem(name):
            raise UserError(f"data.blend_file: {path}: expected the name of a source, found {problem}.")
        if not 0 < weight < float("inf"):
            raise UserError(f'data.blend_file: {path}: "{name}": expected a weight above 0, found {weight}.')
    return weights
