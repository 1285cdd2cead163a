"""Whether [ ... ], [[ ... ]] and test hold. None: it cannot be known without running something."""

import fnmatch
import operator
import re
from collections.abc import Callable

from tools.from_megatron.gaps import gaps, without_gaps

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_AND, _OR = ("-a", "&&"), ("-o", "||")


def holds(words: list[str]) -> bool | None:
    """The words between the brackets, expanded. Undefined variables count as empty, as in the shell."""
    for signs, decisive in ((_OR, True), (_AND, False)):
        for at, word in enumerate(words):
            if word in signs and 0 < at < len(words) - 1 and not _is_operand(words, at):
                return _joined(holds(words[:at]), holds(words[at + 1 :]), decisive)
    if words[:1] == ["!"] and len(words) > 1:
        inner = holds(words[1:])
        return None if inner is None else not inner
    if words[:1] == ["("] and words[-1:] == [")"]:
        return holds(words[1:-1])
    if any(what.startswith("$(") for word in words for _, what in gaps(word)):
        return None
    return _simple([without_gaps(word) for word in words])


def _is_operand(words: list[str], at: int) -> bool:
    """Whether -a or -o at this place is compared with, or asks something of a file."""
    return words[at - 1] in ("=", "==", "!=") or (at == 1 and words[0].startswith("-") and len(words) == 2)


def _joined(left: bool | None, right: bool | None, decisive: bool) -> bool | None:
    """left or right (decisive True), left and right (decisive False), where one side may be unknown."""
    if left is decisive or right is decisive:
        return decisive
    return None if left is None or right is None else not decisive


def _simple(words: list[str]) -> bool | None:
    if not words:
        return False
    if len(words) == 1:
        return words[0] not in ("", "-n")
    if len(words) == 2:
        return {"-n": bool(words[1]), "-z": not words[1]}.get(words[0])
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in _NUMBERS:
        try:
            return _NUMBERS[sign](int(left or 0), int(right or 0))
        except ValueError:
            return None
    if sign in ("=", "==", "!="):
        return fnmatch.fnmatchcase(left, right) is (sign != "!=")
    if sign == "=~":
        try:
            return re.search(right, left) is not None
        except re.error:
            return None
    return {"<": left < right, ">": left > right}.get(sign)
