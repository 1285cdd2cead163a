"""A field by its name, also within another: `doc.text` is the field `text` of the object or struct `doc`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SHOWN = 20
"""Names that a message lists."""
LIST = " (a list)"


def value_at(value: Any, name: str) -> Any:
    """A field of an object. One whose own name is `doc.text` comes before the field `text` of `doc`.

    Raises KeyError where there is none.
    """
    if isinstance(value, Mapping):
        for head, rest in _splits(name):
            if head in value:
                if not rest:
                    return value[head]
                try:
                    return value_at(value[head], rest)
                except KeyError:
                    continue
    raise KeyError(name)


def arrow_path(fields: Any, name: str) -> tuple[int, ...] | None:
    """The same in the columns of an Arrow schema: number of the column, of the field in its struct, …; None where there
    is none. fields: a schema or a struct's type.
    """
    import pyarrow

    names = [one.name for one in fields]
    for head, rest in _splits(name):
        if head in names:
            number = names.index(head)
            kind = fields.field(number).type
            if not rest:
                return (number,)
            if pyarrow.types.is_struct(kind) and (found := arrow_path(kind, rest)):
                return number, *found
    return None


def arrow_leaf(column: Any, path: Iterable[int]) -> Any:
    """The field of a column of structs; null where a struct around it is."""
    for number in path:
        column = column.flatten()[number]
    return column


def names_in(value: Any) -> str:
    """The names of an object's fields, those within others too, for messages."""
    return _joined(_object_names(value, ""))


def arrow_names(schema: Any) -> str:
    """The same of the columns of an Arrow schema."""
    return _joined(_arrow_names(schema, ""))


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """The whole name; then its parts before and after each dot, from the last one on."""
    yield name, ""
    at = name.rfind(".")
    while at >= 0:
        yield name[:at], name[at + 1 :]
        at = name.rfind(".", 0, at)


def _object_names(value: Any, before: str) -> Iterator[str]:
    for name, one in value.items():
        if isinstance(one, Mapping) and one:
            yield from _object_names(one, f"{before}{name}.")
        else:
            yield f"{before}{name}{LIST if isinstance(one, list) else ''}"


def _arrow_names(fields: Any, before: str) -> Iterator[str]:
    import pyarrow

    for one in fields:
        if pyarrow.types.is_struct(one.type) and one.type.num_fields:
            yield from _arrow_names(one.type, f"{before}{one.name}.")
        else:
            yield f"{before}{one.name}{LIST if pyarrow.types.is_nested(one.type) else ''}"


def _joined(names: Iterator[str]) -> str:
    found = list(names)
    more = f", … ({len(found)} in all)" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more if found else "none"
