"""tiktoken's own files as a tokenizer."""

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from parallel.errors import UserError


class TiktokenTokenizer:
    """tiktoken's own format: `X.tiktoken` has a line "base64 of the bytes, blank, rank" an id, and beside it
    `X.json` says {"pat_str": regular expression, "special_tokens": {text: id}, "eod": text}, which are in tiktoken's
    source for the encodings that OpenAI publishes.

    Raises UserError where a file is missing or unusable, or where tiktoken is not installed.
    """

    def __init__(self, path: Path, eod_token: str | None = None, flags: str = "data.") -> None:
        """flags: what stands before `tokenizer` where a user sets it, for messages."""
        try:
            import tiktoken
        except ImportError:
            raise UserError(f"{flags}tokenizer: {path} needs `pip install tiktoken`.") from None
        about = path.with_suffix(".json")
        for file in (path, about):
            if not file.is_file():
                raise UserError(f"{flags}tokenizer: no file {file}; {path.name} needs its ranks and {about.name}.")
        self.path: Path | None = path
        raw = path.read_bytes(), about.read_bytes()
        try:
            said = json.loads(raw[1])
            lines = (line.split() for line in raw[0].splitlines() if line.strip())
            known = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
            specials = dict(said["special_tokens"])
            self.eod: int = specials[eod_token or said["eod"]]
            # Without control tokens: what stands in a text stays text.
            self._encoding = tiktoken.Encoding(
                path.stem, pat_str=said["pat_str"], mergeable_ranks=known, special_tokens={}
            )
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise UserError(
                f"{flags}tokenizer: {path} and {about.name} are not tiktoken's ranks and their description "
                f"({type(error).__name__}: {error})."
            ) from None
        self.special_texts: tuple[str, ...] = tuple(specials)
        self.vocab_size: int = 1 + max(*known.values(), *specials.values())
        self.fingerprint = hashlib.blake2b(b"\0".join(raw) + b"%d" % self.eod, digest_size=16).hexdigest()

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
