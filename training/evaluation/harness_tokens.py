"""Texts of tasks as ids: what lm-evaluation-harness' HFLM makes of them with the exported model's tokenizer.

Training adds no control ids to a document (data/tokenizers/tokenizer_json.py). transformers, and the harness, let a
tokenizer.json add what it says itself, such as Llama 3's begin-of-text, and reads control tokens in a text as such.
Scores are to be those of the exported model, so they do the same here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from data.tokenizers.base import SentencePieceTokenizer, Tokenizer
from data.tokenizers.tokenizer_json import JsonTokenizer, Token
from program.errors import UserError
from program.untrusted import InputError, read_foreign


@dataclass(frozen=True, slots=True)
class BeginConfig:
    """What is read of tokenizer_config.json."""

    bos_token: str | Token | None = None
    add_bos_token: bool | None = None


class HarnessTokenizer:
    """A run's tokenizer as the harness wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises UserError for a tokenizer_config.json beside it that cannot be read."""
        self.tokenizer, self.eot = tokenizer, tokenizer.eod
        self.bos: int | None = None
        self.adds_bos: bool | None = False
        """None: as the tokenizer.json says."""
        self.bos_text = self.eot_text = ""
        if isinstance(tokenizer, JsonTokenizer):
            self._read_json(tokenizer)
        elif isinstance(tokenizer, SentencePieceTokenizer):
            pieces = tokenizer.processor
            self.bos = pieces.bos_id() if pieces.bos_id() >= 0 else None
            self.bos_text = "" if self.bos is None else pieces.id_to_piece(self.bos)
            self.eot_text = pieces.id_to_piece(self.eot)

    @property
    def prefix(self) -> int:
        """What a text without a context is conditioned on: its begin, else an end of text."""
        return self.eot if self.bos is None else self.bos

    @property
    def prefix_text(self) -> str:
        return self.eot_text if self.bos is None else self.bos_text

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Ids of a text. add_special_tokens: None: unless the text begins with the prefix."""
        if add_special_tokens is None:
            add_special_tokens = not (self.prefix_text and text.startswith(self.prefix_text))
        if not isinstance(self.tokenizer, JsonTokenizer):
            return [int(index) for index in self.tokenizer.encode(text)]
        by_file = add_special_tokens and self.adds_bos is None
        ids = list(self.tokenizer.with_specials.encode(text, add_special_tokens=by_file).ids)
        return [self.bos, *ids] if add_special_tokens and self.adds_bos and self.bos is not None else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; control ids have none."""
        return self.tokenizer.decode(ids)

    def _read_json(self, tokenizer: JsonTokenizer) -> None:
        self.eot_text = tokenizer.eod_text
        said = _beside(tokenizer.path)
        begin = said.bos_token.content if isinstance(said.bos_token, Token) else said.bos_token
        index = tokenizer.with_specials.token_to_id(begin) if begin else None
        self.bos, self.bos_text = (None, "") if index is None or begin is None else (int(index), begin)
        self.adds_bos = said.add_bos_token


def _beside(path: Path | None) -> BeginConfig:
    """An export takes a tokenizer_config.json along where the tokenizer has the name that Hugging Face gives it."""
    if path is None or path.name != "tokenizer.json":
        return BeginConfig()
    try:
        return read_foreign(path.with_name("tokenizer_config.json"), BeginConfig)
    except FileNotFoundError:
        return BeginConfig()
    except InputError as error:
        raise UserError(f"data.tokenizer: {error} Mend it, or remove it.") from None
