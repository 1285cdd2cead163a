"""Marks in a text for what is not known without running the script, which matter only where they reach a flag.

They hold hexadecimal digits, so that no quote, blank or $ in them means anything to what reads the text next.
"""

import re

_GAP = re.compile("\ue000([0-9a-f]*)\ue001")


def gap(what: str, line: int) -> str:
    """A mark for ``$NAME`` or ``$(command)``, and the line where it was needed."""
    return f"\ue000{f'{line}:{what}'.encode().hex()}\ue001"


def gaps(text: str) -> list[tuple[int, str]]:
    """The gaps in a text: line and what is missing, e.g. ``$NAME``."""
    found = (bytes.fromhex(digits).decode().partition(":") for digits in _GAP.findall(text))
    return [(int(line), what) for line, _, what in found]


def without_gaps(text: str) -> str:
    """As the shell would read it were the missing variables empty."""
    return _GAP.sub("", text)


def readable(text: str) -> str:
    """As it stands in the script: ``$NAME`` again."""
    return _GAP.sub(lambda match: gaps(match[0])[0][1], text)
