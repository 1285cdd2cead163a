"""The tokenizer of a Hugging Face folder, as training opens it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from data.tokenizers import base
from data.tokenizers.base import SentencePieceTokenizer, TiktokenTokenizer, Tokenizer, open_tokenizer
from data.tokenizers.gpt2_pair import read_beside
from data.tokenizers.tokenizer_json import JsonTokenizer, TokenizerConfig
from models.hf.files import CARRIED_BYTES, TOKENIZERS, present
from models.spans import MOST_TOKENS
from program.errors import UserError
from program.schema import Foreign
from program.untrusted import read_bytes, read_foreign
from training.checkpoint.imported import IMPORTED, STAND_INS
from training.config.run_config import RunConfig

STAND_IN = "byte"
TOKENIZER = "tokenizer_config.json"
DESCRIPTIONS = {
    "generation_config.json": Foreign,
    "tokenizer_config.json": TokenizerConfig,
    "special_tokens_map.json": TokenizerConfig,
}


@dataclass(slots=True, frozen=True)
class Choice:
    """What an imported model's ``config.toml`` says of its tokenizer."""

    name: str
    """Of the carried file; STAND_IN where none can be used."""
    eod_token: str | None = None
    problem: str = ""
    """Why none can be used."""


def choose(folder: Path, config: dict[str, Any], vocab_size: int) -> Choice:
    """The first file of a tokenizer that opens, and has no more ids than the model."""
    problems = []
    there = present(folder, TOKENIZERS)
    names = [name for name in TOKENIZERS if name in there]
    if "tokenizer.tiktoken" in there:  # a tokenizer.json beside it is its description, and nothing that opens alone
        names = ["tokenizer.tiktoken", *(name for name in names if name == "tokenizer.model")]
    for name in names:
        try:
            opened = opened_as(folder / name, config)
        except UserError as error:
            text = str(error).removeprefix("data.tokenizer: ").splitlines()[0]
            problems.append(text.replace(f"{folder.absolute()}/", "").replace(f"{folder}/", ""))
            continue
        if opened.vocab_size <= vocab_size:
            return Choice(name, opened.eod_text if isinstance(opened, JsonTokenizer) else None)
        problems.append(f"{name} has {opened.vocab_size} ids, the model {vocab_size}.")
    return Choice(STAND_IN, problem=" ".join(problems) or f"there is no {' or '.join(TOKENIZERS)}.")


def check_beside(folder: Path) -> None:
    """Raises UserError for a file beside a tokenizer that is not what an export will need."""
    for name, path in present(folder, tuple(DESCRIPTIONS)).items():
        read_foreign(path, DESCRIPTIONS[name])


def opened_as(path: Path, config: dict[str, Any]) -> Tokenizer:
    """A tokenizer's file, opened. What ends a document is what tokenizer_config.json says, else the eos_token_id of
    generation_config.json or config.json, else a usual name. Raises UserError."""
    if path.suffix != ".json":
        return open_tokenizer(path, None)
    first: UserError | None = None
    for eod_token in _eod_tokens(path, config):
        try:
            return open_tokenizer(path, eod_token)
        except UserError as error:
            first = first or error
    assert first is not None
    raise first


def eos_ids(values: dict[str, Any]) -> list[int]:
    """``eos_token_id`` of a configuration, which may be one, several or none."""
    found = values.get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    return [one for one in ids if isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= MOST_TOKENS]


def _eod_tokens(path: Path, config: dict[str, Any]) -> Iterator[str | None]:
    """What to try, the best first. None: what is beside the file, or usual."""
    if read_beside(path, "tokenizer_config.json").get("eos_token"):
        yield None
    plain = _plain(path)
    for ids in (eos_ids(read_beside(path, "generation_config.json")), eos_ids(config)):
        for index in ids if plain is not None else []:
            if (text := plain.id_to_token(index)) is not None:
                yield text
    yield None


def _plain(path: Path) -> Any:
    """The file as the library opens it; None where it cannot, which opening it as a tokenizer explains."""
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_buffer(read_bytes(path, CARRIED_BYTES))
    except UserError:
        raise
    except Exception:  # the library raises nothing more precise
        return None


# ---- which ids begin and end a text


@dataclass(slots=True, frozen=True)
class Ends:
    """The ids that begin and end a text, where they are known, and what they look like."""

    eos: int
    bos: int | None
    texts: Mapping[str, str]
    """``eos_token``, ``bos_token``."""
    tokenizer: Tokenizer


def own_ends(checkpoint: Path, config: RunConfig, entries: Mapping[str, Any]) -> tuple[Ends | None, list[str]]:
    """Those of the tokenizer that a checkpoint's run trained with, and notes. None where it is only a stand-in for a
    model's own, lies in a cache, or does not open."""
    if config.data.tokenizer == "builtin" or (config.data.tokenizer in STAND_INS and IMPORTED in entries):
        return None, []
    try:
        found = base.load(config.data, checkpoint, lambda _: None)
    except UserError as error:
        return None, [f"which id ends a text is not known from the tokenizer: {error}"]
    bos, texts = None, {}
    if isinstance(found, JsonTokenizer) and found.path is not None:
        texts = {"eos_token": found.eod_text}
        begin = read_beside(found.path, TOKENIZER).get("bos_token")
        begin = begin.get("content") if isinstance(begin, dict) else begin
        bos = found.with_specials.token_to_id(begin) if isinstance(begin, str) else None
    elif isinstance(found, SentencePieceTokenizer):
        pieces = found.processor
        bos = pieces.bos_id() if pieces.bos_id() >= 0 else None
        ids = {"eos_token": found.eod, "bos_token": bos, "unk_token": pieces.unk_id()}
        texts = {name: pieces.id_to_piece(index) for name, index in ids.items() if index is not None and index >= 0}
    elif is_llama3(found):
        bos = found.special_tokens["<|begin_of_text|>"]
        texts = {"eos_token": "<|end_of_text|>", "bos_token": "<|begin_of_text|>"}
    return Ends(found.eod, bos, texts, found), []


def is_llama3(tokenizer: Tokenizer) -> TypeGuard[TiktokenTokenizer]:
    """Whether it is Meta's tokenizer.model of Llama 3, whose ranks transformers reads as such; of Llama 4's it does not
    know how text is split."""
    return isinstance(tokenizer, TiktokenTokenizer) and tokenizer.about is None and tokenizer.vocab_size == 128_256
