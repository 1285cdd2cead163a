"""What an old name of recipe fields has become: the kinds of lines in the table of ``old_names``. Delete with 0.3.0."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]
"""By dotted names."""


class Contradiction(ValueError):
    """An old name and its new one say different things."""


@dataclass(kw_only=True, slots=True, frozen=True)
class OldField:
    """One that recipes had."""

    kind: Any
    """Its type."""
    default: Any = None
    """What it was where a recipe left it out: a saved config.toml has every field, and says nothing by most."""


def both_there(old: Values, given: Values) -> str | None:
    """Whatever they say: one of them is enough."""
    first = next(iter(old))
    return f"{first} and {next(iter(given))} are both there: {first} is the old name of it. Remove {first}."


@dataclass(kw_only=True, slots=True, frozen=True)
class Moved:
    """Old fields that are read together."""

    old: Mapping[str, OldField]
    """By dotted names."""
    new: tuple[str, ...] = ()
    """Dotted names of what is there now. None: a constant."""
    becomes: Callable[[Values, Values], Values]
    """(old values as given, what the new fields are) -> new values; none where the old ones say nothing by themselves.
    Raises Contradiction where these disagree."""
    beside: Callable[[Values, Values], str | None] = both_there
    """(old values as given, new ones that stand beside them) -> why not; None where these were fields then, too, and go
    together."""
    now: str = ""
    """What the warning says in place of the new values."""


def of_section(section: str, **fields: tuple[Any, Any]) -> dict[str, OldField]:
    """type and default by name."""
    return {f"{section}.{name}": OldField(kind=kind, default=default) for name, (kind, default) in fields.items()}


def renamed(old: str, *new: str) -> Moved:
    """A switch that has another name."""
    return Moved(
        old={old: OldField(kind=bool, default=False)},
        new=new,
        becomes=lambda was, _: {name: value for value in was.values() for name in new},
    )


def constant(old: str, kind: Any, value: Any) -> Moved:
    """What is ``value`` in every run now."""
    return Moved(old={old: OldField(kind=kind, default=value)}, becomes=lambda *_: {}, now=f"{value:g} in every run")


def in_megatron(section: str, of: str, **fields: tuple[Any, Any]) -> Moved:
    """Fields of ``section`` that ``of``.megatron sets by megatron-core's own names."""
    hatch = f"{of}.megatron"

    def becomes(was: Values, now: Values) -> Values:
        given = {name.rpartition(".")[2]: value for name, value in was.items()}
        kept = [str(each) for each in now[hatch] if _name(str(each)) not in given]
        return {hatch: kept + [f"{name}={_literal(value)}" for name, value in given.items()]}

    def beside(old: Values, given: Values) -> str | None:
        entries = {_name(str(each)) for each in given[hatch]}
        for name in old:
            if (own := name.rpartition(".")[2]) in entries:
                return f"{name} and {hatch} both set {own}: {name} is the old name of it. Remove {name}."
        return None

    return Moved(old=of_section(section, **fields), new=(hatch,), becomes=becomes, beside=beside)


def _name(entry: str) -> str:
    return entry.partition("=")[0].strip()


def _literal(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)
