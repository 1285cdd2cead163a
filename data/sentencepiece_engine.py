"""SentencePiece, word by word: each distinct word is encoded once, by SentencePiece itself, and remembered."""

import re
from itertools import chain

import numpy as np

from data.tokenizers import SentencePieceTokenizer
from parallel.errors import UserError

BLANK = "\u2581"
WORD = re.compile(f"{BLANK}+[^{BLANK}]*|[^{BLANK}]+")
MOST_WORDS = 400_000
"""Words remembered, some 150 MB; then all are forgotten and collected anew."""


class WordsEngine:
    """SentencePiece's ids of normalised words, one word after another.

    These are the ids of the whole text where no piece reaches from a word into the next one's blanks, so that nothing
    is ever merged across the end of a word, and where characters without a piece become bytes, one by one. Both are
    checked; that normalising a word again changes nothing is left to the proof on a sample. Texts that hold
    SentencePiece's own sign for a blank are encoded whole. Raises UserError with what is not so.
    """

    name = "sentencepiece"

    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        self._processor = tokenizer.processor
        pieces = [self._processor.id_to_piece(index) for index in range(tokenizer.vocab_size)]
        if across := [piece for piece in pieces if BLANK in piece.lstrip(BLANK)]:
            raise UserError(f"piece {across[0]!r} reaches over the end of a word")
        # A byte-pair model's scores are its merges' numbers. A unigram model adds up probabilities over a whole text,
        # and where two ways are as good, how they were rounded decides.
        if any(not self._processor.get_score(index).is_integer() for index in range(tokenizer.vocab_size)):
            raise UserError("not a byte-pair model")
        if not any(map(self._processor.is_byte, range(tokenizer.vocab_size))):
            raise UserError("characters without a piece do not become bytes")
        self._adds_blank = self._processor.normalize("x").startswith(BLANK)
        self._ids: dict[str, list[int]] = {}

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the texts, and their lengths [texts] int64."""
        split = [WORD.findall(text) for text in self._processor.normalize(texts)]
        if len(self._ids) > MOST_WORDS:
            self._ids.clear()
        self._learn(set().union(*split))
        known = self._ids.__getitem__
        rows = [
            list(chain.from_iterable(map(known, words))) if BLANK not in text else self._whole(text)
            for text, words in zip(texts, split, strict=True)
        ]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths

    def _learn(self, words: set[str]) -> None:
        new = [word for word in words if word not in self._ids]
        spelled = [word.replace(BLANK, " ") for word in new]
        if self._adds_blank:
            spelled = [text.removeprefix(" ") for text in spelled]
        rows = self._processor.encode(spelled, add_bos=False, add_eos=False, num_threads=1)
        self._ids.update(zip(new, rows, strict=True))

    def _whole(self, text: str) -> list[int]:
        return self._processor.encode(text, add_bos=False, add_eos=False)
