"""What a program prints for people: tables, long lists cut short, and a reader that leaves early."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def for_a_reader() -> Iterator[None]:
    """Around what prints: a reader that has seen enough (``| head``) is no fault, and ends it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # what is still buffered would fail once more at the interpreter's end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Rows of cells as lines, two spaces between columns: numbers to the right, the columns ``left`` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (
            indent
            + "  ".join(
                cell.ljust(width) if place in left else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        ).rstrip()
        for row in rows
    ]
