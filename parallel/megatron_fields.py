"""``section.megatron = ["field=value"]`` sets a field of one of mcore's config classes.

Only what we have no field for is set so: each value has exactly one place. The names are checked against the mcore
class by ``checked``, where a rank builds what the class configures.
"""

import ast
import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from program.errors import SharedMistake

MOST_TEXT = 10_000

NOT_OFFERED = dict.fromkeys(("fp4_param", "fp4_param_gather"), "weights that are kept in fp4")
"""Fields whose function is not tested here, and would fail late or train something else: field -> what it is."""


def megatron_field_problems(where: str, entries: Iterable[str], owned: frozenset[str]) -> list[str]:
    """Entries not of the form ``name=value``, names given twice, and names that our own fields set."""
    found, seen = [], set[str]()
    for entry in entries:
        name, equals, _ = entry.partition("=")
        if not equals or not name.strip().isidentifier():
            found.append(f'{where}: expected "field=value", found "{entry}".')
        elif name.strip() in owned:
            found.append(f"{where}: {name.strip()} is set by Triplane's own fields; use those (see --help).")
        elif name.strip() in NOT_OFFERED:
            found.append(
                f"{where}: {name.strip()} is refused: {NOT_OFFERED[name.strip()]} is not offered "
                "(docs/precision.md). Leave it out."
            )
        elif name.strip() in seen:
            found.append(f"{where}: {name.strip()} is given twice.")
        seen.add(name.strip())
    return found


def parse(entries: Iterable[str]) -> dict[str, Any]:
    """``["a=1", "b=word"]`` as ``{"a": 1, "b": "word"}``: Python literals, anything else is a string. What has no "="
    is left for ``megatron_field_problems``."""
    values: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals:
            continue
        text = text[:MOST_TEXT]
        try:
            values[name.strip()] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: brackets without end
            values[name.strip()] = text.strip()
    return values


def checked(where: str, entries: Iterable[str], target: type) -> dict[str, Any]:
    """The parsed entries, each a field of the dataclass ``target``.

    Raises SharedMistake with the nearest field name otherwise.
    """
    values = parse(entries)
    known = {field.name for field in dataclasses.fields(target)}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f' Did you mean "{near[0]}"?' if near else ""
            raise SharedMistake(f"{where}: {target.__name__} of megatron-core has no field {name!r}.{hint}")
    return values
