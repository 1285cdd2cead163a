"""Text to ids and back: bytes, a SentencePiece model, a tokenizer.json, GPT-2's two files, or tiktoken's ranks."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from data import cache
from data.config import DataConfig, path_of
from data.tokenizers import kinds, sentencepiece_training
from data.tokenizers.gpt2_pair import PairTokenizer, pair_of
from data.tokenizers.tiktoken_ranks import TiktokenTokenizer
from data.tokenizers.tokenizer_json import JsonTokenizer
from data.tokenizers.vocabulary import model_bytes, said
from program.errors import UserError

EXPECTED = (
    '"builtin", "byte", a tokenizer.json, a SentencePiece or Llama tokenizer.model, a vocab.json beside its '
    "merges.txt, a .tiktoken, or a folder with one of these"
)


def load(config: DataConfig, folder: Path, console: cache.Console) -> "Tokenizer":
    """The tokenizer that `data.tokenizer` names; the built-in one is trained into cache `folder` if need be.

    Raises UserError for a missing or unusable model.
    """
    if config.tokenizer == "byte":
        return ByteTokenizer()
    if config.tokenizer == "builtin":
        model = sentencepiece_training.builtin_model(config.builtin_vocab_size, folder, console)
        return SentencePieceTokenizer(model)
    return open_named(config.tokenizer, config.eod_token)


def exists(name: str) -> bool:
    """Whether a file or folder is there that a tokenizer may be in; of a pair, both."""
    return all(path_of(one).exists() for one in _named(name))


def open_named(name: str, eod_token: str | None, flags: str = "data.") -> "Tokenizer":
    """The tokenizer of a file, a folder, or of GPT-2's two files by both names, with a comma between.

    Raises UserError as `open_tokenizer`.
    """
    paths = [path_of(one).absolute() for one in _named(name)]
    if len(paths) == 1:
        return open_tokenizer(paths[0], eod_token, flags)
    return PairTokenizer(paths[0], paths[1], eod_token, flags)


def _named(name: str) -> list[str]:
    first, comma, second = name.partition(",")
    is_pair = comma and first and second and not path_of(name).exists()
    return [first, second] if is_pair else [name]


def open_tokenizer(path: Path, eod_token: str | None, flags: str = "data.") -> "Tokenizer":
    """The tokenizer in a file, known by its content, or in a folder as the Hub has them. eod_token: what ends a
    document, where the file does not say. flags: what stands before `tokenizer` and `eod_token` where a user sets
    them, for messages.

    Raises UserError where it is missing or unusable.
    """
    if path.is_dir():
        path = kinds.file_in(path, flags)
    if not path.exists():
        raise UserError(f"{flags}tokenizer: no file {path}; expected {EXPECTED}.")
    kind = kinds.kind_of(path, flags)
    if kind in ("vocabulary", "merges"):
        return PairTokenizer(*pair_of(path), eod_token, flags)
    if kind in ("tiktoken", "description"):
        return TiktokenTokenizer(path.with_suffix(".tiktoken") if kind == "description" else path, eod_token, flags)
    return JsonTokenizer(path, eod_token, flags) if kind == "json" else SentencePieceTokenizer(path, flags)


@dataclass(frozen=True, slots=True)
class CarriedTokenizer:
    """What a checkpoint keeps, so that it opens as the same tokenizer."""

    name: str
    """What `data.tokenizer` names there."""
    copies: dict[str, Path]
    """Files by the names that they have there."""
    texts: dict[str, str]
    """What is written there, by name."""


def carried(tokenizer: "Tokenizer") -> CarriedTokenizer:
    """Of a tokenizer."""
    if tokenizer.path is None:
        return CarriedTokenizer("byte", {}, {})
    if isinstance(tokenizer, PairTokenizer):
        return CarriedTokenizer("tokenizer.json", {}, {"tokenizer.json": tokenizer.raw.decode()})
    if isinstance(tokenizer, TiktokenTokenizer) and tokenizer.about is not None:
        copies = {"tokenizer.tiktoken": tokenizer.path, "tokenizer.json": tokenizer.about}
        return CarriedTokenizer("tokenizer.tiktoken", copies, {})
    name = "tokenizer.json" if isinstance(tokenizer, JsonTokenizer) else "tokenizer.model"
    return CarriedTokenizer(name, {name: tokenizer.path}, {})


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

    def token_id(self, text: str) -> int | None:
        """Id of the token that looks like this; None where there is none."""

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

    def token_id(self, text: str) -> int | None:
        """None: bytes are no tokens that a text could name."""
        return None

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
            raise UserError(f"{flags}tokenizer: no file {path}; expected {EXPECTED}.")
        self.path: Path | None = path
        with said(flags, path):
            model = model_bytes(path)
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

    def token_id(self, text: str) -> int | None:
        """Id of a piece."""
        found = int(self.processor.piece_to_id(text))
        return found if self.processor.id_to_piece(found) == text else None

    def encode_batch(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Ids of each text."""
        return self.processor.encode(texts, add_bos=False, add_eos=False, num_threads=1)

    def encode(self, text: str) -> np.ndarray:
        """Ids [pieces] int32."""
        return np.asarray(self.processor.encode(text, add_bos=False, add_eos=False), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """U+2581, SentencePiece's own sign for a blank, comes back as a blank."""
        return self.processor.decode([int(index) for index in ids])
