"""metrics.jsonl as columns: one per key, over iterations; a run of 100,000 lines takes a second."""

import io
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from program.untrusted import InputError, json_value, open_regular
from training.metrics.jsonl import MOST_LINE_BYTES, NON_FINITE

MOST_BYTES = 192 << 20
"""Parsed of a file; of a larger one every n-th line, and its end whole."""
END_BYTES = 4 << 20
AT_ONCE = 500
"""Lines that are parsed together: a decoder for each would take twice the time."""
MOST_TABLES = 240
"""Of a key that holds a table, such as expert_load; spread over the run."""
MOST_LISTED = 16
"""Of a key that holds a list: so many entries have a curve each."""
LARGEST = 2**63


@dataclass(slots=True)
class Column:
    """A key's values, by iteration in order."""

    iterations: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, iteration: int, value: float) -> None:
        self.iterations.append(iteration)
        self.values.append(value)

    def forget_from(self, iteration: int) -> tuple[list[int], list[float]]:
        """Remove what is at this iteration and behind it, which a resumed run does again; what was removed."""
        keep = len(self.iterations)
        while keep and self.iterations[keep - 1] >= iteration:
            keep -= 1
        gone = self.iterations[keep:], self.values[keep:]
        del self.iterations[keep:], self.values[keep:]
        return gone


@dataclass(slots=True)
class Spread:
    """Objects of a key, spread evenly over the run, and the newest."""

    kept: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    newest: tuple[int, dict[str, Any]] | None = None
    every: int = 1
    seen: int = 0

    def add(self, iteration: int, value: dict[str, Any]) -> None:
        self.newest = iteration, value
        if self.seen % self.every == 0:
            self.kept.append(self.newest)
        self.seen += 1
        if len(self.kept) == MOST_TABLES:
            self.kept, self.every = self.kept[::2], 2 * self.every

    def forget_from(self, iteration: int) -> None:
        """As a column does."""
        self.kept = [row for row in self.kept if row[0] < iteration]
        self.newest = self.kept[-1] if self.kept else None

    def rows(self) -> list[tuple[int, dict[str, Any]]]:
        """Oldest first."""
        return [*self.kept, *([self.newest] if self.newest and self.newest not in self.kept[-1:] else [])]


@dataclass(kw_only=True, slots=True)
class MetricsTable:
    """What a run logged."""

    columns: dict[str, Column] = field(default_factory=lambda: defaultdict(Column))
    tables: dict[str, Spread] = field(default_factory=lambda: defaultdict(Spread))
    """Keys that hold an object."""
    lost: list[tuple[list[int], list[float]]] = field(default_factory=list)
    """Losses of iterations that were done again."""
    left_out: int = 1
    """Of a file that is too large one line in so many was read."""
    unreadable: int = 0

    def column(self, name: str) -> Column | None:
        """The key's values; None where there are none."""
        found = self.columns.get(name)
        return found if found is not None and found.values else None

    def last(self, name: str) -> float | None:
        """The newest value."""
        found = self.column(name)
        return None if found is None else found.values[-1]

    def names(self) -> list[str]:
        """Keys with values, in the order in which they came."""
        return [name for name, column in self.columns.items() if column.values]


def read_metrics(path: Path) -> MetricsTable:
    """All that the file holds; a table without columns where there is none. Lines that are none are counted."""
    table, newest = MetricsTable(), -1
    try:
        for records in _batches(path, table):
            for group in _alike(records):
                iterations = [record.pop("iteration", None) for record in group]
                trains = "loss" in group[0]
                if trains and _rising(newest, iterations) and _add_alike(table, iterations, group):
                    newest = iterations[-1]
                    continue
                for iteration, record in zip(iterations, group, strict=True):
                    if type(iteration) is not int or not 0 <= iteration < LARGEST:
                        table.unreadable += 1
                        continue
                    if iteration <= newest and trains:
                        _start_over(table, iteration)
                    newest = iteration if trains else newest
                    _add(table, iteration, record)
    except (OSError, InputError):
        pass
    return table


def _alike(records: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Stretches of records with the same keys in the same order."""
    return (list(group) for _, group in groupby(records, key=list))


def _rising(newest: int, iterations: Sequence[Any]) -> bool:
    return set(map(type, iterations)) == {int} and all(
        one < other for one, other in pairwise([newest, *iterations])
    )  # fmt: skip


def _add_alike(table: MetricsTable, iterations: list[int], group: Sequence[dict[str, Any]]) -> bool:
    """A column at a time, a third of the time; False, with nothing added, where a value is no plain number."""
    values = list(zip(*(record.values() for record in group), strict=True))
    if iterations[-1] >= LARGEST:
        return False
    for column in values:
        kinds = set(map(type, column))
        if not kinds <= {float, int} or (int in kinds and not -LARGEST < min(column) <= max(column) < LARGEST):
            return False
    for name, column in zip(group[0], values, strict=True):
        mine = table.columns[name]
        mine.iterations.extend(iterations)
        mine.values.extend(column)
    return True


def _start_over(table: MetricsTable, iteration: int) -> None:
    """A resumed run is at ``iteration``: what came after it does not count."""
    gone = table.columns["loss"].forget_from(iteration)
    if len(gone[0]) > 1:
        table.lost.append(gone)
    for column in table.columns.values():
        column.forget_from(iteration)
    for rows in table.tables.values():
        rows.forget_from(iteration)


def _add(table: MetricsTable, iteration: int, record: dict[str, Any]) -> None:
    for name, value in record.items():
        kind = type(value)
        if kind is float or (kind is int and abs(value) < LARGEST):
            table.columns[name].add(iteration, value)
        elif kind is str and value in NON_FINITE:
            table.columns[name].add(iteration, NON_FINITE[value])
        elif kind is dict:
            table.tables[name].add(iteration, value)
        elif kind is list and len(value) <= MOST_LISTED:
            _add(table, iteration, {f"{name}/{place}": one for place, one in enumerate(value)})


def _batches(path: Path, table: MetricsTable) -> Iterator[list[dict[str, Any]]]:
    with io.BufferedReader(open_regular(path), 1 << 20) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        every = table.left_out = math.ceil(size / MOST_BYTES) or 1
        waiting: list[bytes] = []
        for number, line in enumerate(iter(partial(file.readline, MOST_LINE_BYTES), b"")):
            if len(line) == MOST_LINE_BYTES:  # no metric is as long: a hole in the file, say
                table.unreadable += 1
                continue
            if every == 1 or number % every == 0 or file.tell() > size - END_BYTES:
                waiting.append(line)
            if len(waiting) == AT_ONCE:
                yield list(_parsed(waiting, table))
                waiting = []
        yield list(_parsed(waiting, table))


def _parsed(lines: Sequence[bytes], table: MetricsTable) -> Iterator[dict[str, Any]]:
    """The objects among the lines. One that is no JSON, such as the torn last one, costs no other."""
    try:
        found = json_value(b"[" + b",".join(line.rstrip(b"\n") or b"null" for line in lines) + b"]")
    except InputError:
        found = [one for line in lines for one in [_alone(line)]]
    if len(found) != len(lines):  # a line with a comma between two values
        found = [_alone(line) for line in lines]
    for line, one in zip(lines, found, strict=True):
        if type(one) is dict:
            yield one
        else:
            table.unreadable += bool(line.strip()) and line.endswith(b"\n")


def _alone(line: bytes) -> Any:
    try:
        return json_value(line)
    except InputError:
        return None
