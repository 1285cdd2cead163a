"""``metrics.jsonl``: one JSON object per line, the record that every other tool reads."""

import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from program.errors import UserError
from program.schema import JSON, with_leaves
from program.untrusted import InputError, append_regular, open_regular, parse_json, regular_descriptor
from training.metrics.values import Values

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""JSON cannot spell these: as strings they leave the lines readable by strict parsers (jq, browsers)."""
MOST_LINE_BYTES = 1 << 24
MOST_WAITING = 100_000
"""Lines that wait for a disk that is full, about 1 KB each; older ones are dropped."""


class JsonlSink:
    """Appends one object per logged iteration, ``iteration`` first, numbers at full precision.

    A line is handed to the operating system when it is written: a killed rank loses at most the line that it
    was writing. Lines that the disk does not take wait, and are written when it does; training goes on.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = lambda _: None) -> None:
        """Open ``path`` for appending, in an existing folder; a torn last line left by a kill is mended.

        say: called once when the disk takes no more lines, and once when it does again. Raises OSError where the file
        cannot be opened.
        """
        _mend_last_line(path)
        self._path, self._say, self._file = path, say, append_regular(path)
        self._waiting: list[bytes] = []

    def write(self, iteration: int, values: Values | Mapping[str, str]) -> None:
        """Append one line, after those that wait."""
        record = {"iteration": iteration, **with_leaves(values, plain)}
        waited = bool(self._waiting)
        self._waiting.append(json.dumps(record, allow_nan=False).encode() + b"\n")
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            if not waited:
                self._say(f"warning: {self._path} takes no more lines ({error.strerror}); they wait, training goes on")
            del self._waiting[:-MOST_WAITING]
            return
        if waited:
            self._say(f"{self._path} is written again")

    def close(self) -> None:
        """Close the file. Lines that still wait are lost, and said to be."""
        if self._waiting:
            self._say(f"warning: {self._path} lacks its last {len(self._waiting)} lines, which the disk did not take")
        self._file.close()

    def _append(self, line: bytes) -> None:
        """The whole line, or nothing of it. Raises OSError."""
        before = os.fstat(self._file.fileno()).st_size
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError:
            self._file.truncate(before)
            raise


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of ``path`` in order of iteration: at most one of training, one of validation losses and one of tasks'
    scores an iteration.

    A resumed run repeats iterations: of two lines of the same kind for an iteration, the later one counts.
    A torn last line (of a killed run, or of one that is writing) is ignored. Raises UserError for any other
    line that is no object with an ``iteration``.
    """
    latest: dict[tuple[int, int], dict[str, Any]] = {}
    for number, line in enumerate(_lines(path), start=1):
        record = parse_line(line)
        if record is not None:
            latest[int(record["iteration"]), _kind(record)] = record
        elif line.strip() and line.endswith(b"\n"):
            raise UserError(
                f'{path}, line {number}: expected a JSON object with an integer "iteration", found '
                f"{line[:60].decode(errors='replace')!r}. Only the last line may be torn: remove this one."
            )
    return [latest[key] for key in sorted(latest)]


def _kind(record: Mapping[str, Any]) -> int:
    """0 for training, 1 for validation losses, 2 for tasks' scores."""
    families = {name.partition("/")[0] for name in record}
    return 1 if "validation_loss" in families else 2 if "eval" in families else 0


def _lines(path: Path) -> Iterator[bytes]:
    with io.BufferedReader(open_regular(path)) as file:
        while line := file.readline(MOST_LINE_BYTES):
            yield line


def plain(value: Any) -> Any:
    """JSON cannot spell NaN and Inf: they become strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_line(line: bytes) -> dict[str, Any] | None:
    """One line's object, non-finite numbers turned back from strings; None when it is not a metrics line."""
    try:
        record = parse_json(line, dict[str, JSON])
    except InputError:
        return None
    if not isinstance(record.get("iteration"), int):
        return None
    return dict(with_leaves(record, lambda one: NON_FINITE.get(one, math.nan) if isinstance(one, str) else one))


def _mend_last_line(path: Path) -> None:
    """End ``path`` at a line's end, or the next line would be glued to what a killed run left.

    A whole object without its newline is kept, a part of one is cut off.
    """
    if not path.exists():
        return
    os.close(regular_descriptor(path))  # a FIFO would block what follows
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MOST_LINE_BYTES))
        content = file.read()
        start = content.rfind(b"\n") + 1
        if start == len(content):
            return
        if parse_line(content[start:]) is None:
            file.truncate(size - len(content) + start)
        else:
            file.write(b"\n")
