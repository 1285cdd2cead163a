"""What is a user's mistake, as opposed to a fault of the program or the machine."""


class UserError(Exception):
    """Bad input: its text is all the user sees (no traceback), and the exit code is 2."""


class SharedMistake(UserError):
    """A mistake that every rank finds alike, so that rank 0 alone shows it."""
