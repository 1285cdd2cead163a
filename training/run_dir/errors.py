"""What a run's folder does not allow: a mistake of who starts a run, or, once it has trained, a fault.

A folder that took checkpoints was chosen well: a full disk or a file server that does not answer passes, and is worth
another attempt (exit code 1), where a folder that never worked is bad input (exit code 2, never tried again).
"""

from pathlib import Path

from program.errors import SharedFault, SharedMistake, UserError
from training.checkpoint import folders


def has_trained(run_dir: Path) -> bool:
    """Whether the run has a committed checkpoint; also where that cannot be read, but for want of permission."""
    try:
        return bool(folders.complete(folders.checkpoints(run_dir)))
    except PermissionError:
        return False
    except OSError:
        return True


def run_dir_error(run_dir: Path, text: str) -> UserError | SharedFault:
    """``text`` as what it is here, to be raised. One process asks, which alone has met it."""
    return SharedFault(text) if has_trained(run_dir) else UserError(text)


def shared_run_dir_error(trained: bool, text: str) -> SharedMistake | SharedFault:
    """``text`` as what it is here, on every rank; ``trained``: what one rank found, and sent to all."""
    return SharedFault(text) if trained else SharedMistake(text)
