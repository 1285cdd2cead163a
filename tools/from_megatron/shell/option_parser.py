"""getopt(1), which sorts a script's arguments into options, ``--`` and the rest."""

import getopt
import itertools
from collections.abc import Sequence

from tools.from_megatron.unknown import has_unknown

_OWN = ("options=", "longoptions=", "name=")


def getopt_program(words: Sequence[str], given: str | None) -> str | None:
    """``getopt -o LETTERS --long NAMES -- ARGUMENTS``; None for its older form, and for optional values."""
    if any(map(has_unknown, words)):
        return None
    try:
        own, arguments = getopt.getopt(list(words), "o:l:n:", list(_OWN))
        letters = "".join(value for name, value in own if name in ("-o", "--options"))
        long = ",".join(value for name, value in own if name in ("-l", "--longoptions"))
        if not letters and not long:
            return None
        if "::" in f"{letters},{long}" or letters[:1] in ("+", "-"):
            return None
        names = [name.replace(":", "=") for name in long.replace(",", " ").split()]
        options, rest = getopt.gnu_getopt(arguments, letters, names)
    except getopt.GetoptError:
        return None
    takes = {f"-{one}" for one, after in itertools.pairwise(letters) if after == ":"}
    takes |= {f"--{name[:-1]}" for name in names if name.endswith("=")}
    words = [word for name, value in options for word in ([name, _quoted(value)] if name in takes else [name])]
    return "".join(f" {word}" for word in [*words, "--", *map(_quoted, rest)]) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
