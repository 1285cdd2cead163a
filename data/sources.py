"""What there is to train on: named sources with weights, from data.paths, data.blend or data.blend_file."""

import glob
import itertools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from data.config import DataConfig
from data.inputs import check_complete, pairs
from parallel.errors import UserError


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
    weights = dict(config.blend) if config.blend_file is None else read_weights(Path(config.blend_file).expanduser())
    if not weights:
        return [Named("data.paths", config.paths, 1.0)]
    return [Named(name, _globbed(name), weight) for name, weight in weights.items()]


def _globbed(name: str) -> tuple[str, ...]:
    """Files and prefixes that a name stands for, each once though a glob finds both halves of a pair.

    Raises UserError where nothing fits, or shards are missing that the names of others tell of.
    """
    path = Path(name).expanduser()
    if not glob.has_magic(name) or path.is_file() or pairs(path):  # brackets may be its own
        return (name,)
    found = glob.glob(str(Path(name).expanduser()), recursive=True)  # noqa: PTH207  absolute too
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
        text = path.read_text()
    except OSError as error:
        raise UserError(f"data.blend_file: {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"data.blend_file: {path}: not UTF-8 text at byte {error.start}.") from None
    if path.suffix == ".toml":
        return _toml_weights(path, text)
    words = text.split()
    try:
        pairs = [(name, float(weight)) for weight, name in itertools.batched(words, 2)]
    except ValueError as error:
        raise UserError(f'data.blend_file: {path}: expected "weight path weight path …" ({error}).') from None
    return _checked(path, pairs)


def _toml_weights(path: Path, text: str) -> dict[str, float]:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"data.blend_file: {path}: not valid TOML: {error}.") from None
    wrong = [name for name, weight in table.items() if isinstance(weight, bool) or not isinstance(weight, int | float)]
    if wrong:
        raise UserError(f'data.blend_file: {path}: "{wrong[0]}": expected a weight, as in "corpus/web" = 0.7.')
    return _checked(path, list(table.items()))


def _checked(path: Path, pairs: list[tuple[str, float]]) -> dict[str, float]:
    weights = dict(pairs)
    if not weights or len(weights) < len(pairs):
        raise UserError(f"data.blend_file: {path}: {'a source is named twice' if weights else 'no source is named'}.")
    if bad := [name for name, weight in pairs if not 0 < weight < float("inf")]:
        raise UserError(f'data.blend_file: {path}: "{bad[0]}": expected a weight above 0, found {weights[bad[0]]}.')
    return weights
