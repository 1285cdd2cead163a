"""How large the numbers of a recipe may be: far beyond any model or cluster, and small enough to count through.

Without these a number that was mistyped fills the memory, or is counted to for hours, before a check that knows what
it means is reached.
"""

import dataclasses
import math
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from parallel.launch import MOST_RANKS
from program.schema import Infinite, structured

MOST = 10**12
"""Of any other whole number: tokens, samples, iterations."""
MOST_FLOAT = 1e12
"""Of any number with a fraction: seconds, minutes, rates, scales."""
MOST_LOCAL_RANKS = 4096

LARGEST: dict[str, int] = {
    **dict.fromkeys(("nproc",), MOST_LOCAL_RANKS),
    **dict.fromkeys(
        ("world_size", "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size",
         "parallel.context_parallel_size", "parallel.expert_model_parallel_size",
         "parallel.expert_tensor_parallel_size"),
        MOST_RANKS,
    ),
    **dict.fromkeys(
        ("parallel.virtual_pipeline_model_parallel_size", "parallel.num_layers_in_first_pipeline_stage",
         "parallel.num_layers_in_last_pipeline_stage"),
        10_000,
    ),
    **dict.fromkeys(
        ("data.builtin_vocab_size", "train.micro_batch_size", "train.generate_tokens"), 1 << 24
    ),
    "data.stream_count": 1 << 16,
    "data.stream_shuffle": 1 << 20,
    "train.global_batch_size": (1 << 31) - 1,
}  # fmt: skip
"""Of the model's fields: models/shape_fields.py."""


def range_problems(config: Any) -> list[str]:
    """Values of a configuration that no type of a field allows, or that are larger than any of its kind. Defaults are
    sound: thousands of configurations are looked at when memory is short, and most fields are at theirs."""
    found: list[str] = []
    for name, kind, default in _fields(type(config)):
        if name in ("stage", "begin"):  # made of values that are looked at in the configuration of each stage
            continue
        value = getattr(config, name)
        own = [(name, value, kind, default)]
        if dataclasses.is_dataclass(kind):
            own = [(f"{name}.{key}", getattr(value, key), hint, usual) for key, hint, usual in _fields(kind)]
        for key, field, hint, usual in own:
            found += [] if field is usual else _problems(key, field, hint)
    return found


def _fields(section: Any) -> list[tuple[str, Any, Any]]:
    """Name, type and default of each field of a dataclass."""
    hints = get_type_hints(section, include_extras=True)
    return [(each.name, hints[each.name], each.default) for each in dataclasses.fields(section)]


def _problems(name: str, value: Any, kind: Any) -> list[str]:
    if isinstance(value, float) and not math.isfinite(value) and not (_may_be_infinite(kind) and value > 0):
        return [f"{name} must be a finite number, found {value}."]
    if isinstance(value, float) and math.isfinite(value) and abs(value) > MOST_FLOAT:
        return [f"{name} must be from {-MOST_FLOAT:g} to {MOST_FLOAT:g}, found {value:g}."]
    most = LARGEST.get(name, MOST)
    numbers = value if isinstance(value, tuple) else (value,)
    if any(isinstance(number, int) and abs(number) > most for number in numbers):
        shown = value if all(abs(number) < 10**30 for number in numbers if isinstance(number, int)) else "a larger one"
        return [f"{name} must be at most {most:,}, found {shown}."]
    plain = list(value) if isinstance(value, tuple) else dict(value) if hasattr(value, "items") else value
    _, problems = structured(plain, kind)
    return [f"{name}: {problem.lstrip(': ')}" for problem in problems]


def _may_be_infinite(kind: Any) -> bool:
    return get_origin(kind) is Annotated and Infinite in get_args(kind)
