"""Texts to ids with what ends each document, and what is seen on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import xxhash

from data.raw.reading import Rejects
from data.tokenizers.engines import Engine, Ids

SpecialText = Literal["plain", "special", "error"]

LONG = 4096
"""Letters of a text that is searched where it is: a copy would cost more than a search of its own."""


@dataclass(slots=True)
class UnitCounts:
    """What a unit's documents were like."""

    text_bytes: int = 0
    empty: int = 0
    """Documents without a single id: left out."""
    special_text: int = 0
    """Documents that hold the text of a control token."""
    hashes: list[int] = field(default_factory=list)
    """64 bits of each document's text (xxh3), to find duplicates by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How texts become documents of ids."""

    engine: Engine
    eod: int | None
    """What ends each document; None: nothing does."""
    special_texts: tuple[str, ...]
    special_text: SpecialText

    def encode(self, texts: list[str], seen: UnitCounts, rejects: Rejects, where: Callable[[int], str]) -> Ids:
        """Documents of ids: [n], one after another, and their lengths [documents] int64, none of them 0.

        where: the place of a text, by its number, for messages.
        """
        texts = self._check_specials(texts, seen, rejects, where)
        ids, lengths = self.engine.encode_batch(texts)
        raw = [text.encode() for text in texts]
        seen.text_bytes += sum(map(len, raw))
        seen.hashes += map(xxhash.xxh3_64_intdigest, raw)
        held = lengths[lengths > 0]
        seen.empty += len(lengths) - len(held)
        return (ids, held) if self.eod is None else end_documents(ids, held, self.eod)

    def _check_specials(
        self, texts: list[str], seen: UnitCounts, rejects: Rejects, where: Callable[[int], str]
    ) -> list[str]:
        """Count the texts that hold a control token's; with "error", leave them out."""
        found = _holding(texts, self.special_texts)
        seen.special_text += len(found)
        if self.special_text != "error" or not found:
            return texts
        for number, special in found.items():
            rejects.reject(lambda: f"{where(number)}: {_around(texts[number], special)}.")  # noqa: B023
        return [text for number, text in enumerate(texts) if number not in found]


def _around(text: str, special: str) -> str:
    at = text.index(special)
    shown = text[max(0, at - 30) : at + len(special) + 30]
    return f"the document holds the text of a control token, {special}, at character {at} ({shown!r})"


def _holding(texts: list[str], specials: Sequence[str]) -> dict[int, str]:
    """Which texts hold which special text. Nearly always none does, and short texts are searched at once."""
    long = [text for text in texts if len(text) >= LONG]
    together = "\0".join([text for text in texts if len(text) < LONG])
    present = [one for one in specials if one in together or any(one in text for text in long)]
    if not present:
        return {}
    found = {number: next((one for one in present if one in text), None) for number, text in enumerate(texts)}
    return {number: special for number, special in found.items() if special is not None}


def end_documents(ids: np.ndarray, lengths: np.ndarray, eod: int) -> Ids:
    """Put `eod` after each document: ids [n], lengths [documents] -> [n + documents], lengths + 1."""
    ends = np.cumsum(lengths) + np.arange(len(lengths))
    ended = np.empty(len(ids) + len(lengths), np.int32)
    is_text = np.ones(len(ended), bool)
    is_text[ends] = False
    ended[ends] = eod
    ended[is_text] = ids
    return ended, lengths + 1
