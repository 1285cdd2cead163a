"""What ends a run: a user's mistake, and a fault that was understood."""


class UserError(Exception):
    """Bad input: its text is all the user sees (no traceback), and the exit code is 2."""


class SharedMistake(UserError):
    """A mistake that every rank finds alike, so that rank 0 alone shows it."""


class SharedFault(Exception):
    """A fault of program, data or machine that every rank finds alike: its text says it all, and the exit code is 1.

    rank: where it began, where that is known. host: the node that is to blame, by ``launch.node_name``; None where no
    machine is, or nobody knows.
    """

    def __init__(self, text: str, rank: int | None = None, host: str | None = None) -> None:
        super().__init__(text)
        self.rank, self.host = rank, host
