"""Hugging Face's tokenizer.json, read by their own library, `tokenizers`; it is the reference for other engines."""

import hashlib
import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

USUAL_EODS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|begin▁of▁sentence|>", "<eos>", "<|eot|>")


class JsonTokenizer:
    """A tokenizer.json. What ends a document: `eod_token`; or the eos_token of the tokenizer_config.json beside
    it, as Megatron's; or the one usual name that it has.

    Neither begin-of-text nor other control ids are added, as in Megatron's preprocessing. Raises UserError where
    the file is missing or unusable, where `tokenizers` is not installed, and where nothing ends a document.
    """

    def __init__(self, path: Path, eod_token: str | None = None, flags: str = "data.") -> None:
        """flags: what stands before `tokenizer` and `eod_token` where a user sets them, for messages."""
        # One text at a time: threads of theirs would not survive a fork, and processes already share the work.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if not path.is_file():
            raise UserError(f"{flags}tokenizer: no file {path}.")
        self._flags = flags
        self.path: Path | None = path
        self.raw = path.read_bytes()
        plain = self._load()
        plain.encode_special_tokens = True  # what stands in a text stays text
        self._plain = plain
        self.special_texts = tuple(token.content for token in self._added if token.special)
        self.vocab_size: int = 1 + max(plain.get_vocab(with_added_tokens=True).values())
        self.eod = self._find_eod(eod_token)
        self.eod_text = str(plain.id_to_token(self.eod))
        self.fingerprint = hashlib.blake2b(self.raw + f"\0{self.eod}".encode(), digest_size=16).hexdigest()

    @cached_property
    def content(self) -> dict[str, Any]:
        """The file, as JSON."""
        return json.loads(self.raw)

    @cached_property
    def with_specials(self) -> "Tokenizer":
        """The same, but the text of a control token becomes its id."""
        return self._load()

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
            raise UserError(f"{self._flags}tokenizer: {self.path} is not a tokenizer.json ({error}).") from None

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
            said = "nothing says" if token is None else f'it has no token "{token}", which should say'
            raise UserError(
                f"{self._flags}tokenizer: {self.path}: {said} what ends a document. Name it with "
                f"{self._flags}eod_token; its control tokens: {', '.join(self.special_texts[:20]) or 'none'}."
            )
        return int(index)

    def _configured_eod(self) -> str | None:
        beside = self.path.with_name("tokenizer_config.json") if self.path else None
        if beside is None or not beside.is_file():
            return None
        token = json.loads(beside.read_bytes()).get("eos_token")
        return token.get("content") if isinstance(token, dict) else token
