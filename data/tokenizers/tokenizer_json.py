"""Hugging Face's tokenizer.json, read by their own library, `tokenizers`; it is the reference for other engines."""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data.tokenizers.vocabulary import model_bytes, said, vocabulary_size
from program.errors import UserError, printable
from program.schema import shown
from program.untrusted import json_value, read_foreign

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
USUAL_EODS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|begin▁of▁sentence|>", "<eos>", "<|eot|>")


@dataclass(frozen=True, slots=True)
class Token:
    """A control token that is given with its settings."""

    content: str


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What is read of tokenizer_config.json and special_tokens_map.json."""

    eos_token: str | Token | None = None
    bos_token: str | Token | None = None


class JsonTokenizer:
    """A tokenizer.json. What ends a document: `eod_token`; or the eos_token of the tokenizer_config.json beside
    it, as Megatron's; or the one usual name that it has.

    Neither begin-of-text nor other control ids are added, as in Megatron's preprocessing. Raises UserError where
    the file is missing or unusable, where `tokenizers` is not installed, and where nothing ends a document.
    """

    what = "a tokenizer.json"

    def __init__(
        self, path: Path, eod_token: str | None = None, flags: str = "data.", raw: bytes | None = None
    ) -> None:
        """flags: what stands before `tokenizer` and `eod_token` where a user sets them, for messages. raw: a
        tokenizer.json that other files stand for; None: the file's content.
        """
        # One text at a time: threads of theirs would not survive a fork, and processes already share the work.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if not path.exists():
            raise UserError(f"{flags}tokenizer: no file {path}.")
        self._flags = flags
        self.path: Path | None = path
        with said(flags, path):
            self.raw = model_bytes(path) if raw is None else raw
        plain = self._load()
        plain.encode_special_tokens = True  # what stands in a text stays text
        self._plain = plain
        self.special_texts = tuple(token.content for token in self._added if token.special)
        self.vocab_size = vocabulary_size(plain.get_vocab(with_added_tokens=True).values(), path, flags)
        self.eod = self._find_eod(eod_token)
        self.eod_text = str(plain.id_to_token(self.eod))
        self.fingerprint = hashlib.blake2b(self.raw + f"\0{self.eod}".encode(), digest_size=16).hexdigest()

    @cached_property
    def content(self) -> dict[str, Any]:
        """The file, as JSON."""
        return dict(json_value(self.raw, self.path))

    @cached_property
    def with_specials(self) -> "Tokenizer":
        """The same, but the text of a control token becomes its id."""
        return self._load()

    def token_id(self, text: str) -> int | None:
        """Id of a token, a control token or not."""
        return self._plain.token_to_id(text)

    def encode(self, text: str) -> np.ndarray:
        """Ids [n] int32."""
        return np.asarray(self._plain.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text."""
        return [one.ids for one in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; control ids have none."""
        return self._plain.decode([int(index) for index in ids], skip_special_tokens=True)

    def _load(self) -> "Tokenizer":
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UserError(f"{self._flags}tokenizer: {self.path} needs `pip install tokenizers`.") from None
        try:
            return Tokenizer.from_buffer(self.raw)
        except Exception as error:  # the library raises nothing more precise
            raise UserError(f"{self._flags}tokenizer: {self.path} is not {self.what} ({str(error)[:200]}).") from None

    @property
    def _added(self) -> list[Any]:
        return list(self._plain.get_added_tokens_decoder().values())

    def _find_eod(self, eod_token: str | None) -> int:
        token = eod_token or self._configured_eod()
        known = set(self.special_texts)
        if token is None:
            usual = [name for name in USUAL_EODS if name in known]
            token = usual[0] if len(usual) == 1 else None
        index = None if token is None else self._plain.token_to_id(token)
        if index is None:
            source = f"{self._flags}eod_token" if eod_token else " or ".join(BESIDE)
            problem = "nothing says what ends a document"
            if token is not None:
                problem = f"it has no token {shown(token)}, which ends a document by {source}"
            known_texts = printable(", ".join(self.special_texts[:20])[:500]) or "none"
            raise UserError(
                f"{self._flags}tokenizer: {self.path}: {problem}. Name it with "
                f"{self._flags}eod_token; its control tokens: {known_texts}."
            )
        return int(index)

    def _configured_eod(self) -> str | None:
        """What tokenizer_config.json beside the file says, else special_tokens_map.json."""
        for beside in (self.path.with_name(name) for name in BESIDE) if self.path else ():
            with said(self._flags, beside, " Mend it, or remove it."), contextlib.suppress(FileNotFoundError):
                if (token := read_foreign(beside, TokenizerConfig).eos_token) is not None:
                    return token.content if isinstance(token, Token) else token
        return None
