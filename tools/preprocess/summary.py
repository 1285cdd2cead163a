"""What all units together hold: counted once they are complete, and printed at the end."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from program.errors import UserError
from program.schema import Count
from program.untrusted import InputError, open_regular, read_json
from tools.preprocess.output import COUNTS, read_unit, write_whole
from tools.preprocess.tokenize_unit import TokenizeJob

MOST_HASHES = 1 << 26
"""Documents compared with one another to find duplicates (0.5 GB); of more, a part that the hash chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over units."""

    tokens: Count
    documents: Count
    text_bytes: Count
    empty: Count
    rejected: Count
    special_text: Count
    duplicates: Count | None
    """Documents whose text an earlier one has; None where that is no longer known."""
    duplicates_estimated: bool
    shards: Count
    """Units that hold documents."""
    examples: tuple[str, ...]
    """Some of the rejected documents."""

    @classmethod
    def load(cls, path: Path, units: int) -> "Totals":
        """units: how many there are. Raises UserError for a file that is not what `save` wrote."""
        try:
            found: Totals = read_json(path, Totals)
            if found.shards > units:
                raise InputError(path, f"{found.shards} shards of {units} units.")
        except InputError as error:
            raise UserError(
                f"{path} is damaged: {error.problem} It holds the sums of the work. The shards are not damaged: remove "
                "this file, and the same command counts again (and makes units again that --merge or --shuffle_docs "
                "has used up)."
            ) from None
        return found

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(asdict(self), indent=1).encode())


def add_up(job: TokenizeJob) -> Totals:
    """Over the units of a job, which are complete."""
    found = [read_unit(job.prefix(index)) for index in range(len(job.units))]
    counts = {name: sum(one.counts[name] for one in found) for name in COUNTS}
    hashes = [job.output.hashes(index) for index in range(len(job.units))]
    duplicates, part = _duplicates(hashes) if all(path.is_file() for path in hashes) else (None, 1.0)
    return Totals(
        tokens=sum(one.tokens for one in found),
        documents=sum(one.documents for one in found),
        duplicates=duplicates,
        duplicates_estimated=part < 1,
        shards=sum(one.documents > 0 for one in found),
        examples=tuple(example for one in found for example in one.rejected)[:3],
        **counts,
    )


def _duplicates(hashes: list[Path]) -> tuple[int, float]:
    """How many documents repeat an earlier one, and which part of all was hashed."""
    part = min(1.0, MOST_HASHES / max(1, sum(path.stat().st_size // 8 for path in hashes)))
    below = np.uint64(min(part * 2.0**64, 2**64 - 1))
    kept = np.concatenate([_hashes(path, below, part == 1) for path in hashes])
    kept.sort()  # not np.unique, which imports numpy.ma: more than it does for a small run
    return round(np.count_nonzero(kept[1:] == kept[:-1]) / part), part


def _hashes(path: Path, below: np.uint64, is_all: bool) -> np.ndarray:
    """Of a unit: those below a limit only, so that never many more than these are in memory."""
    with open_regular(path) as file:
        found = np.fromfile(file, np.uint64)
    return found if is_all else found[found < below]


def card(totals: Totals, results: list[Path], is_pair: bool, eod: bool, engine: str | None) -> str:
    """What was made, line by line. engine: what encoded; None: not known."""
    text_tokens = totals.tokens - (totals.documents if eod else 0)
    about = "about " if totals.duplicates_estimated else ""
    twice = "duplicates not known" if totals.duplicates is None else f"{about}{totals.duplicates:,} duplicates kept"
    lines = [
        f"{totals.documents:,} documents, {totals.tokens:,} tokens"
        f", {totals.text_bytes / max(1, text_tokens):.3f} bytes of text per token",
        f"{totals.empty:,} empty documents left out, {totals.rejected:,} bad ones left out, {twice}",
        f"{totals.special_text:,} documents with the text of a control token",
        *(f"  left out: {example}" for example in totals.examples),
        *([f"encoded by {engine}"] if engine else []),
        f"in {results[0]}.bin/.idx/.json" if is_pair else f"in {len(results)} shards {results[0]} …",
    ]
    return "\n".join(lines)
