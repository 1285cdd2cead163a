"""tiktoken's own files as a tokenizer."""

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from data.tokenizers.tiktoken_meta import encoding_of
from data.tokenizers.vocabulary import MOST_IDS, model_bytes, said, vocabulary_size
from program.errors import UserError
from program.schema import Range, shown
from program.untrusted import InputError, parse_json


@dataclass(frozen=True, slots=True)
class _About:
    """What stands beside the ranks."""

    pat_str: str
    special_tokens: dict[str, Annotated[int, Range(0, MOST_IDS - 1)]]
    eod: str


META_NAME = "tokenizer.model"
"""What Meta names the ranks of Llama 3 and 4."""


class TiktokenTokenizer:
    """tiktoken's own format: `X.tiktoken` has a line "base64 of the bytes, blank, rank" an id, and beside it
    `X.json` says {"pat_str": regular expression, "special_tokens": {text: id}, "eod": text}, which are in tiktoken's
    source for the encodings that OpenAI publishes. Meta's `tokenizer.model` is the same, and what it needs beside the
    ranks is known here.

    Raises UserError where a file is missing or unusable, or where tiktoken is not installed.
    """

    about: Path | None
    """The description beside it."""
    special_tokens: dict[str, int]
    """Text and id of the control tokens."""

    def __init__(self, path: Path, eod_token: str | None = None, flags: str = "data.") -> None:
        """flags: what stands before `tokenizer` where a user sets it, for messages."""
        try:
            import tiktoken
        except ImportError:
            raise UserError(f"{flags}tokenizer: {path} needs `pip install tiktoken`.") from None
        if not path.exists():
            raise UserError(f"{flags}tokenizer: no file {path}.")
        beside = path.with_suffix(".json")  # of tokenizer.model, that is another tokenizer's name
        self.about = about = beside if path not in (beside, path.with_name(META_NAME)) and beside.exists() else None
        self.path: Path | None = path
        with said(flags, path):
            raw = [model_bytes(one) for one in (path, about) if one is not None]
            known = _ranks(raw[0], path)
            about_ranks = _metas(path, len(known)) if about is None else parse_json(raw[1], _About, about)
            eod = about_ranks.eod if eod_token is None else eod_token
            if eod not in about_ranks.special_tokens:
                raise InputError(about or path, f"special_tokens has no {shown(eod)}, which should end documents.")
        try:  # without control tokens: what stands in a text stays text
            self._encoding = tiktoken.Encoding(
                path.stem, pat_str=about_ranks.pat_str, mergeable_ranks=known, special_tokens={}
            )
        except ValueError as error:  # of a regular expression that it cannot use
            raise UserError(f"{flags}tokenizer: {about}: pat_str: {str(error)[:200]}.") from None
        self.eod: int = about_ranks.special_tokens[eod]
        self.special_tokens = about_ranks.special_tokens
        self.special_texts: tuple[str, ...] = tuple(about_ranks.special_tokens)
        self.vocab_size = vocabulary_size([*known.values(), *about_ranks.special_tokens.values()], path, flags)
        self.fingerprint = hashlib.blake2b(b"\0".join(raw) + b"%d" % self.eod, digest_size=16).hexdigest()

    def token_id(self, text: str) -> int | None:
        """Id of a control token."""
        return self.special_tokens.get(text)

    def encode(self, text: str) -> np.ndarray:
        """Ids [n] int32."""
        return np.asarray(self._encoding.encode_ordinary(text), np.int32)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self._encoding.encode_ordinary(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; control ids have none."""
        known = self._encoding.n_vocab
        return self._encoding.decode([int(index) for index in ids if index < known])


def _metas(path: Path, ranks: int) -> _About:
    """Raises InputError where Meta published no file of so many ranks."""
    found = encoding_of(ranks)
    if found is None:
        raise InputError(
            path,
            f"{ranks:,} of tiktoken's ranks and no description beside; expected 128,000 (Llama 3) or 200,000 (Llama "
            "4), whose control tokens are known. Give the model's tokenizer.json; or name this one X.tiktoken, and say "
            'in X.json beside it {"pat_str": regular expression, "special_tokens": {text: id}, "eod": text}.',
        )
    return _About(pat_str=found.pattern, special_tokens=found.special_tokens, eod=found.eod)


def _ranks(raw: bytes, path: Path) -> dict[bytes, int]:
    """Raises InputError for what tiktoken would end the process at, now or at some text."""
    known: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            known[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise InputError(f"{path}:{number}", f"expected base64, a blank and a rank, found {line[:40]!r}.") from None
    if lost := [byte for byte in range(256) if bytes([byte]) not in known]:
        raise InputError(path, f"no rank for {len(lost)} of 256 bytes, the first {lost[0]:#04x}.")
    if len(set(known.values())) < len(known) or min(known.values()) < 0:
        raise InputError(path, "expected ranks from 0 on, each once.")
    return known
