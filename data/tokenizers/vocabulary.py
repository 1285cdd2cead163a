"""Reading the files of a tokenizer, and what any vocabulary must be like."""

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

from program.errors import UserError
from program.untrusted import InputError, read_bytes

MOST_BYTES = 256 << 20
"""Of a file; the largest published ones have some 35 MB."""
MOST_IDS = 1 << 24
"""Of a vocabulary; the largest published ones have some 500,000."""


@contextlib.contextmanager
def said(flags: str, path: Path, way: str = "") -> Iterator[None]:
    """Raises what cannot be read as UserError. flags: what stands before `tokenizer` where a user sets it. path: of the
    file. way: what to do about a file that is not as expected."""
    try:
        yield
    except InputError as error:
        raise UserError(f"{flags}tokenizer: {error}{way}") from None
    except OSError as error:
        raise UserError(f"{flags}tokenizer: {error.filename or path}: {error.strerror}.") from None


def model_bytes(path: Path) -> bytes:
    """All of a file. Raises InputError and OSError."""
    return read_bytes(path, MOST_BYTES)


def vocabulary_size(ids: Collection[int], path: Path, flags: str) -> int:
    """One more than the largest id. Raises UserError where there is none, or one is beyond any vocabulary."""
    if not ids or min(ids) < 0 or max(ids) >= MOST_IDS:
        found = f"ids from {min(ids)} to {max(ids)}" if ids else "none"
        raise UserError(f"{flags}tokenizer: {path}: expected ids from 0 to {MOST_IDS - 1:,}, found {found}.")
    return max(ids) + 1
