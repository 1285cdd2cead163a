"""What ends a run: a user's mistake, and a fault that was understood."""


class UserError(Exception):
    """Bad input: its text is all the user sees (no traceback), and the exit code is 2."""


class SharedMistake(UserError):
    """A mistake that every rank finds alike, so that rank 0 alone shows it."""


class SharedFault(Exception):
    """A fault of program, data or machine that every rank finds alike: its text says it all, and the exit code is 1."""
