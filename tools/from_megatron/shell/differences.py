"""Two commands beside each other: what differs between them, flag by flag."""

from collections.abc import Mapping, Sequence

from tools.from_megatron.shell.programs import Launch
from tools.from_megatron.shell.reading import Started
from tools.from_megatron.unknown import MARK, OpenText, ScriptWord

type Parts = list[list[str]]
"""Each flag with its values."""


def parts(started: Started, values: Mapping[str, str] | None = None, flags_only: bool = False) -> Parts:
    """A command's words; marks with these values in their places, all others alike, and without what is empty then.

    flags_only: those of Megatron-LM's program.
    """
    behind = _split(started.flags, values or {})
    return behind if flags_only else [*_split(started.launcher, values or {}), [started.program], *behind]


def _split(words: Sequence[str], values: Mapping[str, str]) -> Parts:
    found: Parts = [[]]
    for word in words:
        for mark, value in values.items():
            word = word.replace(mark, value)
        if word.startswith("-"):
            found.append([])
        found[-1] += MARK.sub("?", word).split()
    return found


def changed(one: Parts, other: Parts) -> set[str]:
    """Flags whose values differ, and those that only one has."""
    sides = [{part[0] if part else "": part for part in each} for each in (one, other)]
    return {name for name in {**sides[0], **sides[1]} if sides[0].get(name) != sides[1].get(name)}


def with_text(started: Started, text: str) -> set[str]:
    """Flags of whose words one holds a text."""
    found = parts(started, {text: "!"} if text else {})
    return {part[0] for part in found if part and (not text or "!" in " ".join(part))}


def with_open_values(words: Sequence[ScriptWord], flag: str, value: OpenText) -> list[ScriptWord]:
    """The words with that as the value of a flag."""
    found, inside = list[ScriptWord](), False
    for word in words:
        inside = inside and not str(word).startswith("-")
        if not inside:
            found.append(word)
        if str(word) == flag:
            inside = True
            found.append(value)
    return found


def same(one: Launch, other: Launch) -> bool:
    """Whether both start the same training."""
    return (one.flags, str(one.program)) == (other.flags, str(other.program))
