"""Engines: how the texts of many documents become ids at speed, and the proof that they are a tokenizer's ids."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal, Protocol

import numpy as np

from data.tokenizers.base import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from data.tokenizers.gpt2_pair import PairTokenizer
from data.tokenizers.tiktoken_ranks import TiktokenTokenizer
from data.tokenizers.tokenizer_json import JsonTokenizer
from program.errors import UserError

EngineName = Literal["auto", "bytes", "sentencepiece", "tokenizers", "tiktoken", "gigatoken"]
Ids = tuple[np.ndarray, np.ndarray]
"""Ids [n] of one text after another, and lengths [texts] int64."""


class Engine(Protocol):
    """Encodes texts. What stands in a text stays text, unless it was built for `special_ids`."""

    name: str

    def encode_batch(self, texts: list[str]) -> Ids:
        """Ids of the texts, without `eod`."""


def flat(rows: Sequence[Sequence[int] | np.ndarray]) -> Ids:
    """Rows of ids, one after another."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    if len(rows) and isinstance(rows[0], np.ndarray):
        return np.concatenate(rows), lengths
    return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths


class BytesEngine:
    """UTF-8 bytes."""

    name = "bytes"

    def encode_batch(self, texts: list[str]) -> Ids:
        raw = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, raw), np.int64, len(raw))
        return np.frombuffer(b"".join(raw), np.uint8), lengths


class ReferenceEngine:
    """The tokenizer itself: SentencePiece, `tokenizers` or tiktoken."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer

    def encode_batch(self, texts: list[str]) -> Ids:
        return flat(self._tokenizer.encode_batch(texts))


class SpecialIdsEngine:
    """`tokenizers`, where the text of a control token becomes its id."""

    name = "tokenizers"

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        self._tokenizer = tokenizer.with_specials

    def encode_batch(self, texts: list[str]) -> Ids:
        return flat([one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)])


class GigatokenEngine:
    """gigatoken; texts that hold a control token's text go to the tokenizer, since gigatoken makes it an id."""

    name = "gigatoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import gigatoken
        except ImportError:
            raise UserError("engine gigatoken needs `pip install gigatoken`.") from None
        if not isinstance(tokenizer, JsonTokenizer) or isinstance(tokenizer, PairTokenizer):
            raise UserError(
                "engine gigatoken: only for a tokenizer.json; what it makes of a SentencePiece model differs where a "
                'text holds "<s>" or "<0x41>".'
            )
        self._tokenizer = tokenizer
        try:
            self._fast = gigatoken.Tokenizer(str(tokenizer.path))
        except Exception as error:  # whatever it does not know of a tokenizer.json
            raise UserError(f"engine gigatoken: cannot use {tokenizer.path} ({error}).") from None

    def encode_batch(self, texts: list[str]) -> Ids:
        return flat([self._one(text) for text in texts])

    def _one(self, text: str) -> np.ndarray:
        """One by one: its batches come as awkward arrays, whose import would be a good part of a small run."""
        if any(special in text for special in self._tokenizer.special_texts):
            return np.asarray(self._tokenizer.encode(text), np.int32)
        return self._fast.encode(text).view(np.int32)


def reference(tokenizer: Tokenizer) -> Engine:
    """The engine that is right by definition."""
    if isinstance(tokenizer, ByteTokenizer):
        return BytesEngine()
    if isinstance(tokenizer, SentencePieceTokenizer):
        return ReferenceEngine(tokenizer, "sentencepiece")
    if isinstance(tokenizer, TiktokenTokenizer):
        return ReferenceEngine(tokenizer, "tiktoken")
    return ReferenceEngine(tokenizer, "tokenizers")


def choose(
    tokenizer: Tokenizer,
    name: EngineName,
    special_ids: bool,
    sample: list[str],
    console: Callable[[str], None],
    begun: str | None = None,
) -> Engine:
    """The engine to use. auto: tiktoken for a tokenizer.json that it can stand for, where `sample` proves that it
    gives the same ids; else the tokenizer's own, which is said. A named engine is proven too, and refused where it
    differs.

    special_ids: the text of a control token becomes its id. begun: name of the engine that has made a part of the
    work; auto is that one then. Raises UserError where the engine cannot be used.
    """
    own = reference(tokenizer)
    if special_ids:
        if not isinstance(tokenizer, JsonTokenizer):
            raise UserError(f"special_tokens special: {own.name} never makes ids of the text of control tokens.")
        own = SpecialIdsEngine(tokenizer)
    if begun == own.name and name in ("auto", begun):
        return own
    if name == "auto":
        name = next((one for one in ("tiktoken", "gigatoken") if one == begun), name)
    if isinstance(tokenizer, SentencePieceTokenizer) and name in ("auto", "sentencepiece"):
        return _by_words(tokenizer, own, sample, console)
    if name == own.name or (name == "auto" and (special_ids or not isinstance(tokenizer, JsonTokenizer))):
        return own
    if special_ids:
        raise UserError(f'special_tokens special: with engine "tokenizers" only, not "{name}".')
    if name == "auto":
        return _proven_or(own, tokenizer, sample, console)
    engine = _build(tokenizer, name)
    if difference := differs(engine, own, sample):
        raise UserError(f"engine {name}: gives other ids than {own.name}: {difference}. Use engine {own.name}.")
    return engine


def _by_words(
    tokenizer: SentencePieceTokenizer, own: Engine, sample: list[str], console: Callable[[str], None]
) -> Engine:
    from data.tokenizers.sentencepiece_engine import WordsEngine

    try:
        engine = WordsEngine(tokenizer)
        reason = differs(engine, own, sample)
    except UserError as error:
        reason = str(error)
    if reason:
        console(f"engine sentencepiece, by whole texts, which is slower: {reason}")
        return own
    return engine


def _proven_or(own: Engine, tokenizer: Tokenizer, sample: list[str], console: Callable[[str], None]) -> Engine:
    try:
        engine = _build(tokenizer, "tiktoken")
    except UserError as error:
        console(f"engine tokenizers, which is slower: {error}")
        return own
    if difference := differs(engine, own, sample):
        console(f"engine tokenizers, which is slower: tiktoken gives other ids: {difference}")
        return own
    console(f"engine tiktoken: gives the ids of tokenizers on a sample of {len(sample)} documents")
    return engine


def _build(tokenizer: Tokenizer, name: EngineName) -> Engine:
    if name == "gigatoken":
        return GigatokenEngine(tokenizer)
    if name == "tiktoken" and isinstance(tokenizer, JsonTokenizer):
        from data.tokenizers.tiktoken_engine import TiktokenEngine

        return TiktokenEngine(tokenizer)
    raise UserError(f"engine {name}: not for this tokenizer, whose engine is {reference(tokenizer).name}.")


def differs(engine: Engine, own: Engine, sample: list[str]) -> str | None:
    """Where an engine's ids of `sample` differ from the reference's; None where they are the same."""
    for text in sample:
        (found, _), (expected, _) = engine.encode_batch([text]), own.encode_batch([text])
        if not np.array_equal(found, expected):
            both = min(len(found), len(expected))
            same = np.flatnonzero(np.append(found[:both] != expected[:both], True))[0]
            return f"from token {same} of a document that begins with {text[:40]!r}"
    return None
