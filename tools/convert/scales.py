"""Whether fp8 matrices have the scales that they need, and nothing else has any."""

from collections.abc import Iterable, Iterator

from parallel.errors import UserError
from tools.convert.dtypes import FLOATS, FP8_BLOCK
from tools.convert.source import SCALE, HfFolder


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
