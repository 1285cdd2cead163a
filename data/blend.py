"""Blends: which of several sources a sample comes from, a pure function of its global index."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import cache
from program.errors import UserError
from program.untrusted import InputError, read_bytes

PERIOD = 1 << 20
"""Samples after which the sequence of sources repeats; weights are multiples of 1 / PERIOD."""

TABLE = "table.uint16"


def rounded(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as multiples of 2^-20 that sum to 1: in units of 2^-20, each at least 1, by largest remainders.

    weights: all above 0; they need not sum to 1.
    """
    try:
        total = math.fsum(weights)
    except OverflowError:  # beyond what floats hold
        return rounded([weight / max(weights) for weight in weights])
    exact = [weight / total * PERIOD for weight in weights]
    units = [max(1, math.floor(one)) for one in exact]
    missing = PERIOD - sum(units)
    by_remainder = sorted(range(len(exact)), key=lambda index: units[index] - exact[index])
    for position in range(missing):
        units[by_remainder[position % len(units)]] += 1
    by_size = [(-unit, index) for index, unit in enumerate(units)]
    heapq.heapify(by_size)
    for _ in range(-missing):  # the largest gives, each time
        unit, index = by_size[0]
        heapq.heapreplace(by_size, (unit + 1, index))
        units[index] -= 1
    return tuple(units)


@dataclass(frozen=True, slots=True)
class Blend:
    """The sources of all samples: among the first n, each source has its weight times n of them, within 1."""

    units: tuple[int, ...]
    """Weights in units of 1 / PERIOD."""
    table: np.ndarray
    """Source of each sample of a period: [PERIOD / gcd] uint16."""
    within: np.ndarray
    """How many of the period's earlier samples have the same source: [PERIOD / gcd] int32."""

    def assign(self, sample_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source [n] and index within that source's own samples [n] int64, of global sample indices [n] int64."""
        periods, positions = np.divmod(sample_indices, len(self.table))
        sources = self.table[positions]
        per_period = np.array(self.units, np.int64) * len(self.table) // PERIOD
        return sources, periods * per_period[sources] + self.within[positions]

    def counts(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples each source gives: [sources] int64."""
        periods, rest = divmod(samples, len(self.table))
        per_period = np.array(self.units, np.int64) * len(self.table) // PERIOD
        return periods * per_period + np.bincount(self.table[:rest], minlength=len(self.units))


def alone() -> Blend:
    """Of one source, which all samples come from."""
    return Blend((PERIOD,), np.zeros(1, np.uint16), np.zeros(1, np.int32))


def load(units: tuple[int, ...], folder: Path, console: cache.Console) -> Blend:
    """The blend of these weights; its table, which takes seconds to make for many sources, comes from `folder`."""
    name = "-".join(map(str, units)) if len(units) < 8 else f"{len(units)}-{hash_of(units)}"
    target = folder / "blends" / name

    def build(part: Path) -> None:
        schedule(units).tofile(part / TABLE)

    cache.build_once(target, build, console)
    table = _table(target / TABLE, units)
    return Blend(units, table, _ranks(table))


def _table(path: Path, units: tuple[int, ...]) -> np.ndarray:
    """What `schedule` made of these weights. Raises UserError where the file holds something else."""
    try:
        table = np.frombuffer(read_bytes(path, 2 * PERIOD), np.uint16)
    except (ValueError, InputError) as error:
        raise UserError(f"data.cache_dir: {path} is damaged ({error}). Remove {path.parent}.") from None
    divisor = math.gcd(*units)
    if np.bincount(table).tolist() != [unit // divisor for unit in units]:
        raise UserError(f"data.cache_dir: {path} is not the order of this blend. Remove {path.parent}.")
    return table


def hash_of(units: tuple[int, ...]) -> str:
    """A short name for many weights."""
    import hashlib

    return hashlib.blake2b(repr(units).encode(), digest_size=12).hexdigest()


def schedule(units: tuple[int, ...]) -> np.ndarray:
    """Source of each sample of the shortest period: [PERIOD / gcd] uint16.

    The j-th sample of a source of weight w must not come before n = (j - 1) / w, nor after n = j / w: else the
    source would be more than one ahead or behind. Of the sources that may, the one with the earliest end comes
    next, which finds a schedule wherever there is one, and there is one (Tijdeman, "The chairman assignment
    problem", Discrete Mathematics 32, 1980). O(PERIOD log sources): about 2 s.
    """
    divisor = math.gcd(*units)
    weights, period = [one // divisor for one in units], PERIOD // divisor
    table = np.empty(period, np.uint16)
    waiting = [(0, source) for source in range(len(weights))]
    ready: list[tuple[int, int]] = []
    given = [0] * len(weights)
    for number in range(1, period + 1):
        while waiting and waiting[0][0] <= number:
            _, source = heapq.heappop(waiting)
            heapq.heappush(ready, ((given[source] + 1) * period // weights[source], source))
        _, source = heapq.heappop(ready)
        table[number - 1] = source
        given[source] += 1
        heapq.heappush(waiting, (-(-given[source] * period // weights[source]), source))
    return table


def _ranks(table: np.ndarray) -> np.ndarray:
    """For each position, how many earlier ones have the same value: [n] int32."""
    order = np.argsort(table, kind="stable")
    counts = np.bincount(table)
    ranks = np.empty(len(table), np.int32)
    ranks[order] = np.arange(len(table)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks
