"""What ends a run: a user's mistake, and a fault that was understood."""


def printable(text: str) -> str:
    """``text`` as a terminal may get it: control characters and what is no UTF-8 are spelled out, lines stay lines."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else _spelled(one) for one in text)


QUOTED = 100
"""Characters of a command line or a file that a message quotes."""


def cut_short(text: str, most: int = QUOTED) -> str:
    """What a message quotes of ``text``, which may be of any length."""
    return text if len(text) <= most else f"{text[:most]}…"


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode()


class UserError(Exception):
    """Bad input: its text is all the user sees (no traceback), and the exit code is 2."""

    def __str__(self) -> str:
        """Printable: the text may quote a file from outside."""
        return printable(super().__str__())


class StoppedOnRequest(SystemExit):
    """A request to stop came while there was nothing to save. No other SystemExit ends a rank well: it is a user's."""


class SharedMistake(UserError):
    """A mistake that every rank finds alike, so that rank 0 alone shows it."""


class SharedFault(Exception):
    """A fault of program, data or machine that every rank finds alike: its text says it all, and the exit code is 1.

    rank: where it began, where that is known. host: the node that is to blame, by ``launch.node_name``; None where no
    machine is, or it is unknown.
    """

    def __init__(self, text: str, rank: int | None = None, host: str | None = None) -> None:
        super().__init__(text)
        self.rank, self.host = rank, host
