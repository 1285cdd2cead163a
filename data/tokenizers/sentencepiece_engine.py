"""SentencePiece, word by word: each distinct word is encoded once, by SentencePiece itself, and remembered."""

import re
from itertools import chain

import numpy as np
from sentencepiece import SentencePieceProcessor

from data.tokenizers.base import SentencePieceTokenizer
from program.errors import UserError

BLANK = "\u2581"
WORD = re.compile(f"{BLANK}+[^{BLANK}]*|[^{BLANK}]+")
OTHER = rf"(?!{BLANK})[\W_]"
PART = re.compile(rf"{BLANK}*[^\W_]+|{BLANK}*(?:{OTHER})+|{BLANK}+")
"""Letters and digits, or else other signs, behind their blanks: far fewer are distinct than of words."""
ACROSS_PARTS = re.compile(rf"[^\W_]{OTHER}|{OTHER}[^\W_]")
APART = "\ue000"
"""For private use, so that normalising keeps it and no model has a piece of it: it keeps a word from its surroundings,
such as the blank that a model sets before a text."""
MOST_WORDS = 400_000
"""Words remembered, some 150 MB; then the cache is emptied."""


class WordsEngine:
    """SentencePiece's ids of normalised words, one word after another.

    These are the ids of the whole text where no piece reaches from a word into the next one's blanks, so that nothing
    is ever merged across the end of a word, and where characters without a piece become bytes, one by one. Both are
    checked; that normalising a word again changes nothing is left to the proof on a sample. Where no piece has a letter
    beside another sign, either, words are cut there, too. Texts that hold SentencePiece's own sign for a blank are
    encoded whole. Raises UserError with what is not so.
    """

    name = "sentencepiece (words)"

    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        self._processor = tokenizer.processor
        pieces = [self._processor.id_to_piece(index) for index in range(tokenizer.vocab_size) if self._is_text(index)]
        if across := [piece for piece in pieces if BLANK in piece.lstrip(BLANK)]:
            raise UserError(f"piece {across[0]!r} reaches over the end of a word")
        # A byte-pair model's scores are its merges' numbers. A unigram model adds up probabilities over a whole text,
        # and where two ways are as good, how they were rounded decides.
        if any(not self._processor.get_score(index).is_integer() for index in range(tokenizer.vocab_size)):
            raise UserError("not a byte-pair model")
        if not any(map(self._processor.is_byte, range(tokenizer.vocab_size))):
            raise UserError("characters without a piece do not become bytes")
        if any(APART in piece for piece in pieces) or not self._processor.normalize(APART).endswith(APART):
            raise UserError(f"{APART!r} is no character apart")
        self._words = WORD if any(map(ACROSS_PARTS.search, pieces)) else PART
        self._known = _Known(self._processor)

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the texts, and their lengths [texts] int64."""
        if len(self._known) > MOST_WORDS:
            self._known.clear()
        rows = [
            self._by_words(normalised) if BLANK not in text else self._whole(text)
            for text, normalised in zip(texts, self._processor.normalize(texts), strict=True)
        ]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.concatenate([np.empty(0, np.int32), *rows]), lengths

    def _is_text(self, index: int) -> bool:
        """Whether a text can become this piece as it is written."""
        processor = self._processor
        return not (processor.is_control(index) or processor.is_unknown(index) or processor.is_byte(index))

    def _by_words(self, normalised: str) -> np.ndarray:
        words = map(self._known.__getitem__, self._words.findall(normalised))
        return np.array(list(chain.from_iterable(words)), np.int32)

    def _whole(self, text: str) -> np.ndarray:
        return np.array(self._processor.encode(text, add_bos=False, add_eos=False), np.int32)


class _Known(dict[str, list[int]]):
    """A word's ids; asked for one that it does not know, it asks SentencePiece."""

    def __init__(self, processor: SentencePieceProcessor) -> None:
        super().__init__()
        self._processor, self._before = processor, len(processor.encode(APART, add_bos=False, add_eos=False))

    def __missing__(self, word: str) -> list[int]:
        text = APART + word.replace(BLANK, " ")
        found: list[int] = self._processor.encode(text, add_bos=False, add_eos=False)[self._before :]
        self[word] = found
        return found
