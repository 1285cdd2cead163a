"""Samples of one source that best-fit packing has put together, and their plan on disk."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from data import cache
from data.config import DataConfig
from data.packing import Plan, Waste, best_fit, train_lengths, waste
from data.prepared import NO_TOKEN, digest
from data.raw.identity import identity
from data.shards import Shard, idx_path
from data.token_source import SplitSegment, TokenSource
from program.errors import UserError
from program.untrusted import InputError, open_regular

RECIPE = "1"
"""Part of the cache key: raise it when the same lengths are to give another plan."""
FILES: dict[str, type[np.integer]] = {"starts": np.int64, "sizes": np.int32, "firsts": np.int64, "waste": np.int64}
Packed = tuple[Plan, Waste]


def load(shards: Sequence[Shard], config: DataConfig, seq_length: int) -> Packed:
    """Of a source's train split, memory-mapped; made once, and kept in data.cache_dir.

    Raises UserError for a damaged index, and for a cache that cannot be written or read.
    """
    # The digest of a shard without a manifest is of its ends alone.
    known_by = [one.fingerprint() if one.manifest else identity(idx_path(one.prefix)) for one in shards]
    target = cache.root(config) / "packing" / digest([RECIPE, config.split, str(seq_length), *known_by])
    cache.build_once(target, partial(_build, shards, config.split, seq_length + 1), partial(print, flush=True))
    try:
        *plan, cost = (_mapped(target / name, dtype) for name, dtype in FILES.items())
    except (OSError, InputError, ValueError) as error:
        raise UserError(f"data.cache_dir: {target} cannot be read ({error}). Remove it.") from None
    return Plan(*plan), Waste(*cost.tolist())


def _build(shards: Sequence[Shard], split: str, capacity: int, part: Path) -> None:
    for shard in shards:
        shard.check_index()  # lengths are added up to where documents begin
    lengths = train_lengths(shards, split)
    for name, values in zip(FILES, (*best_fit(lengths, capacity), waste(lengths, capacity)), strict=True):
        np.asarray(values, FILES[name]).tofile(part / name)


def _mapped(path: Path, dtype: type[np.integer]) -> np.ndarray:
    with open_regular(path) as file:
        return np.memmap(file, dtype, mode="r").view(np.ndarray)


class PackedSource(TokenSource):
    """Samples of whole documents and pieces of long ones, each token in one sample an epoch; padding is NO_TOKEN.

    A sample's place in an epoch is permuted as a window's. Its pieces, the longest first, stay together in every epoch.
    """

    def __init__(
        self,
        segments: list[SplitSegment],
        seq_length: int,
        seed: int | str,
        vocab_size: int,
        shift: int,
        packed: Packed,
    ) -> None:
        super().__init__(segments, seq_length, seed, vocab_size, shift)
        self.plan, self.waste = packed
        self.samples_per_epoch = len(self.plan.firsts) - 1

    def read_windows(self, windows: np.ndarray, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of the plan's samples [n] int64. Raises as `fetch`."""
        samples = np.zeros((len(windows), self.seq_length + 1), self._dtype)
        is_padding = np.ones(samples.shape, bool)
        for sample, padding, window in zip(samples, is_padding, windows.tolist(), strict=True):
            held = 0
            for start, size in self._spans(window):
                self._read(start, sample[held : held + size])
                held += size
            padding[:held] = False
        found = self._checked(samples, windows, sample_indices)
        found[is_padding] = NO_TOKEN
        return found

    def _spans(self, window: int) -> list[tuple[int, int]]:
        own = slice(*self.plan.firsts[window : window + 2].tolist())
        return list(zip(self.plan.starts[own].tolist(), self.plan.sizes[own].tolist(), strict=True))
