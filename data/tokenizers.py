"""Text to ids and back: bytes, a SentencePiece model, a tokenizer.json, or tiktoken's ranks."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from data import cache, sentencepiece_training
from data.config import DataConfig, path_of
from data.tokenizer_files import model_bytes
from data.tokenizer_json import JsonTokenizer
from data.tokenizer_tiktoken import TiktokenTokenizer
from parallel.errors import UserError


def load(config: DataConfig, folder: Path, console: cache.Console) -> "Tokenizer":
    """The tokenizer that `data.tokenizer` names; the built-in one is trained into cache `folder` if need be.

    Raises UserError for a missing or unusable model.
    """
    if config.tokenizer == "byte":
        return ByteTokenizer()
    if config.tokenizer == "builtin":
        model = sentencepiece_training.builtin_model(config.builtin_vocab_size, folder, console)
        return SentencePieceTokenizer(model)
    return open_tokenizer(path_of(config.tokenizer).absolute(), config.eod_token)


def open_tokenizer(path: Path, eod_token: str | None, flags: str = "data.") -> "Tokenizer":
    """The tokenizer in a file, known by its ending: .json, .tiktoken, else a SentencePiece model; or the
    tokenizer.json in a folder. eod_token: what ends a document, where the file does not say. flags: what stands before
    `tokenizer` and `eod_token` where a user sets them, for messages.

    Raises UserError where it is missing or unusable.
    """
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.suffix == ".json":
        return JsonTokenizer(path, eod_token, flags)
    if path.suffix == ".tiktoken":
        return TiktokenTokenizer(path, eod_token, flags)
    return SentencePieceTokenizer(path, flags)


class Tokenizer(Protocol):
    """What the data layer asks of a tokenizer. What stands in a text stays text: no string in it, "</s>"
    included, ever becomes a control id.
    """

    vocab_size: int
    """Number of ids; every id is below it."""
    eod: int
    """The id that ends a document."""
    fingerprint: str
    """Hex digest; equal for tokenizers that give equal ids."""
    path: Path | None
    """The model's file, to be kept with a checkpoint; None where there is none."""
    special_texts: tuple[str, ...]
    """What control tokens look like as text."""

    def encode_batch(self, texts: list[str]) -> Sequence[Sequence[int] | np.ndarray]:
        """Ids of each text, without `eod`."""

    def encode(self, text: str) -> np.ndarray:
        """Ids [n] int32, without `eod`."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; control ids have none."""


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255, and 256 ends a document; there is no begin-of-text id."""

    vocab_size = 257
    eod = 256
    fingerprint = hashlib.blake2b(b"triplane bytes 1", digest_size=16).hexdigest()
    path: Path | None = None
    special_texts: tuple[str, ...] = ()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text."""
        return [self.encode(text) for text in texts]

    def encode(self, text: str) -> np.ndarray:
        """One id a byte: [bytes] int32."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD, as a model may produce them."""
        return bytes(index for index in ids if index < self.eod).decode(errors="replace")


class SentencePieceTokenizer:
    """A SentencePiece model; its end-of-sentence id ends a document.

    Raises UserError where the file is missing, is no model, or has no such id.
    """

    def __init__(self, path: Path, flags: str = "data.") -> None:
        """flags: as for `open_tokenizer`."""
        from sentencepiece import SentencePieceProcessor

        if not path.exists():
            raise UserError(
                f'{flags}tokenizer: no file {path}; expected "builtin", "byte", a .model, .json or .tiktoken.'
            )
        self.path: Path | None = path
        model = model_bytes(path, flags)
        try:
            self.processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(f"{flags}tokenizer: {path} is not a SentencePiece model ({error}).") from None
        self.vocab_size: int = self.processor.get_piece_size()
        self.eod: int = self.processor.eos_id()
        self.fingerprint = hashlib.blake2b(model, digest_size=16).hexdigest()
        if not self.vocab_size:
            raise UserError(f"{flags}tokenizer: {path} is not a SentencePiece model (no pieces).")
        if self.eod < 0:
            raise UserError(f"{flags}tokenizer: {path} has no end-of-sentence piece, which must end documents.")
        controls = filter(self.processor.is_control, range(self.vocab_size))
        self.special_texts: tuple[str, ...] = tuple(self.processor.id_to_piece(index) for index in controls)

    def encode_batch(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Ids of each text."""
        return self.processor.encode(texts, add_bos=False, add_eos=False, num_threads=1)

    def encode(self, text: str) -> np.ndarray:
        """Ids [pieces] int32."""
        return np.asarray(self.processor.encode(text, add_bos=False, add_eos=False), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """U+2581, SentencePiece's own sign for a blank, comes back as a blank."""
        return self.processor.decode([int(index) for index in ids])
